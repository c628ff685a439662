"""The stage of the fault tests: a live engine, its home node `a` and a second node `b`.

The engine first answers every prompt without storage; that is what it must say ever after.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.integration.processes import StandaloneNode
from tests.integration.recorded_store import Call, Strike, calls, order
from tests.integration.served_engine import DEVICE_TOKENS, PAGE_TOKENS, Reply, ServedEngine
from tests.integration.tiny_llama import VOCABULARY
from tests.pace import FACTOR, assert_within, wait_until

PROMPTS = 8
PROMPT_TOKENS = 600
STORED_TOKENS = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
assert PROMPTS * PROMPT_TOKENS > 1.5 * DEVICE_TOKENS + PROMPT_TOKENS, "one round evicts all of it"

MARGIN = 0.05
"""Least distance to the second best token: sums in another order may decide a draw."""

PREFETCH_S = 1.0 + 0.25 * PROMPT_TOKENS / 1024
"""SGLang's own timeout of a prefetch, by its defaults."""

LATE_S = 10.0 * FACTOR
"""More than a busy machine adds to a request of half a second."""

TRIES = 8


@attrs.define
class Nodes:
    """Two nodes of one cluster that are killed, stopped, continued and started again."""

    folder: Path
    running: dict[str, StandaloneNode] = attrs.field(factory=dict)
    stopped: set[str] = attrs.field(factory=set)

    def start(self, name: str) -> None:
        """Start a node at its home address, and have it join the other one if that runs."""
        (self.folder / name).mkdir(exist_ok=True)
        others = [node.control for other, node in self.running.items() if other != name]
        self.running[name] = StandaloneNode(
            self.folder / name, discovery=others[0] if others else "", pool_size="64MiB"
        )

    def home(self, name: str) -> str:
        """Return a node's home address, the same in every life of it."""
        return f"ipc://{self.folder / name}/home.ipc"

    def clients(self, name: str) -> int:
        """Return how many clients of this host a node has."""
        return len(list((self.folder / name / "home.ipc.clients").glob("*.lock")))

    def stop(self, name: str) -> None:
        """Pauses it."""
        self.running[name].send_signal(signal.SIGSTOP)
        self.stopped.add(name)

    def kill(self, name: str) -> None:
        """End it at once."""
        self.stopped.discard(name)
        self.running.pop(name).kill()

    def repair(self) -> None:
        """Have both run again."""
        for name in sorted(self.stopped):
            self.running[name].send_signal(signal.SIGCONT)
        self.stopped.clear()
        for name in ("a", "b"):
            if name in self.running and self.running[name].has_ended:
                self.running.pop(name).kill()
            if name not in self.running:
                self.start(name)

    def close(self) -> None:
        """End them."""
        for name in sorted(self.stopped):
            self.running[name].send_signal(signal.SIGCONT)
        for node in self.running.values():
            node.close()


@attrs.define
class Scene:
    """The engine, the nodes, and what the engine answers without storage.

    compute_s: the slowest answer without storage.
    """

    engine: ServedEngine
    nodes: Nodes
    folder: Path
    prompts: list[list[int]] = attrs.field(factory=list)
    expected: list[Reply] = attrs.field(factory=list)

    @property
    def compute_s(self) -> float:
        """Return how long an answer takes at most without storage."""
        return max(reply.took_s for reply in self.expected)

    def learn(self) -> None:
        """Have the engine answer prompts without storage; keep those with one best token."""
        seed = 0
        while len(self.prompts) < PROMPTS:
            ids = random.Random(seed).choices(range(3, VOCABULARY), k=PROMPT_TOKENS)
            reply = self.engine.ask(ids)
            if reply.margin > MARGIN:
                self.prompts.append(ids)
                self.expected.append(reply)
            seed += 1

    def look_up_once(self) -> None:
        """Return once SGLang has asked a store for the first time.

        Before that it loads the code that hashes pages, in the thread that a flush waits ten
        seconds for: a busy machine takes longer, and then SGLang ends.
        """
        with self.attached():
            self.engine.ask(random.Random("first").choices(range(3, VOCABULARY), k=PROMPT_TOKENS))
            wait_until(lambda: bool(self.calls("exists")), "SGLang asks the store")

    def ask(self, index: int) -> Reply:
        """Ask a prompt; fail if the answer is late, or not the one without storage."""
        reply, expected = self.engine.ask(self.prompts[index]), self.expected[index]
        assert reply.tokens == expected.tokens
        assert reply.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert_within(reply.took_s, PREFETCH_S + self.compute_s + LATE_S)
        return reply

    def ask_again(self, index: int) -> Reply:
        """Ask with empty caches in the engine: what is not in the store is computed."""
        self.engine.flush()
        return self.ask(index)

    def hits(self, index: int) -> bool:
        """Ask with empty caches; return whether all whole pages came from the store."""
        return self.ask_again(index).stored == STORED_TOKENS

    def heal(self, *indices: int) -> None:
        """Return once prompts come from the store again: no one but time and requests helps."""
        for index in indices:
            wait_until(lambda index=index: self.hits(index), f"prompt {index} comes from the store")

    def config(self, home: str, **extra: Any) -> dict[str, Any]:
        """Return what attaches storage at a node's home address."""
        return {
            "backend_name": "peercache",
            "module_path": "tests.integration.recorded_store",
            "class_name": "RecordedStore",
            "interface_v1": 1,
            "home": self.nodes.home(home),
            "record": str(self.folder),
            **extra,
        }

    @contextmanager
    def attached(self, home: str = "a", **extra: Any) -> Iterator[None]:
        """Attach storage at a node's home address; fix the nodes and detach at the end."""
        config = self.config(home, **extra)
        wait_until(lambda: self.engine.attach(config)[0], "storage is attached")
        try:
            yield
        finally:
            self.nodes.repair()
            wait_until(lambda: self.engine.detach()[0], "storage is detached")

    # --- faults in the middle of calls --------------------------------------------------------

    def calls(self, operation: str) -> list[Call]:
        """Return the calls of an operation so far."""
        return [call for call in calls(self.folder) if call.operation == operation]

    def strike(self, index: int, *, node: str, fault: str, operation: str, after_s: float) -> bool:
        """Ask a prompt, and kill or stop a node in the middle of the call that this leads to.

        Returns whether the call was still under way then. A busy machine answers `exists` too late
        for a get, and `clear` too late for a set: then it is asked again.
        """
        signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
        before = len(self.calls(operation))
        order(
            self.folder,
            Strike(
                operation=operation,
                process=self.nodes.running[node].pid,
                signal=signals[fault],
                after_s=after_s,
            ),
        )

        def has_struck() -> bool:
            if operation == "set":
                self.engine.clear_storage()
            self.ask_again(index)
            # Idle again: the set that follows an answer has returned, too.
            self.engine.flush()
            return self.struck(operation, before) is not None

        wait_until(has_struck, f"a {operation} strikes")
        if fault == "stopped":
            self.nodes.stopped.add(node)
        call = self.struck(operation, before)
        return call is not None and call.was_met

    def struck(self, operation: str, before: int) -> Call | None:
        """Return the call that struck, of those after the first so many."""
        return next((c for c in self.calls(operation)[before:] if c.struck is not None), None)

    def usual_s(self, operation: str) -> float:
        """Return how long such a call takes when all is well."""
        took = [call.took_s for call in self.calls(operation) if call.good == call.pages]
        return statistics.median(took)


@contextmanager
def open_scene(model: Path, folder: Path) -> Iterator[Scene]:
    """Start everything at once; yield when the engine has answered without storage."""
    nodes = Nodes(folder)
    with ServedEngine(model) as engine:
        try:
            nodes.repair()
            engine.wait()
            scene = Scene(engine, nodes, folder)
            scene.learn()
            scene.look_up_once()
            yield scene
        finally:
            nodes.close()


def now() -> float:
    """Return the time on the clock of the recorded calls."""
    return time.monotonic()
