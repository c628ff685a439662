"""Slots of a batch: taken together, they are those that would be taken one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.pool.reservations import Shares
from peercache.actors.pool.slots import Slot, SlotAllocator
from peercache.model.room import DONOR_CHECK_EVERY
from tests.examples import examples

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
