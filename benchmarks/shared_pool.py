"""What SGLang's host pool in shared memory (`"allocator": "shm"`) changes for PeerCache.

    PYTHONPATH=src ~/.cache/peercache/sglang-0.5.23/bin/python -m benchmarks.shared_pool [--json]

SGLang's own allocators make two host pools: anonymous memory, the default, and a memory file. A set
copies pages once, from the pool into the home node's memory; a get over shm copies them once into
the pool. The first figures are those calls, with both pools in turns. The others are copies of the
same bytes: by the engine's thread, as a set does it, and by another process that has mapped the
memory file and is asked to copy, as a home node could do it. Each is a median. Needs the
environment of tests/integration/install_sglang.sh.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peercache.client.client import Client
from peercache.config.settings import Config
from peercache.model.keys import Namespace, page_keys
from peercache.model.runs import PageRuns
from tests.integration.processes import HERE, StandaloneNode

PAGES, PAGE_BYTES = 128, 512 << 10
BATCH_BYTES = PAGES * PAGE_BYTES
ROUNDS = 60
WARM_UP = 10
"""First rounds that are not counted: a new client populates its page tables."""

DEADLINE_S = 30.0
"""Longer than any call on a busy machine takes: refused pages would make a call look fast."""

Bytes = npt.NDArray[np.uint8]


def pools() -> tuple[dict[str, Bytes], int]:
    """Return SGLang's host memory of a batch, by the kind of allocator; and the memory file."""
    sys.path.insert(0, str(HERE / "cpu_engine"))
    import_module("host_copies").prepare()
    import torch  # noqa: PLC0415 - only SGLang's environment has these
    from sglang.srt.mem_cache.storage.mmap import alloc_mmap, alloc_shm  # noqa: PLC0415

    shared, descriptor, _ = alloc_shm((BATCH_BYTES,), torch.uint8)
    made = {"usual": alloc_mmap((BATCH_BYTES,), torch.uint8), "shared": shared}
    return {name: pool.random_().numpy() for name, pool in made.items()}, descriptor


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def calls(memory: dict[str, Bytes]) -> dict[str, list[float]]:
    """Return the seconds of sets and gets of each pool, in turns."""
    times: dict[str, list[float]] = {}
    settings = {"op_timeout_s": DEADLINE_S, "exists_timeout_s": DEADLINE_S}
    namespace = Namespace.of("shared-pool", {}, {}, {})
    with (
        tempfile.TemporaryDirectory() as folder,
        StandaloneNode(Path(folder), pool_size=str(16 * BATCH_BYTES)) as node,
    ):
        config = Config.from_sglang({**settings, "home": node.home}, os.environ)
        client = Client.open(config, namespace=namespace)
        for number in range(ROUNDS):
            for kind in sorted(memory, reverse=bool(number % 2)):
                begin = memory[kind].ctypes.data
                runs = PageRuns.regular(
                    np.arange(begin, begin + BATCH_BYTES, PAGE_BYTES, dtype=np.uint64),
                    np.full(PAGES, PAGE_BYTES, np.uint64),
                    PAGES,
                )
                digests = [
                    f"{number:032x}{kind.encode().hex():0>28}{page:04x}" for page in range(PAGES)
                ]
                keys = page_keys(digests, namespace.digest())
                for name, call in (("set", client.batch_set_from), ("get", client.batch_get_into)):
                    answers: list[bool] = []
                    took = timed(lambda: answers.extend(call(keys, runs)))  # noqa: B023 - called at once
                    assert all(answers), "a page was refused or missed: the figures mean nothing"
                    times.setdefault(f"{name}_{kind}", []).append(took)
                client.remove(keys)
        client.close()
    return times


@contextmanager
def copying_process(source: int, target: int) -> Iterator[Callable[[], None]]:
    """Start a process that maps both memory files; yield what has it copy one to the other."""
    asked, answered = os.pipe(), os.pipe()
    process = os.fork()
    if not process:
        given, wanted = (
            np.frombuffer(mmap.mmap(each, BATCH_BYTES), np.uint8) for each in (source, target)
        )
        while os.read(asked[0], 1) == b"c":
            np.copyto(wanted, given)
            os.write(answered[1], b"c")
        os._exit(0)

    def copy() -> None:
        os.write(asked[1], b"c")
        assert os.read(answered[0], 1) == b"c"

    yield copy
    os.write(asked[1], b"e")
    os.waitpid(process, 0)


def copies(memory: dict[str, Bytes], descriptor: int) -> dict[str, list[float]]:
    """Return the seconds of copies into shared memory, by the engine and by another process."""
    target = os.memfd_create("target")
    os.ftruncate(target, BATCH_BYTES)
    wanted = np.frombuffer(mmap.mmap(target, BATCH_BYTES), np.uint8)
    times: dict[str, list[float]] = {"copy_by_node": []}
    with copying_process(descriptor, target) as copy:
        for _ in range(ROUNDS):
            for kind, pool in memory.items():
                took = timed(lambda: np.copyto(wanted, pool))  # noqa: B023 - called at once
                times.setdefault(f"copy_by_engine_{kind}", []).append(took)
            times["copy_by_node"].append(timed(copy))
    return times


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    options = arguments.parse_args()
    memory, descriptor = pools()
    found = {
        f"{name}_ms": round(statistics.median(times[WARM_UP:]) * 1e3, 2)
        for name, times in {**calls(memory), **copies(memory, descriptor)}.items()
    }
    found["load_average"] = round(os.getloadavg()[0], 1)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(f"{name:<28}{value:>10}" for name, value in found.items()))


if __name__ == "__main__":
    main()
