"""The slot allocator: extents, size classes, who goes when there is no room."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.pool.slots import UNITS_ABOUT, SlotAllocator
from tests.examples import examples
from tests.unit.actors.slots_rig import Rig


@pytest.mark.parametrize("granules", [1, 3, 255, 256, 511, 512, 1000, 100_000, 2**24])
def test_pool_of_any_size_is_cut_into_about_as_many_units(granules: int) -> None:
    """Up to 512 units, none smaller than a granule."""
    slots = SlotAllocator(granules=granules, usable=granules)

    units = -(-granules // slots.unit)

    assert min(granules, UNITS_ABOUT) <= units <= 2 * UNITS_ABOUT


@pytest.mark.parametrize(
    ("size", "units"),
    [(256, 1), (64, 1), (224, 1), (200, 4), (160, 2), (255, 1), (129, 4), (384, 3), (512, 2),
     (257, 8), (2000, 8)],
)  # fmt: skip
def test_extent_spans_the_fewest_units_that_waste_little(size: int, units: int) -> None:
    """At most an eighth of an extent is left over; here a unit has 256 granules."""
    rig = Rig(256 * 256)

    slot = rig.put(size)

    assert slot.extent.units == units
    assert 8 * (units * 256 - slot.extent.slots_max * size) <= units * 256


def test_every_granule_of_a_pool_that_is_no_multiple_of_units_can_be_used() -> None:
    """The last unit is short, and belongs to a page of the whole pool."""
    rig = Rig(1023)

    whole = rig.put(1023)
    rig.release(whole)
    singles = [rig.put(1) for _ in range(1023)]

    assert whole.first == 0
    assert len({slot.first for slot in singles}) == 1023
    assert rig.evicted == []


def test_freed_slots_are_reused_oldest_first() -> None:
    """A slot just freed is the last to be used again."""
    rig = Rig(256 * 16)
    slots = [rig.put(4) for _ in range(8)]
    for index in (2, 0, 1):
        rig.release(slots[index])

    again = [rig.put(4).first for _ in range(3)]

    assert again == [slots[index].first for index in (2, 0, 1)]


def test_extent_that_is_wholly_free_can_be_of_another_class() -> None:
    """No memory stays with a size that is not used any more."""
    rig = Rig(16)
    slots = [rig.put(4) for _ in range(4)]
    for slot in slots:
        rig.release(slot)

    whole = rig.put(16)

    assert whole.first == 0
    assert rig.evicted == []
    assert rig.slots.class_count == 1


def test_units_freed_longest_ago_are_assigned_first() -> None:
    """Also whole extents are reused oldest first."""
    rig = Rig(8)
    slots = [rig.put(1) for _ in range(8)]
    for index in (5, 1, 3):
        rig.release(slots[index])

    again = [rig.put(1).first for _ in range(3)]

    assert again == [5, 1, 3]


def test_stale_free_slots_of_a_gone_extent_are_skipped() -> None:
    """1. An extent is freed, 2. another class gets its units, 3. the first class wants a slot."""
    rig = Rig(512 * 4)
    first = [rig.put(2) for _ in range(4)]
    for slot in first[2:]:
        rig.release(slot)
    other = rig.put(4)

    again = [rig.put(2) for _ in range(4)]

    assert other.first not in {slot.first for slot in again}


def test_least_recently_touched_goes_first() -> None:
    """Within a class it is plain LRU."""
    rig = Rig(4)
    slots = [rig.put(1) for _ in range(4)]
    rig.slots.touch(slots[0])

    rig.put(1)
    rig.put(1)

    assert rig.evicted == [slots[1].first, slots[2].first]


def test_nothing_touched_since_goes() -> None:
    """What the caller has just found is not evicted for it."""
    rig = Rig(4)
    slots = [rig.put(1) for _ in range(4)]
    since = rig.slots.clock
    for slot in slots:
        rig.slots.touch(slot)

    same_size = rig.take(1, untouched_since=since)
    other_size = rig.take(2, untouched_since=since)

    assert same_size is other_size is None
    assert rig.evicted == []


def test_class_without_anything_takes_the_coldest_window() -> None:
    """The neighbouring units that were untouched for longest are reclaimed, and no others."""
    rig = Rig(16)
    slots = [rig.put(1) for _ in range(16)]
    for slot in slots[:6] + slots[9:]:
        rig.slots.touch(slot)

    large = rig.put(3)

    assert large.first == 6
    assert sorted(rig.evicted) == [6, 7, 8]


def test_window_prefers_units_that_are_nobodys() -> None:
    """Of windows equally cold the one that evicts less is taken."""
    rig = Rig(8)
    slots = [rig.put(1) for _ in range(8)]
    rig.release(slots[2])
    rig.release(slots[4])

    large = rig.put(2)

    assert len(rig.evicted) == 1
    assert {large.first, large.first + 1} & {2, 4}


def test_window_may_be_cut_from_a_larger_extent() -> None:
    """The rest of an extent that lost some of its units is free."""
    rig = Rig(16)
    rig.put(12)
    rig.put(4)

    small = [rig.put(1) for _ in range(12)]

    assert rig.count(12) == 0
    assert rig.count(4) == 1
    assert sorted(slot.first for slot in small) == list(range(12))


def test_reserved_slot_saves_its_extent() -> None:
    """An extent with a slot that may be written to is never reclaimed."""
    rig = Rig(64 * 256)
    rig.take(1)
    others = [rig.put(64) for _ in range(255)]

    for _ in range(600):
        rig.put(64)

    assert len(others) == 255
    assert list(rig.reserved) == [0]


def test_everything_reserved_leaves_no_room() -> None:
    """Then there is no slot, of no size, and no class is left behind."""
    rig = Rig(4)
    for _ in range(4):
        rig.take(1)

    refused = [rig.take(1), rig.take(2), rig.take(4)]

    assert refused == [None] * 3
    assert rig.slots.class_count == 1


def test_usable_part_grows() -> None:
    """Nothing beyond the usable part is given out."""
    rig = Rig(1024, usable=0)

    before = rig.take(1)
    rig.slots.grow(10)
    units = [rig.take(4) for _ in range(3)]
    rig.slots.grow(1024)
    after = rig.take(512)

    assert before is None
    assert [slot is None for slot in units] == [False, False, True]
    assert after is not None


def test_page_that_does_not_fit_yet_gets_no_slot() -> None:
    """A page larger than the usable part waits for it."""
    rig = Rig(1024, usable=512)

    early = rig.take(1024)
    rig.slots.grow(1024)
    later = rig.take(1024)

    assert early is None
    assert later is not None


def test_slot_freed_twice_is_a_bug() -> None:
    """Our own mistakes fail at once."""
    rig = Rig(16)
    rig.put(1)
    slot = rig.put(1)
    rig.slots.release(slot)

    with pytest.raises(AssertionError, match="freed twice"):
        rig.slots.release(slot)


@settings(max_examples=examples(60))
@given(
    granules=st.integers(1, 700),
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 250),
    largest=st.integers(1, 40),
    units_about=st.sampled_from([3, 16, UNITS_ABOUT]),
)
def test_allocator_never_gives_one_granule_twice(
    granules: int, seed: int, steps: int, largest: int, units_about: int
) -> None:
    """Whatever is taken, held, touched and freed: slots do not overlap, and sums are right."""
    rig, rng = Rig(granules, units_about=units_about), random.Random(seed)
    largest = min(largest, granules)

    for _ in range(steps):
        size = rng.randint(1, largest)
        slot = rig.take(size)
        # Only reserved slots can stand in the way of a page that fits the pool.
        assert slot is not None or rig.reserved
        if slot is not None and rng.random() < 0.8:
            rig.hold(slot)
        everything = [*rig.held.values(), *rig.reserved.values()]
        if everything and rng.random() < 0.4:
            rig.release(rng.choice(everything))
        if rig.held and rng.random() < 0.5:
            rig.slots.touch(rng.choice(list(rig.held.values())))
        rig.check()
