"""The failure detector: who is back from the dead, and that ended members stay ended."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.actors.membership import gossip as tombstones_module
from peercache.actors.membership.gossip import (
    ENDED_MAX,
    FORGET_S,
    FailureDetector,
    Tombstones,
)
from peercache.model.member import ALIVE, DEAD, Member

A, B = 11, 12


def test_a_member_is_back_for_a_while() -> None:
    """Others never were away."""
    detector = FailureDetector()
    detector.back(A, 100.0)

    seen = [detector.back_within(one, now, 3.0) for one, now in ((A, 102.9), (A, 103.0), (B, 100))]

    assert seen == [True, False, False]


def test_a_member_that_ends_again_is_back_no_more() -> None:
    """And is remembered no longer than others that are gone."""
    detector = FailureDetector()
    detector.back(A, 100.0)

    detector.ended(A)

    assert not detector.back_within(A, 100.1, 3.0)


DEAD_MEMBER = Member(1, 3, DEAD, 255, "host", "host:1", "", "", "")


def test_ended_is_due_after_its_time_and_oldest_first() -> None:
    """Each keeps the time at which it was first seen to have ended."""
    tombstones = Tombstones()
    tombstones.ended(1, 0.0)
    tombstones.ended(2, 10.0)
    tombstones.ended(1, 20.0)

    assert tombstones.due(FORGET_S - 1.0) == []
    assert tombstones.due(FORGET_S) == [1]
    assert tombstones.due(FORGET_S + 10.0) == [1, 2]


def test_too_many_ended_are_due_early() -> None:
    """Views stay small whatever happens to a cluster."""
    tombstones = Tombstones()
    for incarnation in range(ENDED_MAX + 3):
        tombstones.ended(incarnation, 5.0)

    assert tombstones.due(5.0) == [0, 1, 2]


def test_a_tombstone_holds_entries_that_are_not_newer() -> None:
    """A higher counter is of its own making, so it lives."""
    tombstones = Tombstones()
    tombstones.ended(1, 0.0)
    tombstones.set(DEAD_MEMBER)

    assert tombstones.holds(attrs.evolve(DEAD_MEMBER, state=ALIVE))
    assert tombstones.holds(attrs.evolve(DEAD_MEMBER, counter=2, state=ALIVE))
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, counter=4, state=ALIVE))
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=2))
    assert tombstones.as_dead(attrs.evolve(DEAD_MEMBER, counter=2, state=ALIVE)) == DEAD_MEMBER


def test_a_member_that_lives_again_is_not_due_and_has_no_tombstone() -> None:
    """It refuted: nothing of its death is left."""
    tombstones = Tombstones()
    tombstones.ended(1, 0.0)
    tombstones.lives(1)
    tombstones.ended(2, 0.0)
    tombstones.set(attrs.evolve(DEAD_MEMBER, incarnation=2))
    tombstones.lives(2)

    assert tombstones.due(2 * FORGET_S) == []
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=2))


def test_tombstones_are_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the dead does not grow for ever."""
    monkeypatch.setattr(tombstones_module, "TOMBSTONES_MAX", 3)
    tombstones = Tombstones()
    for incarnation in range(5):
        tombstones.ended(incarnation, 0.0)
        tombstones.set(attrs.evolve(DEAD_MEMBER, incarnation=incarnation))

    assert len(tombstones) == 3
    assert not tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=1))
    assert tombstones.holds(attrs.evolve(DEAD_MEMBER, incarnation=2))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=30))
def test_a_tombstone_is_always_dead_and_never_older(ends: list[tuple[int, int]]) -> None:
    """The oracle: the last counter with which each tombstone was set."""
    tombstones = Tombstones()
    last: dict[int, int] = {}
    for incarnation, counter in ends:
        tombstones.ended(incarnation, 0.0)
        tombstones.set(attrs.evolve(DEAD_MEMBER, incarnation=incarnation, counter=counter))
        last[incarnation] = counter

    for incarnation, counter in last.items():
        entry = attrs.evolve(DEAD_MEMBER, incarnation=incarnation, counter=0, state=ALIVE)
        assert tombstones.holds(entry)
        assert tombstones.as_dead(entry) == attrs.evolve(entry, counter=counter, state=DEAD)
