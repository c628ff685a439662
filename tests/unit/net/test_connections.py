"""Idle connections: the least used go, by number, by time, and with their peers."""

from __future__ import annotations

import resource
from typing import Any

import attrs
import pytest

from peercache.net import requests as connections
from peercache.net.breaker import Breakers
from peercache.net.requests import (
    IDLE_S,
    KEPT_MAX,
    KEPT_MIN,
    OF_ONE_MAX,
    Connections,
    most_kept,
)


@attrs.define(eq=False)
class Line:
    """A connection with a name, which is notified when it is closed."""

    name: str
    closed: list[str]
    url: str = "url"
    is_broken: bool = False
    is_fresh: bool = True
    is_redial: bool = False

    def close(self) -> None:
        """Hang up."""
        self.closed.append(self.name)


def unused(*_: Any) -> Any:
    """No test here makes a connection or a message."""
    raise AssertionError


class Kept:
    """The connections of a client that makes none again, and its clock."""

    def __init__(self, most: int = 100) -> None:
        self.now = 100.0
        self.closed: list[str] = []
        self.lines: dict[str, Line] = {}
        self.url: str | None = "url"
        self.connections: Connections[Any] = Connections(
            identity=1, cluster="test", breakers=Breakers(), clock=lambda: self.now,
            hello_for=unused, url_of=lambda _: self.url, connect=lambda *_: None, on_refused=unused,
            on_unasked=unused, kept_max=most,
        )  # fmt: skip

    def keep(self, peer: int, name: str, passed_s: float = 0.0) -> list[str]:
        """Give a connection back after some time; return those that are closed for it."""
        self.now += passed_s
        self.closed.clear()
        self.lines[name] = Line(name, self.closed)
        self.connections.give_back(peer, self.lines[name])
        return list(self.closed)

    def take(self, peer: int) -> str:
        """Lease a connection, and return its name; "" without one."""
        line = self.connections.lease(peer, fresh=False)
        return "" if line is None else str(line.name)

    def forget(self, alive: set[int]) -> list[str]:
        """Forget peers; return the connections that are closed."""
        self.closed.clear()
        self.connections.forget(alive)
        return list(self.closed)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_the_connection_used_last_is_taken_first(kept: Kept) -> None:
    for name in "abc":
        kept.keep(7, name)

    taken = [kept.take(7) for _ in range(4)]

    assert taken == ["c", "b", "a", ""]
    assert kept.forget(set()) == []


def test_a_broken_one_is_closed_and_the_next_one_taken(kept: Kept) -> None:
    kept.keep(7, "works")
    kept.keep(7, "breaks")
    kept.lines["breaks"].is_broken = True

    assert kept.take(7) == "works"
    assert kept.closed == ["breaks"]


def test_one_peer_keeps_a_few(kept: Kept) -> None:
    gone = [kept.keep(7, str(number)) for number in range(OF_ONE_MAX + 2)]

    assert gone == [[]] * OF_ONE_MAX + [["0"], ["1"]]


def test_of_too_many_the_peer_used_least_lately_loses_its_own() -> None:
    kept = Kept(most=3)
    for peer in (1, 2, 3):
        kept.keep(peer, f"to {peer}")
    again = kept.take(1)

    gone = [kept.keep(1, again), kept.keep(4, "to 4"), kept.keep(5, "to 5")]

    assert gone == [[], ["to 2"], ["to 3"]]
    assert kept.forget(set()) == ["to 1", "to 4", "to 5"]


def test_a_peer_with_several_connections_counts_as_used_with_any_of_them() -> None:
    kept = Kept(most=4)
    for peer, name in ((1, "a"), (1, "b"), (2, "c"), (3, "d")):
        kept.keep(peer, name)
    kept.keep(1, kept.take(1))

    assert kept.keep(4, "e") == ["c"]


def test_what_was_not_used_for_long_goes_while_the_home_node_is_asked_each_second(
    kept: Kept,
) -> None:
    """Nothing but the client's own beat is needed to notice it."""
    kept.keep(7, "home")
    kept.keep(8, "early")
    kept.keep(9, "late", passed_s=10.0)

    went: dict[str, float] = {}
    for second in range(1, 100):
        for name in kept.keep(7, kept.take(7), passed_s=1.0):
            went[name] = second

    assert went == {"early": IDLE_S - 10.0, "late": IDLE_S}
    assert kept.forget(set()) == ["home"]


def test_further_connections_of_a_burst_go_too(kept: Kept) -> None:
    """Four threads asked one peer at once, and one of them still does."""
    for name in "abcd":
        kept.keep(7, name)

    assert kept.keep(7, kept.take(7), passed_s=IDLE_S) == ["a", "b", "c"]


def test_peers_that_are_gone_give_theirs_back(kept: Kept) -> None:
    for peer in (7, 7, 8):
        kept.keep(peer, f"to {peer}")

    assert kept.forget({8, 9}) == ["to 7", "to 7"]
    assert kept.take(7) == ""
    assert kept.forget(set()) == ["to 8"]


def test_what_is_taken_and_forgotten_leaves_its_place() -> None:
    """Else fewer and fewer would be kept."""
    kept = Kept(most=2)
    for round_ in range(5):
        kept.keep(1, "one")
        kept.keep(2, "two")
        assert kept.take(1) == "one", round_
        assert kept.forget(set()) == ["two"]

    assert [kept.keep(1, "a"), kept.keep(2, "b"), kept.keep(3, "c")] == [[], [], ["a"]]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(64, KEPT_MIN), (1024, 85), (65_536, KEPT_MAX), (resource.RLIM_INFINITY, KEPT_MAX)],
)
def test_a_process_with_few_open_files_keeps_few(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    """Its engine needs them."""
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (limit, limit))

    assert most_kept() == expected
