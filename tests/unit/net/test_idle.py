"""Idle connections: the least used go, by number, by time, and with their peers."""

from __future__ import annotations

import resource

import attrs
import pytest

from peercache.net import idle
from peercache.net.idle import IDLE_S, KEPT_MAX, KEPT_MIN, OF_ONE_MAX, IdleConnections, most_kept


@attrs.define(eq=False)
class Line:
    """A connection with a name."""

    name: str
    is_broken: bool = False

    def close(self) -> None:
        """Only `Connections` closes."""
        raise AssertionError(self.name)


class Kept:
    """The idle connections of a client, and its clock."""

    def __init__(self, most: int = 100) -> None:
        self.now = 100.0
        self.idle: IdleConnections[Line] = IdleConnections(most=most, clock=lambda: self.now)

    def keep(self, peer: int, name: str, passed_s: float = 0.0) -> list[str]:
        """Keep a connection after some time; return those that go for it."""
        self.now += passed_s
        return [line.name for line in self.idle.keep(peer, Line(name))]


def test_the_connection_used_last_is_taken_first() -> None:
    kept = Kept()
    for name in "abc":
        kept.keep(7, name)

    taken = [kept.idle.take(7) for _ in range(4)]

    assert [line and line.name for line in taken] == ["c", "b", "a", None]
    assert (len(kept.idle), kept.idle.peers()) == (0, [])


def test_one_peer_keeps_a_few() -> None:
    kept = Kept()

    gone = [kept.keep(7, str(number)) for number in range(OF_ONE_MAX + 2)]

    assert gone == [[]] * OF_ONE_MAX + [["0"], ["1"]]


def test_of_too_many_the_peer_used_least_lately_loses_its_own() -> None:
    kept = Kept(most=3)
    for peer in (1, 2, 3):
        kept.keep(peer, f"to {peer}")
    again = kept.idle.take(1)
    assert again is not None

    gone = [kept.keep(1, again.name), kept.keep(4, "to 4"), kept.keep(5, "to 5")]

    assert gone == [[], ["to 2"], ["to 3"]]
    assert kept.idle.peers() == [1, 4, 5]
    assert len(kept.idle) == 3


def test_what_was_not_used_for_long_goes_while_the_home_node_is_asked_each_second() -> None:
    """Nothing but the client's own beat is needed to notice it."""
    kept = Kept()
    kept.keep(7, "home")
    kept.keep(8, "early")
    kept.keep(9, "late", passed_s=10.0)

    went: dict[str, float] = {}
    for second in range(1, 100):
        line = kept.idle.take(7)
        assert line is not None
        for name in kept.keep(7, line.name, passed_s=1.0):
            went[name] = second

    assert went == {"early": IDLE_S - 10.0, "late": IDLE_S}
    assert kept.idle.peers() == [7]


def test_further_connections_of_a_burst_go_too() -> None:
    """Four threads asked one peer at once, and one of them still does."""
    kept = Kept()
    for name in "abcd":
        kept.keep(7, name)
    line = kept.idle.take(7)
    assert line is not None

    assert kept.keep(7, line.name, passed_s=IDLE_S) == ["a", "b", "c"]


def test_peers_that_are_gone_give_theirs_back() -> None:
    kept = Kept()
    for peer in (7, 7, 8):
        kept.keep(peer, f"to {peer}")

    assert [line.name for line in kept.idle.drop([7, 9])] == ["to 7", "to 7"]
    assert (len(kept.idle), kept.idle.peers()) == (1, [8])


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(64, KEPT_MIN), (1024, 85), (65_536, KEPT_MAX), (resource.RLIM_INFINITY, KEPT_MAX)],
)
def test_a_process_with_few_open_files_keeps_few(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    """Its engine needs them."""
    monkeypatch.setattr(idle.resource, "getrlimit", lambda _: (limit, limit))

    assert most_kept() == expected
