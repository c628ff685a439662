"""Retained pages in the pool: they stay until their time, and then go as any page."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.effects import Send, StoreWords, TellDirectory
from peercache.actors.mailboxes import DrainChanged, RequestGive, RequestHeld
from peercache.actors.origin import Origin
from peercache.actors.pool import page_table
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.page_table import LAPSES_MAX, RETAIN_MAX_S, STALE_ENDS_MIN
from peercache.model.ids import Incarnation
from peercache.wire.messages.pool import (
    NOT_HERE,
    OVER_QUOTA,
    RESERVED,
    RETAINED,
    Clear,
    Commit,
    Granted,
    Remove,
    Reserve,
    Retain,
    Retained,
)
from tests.examples import examples

GRANULE = 4096
PAGES = 64
MOST = PAGES // 4
CLIENT, NODE = Origin(1, 3), Origin(9)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(numbers: Any) -> bytes:
    return b"".join(map(key, numbers))


class Rig:
    """A pool of PAGES pages of one namespace without a quota, and a clock."""

    def __init__(self, *, has_disk: bool = False) -> None:
        self.pool = Pool(
            incarnation=Incarnation(77),
            granule=GRANULE,
            page_bytes=PAGES * GRANULE,
            usable_bytes=PAGES * GRANULE,
            client_uncommitted_max=PAGES * GRANULE,
            rng=random.Random(1),
            has_disk=has_disk,
        )
        self.now = 100.0
        self.sequence = 0

    def say(self, message: Any, sender: Origin = CLIENT) -> list[Any]:
        effects = self.pool.on_message(sender, message, self.now)
        self.pool.check()
        return effects

    def store(self, *numbers: int) -> bytes:
        """Store pages; return the states of the Reserve."""
        self.sequence += 1
        count = len(numbers)
        lengths = np.full(count, GRANULE, "<u8").tobytes()
        granted = self.say(Reserve(5, self.sequence, 1, keys(numbers), lengths))[-1].message
        assert isinstance(granted, Granted)
        self.say(Commit(6, self.sequence, b"\1" * count, bytes(8 * count), 0.1))
        return granted.states

    def retain(self, *numbers: int, seconds: float = 60.0, namespace: int = 1) -> list[int]:
        """Retain pages; return the state of each."""
        (effect,) = self.say(Retain(7, namespace, keys(numbers), seconds), NODE)
        assert isinstance(effect, Send)
        assert effect.to == NODE
        assert isinstance(effect.message, Retained)
        assert effect.message.request == 7
        return list(effect.message.states)

    def wait(self, until: float) -> None:
        """Let time pass, tick by tick."""
        while self.pool.deadline() <= until:
            self.now = max(self.now, self.pool.deadline())
            assert self.pool.on_tick(self.now) == []
            self.pool.check()
        self.now = max(self.now, until)

    def holds(self, *numbers: int) -> list[bool]:
        return [self.pool.pages.find(key(number)) is not None for number in numbers]


def test_a_retained_page_stays_until_its_time_and_then_goes() -> None:
    rig = Rig()
    rig.store(*range(PAGES))
    assert rig.retain(0, 1, seconds=60) == [RETAINED, RETAINED]

    rig.store(*range(100, 200))
    assert rig.holds(0, 1, 2) == [True, True, False]
    rig.wait(159.9)
    rig.store(*range(200, 300))
    assert rig.holds(0, 1) == [True, True]

    rig.wait(160.0)
    assert rig.pool.deadline() == math.inf
    rig.store(*range(300, 400))
    assert rig.holds(0, 1) == [False, False]


def test_of_a_chain_that_lapses_the_tail_goes_first() -> None:
    rig = Rig()
    rig.store(*range(8))
    rig.retain(*range(8))
    rig.wait(1000.0)

    rig.store(*range(100, 100 + PAGES - 4))

    assert rig.holds(*range(8)) == [True] * 4 + [False] * 4


def test_pages_that_are_not_here_or_of_another_namespace_are_told() -> None:
    rig = Rig()
    rig.store(1)

    assert rig.retain(1, 2) == [RETAINED, NOT_HERE]
    assert rig.retain(1, namespace=2) == [NOT_HERE]


def test_more_than_may_be_retained_is_told_and_the_first_ones_stay() -> None:
    rig = Rig()
    rig.store(*range(PAGES))

    assert rig.retain(*range(20)) == [RETAINED] * MOST + [OVER_QUOTA] * (20 - MOST)

    assert rig.pool.figures()["pool_bytes_retained"] == MOST * GRANULE
    rig.say(Remove(8, 1, key(0)), NODE)
    assert rig.pool.figures()["pool_bytes_retained"] == (MOST - 1) * GRANULE
    assert rig.retain(*range(1, 20))[: MOST + 1] == [RETAINED] * MOST + [OVER_QUOTA]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, -math.inf])
def test_no_time_lets_pages_go(seconds: float) -> None:
    rig = Rig()
    rig.store(*range(PAGES))
    rig.retain(0)

    assert rig.retain(0, 1, seconds=seconds) == [RETAINED, RETAINED]

    rig.store(*range(100, 200))
    assert rig.holds(0) == [False]


@pytest.mark.parametrize("seconds", [math.inf, 1e300, RETAIN_MAX_S])
def test_no_page_is_retained_for_ever(seconds: float) -> None:
    rig = Rig()
    rig.store(0)

    rig.retain(0, seconds=seconds)

    assert rig.pool.deadline() == rig.now + RETAIN_MAX_S


def test_the_longest_time_holds() -> None:
    """A second client that wants a page for less time takes nothing from the first one."""
    rig = Rig()
    rig.store(*range(PAGES))
    for seconds in (10.0, 60.0, 20.0):
        rig.retain(0, seconds=seconds)

    rig.wait(159.0)
    rig.store(*range(100, 200))
    assert rig.holds(0) == [True]
    rig.wait(160.0)
    rig.store(*range(200, 300))
    assert rig.holds(0) == [False]


@pytest.mark.parametrize("message", [Remove(8, 1, keys([0, 1])), Clear(8, 1)])
def test_removals_remove_retained_pages(message: Any) -> None:
    """The word is odd, the record is withdrawn, and a page that comes again is not retained."""
    rig = Rig()
    rig.store(*range(PAGES))
    rig.retain(0, 1)

    effects = rig.say(message, NODE)

    assert [type(effect) for effect in effects[:2]] == [StoreWords, TellDirectory]
    assert rig.holds(0, 1) == [False, False]
    assert rig.store(0, 1) == bytes((RESERVED,)) * 2
    rig.store(*range(100, 100 + 2 * PAGES))
    assert rig.holds(0, 1) == [False, False]
    rig.wait(1000.0)


def test_a_stop_and_a_drain_see_retained_pages() -> None:
    """They are flushed to disk, and handed over."""
    rig = Rig(has_disk=True)
    rig.store(0, 1)
    rig.retain(0)

    (held,) = rig.say(RequestHeld(), NODE)
    rig.say(DrainChanged(True), NODE)
    (given,) = rig.say(RequestGive(True), NODE)

    for told in (held, given):
        named = b"".join(group.records["key"].tobytes() for group in told.fact.groups)
        assert key(0) in named
        assert key(1) in named


def test_ends_are_bounded_however_often_pages_are_renewed() -> None:
    rig = Rig()
    rig.store(*range(8))

    for second in range(3 * STALE_ENDS_MIN // 8):
        rig.retain(*range(8), seconds=60.0 + second)

    assert len(rig.pool._retention._ends) <= 2 * 8 + STALE_ENDS_MIN
    rig.wait(rig.now + 59.0 + 3 * STALE_ENDS_MIN // 8)
    assert rig.pool._slots.retained_count == 0


@pytest.mark.parametrize("how", ["let go", "removed", "cleared"])
def test_ends_are_bounded_when_most_pages_are_retained_no_longer(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool asserts the bound after each message: a node that exceeds it ends."""
    monkeypatch.setattr(page_table, "STALE_ENDS_MIN", 4)
    rig = Rig()
    rig.store(*range(12))
    rig.retain(*range(12))

    if how == "let go":
        rig.retain(*range(12), seconds=0)
    elif how == "removed":
        rig.say(Remove(8, 1, keys(range(12))), NODE)
    else:
        rig.say(Clear(8, 1), NODE)

    assert rig.pool._slots.retained_count == 0
    assert len(rig.pool._retention._ends) <= 4


def test_ends_are_bounded_while_renewed_pages_lapse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "STALE_ENDS_MIN", 0)
    rig = Rig()
    rig.store(*range(8))
    rig.retain(*range(4), seconds=10)
    rig.retain(*range(4, 8), seconds=20)
    rig.retain(*range(4, 8), seconds=30)
    assert len(rig.pool._retention._ends) == 12

    rig.wait(rig.now + 10)

    assert rig.pool._slots.retained_count == 4
    assert len(rig.pool._retention._ends) <= 8


def test_many_pages_lapse_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tick is bounded; the next one is due later: a node whose tick is due at once ends."""
    assert LAPSES_MAX > 1
    monkeypatch.setattr(page_table, "LAPSES_MAX", 3)
    rig = Rig()
    rig.store(*range(8))
    rig.retain(*range(8))
    rig.now += 60.0

    rig.pool.on_tick(rig.now)

    assert rig.pool._slots.retained_count == 5
    assert rig.now < rig.pool.deadline() < rig.now + 0.01
    rig.wait(rig.now + 0.01)
    assert rig.pool._slots.retained_count == 0


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_pages_stay_as_a_slow_model_says(seed: int) -> None:
    """The model keeps the end of each page, and knows nothing of slots, extents and heaps."""
    rng = random.Random(seed)
    rig = Rig()
    ends: dict[int, float] = {}
    for _ in range(80):
        step, number = rng.random(), rng.randrange(150)
        if step < 0.5:
            rig.store(*range(number, number + rng.randrange(1, 12)))
        elif step < 0.75:
            seconds = rng.choice((0.0, 1.0, 5.0, 5.0, 20.0))
            numbers = range(number, number + 4)
            before = rig.holds(*numbers)
            states = rig.retain(*numbers, seconds=seconds)
            assert [state != NOT_HERE for state in states] == before
            for one, state in zip(numbers, states, strict=True):
                if state == RETAINED and seconds:
                    ends[one] = max(rig.now + seconds, ends.get(one, 0.0))
                elif state == RETAINED:
                    ends.pop(one, None)
        elif step < 0.85:
            rig.say(Remove(8, 1, key(number)), NODE)
            ends.pop(number, None)
        else:
            rig.wait(rig.now + rng.choice((0.5, 2.0, 7.0)))
            ends = {one: end for one, end in ends.items() if end > rig.now}
        assert all(rig.holds(*ends))
        assert rig.pool._slots.retained_count == len(ends) <= MOST
