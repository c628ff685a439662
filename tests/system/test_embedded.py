"""A node in an engine's process that ends by an error: another one takes its place."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peercache import Client
from peercache.node import runner as embedded
from peercache.node.node import Node
from tests.pace import TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import capture_logs, keys_of, pages_of, read

THREAD = "peercache-node"


@contextmanager
def opened() -> Iterator[Client]:
    """Give a client with a node of its own."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        settings = {"shm_dir": folder, "pool_size": "16MiB", "metrics_port": 0}
        with Client.open(insecure=f"embedded-{os.getpid()}", **settings) as client:
            yield client


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Such a client, whose node is started again soon after an error."""
    monkeypatch.setattr(embedded, "AGAIN_MIN_S", 0.1)
    with opened() as client:
        yield client


def end_by_an_error(client: Client) -> None:
    """Raise in a task of the node."""
    own = client._wiring._node
    assert own is not None
    assert own._token is not None
    assert own._node is not None
    nursery = own._node._switchboard._nursery

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    own._token.run_sync_soon(nursery.start_soon, fail)


def test_an_engine_whose_node_has_ended_gets_another_one(engine: Client) -> None:
    """The log says why it ended; pages are stored and read again, with no call of the engine's."""
    keys = keys_of("before", 4)
    assert all(engine.batch_set(keys, pages_of(keys)))
    first = engine.stats()["home_node"]

    with capture_logs() as lines:
        end_by_an_error(engine)
        wait_until(lambda: engine.stats().get("home_node", first) != first)
        later = keys_of("later", 4)
        wait_until(lambda: all(engine.batch_set(later, pages_of(later))))

    assert all(read(engine, later))
    assert not any(read(engine, keys))
    failed = [line for line in lines if "node.embedded_failed" in line]
    assert len(failed) == 1
    assert "a bug" in failed[0]


def test_a_node_that_cannot_be_started_again_is_tried_until_it_can(
    engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are misses meanwhile, and none raises."""
    tries: list[int] = []
    run = Node.run

    async def fail(node: Node, **options: object) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(24, "Too many open files")
        await run(node, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Node, "run", fail)
    keys = keys_of("k", 2)
    end_by_an_error(engine)

    wait_until(lambda: len(tries) >= 1)
    assert engine.batch_get(keys, pages_of(keys)) == [False] * 2
    wait_until(lambda: all(engine.batch_set(keys, pages_of(keys))))
    assert len(tries) == 3


def test_an_engine_that_ends_while_its_node_is_down_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait for the next start ends at once, and no node is started behind the engine's back."""
    monkeypatch.setattr(embedded, "AGAIN_MIN_S", 2 * TIMEOUT_S)
    with opened() as engine, capture_logs() as lines:
        end_by_an_error(engine)
        wait_until(lambda: "node.embedded_failed" in "".join(lines))

        began = time.monotonic()
        engine.close()
        assert_within(time.monotonic() - began, embedded.CLOSE_S, "the close")

    wait_until(lambda: THREAD not in {thread.name for thread in threading.enumerate()})
