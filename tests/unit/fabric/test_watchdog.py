"""The watchdog interrupts what outlasts its deadline, and nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from peercache.fabric.tcp.client import Watchdog
from tests.pace import TIMEOUT_S


def test_what_outlasts_its_deadline_is_interrupted() -> None:
    """The interrupt comes from another thread, and release says that it came."""
    watchdog = Watchdog(time.monotonic)
    interrupted = threading.Event()
    later = watchdog.watch(lambda: None, time.monotonic() + TIMEOUT_S)

    token = watchdog.watch(interrupted.set, time.monotonic() + 0.01)

    assert interrupted.wait(TIMEOUT_S)
    assert not watchdog.release(token)
    assert watchdog.release(later)
    watchdog.close()


def test_what_is_released_in_time_is_not_interrupted() -> None:
    """A read that ended is out of reach, even when its deadline passes."""
    watchdog = Watchdog(time.monotonic)
    interrupted: list[str] = []
    second_came = threading.Event()
    deadline = time.monotonic() + 1.0
    first = watchdog.watch(lambda: interrupted.append("first"), deadline)

    in_time = watchdog.release(first)
    watchdog.watch(second_came.set, deadline)

    assert in_time
    assert second_came.wait(TIMEOUT_S)
    assert interrupted == []
    watchdog.close()


def test_nearer_deadline_is_not_kept_waiting_by_a_farther_one() -> None:
    """The thread that sleeps until a far deadline is woken for a near one."""
    watchdog = Watchdog(time.monotonic)
    interrupted = threading.Event()
    far = watchdog.watch(lambda: None, time.monotonic() + 3600)
    begun = time.monotonic()

    watchdog.watch(interrupted.set, begun + 0.01)

    assert interrupted.wait(TIMEOUT_S)
    watchdog.release(far)
    watchdog.close()


def test_close_ends_the_thread() -> None:
    """Nothing of a closed fabric runs on."""
    watchdog = Watchdog(time.monotonic)
    watchdog.release(watchdog.watch(lambda: None, time.monotonic() + 3600))
    before = [thread.name for thread in threading.enumerate()]

    watchdog.close()

    after = [thread.name for thread in threading.enumerate()]
    assert before.count("peercache-deadlines") == after.count("peercache-deadlines") + 1


def test_a_thread_that_could_not_be_started_is_started_for_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else no read would be bounded any more."""
    watchdog = Watchdog(time.monotonic)
    interrupted = threading.Event()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            watchdog.watch(lambda: None, time.monotonic())
    watchdog.watch(interrupted.set, time.monotonic())

    assert interrupted.wait(TIMEOUT_S)
    watchdog.close()
