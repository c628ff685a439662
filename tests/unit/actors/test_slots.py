"""The slot allocator: extents, size classes, who goes when there is no room; batches too."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.pool.reservations import Shares
from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import UNITS_ABOUT, SlotAllocator
from peercache.model.room import DONOR_CHECK_EVERY
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


@pytest.mark.parametrize(("one", "other"), [(1, 2), (4, 3), (4, 12), (4, 5)])
def test_two_classes_in_equal_use_do_not_steal_from_each_other(one: int, other: int) -> None:
    """After settling, a long alternation of two sizes moves no extent."""
    rig = Rig(1024)
    for _ in range(2000):
        rig.put(one)
        rig.put(other)
    settled = rig.slots.reclaims

    for _ in range(4000):
        rig.put(one)
        rig.put(other)

    assert rig.slots.reclaims == settled
    assert min(rig.count(one), rig.count(other)) * 5 > max(rig.count(one), rig.count(other))


@pytest.mark.parametrize("units", [2, 3, 4, 5, 7])
def test_two_classes_in_a_tiny_pool_settle(units: int) -> None:
    """Also where an extent is a large part of the pool nothing moves to and fro."""
    rig = Rig(units * 6, units_about=units)
    for _ in range(500):
        rig.put(2)
        rig.put(3)
    settled = rig.slots.reclaims

    for _ in range(2000):
        rig.put(2)
        rig.put(3)

    assert rig.slots.reclaims == settled


def test_only_a_much_colder_class_gives_an_extent() -> None:
    """A class whose pages are about as old as our own gives nothing, be its extents colder.

    Ancient pages and hot ones are in every extent of one class; those of the other are middling.
    """
    rig = Rig(36, units_about=9)
    ancient = [rig.put(2) for _ in range(4)]
    hot = rig.put(3)
    for _ in range(100):
        rig.slots.touch(hot)
    middling = [rig.put(1) for _ in range(8)]
    for _ in range(10):
        rig.slots.touch(hot)
    own = [rig.put(4) for _ in range(2)]
    for slot in [hot] * 20 + ancient[1::2]:
        rig.slots.touch(slot)

    rig.put(4)

    assert rig.count(1) == len(middling)
    assert rig.count(4) == len(own) + 1
    assert rig.count(2) == 2


def test_search_that_failed_is_repeated_when_units_become_free() -> None:
    """1. No two free units are neighbours; 2. two become so; 3. then no page is evicted."""
    rig = Rig(8)
    rig.put(2)
    slots = {slot.first: slot for slot in (rig.put(1) for _ in range(6))}
    rig.release(slots[3])
    rig.release(slots[5])
    rig.put(2)
    evicted_before = len(rig.evicted)
    rig.release(slots[4])

    rig.put(2)

    assert evicted_before == 1
    assert len(rig.evicted) == 1


def test_unused_class_gives_its_room() -> None:
    """A pool follows the demand: the new size gets nearly everything in the end."""
    rig = Rig(1024)
    for _ in range(256):
        rig.put(4)

    for _ in range(3000):
        rig.put(2)

    assert rig.count(4) == 0
    assert rig.count(2) == 512


def test_class_in_steady_use_keeps_its_room() -> None:
    """One that is read all the time is not robbed by one that is only written."""
    rig = Rig(1024)
    hot = [rig.put(4) for _ in range(128)]
    for _ in range(3000):
        rig.put(2)
        for slot in hot[:: len(hot) // 4]:
            rig.slots.touch(slot)
        hot = hot[1:] + hot[:1]

    assert rig.count(4) == 128


def test_many_sizes_that_come_once_cost_an_extent_each() -> None:
    """An odd size leaves the others alone beyond its extent."""
    rig = Rig(2**16)
    for _ in range(256 * 4):
        rig.put(64)

    rig.put(70)

    assert len(rig.evicted) <= 2 * 4


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "batch", "batch", "touch", "release", "mirror"]),
        st.sampled_from([1, 1, 2, 3, 7]),
        st.integers(1, 40),
    ),
    max_size=40,
)


class Pair:
    """Two equal allocators: one takes batches, the other slot by slot."""

    def __init__(self, granules: int, units_about: int) -> None:
        self.both = [
            SlotAllocator(granules=granules, usable=granules, units_about=units_about)
            for _ in range(2)
        ]
        self.held: list[list[Slot]] = [[], []]

    def batch(self, size: int, count: int) -> tuple[list[int], list[int]]:
        """Take and hold; return the first granules of what was taken and evicted."""
        said = [self._batch(which, size, count) for which in range(2)]
        assert said[0] == said[1]
        return said[0]

    def each(self, name: str, place: int, size: int) -> None:
        """Do something else to both."""
        for slots, held in zip(self.both, self.held, strict=True):
            if name == "mirror":
                gone: list[Slot] = []
                most = slots.granules // 2
                since = slots.clock
                slot = slots.take_mirror(size, most=most, untouched_since=since, evicted=gone)
                self._forget(held, gone)
                if slot is not None:
                    slots.hold([slot])
                    held.append(slot)
            elif held and name == "touch":
                slots.touch(held[place % len(held)])
            elif held:
                slots.release(held.pop(place % len(held)))

    def check(self) -> None:
        """Compare all that can be seen."""
        figures: list[Any] = []
        for slots, held in zip(self.both, self.held, strict=True):
            slots.check()
            order = [[slot.first for slot in of_size] for of_size in slots.coldest_first()]
            sums = (slots.held_granules, slots.reserved_granules, slots.held_count, slots.clock)
            extents = {slot.extent.first_unit: slot.extent for slot in held}
            counts = {unit: (e.held, e.reserved, len(e.slots)) for unit, e in extents.items()}
            figures.append((order, sums, counts, [slot.first for slot in held]))
        assert figures[0] == figures[1]

    def _batch(self, which: int, size: int, count: int) -> tuple[list[int], list[int]]:
        slots, gone = self.both[which], []
        # Some batches find pages that they must not evict.
        since = slots.clock - 5 * (count % 4)
        if which == 0:
            taken = slots.take_many(size, count, untouched_since=since, evicted=gone)
        else:
            some = [slots.take(size, untouched_since=since, evicted=gone) for _ in range(count)]
            taken = [slot for slot in some if slot is not None]
        self._forget(self.held[which], gone)
        slots.hold(taken)
        self.held[which] += taken
        return [slot.first for slot in taken], [slot.first for slot in gone]

    @staticmethod
    def _forget(held: list[Slot], gone: list[Slot]) -> None:
        firsts = {id(slot) for slot in gone}
        held[:] = [slot for slot in held if id(slot) not in firsts]


@settings(max_examples=examples(60))
@given(granules=st.integers(8, 300), units_about=st.sampled_from([4, 16, 64]), steps=STEPS)
def test_a_batch_takes_what_single_steps_take(
    granules: int, units_about: int, steps: list[tuple[str, int, int]]
) -> None:
    """The same slots, the same evictions in the same order, and the same sums."""
    pair = Pair(granules, units_about)
    for name, size, count in steps:
        if name == "batch":
            pair.batch(size, count)
        else:
            pair.each(name, count, size)
        pair.check()


def test_a_long_batch_still_looks_at_other_sizes() -> None:
    """A class that only evicts its own would never take the room of a much colder one."""
    pair = Pair(64 * DONOR_CHECK_EVERY, 64)
    pair.batch(2, 8 * DONOR_CHECK_EVERY)
    for _ in range(12):
        pair.batch(1, 20 * DONOR_CHECK_EVERY)
        pair.check()

    assert not any(slot.extent.size_class.granules == 2 for slot in pair.held[0])


@given(
    together_max=st.integers(0, 60),
    each_max=st.integers(0, 60),
    size=st.integers(1, 9),
    count=st.integers(1, 12),
    own=st.integers(0, 60),
    others=st.integers(0, 60),
)
def test_what_is_allowed_together_is_allowed_one_by_one(
    together_max: int, each_max: int, size: int, count: int, own: int, others: int
) -> None:
    """And a batch that is not allowed as a whole goes page by page."""
    shares = Shares(together_max, each_max)
    if not shares.allow_all(size, count, own, own + others):
        return
    for page in range(count):
        before = page * size
        assert shares.allow(size, own=own + before, together=own + others + before)
