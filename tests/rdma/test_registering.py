"""Registration with real verbs: both ways of it, and what the kernel refuses."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.rdma.memory import Region, Regions
from peercache.rdma.registrar import DirectRegistrar, PyverbsRegistrar, registrar_for
from peercache.rdma.verbs import load, open_context
from tests.pace import TIMEOUT_S, at_best

pytestmark = pytest.mark.rdma

MIB = 2**20


@pytest.fixture
def pd() -> Iterator[Any]:
    """A protection domain of the device that talks to itself."""
    verbs = load()
    assert not isinstance(verbs, str), verbs
    context = open_context(verbs, "rxe0")
    domain = verbs.PD(context)
    yield domain
    # Raises if one registration is left.
    domain.close()
    context.close()


def registered(regions: Regions, memory: np.ndarray, **options: Any) -> Region:
    """Register an array and wait until that is over."""
    options = {"remote": True, **options}
    region = regions.add("test", int(memory.ctypes.data), memory.nbytes, **options)
    assert regions.wait(region, TIMEOUT_S)
    return region


def test_recent_pyverbs_registers_without_the_gil_and_an_old_one_in_small_pieces(pd: Any) -> None:
    """Which way is open is found out without touching what crashes the other one."""
    expected = {"built": DirectRegistrar, "packaged": PyverbsRegistrar}

    registrar = registrar_for(pd)

    assert type(registrar) is expected[os.environ["PEERCACHE_RDMA_GUEST"]]


def test_chunks_have_keys_of_their_own_and_leave_nothing(pd: Any) -> None:
    """Four chunks, four keys, for peers and for us; the domain closes after them."""
    memory = np.zeros(8 * MIB, np.uint8)
    regions = Regions(pd, device="rxe0", chunk_bytes=2 * MIB)

    remote = registered(regions, memory)
    local = registered(regions, memory, remote=False)

    assert (remote.failure, local.failure) == ("", "")
    assert [(offset, length) for offset, length, _ in remote.remote()] == [
        (index * 2 * MIB, 2 * MIB) for index in range(4)
    ]
    assert len({rkey for _, _, rkey in remote.remote()}) == 4
    found = regions.find(int(memory.ctypes.data) + MIB, 3 * MIB)
    assert [length for _, length, _ in found] == [MIB, 2 * MIB]
    regions.close()


def test_untouched_memory_is_registered_and_keeps_its_content(pd: Any) -> None:
    """Populating for the device changes no byte of what an engine has there."""
    memory = mmap.mmap(-1, 4 * MIB)
    memory[MIB : MIB + 5] = b"bytes"
    regions = Regions(pd, device="rxe0")

    region = registered(regions, np.frombuffer(memory, np.uint8))
    regions.close()

    assert region.failure == ""
    assert memory[MIB : MIB + 5] == b"bytes"


def test_read_only_mapping_is_refused_with_the_reason(pd: Any, tmp_path: Path) -> None:
    """The kernel's EFAULT explains nothing."""
    path = tmp_path / "pages"
    path.write_bytes(bytes(MIB))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), MIB, prot=mmap.PROT_READ)
    regions = Regions(pd, device="rxe0")

    region = registered(regions, np.frombuffer(mapping, np.uint8))
    regions.close()

    assert "read-only" in region.failure


def test_other_threads_run_while_memory_is_registered(pd: Any) -> None:
    """An engine's scheduler is not stopped by a pool that is registered at the same time."""

    def longest_stop_too_long_s() -> float:
        memory = np.frombuffer(mmap.mmap(-1, 512 * MIB), np.uint8)
        is_over = threading.Event()
        gaps_s = []

        def run() -> None:
            last = time.perf_counter()
            while not is_over.is_set():
                time.sleep(0)
                now = time.perf_counter()
                gaps_s.append(now - last)
                last = now

        thread = threading.Thread(target=run)
        thread.start()
        regions = Regions(pd, device="rxe0")
        started_s = time.perf_counter()
        registered(regions, memory)
        took_s = time.perf_counter() - started_s
        is_over.set()
        thread.join()
        regions.close()
        print(f"512 MiB in {took_s:.3f} s, longest stop {max(gaps_s) * 1e3:.1f} ms")
        return max(gaps_s) - max(0.5 * took_s, 0.1)

    # The machine itself may are paused; a registration that stops all does so every time.
    assert at_best(longest_stop_too_long_s, below=0.0) < 0.0


OPENED = """
import os, resource, sys
import numpy as np
from peercache.rdma.memory import Regions
from peercache.rdma.verbs import load, open_context
verbs = load()
context = open_context(verbs, "rxe0")
domain = verbs.PD(context)
def registered(size, **options):
    regions = Regions(domain, device="rxe0", chunk_bytes=2**20, **options)
    memory = np.zeros(size, np.uint8)
    region = regions.add("pool", memory.ctypes.data, memory.nbytes, remote=True)
    assert regions.wait(region, 60)
    return regions, region
"""
CLOSED = """
regions.close()
domain.close()
context.close()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has a device open, and closes `regions` at its end."""
    command = [sys.executable, "-c", OPENED + program + CLOSED]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)


LOCKED_OUT = """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**21, 2**21))
# root may lock what it likes.
os.setuid(65534)
regions, region = registered(2**23, threads_max=1)
print(region.registered_bytes, region.failure)
"""


def test_limit_of_locked_memory_is_named_with_its_fix_and_costs_only_the_rest() -> None:
    """What fits under the limit is served; the log names what to set for the rest."""
    process = run(LOCKED_OUT)

    ready, _, failure = process.stdout.partition(" ")
    assert 0 < int(ready) < 2**23
    assert "ulimit -l unlimited" in failure
    assert "rdma.register_failed" in process.stderr


FORKED = """
regions, _ = registered(2**22)
child = os.fork()
if not child:
    regions.close()
    os._exit(0)
os.waitpid(child, 0)
# Closing fails, and raises, for a registration that is gone.
"""


def test_forked_child_that_closes_leaves_the_parents_registrations() -> None:
    """The child's descriptor is the parent's: what it ended would be gone for both."""
    assert "rdma.deregister_failed" not in run(FORKED).stderr
