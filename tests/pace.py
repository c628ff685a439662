"""Time in tests, where no machine may be too slow for them.

A test waits for a state with `wait_until` or `until`, never for a number of seconds. TIMEOUT_S is
for what is certain to come: only a failing test waits that long. A test of a near deadline or of
silence needs a short time that nevertheless is long enough for what comes before: `paced` runs it
again, slower, on a machine that did not keep up.

Every shorter time in here grows with FACTOR, which is measured once, when the suite begins. What
came too late raises TimedOut. It is the one failure that may have no other cause than the machine,
so it is the one that the gate tries again (`.ci/gate.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import trio

from peercache.client import home
from peercache.fabric.tcp.client import TcpFabric
from peercache.net import breaker

T = TypeVar("T")

FACTOR_VARIABLE = "PEERCACHE_TEST_PACE"
"""Set by the first process that measures, so that its workers and children have its factor."""
LOOPS_PER_S = 40_000_000
"""Steps of an empty loop in Python 3.11 on an idle core."""
MEASURED_S = 0.3
"""Some turns of the scheduler: a core that is shared shows it."""
FACTOR_MAX = 4.0
"""A test that waits for what never comes must end while a reader still waits for the gate."""


def _measured() -> float:
    """Return how many times slower than an idle core this thread runs now: 1 to FACTOR_MAX."""
    began, steps = time.monotonic(), 0
    while (took_s := time.monotonic() - began) < MEASURED_S:
        for _ in range(100_000):
            pass
        steps += 100_000
    return min(max(1.0, LOOPS_PER_S * took_s / steps), FACTOR_MAX)


FACTOR = float(os.environ.setdefault(FACTOR_VARIABLE, f"{_measured():.1f}"))

TIMEOUT_S = 240.0
"""Longer than any pause of a machine that still works. It does not depend on FACTOR: load may begin
later, also that of the suite itself, and then one process has taken more than a minute to start."""
PROMPT_S = 30.0 * FACTOR
"""What ends by itself, and not when TIMEOUT_S is over, has ended within this."""
PACES_S = (0.3 * FACTOR, 3.0 * FACTOR, 20.0 * FACTOR)


LOOK_S = 0.005
"""Between two looks at what a test waits for."""


class TimedOut(AssertionError):
    """What a test waited for did not come in time."""


def wait_until(
    holds: Callable[[], object], what: str = "the state", within_s: float = TIMEOUT_S
) -> float:
    """Wait for something that another thread or process does; return the seconds it took.

    what: names it in the failure. The pause between two looks releases Python's lock, which a
    thread of this process may need.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began >= within_s:
            raise TimedOut(f"{what}: not within {within_s:g} s")
        time.sleep(LOOK_S)
    return time.monotonic() - began


async def until(
    holds: Callable[[], object], what: str = "the state", within_s: float = TIMEOUT_S
) -> None:
    """Wait for something that another task, thread or process does, as `wait_until`."""
    with ends_within(within_s, what):
        while not holds():  # noqa: ASYNC110 - sockets and files have no event for a test
            await trio.sleep(LOOK_S)


@contextlib.contextmanager
def ends_within(within_s: float = TIMEOUT_S, what: str = "the block") -> Iterator[None]:
    """Cancel a block of trio after a time, and raise TimedOut."""
    with trio.move_on_after(within_s) as scope:
        yield
    if scope.cancelled_caught:
        raise TimedOut(f"{what}: not within {within_s:g} s")


def assert_within(took_s: float, within_s: float, what: str = "it") -> None:
    """Fail with TimedOut where something took longer than it may."""
    if took_s >= within_s:
        raise TimedOut(f"{what} took {took_s:.3f} s, at most {within_s:g} s")


def paced(story: Callable[[float], T], kept_up: Callable[[T], bool]) -> T:
    """Return what the story comes to at the first pace at which the machine kept up.

    story: takes a short time in seconds, and starts again each time. At the slowest pace whatever
    it comes to is returned, so what never happens still fails its test.
    """
    for pace_s in PACES_S[:-1]:
        reported = story(pace_s)
        if kept_up(reported):
            return reported
    return story(PACES_S[-1])


def at_best(seconds_of: Callable[[], float], *, below: float) -> float:
    """Return the least time that something takes: at most `below`, or the least of fifty.

    A busy machine makes anything late now and then; a bug does so every time.
    """
    least = seconds_of()
    for _ in range(49):
        if least < below:
            break
        least = min(least, seconds_of())
    return least


def no_peer_is_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the clients of this process timeout with nodes that are slow because the machine is.

    Theirs of a quarter of a second is right in production, where a miss costs less than a wait; in
    a test that expects hits it would be a bet on the machine.
    """
    monkeypatch.setattr(breaker, "STALL_S", TIMEOUT_S)
    monkeypatch.setattr(home, "ATTACH_S", PROMPT_S)
    defaults = TcpFabric.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "stall_s", TIMEOUT_S)
    monkeypatch.setitem(defaults, "connect_timeout_s", TIMEOUT_S)


@pytest.fixture(autouse=True)
def timeout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nodes that are slow because the machine is, but in tests of what a hung node costs.

    For a conftest to import, with `stalls`: it holds in its folder.
    """
    monkeypatch.setattr(home, "ATTACH_S", PROMPT_S)
    if "stalls" not in request.fixturenames:
        no_peer_is_taken_for_hung(monkeypatch)


@pytest.fixture
def stalls() -> None:
    """Let a silent node be taken for hung as soon as in production."""
