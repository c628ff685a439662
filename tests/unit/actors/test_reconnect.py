"""Reconnect: heads for ever, lost members for ever but not all at once, and no live member."""

from __future__ import annotations

import random

from peercache.actors.membership.reconnect import ALIAS_S, LOST_MAX, REDIALS_PER_TURN, Reconnect

TURN_S = 0.25


def redial(**discovery: int) -> Reconnect:
    return Reconnect(discovery, first_s=0.5, longest_s=3.0, rng=random.Random(1))


def calls_in(
    calling: Reconnect,
    seconds: float,
    *,
    start: float = 0.0,
    reached: tuple[str, ...] = (),
    ranks: tuple[int, ...] = (),
) -> list[str]:
    """Return whom it calls, turn by turn."""
    turns = int(seconds / TURN_S)
    return [
        address
        for turn in range(turns)
        for address in calling.due(start + turn * TURN_S, reached=reached, ranks=ranks)
    ]


def test_every_head_is_called_at_once() -> None:
    """A starting node asks all of them, in their order."""
    assert redial(a=0, b=1).due(7.0, reached=(), ranks=()) == ["a", "b"]


def test_head_that_is_reached_rests_and_is_called_at_once_when_lost() -> None:
    """Its backoff starts anew each time."""
    calling = redial(a=0)
    calls_in(calling, 60.0)

    resting = calls_in(calling, 60.0, start=60.0, reached=("a",))
    again = calls_in(calling, 3.0, start=120.0)

    assert resting == []
    assert len(again) >= 3


def test_head_reached_under_another_address_is_called_rarely() -> None:
    """Its rank is there: it is the same one, unless lists differ between hosts."""
    calling = redial(a=0)
    calling.due(0.0, reached=(), ranks=())

    calls = calls_in(calling, 10 * ALIAS_S, start=1.0, ranks=(0,))

    assert 5 <= len(calls) <= 30


def test_head_reached_under_another_address_is_called_soon_when_it_is_lost() -> None:
    """The rare calls of good times do not delay the first one of bad times."""
    calling = redial(a=0)
    calls_in(calling, 10 * ALIAS_S, ranks=(0,))

    assert calls_in(calling, 3.5, start=10 * ALIAS_S)


def test_lost_are_called_in_turn_and_never_all_at_once() -> None:
    """A hundred lost members get their calls one after the other, each as often as the rest."""
    calling = redial()
    for number in range(100):
        calling.lost(f"n{number}", 0.0)

    for turn in range(200):
        assert len(calling.due(turn * TURN_S, reached=(), ranks=())) <= REDIALS_PER_TURN
    calls = calls_in(calling, 500.0, start=50.0)

    counts = [calls.count(f"n{number}") for number in range(100)]
    assert max(counts) - min(counts) <= 3
    assert min(counts) >= 38


def test_heads_are_called_however_many_are_lost() -> None:
    """They do not wait behind the lost."""
    calling = redial(a=0)
    for number in range(LOST_MAX):
        calling.lost(f"n{number}", 0.0)

    assert calls_in(calling, 10.0).count("a") >= 4


def test_lost_addresses_are_bounded_and_the_oldest_makes_room() -> None:
    """Crashes of years do not fill the memory."""
    calling = redial(a=0)
    for number in range(LOST_MAX + 5):
        calling.lost(f"n{number}", 0.0)
    calling.lost("a", 0.0)

    assert len(calling) == LOST_MAX
    called = set(calls_in(calling, 300.0))
    assert called == {"a", *(f"n{number}" for number in range(5, LOST_MAX + 5))}


def test_found_address_is_called_no_longer() -> None:
    """A live member is at the address, or it left."""
    calling = redial()
    calling.lost("x", 0.0)

    calling.found("x")
    calling.found("never lost")

    assert calls_in(calling, 30.0) == []


def test_losing_again_what_is_lost_does_not_start_its_backoff_anew() -> None:
    """A view that says so again and again does not make calls more frequent."""
    calling = redial()
    calling.lost("x", 0.0)
    calls_in(calling, 60.0)
    calling.lost("x", 60.0)

    assert len(calls_in(calling, 30.0, start=60.0)) <= 21
