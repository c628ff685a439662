"""Lanes: each piece of work is done or refused once, and its caller waits for neither."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from peercache.engines.lanes import CallLane
from peercache.observability.log import get_logger
from tests.pace import wait_until


class Told:
    """What happened to pieces of work, by name."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.done: list[str] = []
        self.refused: list[str] = []
        self.go = threading.Event()

    def submit(
        self, lane: CallLane, name: str, *, waits: bool = False, fails: bool = False
    ) -> None:
        """Submit a piece of work that may wait for `go`, or raise."""

        def work() -> None:
            if waits:
                assert self.go.wait(30)
            if fails:
                raise ValueError(name)
            self.done.append(name)

        lane.submit(work, lambda: self.refused.append(name))


class Clock:
    """A clock that stands still."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def told() -> Iterator[Told]:
    """Return what is told; at the end nothing waits any more."""
    told = Told()
    yield told
    told.go.set()


def lane(**options: Any) -> CallLane:
    """Return a lane of one thread."""
    return CallLane("test", get_logger(), **{"timeout_s": 30.0, **options})


def test_work_is_done_in_its_order(told: Told) -> None:
    """One thread takes what came first."""
    with_one = lane()
    for name in "abc":
        told.submit(with_one, name)
    wait_until(lambda: told.done == ["a", "b", "c"])
    assert with_one.close(30)
    assert told.refused == []


def test_a_full_lane_refuses_at_once(told: Told) -> None:
    """The queue is bounded: what does not fit is refused in the caller's thread."""
    full = lane(work_max=2)
    told.submit(full, "busy", waits=True)
    wait_until(lambda: len(full) == 1 and not full._waiting)
    told.submit(full, "waits")
    told.submit(full, "too much")
    assert told.refused == ["too much"]
    told.go.set()
    wait_until(lambda: told.done == ["busy", "waits"])
    full.close(30)


def test_work_that_waited_too_long_is_refused(told: Told) -> None:
    """Its answer would come after its use."""
    clock = Clock()
    slow = lane(timeout_s=1.0, clock=clock)
    told.submit(slow, "busy", waits=True)
    wait_until(lambda: len(slow) == 1 and not slow._waiting)
    told.submit(slow, "late")
    clock.now = 1.5
    told.go.set()
    wait_until(lambda: told.refused == ["late"])
    assert told.done == ["busy"]
    slow.close(30)


def test_work_behind_a_call_that_hangs_is_refused_at_its_deadline(told: Told) -> None:
    """A caller that waits for its answer gets it then."""
    clock = Clock()
    hung = lane(timeout_s=0.05, clock=clock)
    told.submit(hung, "hangs", waits=True)
    wait_until(lambda: len(hung) == 1 and not hung._waiting)
    told.submit(hung, "late")
    clock.now = 1.0
    wait_until(lambda: told.refused == ["late"])
    assert len(hung) == 1
    told.go.set()
    hung.close(30)


def test_work_that_raises_is_refused_and_the_thread_lives(told: Told) -> None:
    """Each piece has an end, and the next one is done."""
    alive = lane()
    told.submit(alive, "fails", fails=True)
    told.submit(alive, "next")
    wait_until(lambda: told.done == ["next"])
    assert told.refused == ["fails"]
    alive.close(30)


def test_a_drain_refuses_what_waits_and_ends_when_the_rest_is_done(told: Told) -> None:
    """Nothing runs after it, and the lane goes on."""
    drained = lane()
    told.submit(drained, "busy", waits=True)
    wait_until(lambda: len(drained) == 1 and not drained._waiting)
    told.submit(drained, "waits")
    assert not drained.drain(timeout_s=0.01)
    assert told.refused == ["waits"]
    told.go.set()
    assert drained.drain(timeout_s=30)
    assert told.done == ["busy"]
    told.submit(drained, "after")
    wait_until(lambda: told.done == ["busy", "after"])
    drained.close(30)


def test_a_closed_lane_refuses_everything(told: Told) -> None:
    """Closing is bounded, even while a call does not come back."""
    closed = lane()
    told.submit(closed, "busy", waits=True)
    wait_until(lambda: len(closed) == 1 and not closed._waiting)
    told.submit(closed, "waits")
    assert not closed.close(0.01)
    told.submit(closed, "after")
    assert told.refused == ["waits", "after"]
    told.go.set()
    assert closed.close(30)
