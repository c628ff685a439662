"""Time in tests, where no machine may be too slow for them.

PATIENCE_S is for what is certain to come: only a failing test waits that long. A test of a near
deadline or of silence needs a short time that nevertheless is long enough for what comes before:
it tells its story again, slower, to a machine that did not keep up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from peercache.client import home
from peercache.fabric.tcp.client import TcpFabric
from peercache.paths import breaker, locating

T = TypeVar("T")

PATIENCE_S = 60.0
"""Longer than any pause of a machine that still works."""
PROMPT_S = 30.0
"""What ends by itself, and not when PATIENCE_S is over, has ended within this."""
PACES_S = (0.3, 3.0, 20.0)


def paced(story: Callable[[float], T], kept_up: Callable[[T], bool]) -> T:
    """Return what the story comes to at the first pace at which the machine kept up.

    story: takes a short time in seconds, and starts anew each time. At the slowest pace whatever
    it comes to is returned, so what never happens still fails its test.
    """
    for pace_s in PACES_S[:-1]:
        told = story(pace_s)
        if kept_up(told):
            return told
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
    """Give the clients of this process patience with nodes that are slow because the machine is.

    Theirs of a quarter of a second is right in production, where a miss costs less than a wait; in
    a test that expects hits it would be a bet on the machine.
    """
    monkeypatch.setattr(breaker, "STALL_S", PATIENCE_S)
    monkeypatch.setattr(locating, "STALL_S", PATIENCE_S)
    monkeypatch.setattr(home, "ATTACH_S", PROMPT_S)
    defaults = TcpFabric.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "stall_s", PATIENCE_S)
    monkeypatch.setitem(defaults, "connect_timeout_s", PATIENCE_S)


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nodes that are slow because the machine is, but in tests of what a hung node costs.

    For a conftest to import, with `stalls`: it holds in its folder.
    """
    if "stalls" not in request.fixturenames:
        no_peer_is_taken_for_hung(monkeypatch)


@pytest.fixture
def stalls() -> None:
    """Let a silent node be taken for hung as soon as in production."""
