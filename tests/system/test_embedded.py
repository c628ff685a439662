"""A node in an engine's process that ends by an error: another one takes its place."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from peercache import Client
from peercache.node import runner as embedded
from peercache.node.node import Node
from tests.pace import TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import capture_logs, keys_of, pages_of, read

THREAD = "peercache-node"


class Fault:
    """What makes the node of this process end by an error, as a bug in one of its tasks does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have nodes end when the test requests it, and fail to start again so many times then."""
        self.is_due = threading.Event()
        self.failed_starts = 0
        self.starts: list[bool] = []
        run = Node.run

        async def run_until_due(node: Node, **options: Any) -> None:
            self.starts.append(self.failed_starts == 0)
            if self.failed_starts:
                self.failed_starts -= 1
                raise OSError(24, "Too many open files")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._fail_when_due)
                await run(node, **options)
                # The node has ended in good order.
                nursery.cancel_scope.cancel()

        monkeypatch.setattr(Node, "run", run_until_due)

    async def _fail_when_due(self) -> None:
        while not self.is_due.is_set():  # noqa: ASYNC110 - a thread of the test sets it
            await trio.sleep(0.01)
        self.is_due.clear()
        raise ZeroDivisionError("a bug")


@pytest.fixture
def pause_s() -> float:
    """How long a node stays down."""
    return 0.1


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> Fault:
    """What ends the node of an engine."""
    monkeypatch.setattr(embedded, "AGAIN_MIN_S", pause_s)
    return Fault(monkeypatch)


@pytest.fixture
def engine(fault: Fault) -> Iterator[Client]:
    """A client with a node of its own."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        settings: dict[str, Any] = {"embedded": True, "shm_dir": folder, "pool_size": "16MiB"}
        with Client.open(cluster=f"embedded-{os.getpid()}", insecure=True, **settings) as client:
            yield client


def test_an_engine_whose_node_has_ended_gets_another_one(engine: Client, fault: Fault) -> None:
    """The log shows why it ended; pages are stored and read again without a call of the engine."""
    keys = keys_of("before", 4)
    assert all(engine.batch_set(keys, pages_of(keys)))
    # The node answers for them within `exists_timeout_s`, or they are missing.
    seen: list[object] = []
    wait_until(lambda: seen.append(engine.stats().get("home_node")) or seen[-1])  # type: ignore[func-returns-value]
    first = seen[-1]

    with capture_logs() as lines:
        fault.is_due.set()
        wait_until(lambda: engine.stats().get("home_node", first) != first)
        later = keys_of("later", 4)
        wait_until(lambda: all(engine.batch_set(later, pages_of(later))))

    assert all(read(engine, later))
    assert not any(read(engine, keys))
    failed = [line for line in lines if "node.embedded_failed" in line]
    assert len(failed) == 1
    assert "a bug" in failed[0]


def test_a_node_that_cannot_be_started_again_is_tried_until_it_can(
    engine: Client, fault: Fault
) -> None:
    """Calls are misses meanwhile, and none raises."""
    keys = keys_of("k", 2)
    fault.failed_starts = 2
    fault.is_due.set()

    wait_until(lambda: len(fault.starts) >= 2)
    assert engine.batch_get(keys, pages_of(keys)) == [False] * 2
    wait_until(lambda: all(engine.batch_set(keys, pages_of(keys))))
    assert fault.starts == [True, False, False, True]


@pytest.mark.parametrize("pause_s", [2 * TIMEOUT_S])
def test_an_engine_that_ends_while_its_node_is_down_is_not_held_up(
    engine: Client, fault: Fault
) -> None:
    """The wait for the next start ends at once, and no node is started behind the engine's back."""
    with capture_logs() as lines:
        fault.is_due.set()
        wait_until(lambda: "node.embedded_failed" in "".join(lines))

        began = time.monotonic()
        engine.close()
        assert_within(time.monotonic() - began, embedded.CLOSE_S, "the close")

    wait_until(lambda: THREAD not in {thread.name for thread in threading.enumerate()})
    assert fault.starts == [True]
