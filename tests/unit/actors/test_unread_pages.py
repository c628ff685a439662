"""Unread pages: bytes that were promoted and may not have been read yet."""

from __future__ import annotations

from math import inf

from peercache.actors.promote.unread_pages import READ_WITHIN_S, UnreadPages


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
