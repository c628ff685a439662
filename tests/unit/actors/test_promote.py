"""Promote: many readers that wait for the same pages, and pages that are not read yet."""

from __future__ import annotations

from math import inf

from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import PromoteAnswered
from peercache.actors.origin import Origin
from peercache.actors.promote.actor import READ_WITHIN_S, WAITERS_MAX, UnreadPages, Waiter, Waiters
from peercache.wire.messages.pool import LATER, LOST, PROMOTED

A, B = b"A" * 16, b"B" * 16


def admit(waiters: Waiters, reader: int, *keys: bytes, until: float) -> list[Effect]:
    """Let a reader wait for all of these pages."""
    states = bytearray((LATER,)) * len(keys)
    waiter = Waiter(Origin(reader), reader, list(keys), states, 0.0, until)
    return waiters.admit(waiter, list(range(len(keys))))


def answers(effects: list[Effect]) -> list[tuple[int, bytes]]:
    """Return which readers are answered, and with what."""
    found = []
    for effect in effects:
        assert isinstance(effect, TellPool)
        assert isinstance(effect.fact, PromoteAnswered)
        found.append((effect.fact.request, effect.fact.states))
    return found


def test_a_reader_that_gives_up_leaves_the_page_to_the_others() -> None:
    waiters = Waiters()
    admit(waiters, 1, A, B, until=1.0)
    admit(waiters, 2, A, until=2.0)
    waiters.now = 1.0

    assert answers(waiters.expire()) == [(1, bytes((LATER, LATER)))]

    assert (waiters.want(A), waiters.want(B)) == (True, False)
    assert waiters.wanted_keys() == [A]
    assert waiters.identities(A) == {2: None}
    assert answers(waiters.settle(A, PROMOTED)) == [(2, bytes((PROMOTED,)))]
    assert len(waiters) == 0


def test_a_page_that_all_have_given_up_is_wanted_no_more() -> None:
    """Also one that a question names twice."""
    waiters = Waiters()
    for reader in range(100):
        admit(waiters, reader, A, B, A, until=1.0)
    waiters.now = 1.0

    assert len(waiters.expire()) == 100

    assert waiters.wanted_keys() == []
    assert waiters.deadline() > 1.0


def test_a_question_that_names_a_page_twice_is_answered_once() -> None:
    waiters = Waiters()
    admit(waiters, 1, A, B, A, until=1.0)

    assert waiters.settle(A, PROMOTED) == []
    assert answers(waiters.settle(B, LOST)) == [(1, bytes((PROMOTED, LOST, PROMOTED)))]
    assert waiters.settle(A, LOST) == []


def test_waiters_are_bounded() -> None:
    waiters = Waiters()
    for reader in range(WAITERS_MAX):
        assert admit(waiters, reader, A, until=1.0) == []

    assert answers(admit(waiters, WAITERS_MAX, A, until=1.0)) == [(WAITERS_MAX, bytes((LATER,)))]


def test_pages_promoted_for_two_readers_are_read_when_both_have() -> None:
    """The first of them asks for more: the second may still be reading."""
    unread = UnreadPages()
    unread.add(1.0, 100, {7: None, 8: None})

    unread.read_by(7)
    once = unread.size
    unread.read_by(7)
    unread.read_by(8)

    assert (once, unread.size) == (100, 0)


def test_pages_that_are_not_read_lose_their_protection() -> None:
    """A reader that died, or a wish, holds nothing for long; what was read is not counted twice."""
    unread = UnreadPages()
    unread.add(1.0, 100, {})
    unread.add(2.0, 10, {7: None})
    unread.read_by(7)
    due = unread.deadline()

    unread.expire(1.0 + READ_WITHIN_S)
    left = unread.size
    unread.expire(3.0)

    assert due == 1.0 + READ_WITHIN_S
    assert (left, unread.size) == (0, 0)
    assert unread.deadline() == inf
