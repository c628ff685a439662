"""A live engine while its node, another node or SGLang's own injector fails.

Tokens are always those of the engine without storage, no request waits longer than SGLang's
timeout of a prefetch concurrent with its own compute, and hits come back without any help.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.faulty_scene import (
    PREFETCH_S,
    PROMPTS,
    STORED_TOKENS,
    TRIES,
    Scene,
    now,
    open_scene,
)
from tests.integration.served_engine import Reply
from tests.integration.tiny_llama import write_tiny_llama
from tests.pace import assert_within, at_best, wait_until

# An engine is three processes that import SGLang.
pytestmark = pytest.mark.slow

ASKED_MAX = 60
"""Half of all prefetches meet an injected failure: so many alike are no chance."""

OUTAGES = 6
"""Of random ones; each lasts until requests were answered in it, however slow the machine is."""

CALL_S = 7.0
"""The longest deadline of a call, 2 s, and what a busy machine adds."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Return a live engine without storage, and two nodes."""
    folder = tmp_path_factory.mktemp("scene")
    with open_scene(write_tiny_llama(folder / "tiny-llama"), folder) as scene:
        yield scene


@pytest.fixture(autouse=True)
def repaired(scene: Scene) -> Iterator[None]:
    """Begin with both nodes; no call of the test took longer than its deadline allows."""
    scene.nodes.repair()
    begun = now()
    yield
    took = [
        call.took_s
        for op in ("exists", "get", "set")
        for call in scene.calls(op)
        if call.begun > begun
    ]
    assert_within(max(took, default=0.0), CALL_S)


def fill(scene: Scene, *indices: int) -> None:
    """Have prompts in the store, and nothing else."""
    scene.engine.clear_storage()
    for index in indices:
        scene.ask_again(index)
    scene.heal(*indices)


def test_answers_under_sglangs_own_injector_are_those_without_storage(scene: Scene) -> None:
    """Three calls of ten fail, and each is late: prompts that are stored hit and miss by chance."""
    with scene.attached():
        fill(scene, 0, 1)
    stored: list[int] = []
    with scene.attached(failure=0.3, delay_s=0.02):
        while len(stored) < 8 or not {0, STORED_TOKENS} <= set(stored):
            assert len(stored) < ASKED_MAX, stored
            stored.append(scene.ask_again(len(stored) % 2).stored)


def test_a_store_that_is_slower_than_the_prefetch_timeout_costs_no_more_than_it(
    scene: Scene,
) -> None:
    """SGLang gives a prefetch up, and the call that is under way harms nothing."""
    with scene.attached():
        fill(scene, 0)
    with scene.attached(delay_s=6.0):
        limit_s = PREFETCH_S + scene.compute_s

        assert at_best(lambda: scene.ask_again(0).took_s, below=limit_s) < limit_s


@pytest.mark.parametrize("operation", ["get", "set"])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_home_node_is_struck_in_the_middle_of_a_call(
    scene: Scene, fault: str, operation: str
) -> None:
    """The struck request, requests while the node is gone, and those after its return are right."""
    rng = random.Random(f"{fault} {operation}")
    limit_s = PREFETCH_S + scene.compute_s
    with scene.attached():
        fill(scene, 0)
        for attempt in range(1, TRIES + 1):
            after_s = rng.uniform(0, scene.usual_s(operation)) / attempt
            was_met = scene.strike(0, node="a", fault=fault, operation=operation, after_s=after_s)
            best_s = at_best(lambda: scene.ask_again(2).took_s, below=limit_s)
            scene.nodes.repair()
            scene.heal(0)
            if was_met:
                break

        assert was_met
        assert best_s < limit_s


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_the_holder_on_another_node_is_struck_in_the_middle_of_a_get(
    scene: Scene, fault: str
) -> None:
    """The engine computes what the holder does not give, and stores it at home."""
    rng = random.Random(fault)
    limit_s = PREFETCH_S + scene.compute_s
    for attempt in range(1, TRIES + 1):
        with scene.attached(home="b"):
            fill(scene, 0, 1)
        with scene.attached(home="a", fabric="tcp"):
            # Pages of this prompt come over tcp from the other node, and stay there only.
            scene.heal(1)
            after_s = rng.uniform(0, scene.usual_s("get")) / attempt
            was_met = scene.strike(0, node="b", fault=fault, operation="get", after_s=after_s)
            best_s = at_best(lambda: scene.ask_again(1).took_s, below=limit_s)
            scene.nodes.repair()
            scene.heal(0)
        if was_met:
            break

    assert was_met
    assert best_s < limit_s


class Stream:
    """Asks one prompt after the other in a thread, until it is ended or an answer is wrong."""

    def __init__(self, scene: Scene, turns: Iterator[int], pause_s: float = 0.0) -> None:
        """Begin. turns: which prompts, shared with other streams."""
        self.replies: list[Reply] = []
        self._problems: list[BaseException] = []
        self._is_over = threading.Event()
        self._scene, self._turns, self._pause_s = scene, turns, pause_s
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def _main(self) -> None:
        try:
            while not self._is_over.wait(self._pause_s):
                self.replies.append(self._scene.ask(next(self._turns)))
        except BaseException as problem:
            self._problems.append(problem)

    def answered(self, count: int) -> None:
        """Return when it has had so many more answers, or has failed."""
        until = len(self.replies) + count
        wait_until(lambda: bool(self._problems) or len(self.replies) >= until, "answers")

    def end(self) -> list[Reply]:
        """Return the replies; raise what went wrong."""
        self._is_over.set()
        self._thread.join()
        if self._problems:
            raise self._problems[0]
        return self.replies


def turns() -> Iterator[int]:
    """Yield the prompts in turn: each is evicted from the engine before it comes again."""
    return itertools.cycle(range(PROMPTS))


def test_faults_at_random_times_spoil_no_answer_of_many(scene: Scene) -> None:
    """Both nodes are killed and stopped at seeded times while two streams of prompts run."""
    rng = random.Random(7)
    outages: list[tuple[float, float]] = []
    with scene.attached(fabric="tcp"):
        scene.engine.clear_storage()
        order = turns()
        streams = [Stream(scene, order) for _ in range(2)]
        try:
            # All are stored once, and some come back, before the first outage.
            streams[0].answered(PROMPTS)
            for _ in range(OUTAGES):
                streams[0].answered(rng.randrange(3))
                threading.Event().wait(rng.uniform(0, 0.3))
                begun = now()
                (scene.nodes.kill if rng.random() < 0.4 else scene.nodes.stop)(rng.choice("ab"))
                streams[0].answered(rng.randrange(1, 3))
                scene.nodes.repair()
                outages.append((begun, now()))
        finally:
            replies = [reply for stream in streams for reply in stream.end()]
        scene.heal(0, 1)

    for operation in ("exists", "set"):
        met = [call for call in scene.calls(operation) if any(call.overlaps(*o) for o in outages)]
        assert len(met) >= OUTAGES, operation
    assert {reply.stored for reply in replies} >= {0, STORED_TOKENS}


def test_storage_is_detached_and_attached_while_prompts_run(scene: Scene) -> None:
    """SGLang does so between two requests; afterwards nothing of the store is in the engine."""
    scheduler = scene.engine.scheduler()
    kept: list[int] = []
    stream = Stream(scene, turns(), pause_s=0.1)
    try:
        for _ in range(3):
            with scene.attached():
                stream.answered(2)
                assert scene.nodes.clients("a") == 1
            wait_until(lambda: scene.nodes.clients("a") == 0, "the node has forgotten the client")
            assert segments_of(scheduler) == []
            kept.append(scheduler.num_fds() + scheduler.num_threads())
    finally:
        stream.end()
    # What the first time loads and starts for good stays; a store would leave as much each time.
    wait_until(
        lambda: scheduler.num_fds() + scheduler.num_threads() <= max(kept[:2]),
        "descriptors and threads are as before",
    )
    with scene.attached():
        scene.heal(0)


def test_an_engine_serves_on_after_its_storage_could_not_be_attached(scene: Scene) -> None:
    """The home node is gone: the engine logs it, serves without storage, and attaches later."""
    home = scene.config("a")
    scene.nodes.kill("a")

    def is_refused() -> bool:
        attached, said = scene.engine.attach(home)
        assert not attached
        return "no answer from the home node" in said

    # Before that, the engine may refuse because it is not idle yet.
    wait_until(is_refused, "a refusal that names the home node")
    assert scene.ask_again(0).stored == 0
    assert segments_of(scene.engine.scheduler()) == []
    scene.nodes.repair()
    with scene.attached():
        scene.heal(0)


def segments_of(process: psutil.Process) -> list[str]:
    """Return the memory of nodes that a process has mapped."""
    paths = [each.path for each in process.memory_maps()]
    return [path for path in paths if Path(path).name.startswith("peercache-")]
