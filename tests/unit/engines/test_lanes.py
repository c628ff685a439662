"""What adapters share: lanes, whose pieces of work are done or refused once, and a late client."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from peercache import Client
from peercache.client import home
from peercache.engines.lanes import CallLane, harmless
from peercache.engines.late_client import OP_TIMEOUT_S, LateClient, engine_config, level_named
from peercache.errors import ConfigError, PeerUnreachable
from peercache.model.keys import Namespace
from peercache.observability.log import LOGGER, get_logger
from tests.children import in_child
from tests.pace import TIMEOUT_S, wait_until
from tests.unit.engines.fake_client import FakeClient


class Calls:
    """What happened to pieces of work, by name."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.done: list[str] = []
        self.refused: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def submit(
        self, lane: CallLane, name: str, *, waits: bool = False, fails: bool = False
    ) -> None:
        """Submit a piece of work that may wait for `go`, or raise."""

        def work() -> None:
            self.begun.set()
            if waits:
                assert self.go.wait(30)
            if fails:
                raise ValueError(name)
            self.done.append(name)

        lane.submit(work, lambda: self.refused.append(name))


class Clock:
    """A clock that is paused."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def calls() -> Iterator[Calls]:
    """Return what lanes call; at the end nothing waits any more."""
    calls = Calls()
    yield calls
    calls.go.set()


def lane(**options: Any) -> CallLane:
    """Return a lane of one thread."""
    return CallLane("test", get_logger(), **{"timeout_s": 30.0, **options})


def test_work_is_done_in_its_order(calls: Calls) -> None:
    """One thread takes what came first."""
    with_one = lane()
    for name in "abc":
        calls.submit(with_one, name)
    wait_until(lambda: calls.done == ["a", "b", "c"])
    assert with_one.close(30)
    assert calls.refused == []


def test_a_full_lane_refuses_at_once(calls: Calls) -> None:
    """The queue is bounded: what does not fit is refused in the caller's thread."""
    full = lane(work_max=2)
    calls.submit(full, "busy", waits=True)
    assert calls.begun.wait(30)
    calls.submit(full, "waits")
    calls.submit(full, "too much")
    assert calls.refused == ["too much"]
    calls.go.set()
    wait_until(lambda: calls.done == ["busy", "waits"])
    full.close(30)


def test_a_forked_child_refuses_all_work(calls: Calls) -> None:
    """Its lane has no threads. The parent held the lock when it forked, as at any moment."""
    of_parent = lane()
    try:
        with of_parent._changed:
            assert in_child(lambda: _refuses(of_parent, calls)) == 0
        calls.submit(of_parent, "own")
        wait_until(lambda: calls.done == ["own"])
    finally:
        of_parent.close(30)


def _refuses(of_parent: CallLane, calls: Calls) -> bool:
    signal.alarm(int(TIMEOUT_S))
    calls.submit(of_parent, "child's")
    of_parent.end(None)
    return of_parent.drain() and of_parent.close(1) and calls.refused == ["child's"]


def test_work_that_waited_too_long_is_refused(calls: Calls) -> None:
    """Its answer would come after its use."""
    clock = Clock()
    slow = lane(timeout_s=1.0, clock=clock)
    calls.submit(slow, "busy", waits=True)
    assert calls.begun.wait(30)
    calls.submit(slow, "late")
    clock.now = 1.5
    calls.go.set()
    wait_until(lambda: calls.refused == ["late"])
    assert calls.done == ["busy"]
    slow.close(30)


def test_work_behind_a_call_that_hangs_is_refused_at_its_deadline(calls: Calls) -> None:
    """A caller that waits for its answer gets it then."""
    clock = Clock()
    hung = lane(timeout_s=0.05, clock=clock)
    calls.submit(hung, "hangs", waits=True)
    wait_until(lambda: len(hung) == 1 and not hung._waiting)
    calls.submit(hung, "late")
    clock.now = 1.0
    wait_until(lambda: calls.refused == ["late"])
    assert len(hung) == 1
    calls.go.set()
    hung.close(30)


def test_work_that_raises_is_refused_and_the_thread_lives(calls: Calls) -> None:
    """Each piece has an end, and the next one is done."""
    alive = lane()
    calls.submit(alive, "fails", fails=True)
    calls.submit(alive, "next")
    wait_until(lambda: calls.done == ["next"])
    assert calls.refused == ["fails"]
    alive.close(30)


def test_a_drain_refuses_what_waits_and_ends_when_the_rest_is_done(calls: Calls) -> None:
    """Nothing runs after it, and the lane goes on."""
    drained = lane()
    calls.submit(drained, "busy", waits=True)
    assert calls.begun.wait(30)
    calls.submit(drained, "waits")
    assert not drained.drain(timeout_s=0.01)
    assert calls.refused == ["waits"]
    calls.go.set()
    assert drained.drain(timeout_s=30)
    assert calls.done == ["busy"]
    calls.submit(drained, "after")
    wait_until(lambda: calls.done == ["busy", "after"])
    drained.close(30)


def test_a_closed_lane_refuses_everything(calls: Calls) -> None:
    """Closing is bounded, even while a call does not come back."""
    closed = lane()
    calls.submit(closed, "busy", waits=True)
    assert calls.begun.wait(30)
    calls.submit(closed, "waits")
    assert not closed.close(0.01)
    calls.submit(closed, "after")
    assert calls.refused == ["waits", "after"]
    calls.go.set()
    assert closed.close(30)


SPACE = Namespace("test")


def late_client(fake: FakeClient) -> LateClient:
    """Return an attachment that tries often."""
    return LateClient(
        engine_config({}, {}), SPACE, get_logger(), client_factory=fake.open, retry_s=0.01
    )


def test_a_client_is_there_at_once() -> None:
    """The first call of an engine is served."""
    fake = FakeClient()
    attached = late_client(fake)
    assert attached.client is fake
    assert fake.namespace == SPACE
    attached.close()
    attached.close()
    assert fake.is_closed
    assert attached.client is None


def test_a_home_node_that_comes_later_is_found() -> None:
    """An engine starts without its cache, and has it when the node is there."""
    fake = FakeClient()
    fake.problem = PeerUnreachable("the home node")
    attached = late_client(fake)
    assert attached.client is None
    status = attached.status()
    assert not status["is_healthy"]
    assert (status["reason"], status["why"]) == ("not_open", str(fake.problem))
    fake.problem = None
    wait_until(lambda: attached.client is fake)
    assert attached.status()["is_healthy"]
    attached.close()


def test_an_engine_without_a_node_logs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it tries; each try makes a client, and closes it."""
    monkeypatch.setattr(home, "ATTACH_S", 0.0)
    caplog.set_level(logging.INFO, LOGGER)
    config = engine_config({"home": f"ipc://{tmp_path}/home.ipc"}, {})
    tried: list[object] = []

    def open_client(*given: Any, **named: Any) -> Client:
        tried.append(given)
        return Client.open(*given, **named)

    attached = LateClient(config, SPACE, get_logger(), client_factory=open_client, retry_s=0.01)
    wait_until(lambda: len(tried) > 4)
    attached.close()

    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "event=engines.open_failed"
    ]


def test_a_client_that_comes_after_the_close_is_closed() -> None:
    """A node that is found while the engine stops keeps no client of it."""
    fake = FakeClient()
    made: Future[LateClient] = Future()
    attached = LateClient(
        engine_config({}, {}),
        SPACE,
        get_logger(),
        on_open=lambda _: made.result(TIMEOUT_S).close(),
        client_factory=_second_try(fake),
        retry_s=0.01,
    )
    # Its thread may have opened the client before this line.
    made.set_result(attached)
    wait_until(lambda: fake.is_closed)
    assert attached.client is None


def _second_try(fake: FakeClient):  # noqa: ANN202 - a stand-in of Client.open
    tries: list[int] = []

    def open_client(*given: object, **named: object) -> FakeClient:
        tries.append(1)
        if len(tries) == 1:
            raise PeerUnreachable("the home node")
        return fake

    return open_client


def test_an_engine_waits_a_second_unless_a_setting_allows_more() -> None:
    """The JSON line and the environment come before the default of adapters."""
    assert engine_config({}, {}).op_timeout_s == OP_TIMEOUT_S
    assert engine_config({}, {"PEERCACHE_OP_TIMEOUT_S": "3"}).op_timeout_s == 3
    assert engine_config({"op_timeout_s": 2}, {"PEERCACHE_OP_TIMEOUT_S": "3"}).op_timeout_s == 2
    with pytest.raises(ConfigError, match="pool_sise"):
        engine_config({"pool_sise": "1GiB"}, {})


def test_what_would_raise_answers() -> None:
    """The engine gets the harmless answer, and other answers as they are."""

    @harmless(lambda: -1)
    def half(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return number // 2

    assert [half(4), half(3)] == [2, -1]


def test_the_log_level_of_an_engines_settings_counts() -> None:
    """That of the JSON line, then that of the environment; the default is the engine's own."""
    for settings, environment, level in (
        ({"log_level": "debug"}, {"PEERCACHE_LOG_LEVEL": "error"}, "debug"),
        ({}, {"PEERCACHE_LOG_LEVEL": "error"}, "error"),
        ({}, {}, ""),
    ):
        assert level_named(engine_config(settings, environment), settings, environment) == level
    logger = logging.getLogger(LOGGER)
    before = logger.level
    try:
        engine_config({"log_level": "debug"}, {}, engine="an engine")
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
