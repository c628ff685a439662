"""Live engines whose host memory is no cache: PeerCache is the only one next to the device.

One has `--hicache-host-memory-mode buffer_only`, where host memory is for pages that move; one has
the linker, and no host pool; and one has its buffer in shared memory. Pages are evicted from the
device and from the cluster, nodes fail, and storage is detached and attached: tokens are those that
the engine computed first.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.integration.engine_process import LINKER
from tests.integration.engines import (
    DYNAMIC,
    a_prompt,
    from_linker,
    installed,
    start_engine,
    wait_for,
)
from tests.integration.faulty_scene import LATE_S, MARGIN, PREFETCH_S, Nodes
from tests.integration.processes import StandaloneNode
from tests.integration.served_engine import DEVICE_TOKENS, PAGE_TOKENS, TIERED, Reply, ServedEngine
from tests.integration.sglang_pools import SHARED_POOL
from tests.integration.tiny_llama import write_tiny_llama
from tests.pace import assert_within, wait_until

# An engine is three processes that import SGLang.
pytestmark = pytest.mark.slow

PROMPT_TOKENS = 600
STORED_TOKENS = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
PROMPTS = 2 * DEVICE_TOKENS // PROMPT_TOKENS
"""Twice as many as the device holds."""

IN_SHM = {**DYNAMIC, "allocator": "shm"}
"""Has SGLang allocate its host memory in a memory file; it reads this with `dynamic` only."""

OUTAGES = 6
MODES = ("buffer_only", "linker", "shm")


@attrs.define
class Untiered:
    """An engine, its nodes, and what it answered when it computed everything."""

    mode: str
    model: Path
    engine: ServedEngine
    nodes: Nodes
    prompts: list[list[int]] = attrs.field(factory=list)
    computed: list[Reply] = attrs.field(factory=list)

    def learn(self) -> None:
        """Have prompts answered for the first time; keep those with one best token."""
        for seed in itertools.count():
            if len(self.prompts) == PROMPTS:
                return
            ids = a_prompt(seed, PROMPT_TOKENS)
            reply = self.engine.ask(ids)
            assert not self.cached(reply)
            if reply.margin > MARGIN:
                self.prompts.append(ids)
                self.computed.append(reply)

    def cached(self, reply: Reply) -> int:
        """Return how many tokens came from PeerCache."""
        if self.mode == "linker":
            return reply.host
        assert not reply.host
        return reply.stored

    def ask(self, index: int) -> Reply:
        """Ask a prompt; fail if the answer is late, or not the first one."""
        reply, computed = self.engine.ask(self.prompts[index]), self.computed[index]
        assert reply.tokens == computed.tokens
        assert reply.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
        slowest_s = max(each.took_s for each in self.computed)
        assert_within(reply.took_s, PREFETCH_S + slowest_s + LATE_S)
        return reply

    def hits(self, index: int) -> bool:
        """Ask with an empty device; return whether all whole pages came from PeerCache."""
        self.engine.flush()
        return self.cached(self.ask(index)) == STORED_TOKENS

    def heal(self, *indices: int) -> None:
        """Return once prompts come from PeerCache again, without help."""
        for index in indices:
            wait_until(lambda index=index: self.hits(index), f"prompt {index} is cached again")


def config(mode: str, home: str) -> tuple[str, ...]:
    """Return what starts an engine in a mode, with this home node."""
    if mode == "linker":
        return (
            "--enable-unified-cache-external-linker",
            "--unified-cache-external-linker-backend", "peercache",
            "--unified-cache-external-linker-config", json.dumps({"home": home}),
        )  # fmt: skip
    backend, extra = ("dynamic", IN_SHM) if mode == "shm" else ("peercache", {})
    return (
        TIERED,
        "--hicache-host-memory-mode", "buffer_only",
        "--hicache-storage-backend", backend,
        "--hicache-storage-backend-extra-config", json.dumps({**extra, "home": home}),
    )  # fmt: skip


def maps_shared_pool(process: int) -> bool:
    """Return whether a process has mapped host memory of SGLang's allocator `shm`."""
    return SHARED_POOL in Path(f"/proc/{process}/maps").read_text()


@pytest.fixture(scope="module", params=MODES)
def untiered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Untiered]:
    """Return an engine that has answered all prompts, and two nodes."""
    mode, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = write_tiny_llama(folder / "tiny-llama")
    nodes = Nodes(folder)
    nodes.repair()
    named = {"PYTHONPATH_FIRST": str(installed(folder / "installed"))}
    try:
        arguments = config(mode, nodes.home("a"))
        with ServedEngine(model, *arguments, switches=(), **named) as engine:
            engine.wait()
            scene = Untiered(mode, model, engine, nodes)
            scene.learn()
            yield scene
    finally:
        nodes.close()


@pytest.fixture(autouse=True)
def repaired(request: pytest.FixtureRequest) -> None:
    """Begin with both nodes."""
    if "untiered" in request.fixturenames:
        request.getfixturevalue("untiered").nodes.repair()


def test_prompts_that_the_device_evicted_come_back(untiered: Untiered) -> None:
    """In turns, so that each is evicted before it comes again: nothing is flushed here."""
    untiered.heal(*range(PROMPTS))

    found = [untiered.cached(untiered.ask(index)) for _ in range(2) for index in range(PROMPTS)]

    assert found.count(STORED_TOKENS) >= len(found) * 3 // 4, found


def test_pages_that_the_cluster_lost_are_computed_and_stored_again(untiered: Untiered) -> None:
    """Both nodes start again, empty. The engine may believe that it stored the pages."""
    untiered.heal(0, 1)
    for name in "ab":
        untiered.nodes.kill(name)
    untiered.nodes.repair()
    untiered.engine.flush()

    assert untiered.cached(untiered.ask(0)) == 0
    untiered.heal(0, 1)


def test_nodes_that_fail_at_random_times_spoil_no_answer(untiered: Untiered) -> None:
    """Killed and paused: each answer is right and in time, and hits come back."""
    rng = random.Random(untiered.mode)
    untiered.heal(0)
    turns = itertools.cycle(range(PROMPTS))
    for _ in range(OUTAGES):
        fail = untiered.nodes.kill if rng.random() < 0.4 else untiered.nodes.stop
        fail(rng.choice("ab"))
        for _ in range(rng.randrange(1, 3)):
            untiered.ask(next(turns))
        untiered.nodes.repair()
        untiered.ask(next(turns))
    untiered.heal(0, 1)


def test_storage_is_detached_and_attached_again(untiered: Untiered) -> None:
    """Without it the engine computes."""
    if untiered.mode == "linker":
        pytest.skip("SGLang detaches no linker")
    untiered.heal(0)
    wait_until(lambda: untiered.engine.detach()[0], "storage is detached")
    untiered.engine.flush()
    assert untiered.cached(untiered.ask(0)) == 0
    home: dict[str, Any] = {**DYNAMIC, "home": untiered.nodes.home("b")}
    wait_until(lambda: untiered.engine.attach(home)[0], "storage is attached")

    untiered.heal(0, 1)


def test_an_engine_that_dies_leaves_no_wrong_page(untiered: Untiered, tmp_path: Path) -> None:
    """Killed while it stores, it leaves pages that are whole, or none, to another engine."""
    named = {"PYTHONPATH_FIRST": str(installed(tmp_path))}
    arguments = config(untiered.mode, untiered.nodes.home("b"))
    ids = a_prompt(999, PROMPT_TOKENS)
    with ServedEngine(untiered.model, *arguments, switches=(), **named) as other:
        other.wait()
        computed = other.ask(ids)
        assert maps_shared_pool(other.scheduler().pid) == (untiered.mode == "shm")
        other.scheduler().kill()

    reply = untiered.engine.ask(ids)

    assert reply.tokens == computed.tokens
    assert reply.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
    # No node has mapped the engine's memory, which would outlive it, and no file is left of it.
    assert not any(maps_shared_pool(node.pid) for node in untiered.nodes.running.values())
    assert not list(Path("/dev/shm").glob("sglang_host_pool*"))


def test_two_ranks_of_one_model_load_their_heads(tmp_path: Path) -> None:
    """Both ranks take or refuse each load together, and answer as when they computed."""
    model = write_tiny_llama(tmp_path / "tiny-llama")
    (tmp_path / "a").mkdir()
    named = {"PYTHONPATH_FIRST": str(installed(tmp_path / "installed"))}
    ids = a_prompt(5, PROMPT_TOKENS)
    with (
        StandaloneNode(tmp_path / "a") as node,
        start_engine(
            model, node, {}, backend=f"{LINKER}peercache",
            options={"tp_size": 2, "dtype": "float32"}, SGLANG_CPU_OMP_THREADS_BIND="0|1", **named,
        ) as engine,
    ):  # fmt: skip
        wait_for(engine)
        computed = engine.ask({"input_ids": ids})
        answers: list[dict[str, Any]] = []

        def has_loaded() -> bool:
            answers.append(engine.ask({"input_ids": ids, "flush": True}))
            return from_linker(answers[-1]) == STORED_TOKENS

        wait_until(has_loaded, "both ranks have stored and load")

    assert from_linker(computed) == 0
    for reply in answers:
        assert reply["tokens"] == computed["tokens"]
        assert reply["logprobs"] == pytest.approx(computed["logprobs"], abs=1e-4)
