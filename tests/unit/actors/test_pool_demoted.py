"""Demoted pages go next, and nothing else of the order of eviction changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.effects import Send
from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.wire.messages.pool import DEMOTED, NOT_HERE, STAYS, Demote, Retained
from tests.examples import examples
from tests.unit.actors.slots_rig import Rig as Slots
from tests.unit.actors.test_pool_mirrors import NODE, key
from tests.unit.actors.test_pool_mirrors import Rig as PoolRig
from tests.unit.actors.test_slots_retained import mirror
from tests.unit.actors.test_tenants import rig_of

PAGES = 64


class Rig(PoolRig):
    """A pool whose pages can be demoted."""

    def demote(self, *numbers: int, namespace: int = 1) -> list[int]:
        """Demote pages; return the state of each."""
        (effect,) = self.say(Demote(7, namespace, b"".join(map(key, numbers))), NODE)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Retained)
        assert effect.message.request == 7
        return list(effect.message.states)


def filled(**options: float) -> Rig:
    rig = Rig(pages=PAGES, **options)
    for number in range(PAGES):
        rig.store(number)
        rig.now += 10.0
    return rig


def test_demoted_pages_go_first_and_the_last_of_a_chain_before_the_others() -> None:
    rig = filled()

    assert rig.demote(60, 61, 62) == [DEMOTED] * 3

    rig.store(100, 101)
    assert rig.holds(0, 60, 61, 62) == [True, True, False, False]
    rig.store(102, 103)
    assert rig.holds(0, 1, 60) == [False, True, False]


def test_pages_that_are_not_here_or_of_another_namespace_are_reported() -> None:
    rig = filled()

    assert rig.demote(1, 1000, 2) == [DEMOTED, NOT_HERE, DEMOTED]
    assert rig.demote(3, namespace=2) == [NOT_HERE]
    rig.store(100, 101, 102)
    assert rig.holds(1, 2, 3) == [False, False, True]


def test_a_page_that_is_used_again_is_like_any_other() -> None:
    """A use after the hint counts more than the hint."""
    rig = filled()
    rig.demote(5)
    rig.store(5)

    rig.store(*range(100, 100 + PAGES - 1))

    assert rig.holds(5, 4, 63) == [True, False, False]


def test_a_retained_page_stays() -> None:
    rig = filled()
    rig.retain(5, 6, seconds=60.0)

    assert rig.demote(5, 6, 7) == [STAYS, STAYS, DEMOTED]
    rig.store(*range(100, 100 + PAGES - 2))
    assert rig.holds(5, 6, 7) == [True, True, False]


def test_a_page_of_this_second_is_demoted_too() -> None:
    """A request may end within the second in which its pages were stored."""
    rig = Rig(pages=4)
    rig.store(0, 1, 2, 3)

    assert rig.demote(1) == [DEMOTED]
    rig.store(4)
    assert rig.holds(0, 1, 2, 3) == [True, False, True, True]


def test_a_mirrored_page_is_demoted_among_mirrored_pages() -> None:
    slots = SlotAllocator(granules=8, usable=8)
    copies = [mirror(slots, most=4) for _ in range(4)]
    last = copies[3]
    assert last is not None

    assert slots.demote(last)

    gone: list[Slot] = []
    assert slots.take_mirror(1, most=4, untouched_since=slots.clock, evicted=gone) is last
    assert gone == [last]


def test_a_demoted_page_takes_no_extent_from_hot_pages_of_its_size() -> None:
    """It counts as no colder than the coldest one: another size looks at nothing else."""
    rig = Slots(64, units_about=16)
    small = [rig.put(1) for _ in range(32)]
    for _ in range(8):
        rig.put(4)
    coldest = small[0].touched

    assert rig.slots.demote(small[20])

    assert small[20].touched == coldest
    assert small[20].extent.touched > coldest


def test_a_tenant_that_demotes_costs_no_other_one_a_page() -> None:
    rig, named = rig_of("a=50%;b=50%")
    one, other = named["a"], named["b"]
    mine = [rig.put(1, tenant=one) for _ in range(rig.slots.granules // 2)]
    theirs = [rig.put(1, tenant=other) for _ in range(rig.slots.granules // 2)]

    for slot in mine[4:8]:
        assert rig.slots.demote(slot)
    for _ in range(4):
        rig.put(1, tenant=one)

    assert sorted(rig.evicted) == sorted(slot.first for slot in mine[4:8])
    assert all(rig.held[slot.first] is slot for slot in theirs)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), quotas=st.sampled_from(["", "a=40%;b=30%"]))
def test_no_story_loses_a_slot_or_unsettles_the_order(seed: int, quotas: str) -> None:
    """Random sizes, tenants and seconds: what may be evicted is in the order of its touches."""
    rng = random.Random(seed)
    rig, named = rig_of(quotas)
    now = 0.0
    for _ in range(150):
        step, slots = rng.random(), list(rig.held.values())
        if step < 0.5 or not slots:
            slot = rig.take(rng.choice((1, 1, 2, 5)), tenant=rng.choice(list(named.values())))
            if slot is not None:
                rig.hold(slot)
        elif step < 0.65:
            rig.slots.demote(rng.choice(slots))
        elif step < 0.75:
            rig.slots.retain(rng.choice(slots), 1.0)
        elif step < 0.85:
            rig.slots.touch(rng.choice(slots))
        elif step < 0.9:
            rig.release(rng.choice(slots))
        elif step < 0.93:
            rng.choice(slots).disk_length = 1
        else:
            now += rng.choice((0.1, 1.0, 3.0))
            rig.slots.pass_time(now)
        rig.check()
        touched = [slot.touched for slot in rig.slots.coldest_held()]
        assert touched == sorted(touched)
        evictable = sum(len(list(slots)) for slots in rig.slots.coldest_first())
        assert evictable + rig.slots.retained_count == len(rig.held)


@pytest.mark.parametrize("moved_at", [0, 5])
def test_a_demoted_page_goes_before_one_that_came_from_another_node(moved_at: int) -> None:
    rig = Slots(16, units_about=4)
    slots = [rig.put(1) for _ in range(16)]
    rig.slots.move_in(slots[3], moved_at)

    assert rig.slots.demote(slots[9])

    gone: list[Slot] = []
    rig.slots.pass_time(10.0)
    rig.slots.take(1, untouched_since=rig.slots.clock, evicted=gone)
    assert gone == [slots[9]]
