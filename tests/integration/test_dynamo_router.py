"""Dynamo's router with a shared cache, over our object events."""

from __future__ import annotations

import hashlib
import json
import queue
import struct
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import attrs
import pytest

from peercache.events.objects import ObjectNames, ObjectPublisher
from tests.integration.dynamo_router import PAGE
from tests.integration.other_engines import ROOT, environment_of
from tests.pace import wait_until

OBJECTS_MAX = 1_000_000
"""Of Dynamo's index, as `sglang/object_events.py` has it."""
PROMPT = tuple(range(100, 116))
ANY = "tcp://127.0.0.1:*"
START_S = 120.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def pages_of(tokens: tuple[int, ...]) -> list[str]:
    """Return SGLang's hashes of a prompt's pages: a chain of SHA-256."""
    hashes, prior = [], b""
    for begin in range(0, len(tokens), PAGE):
        page = tokens[begin : begin + PAGE]
        prior = hashlib.sha256(prior + struct.pack(f"<{PAGE}I", *page)).digest()
        hashes.append(prior.hex())
    return hashes


class Router:
    """Dynamo's router as a process, whose one worker's cache is reported at an endpoint."""

    def __init__(self, endpoint: str, folder: Path, **facts: object) -> None:
        """Start it, and wait until it answers. facts: what the worker reports of its cache."""
        python = environment_of("dynamo") / "bin/python"
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.log = (folder / "router.log").open("w+")
        self.process = subprocess.Popen(
            [
                python, "-m", "tests.integration.dynamo_router", endpoint, str(folder),
                json.dumps(facts),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env={
                "PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT),
                "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
            },
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._line() == "ready\n"

    def ranges(self) -> list[list[int]]:
        """Return which pages of the prompt it takes for stored, from and to."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(PROMPT) + "\n")
        self.process.stdin.flush()
        reported: dict[str, Any] = json.loads(self._line())
        ranges: list[list[int]] = reported["shared_cache"]["ranges"]
        return ranges

    def comes_to(self, *ranges: list[int]) -> None:
        """Wait until it takes these for stored."""
        wait_until(lambda: self.ranges() == list(ranges))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            assert stream is not None
            stream.close()

    def _line(self) -> str:
        try:
            return self._lines.get(timeout=START_S)
        except queue.Empty:
            self.log.seek(0)
            raise AssertionError(f"the router said nothing: {self.log.read()[-4000:]}") from None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("ready", "{")):
                self._lines.put(line)


@pytest.mark.dynamo
def test_a_router_knows_what_the_shared_cache_has(tmp_path: Path) -> None:
    """What was there when it came, each change, and after a loss no page that is gone."""
    pages = pages_of(PROMPT)
    there = {pages[0]}
    with (
        closing(ObjectPublisher(ANY, ObjectNames(), present=lambda: list(there))) as publisher,
        closing(Router(publisher.endpoint, tmp_path)) as router,
    ):
        router.comes_to([0, 1])

        there.update(pages[1:3])
        publisher.publish(stored=pages[1:3])
        router.comes_to([0, 3])
        there.discard(pages[0])
        publisher.publish(removed=[pages[0]])
        router.comes_to([1, 3])

        there.clear()
        there.add(pages[0])
        publisher.resync()
        router.comes_to([0, 1])


@pytest.mark.dynamo
@pytest.mark.parametrize(
    ("names", "facts"),
    [
        (ObjectNames("t_m", 2, 3), {"tp_size": 2, "pp_size": 3, "key_prefix": "t_m"}),
        (ObjectNames("m", 0, 2), {"pp_size": 2, "is_mla_model": True, "key_prefix": "m"}),
    ],
)
def test_a_page_counts_once_all_its_ranks_and_stages_have_it(
    names: ObjectNames, facts: dict[str, object], tmp_path: Path
) -> None:
    """The second page lacks the objects of one stage: only the first one counts."""
    pages = pages_of(PROMPT)
    short = attrs.evolve(names, stages=names.stages - 1)
    reported = Mock(of=lambda page: (short if page == pages[1] else names).of(page))
    with (
        closing(ObjectPublisher(ANY, reported, present=lambda: pages[:2])) as publisher,
        closing(Router(publisher.endpoint, tmp_path, **facts)) as router,
    ):
        router.comes_to([0, 1])


@pytest.mark.dynamo
def test_its_index_clears_itself_above_a_million_objects(tmp_path: Path) -> None:
    """That is why an engine publishes no more: one page above the limit, and all are forgotten."""
    names = ObjectNames(ranks=32)
    first = pages_of(PROMPT)[0]
    others = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(OBJECTS_MAX // 64)]
    limit, above = others[:-1], others[-1:]
    with (
        closing(ObjectPublisher(ANY, names, present=lambda: [first, *limit])) as publisher,
        closing(Router(publisher.endpoint, tmp_path, tp_size=32)) as router,
    ):
        router.comes_to([0, 1])
        # What was sent before has arrived by then.
        publisher.publish(removed=[first])
        router.comes_to()
        publisher.publish(stored=[first])
        router.comes_to([0, 1])

        publisher.publish(stored=above)
        wait_until(lambda: "exceeded its size limit" in (tmp_path / "router.log").read_text())
        router.comes_to()
        assert publisher.resyncs == 0
