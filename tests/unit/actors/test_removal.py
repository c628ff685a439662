"""Removal: what clients want removed reaches every member, and the counts are summed."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from peercache.actors.effects import NotifyDirectory, Send
from peercache.actors.mailboxes import RemovalDone, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.removal.actor import FOLLOWS_S, PENDING_MAX, TIMEOUT_MAX_S, Remover
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.wire.messages.pool import Clear, Demote, Remove, Removed, Retain, Retained
from peercache.wire.messages.session import Refused

CLIENT = Origin(0x77, pipe=4)
CLEAR = Clear(9, 5, timeout_s=2.0)
DEAD_S = 6.0


def view(**states: int) -> ViewChanged:
    members = [Member(int(n[1:]), 1, state, 255, "h", n, n, "", "") for n, state in states.items()]
    return ViewChanged(tuple(members))


def answered(removed: Removed) -> NotifyDirectory:
    """Return how the client of a removal is answered: behind what the own shard has to take."""
    return NotifyDirectory(RemovalDone(CLIENT, removed))


@pytest.fixture
def remover() -> Remover:
    remover = Remover(dead_s=DEAD_S)
    states = {"m1": ALIVE, "m2": SUSPECT, "m3": DEAD, "m4": LEFT, "m5": ALIVE}
    assert remover.on_message(Origin(0), view(**states), -DEAD_S) == []
    return remover


@pytest.mark.parametrize("asked", [CLEAR, Remove(9, 5, bytes(32), 2.0)])
def test_every_live_member_is_notified_and_the_counts_are_summed(
    remover: Remover, asked: Any
) -> None:
    """The own node is a member as the others are; the dead are not asked."""
    sent = remover.on_message(CLIENT, asked, 10.0)

    forwarded = attrs.evolve(asked, request=1)
    assert sent == [Send(member, forwarded) for member in (1, 2, 5)]
    assert remover.on_message(Origin(5), Removed(1, 3), 10.1) == []
    assert remover.on_message(Origin(1), Removed(1, 0), 10.2) == []
    assert remover.on_message(Origin(2), Removed(1, 4), 10.3) == [answered(Removed(9, 7))]
    assert remover.deadline() == math.inf


def test_owners_that_may_still_name_removed_pages_are_named(remover: Remover) -> None:
    """Each holder names those that have not acknowledged; who is no live member is none of them."""
    remover.on_message(CLIENT, CLEAR, 10.0)
    remover.on_message(Origin(1), Removed(1, 3, (5, 99)), 10.1)
    remover.on_message(Origin(5), Removed(1, 0), 10.1)

    sent = remover.on_message(Origin(2), Removed(1, 1, (5,)), 10.1)

    assert sent == [answered(Removed(9, 4, (5,)))]


def test_members_that_do_not_answer_in_time_are_named(remover: Remover) -> None:
    """The client learns that pages may still be there."""
    remover.on_message(CLIENT, CLEAR, 10.0)
    remover.on_message(Origin(1), Removed(1, 3), 10.1)

    assert remover.deadline() == 12.0
    assert remover.on_tick(11.9) == []
    assert remover.on_tick(12.0) == [answered(Removed(9, 3, (2, 5)))]
    assert remover.on_message(Origin(2), Removed(1, 1), 12.1) == []
    assert remover.deadline() == math.inf


def test_only_a_member_that_was_asked_is_counted_and_once(remover: Remover) -> None:
    """Neither a repeated answer nor one of another member changes the sum."""
    remover.on_message(CLIENT, CLEAR, 10.0)
    for member, number in ((1, 1), (1, 1), (3, 1), (99, 1), (2, 8)):
        remover.on_message(Origin(member), Removed(number, 10), 10.1)

    assert remover.on_tick(12.0) == [answered(Removed(9, 10, (2, 5)))]


def test_a_member_that_has_gone_is_waited_for_no_longer(remover: Remover) -> None:
    """But it is named: other clients of its host have its memory mapped."""
    remover.on_message(CLIENT, CLEAR, 10.0)
    remover.on_message(Origin(1), Removed(1, 2), 10.1)

    ended = remover.on_message(Origin(0), view(m1=ALIVE, m2=DEAD), 10.2)

    assert ended == [answered(Removed(9, 2, (2, 5)))]


@pytest.mark.parametrize("end", [DEAD, LEFT])
def test_a_member_is_named_until_all_must_know_of_its_end(remover: Remover, end: int) -> None:
    """From when it was first seen ended, by whatever view; afterwards it is gone."""
    answers = []
    for now in (10.0, 12.0, 10.0 + DEAD_S + FOLLOWS_S):
        remover.on_message(Origin(0), view(m1=ALIVE, m2=end), now)
        (sent,) = remover.on_message(CLIENT, CLEAR, now)
        assert isinstance(sent, Send)
        assert isinstance(sent.message, Clear)
        answers += remover.on_message(Origin(1), Removed(sent.message.request, 3), now)

    assert answers == [answered(Removed(9, 3, missed)) for missed in ((2,), (2,), ())]


def test_a_member_that_was_held_dead_and_is_back_is_asked_like_any(remover: Remover) -> None:
    """It answers for itself."""
    remover.on_message(Origin(0), view(m1=ALIVE, m2=DEAD), 10.0)
    remover.on_message(Origin(0), view(m1=ALIVE, m2=ALIVE), 10.5)
    remover.on_message(CLIENT, CLEAR, 11.0)

    assert remover.on_message(Origin(1), Removed(1, 0), 11.1) == []
    assert remover.on_message(Origin(2), Removed(1, 4), 11.1) == [answered(Removed(9, 4))]


def test_a_retain_names_no_member_that_has_ended(remover: Remover) -> None:
    """It protects no page there."""
    remover.on_message(Origin(0), view(m1=ALIVE, m2=DEAD), 10.0)
    remover.on_message(CLIENT, RETAIN, 10.0)

    sent = remover.on_message(Origin(1), Retained(1, b"\1\1\1"), 10.1)

    assert sent == [Send(CLIENT, Retained(9, b"\1\1\1"))]


def test_a_view_without_one_member_leaves_the_others_to_be_waited_for(remover: Remover) -> None:
    """The client is not notified of pages as removed that those still have."""
    remover.on_message(CLIENT, CLEAR, 10.0)

    assert remover.on_message(Origin(0), view(m1=ALIVE, m5=ALIVE), 10.1) == []

    assert remover.on_message(Origin(1), Removed(1, 3), 10.2) == []
    assert remover.on_message(Origin(5), Removed(1, 4), 10.3) == [answered(Removed(9, 7, (2,)))]


def test_a_node_without_a_view_answers_at_once() -> None:
    assert Remover(dead_s=DEAD_S).on_message(CLIENT, CLEAR, 1.0) == [answered(Removed(9, 0))]


@pytest.mark.parametrize(("asked_s", "until"), [(1e300, 10.0 + TIMEOUT_MAX_S), (-5.0, 10.0)])
def test_timeout_is_bounded(remover: Remover, asked_s: float, until: float) -> None:
    remover.on_message(CLIENT, attrs.evolve(CLEAR, timeout_s=asked_s), 10.0)

    assert remover.deadline() == until


def test_removals_at_once_are_bounded(remover: Remover) -> None:
    """The client is notified to try again; the others go on."""
    for number in range(PENDING_MAX):
        remover.on_message(CLIENT, attrs.evolve(CLEAR, request=number), 10.0)

    (refused,) = remover.on_message(CLIENT, CLEAR, 10.0)

    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert (refused.message.request, refused.message.reason) == (9, "busy")
    remover.check()
    assert len(remover.on_tick(12.0)) == PENDING_MAX


# --- retaining -----------------------------------------------------------------------------------

RETAIN = Retain(9, 5, bytes(48), 60.0, timeout_s=2.0)
DEMOTE = Demote(9, 5, bytes(48), timeout_s=2.0)


@pytest.mark.parametrize("asked", [RETAIN, DEMOTE])
def test_a_page_is_retained_or_demoted_if_one_member_does_so(remover: Remover, asked: Any) -> None:
    """The best of what members answered, a page; each of them counts once."""
    sent = remover.on_message(CLIENT, asked, 10.0)

    assert sent == [Send(member, attrs.evolve(asked, request=1)) for member in (1, 2, 5)]
    assert remover.on_message(Origin(1), Retained(1, b"\0\1\0"), 10.1) == []
    assert remover.on_message(Origin(2), Retained(1, b"\2\0\0"), 10.2) == []
    (answer,) = remover.on_message(Origin(5), Retained(1, b"\1\0\0"), 10.3)
    assert answer == Send(CLIENT, Retained(9, b"\2\1\0"))


def test_members_that_say_nothing_of_a_retain_are_named(remover: Remover) -> None:
    """One that refuses the Retain does not count either."""
    remover.on_message(CLIENT, RETAIN, 10.0)
    remover.on_message(Origin(1), Retained(1, b"\2\2\0"), 10.1)

    assert remover.on_tick(12.0) == [Send(CLIENT, Retained(9, b"\2\2\0", (2, 5)))]


@pytest.mark.parametrize("wrong", [Removed(1, 3), Retained(1, b"\2\2"), Retained(1, b"\2" * 4)])
def test_an_answer_to_another_question_is_none(remover: Remover, wrong: Any) -> None:
    """Neither a count nor the states of other pages change what the client is notified."""
    remover.on_message(CLIENT, RETAIN, 10.0)
    remover.on_message(Origin(1), wrong, 10.1)

    assert remover.on_tick(12.0) == [Send(CLIENT, Retained(9, bytes(3), (1, 2, 5)))]


def test_retained_is_no_answer_to_a_removal(remover: Remover) -> None:
    remover.on_message(CLIENT, CLEAR, 10.0)
    remover.on_message(Origin(1), Retained(1, b""), 10.1)

    assert remover.on_tick(12.0) == [answered(Removed(9, 0, (1, 2, 5)))]
