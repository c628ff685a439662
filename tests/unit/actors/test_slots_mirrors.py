"""Slots of mirrored pages: a share, the first to go, never the place of what is read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.pool.slots import HELD, MIRROR_AGE_FACTOR, Slot, SlotAllocator
from tests.examples import examples


def pool(granules: int = 8) -> SlotAllocator:
    """Return an allocator whose pages of one granule each have an extent of their own."""
    return SlotAllocator(granules=granules, usable=granules)


def put(slots: SlotAllocator, count: int = 1, size: int = 1) -> list[Slot]:
    """Hold pages of the node's own."""
    taken = [slots.take(size, untouched_since=slots.clock, evicted=[]) for _ in range(count)]
    held = [slot for slot in taken if slot is not None]
    slots.hold(held)
    slots.check()
    return held


def mirror(slots: SlotAllocator, *, most: int = 8, since: int | None = None) -> Slot | None:
    """Hold a mirrored page, if there is room for one."""
    slot = slots.take_mirror(
        1, most=most, untouched_since=slots.clock if since is None else since, evicted=[]
    )
    if slot is not None:
        slots.hold([slot])
    slots.check()
    return slot


def test_mirrored_pages_take_their_share_and_then_each_others_place() -> None:
    """The share counts what is reserved too; the coldest of them goes."""
    slots = pool()
    first, second = mirror(slots, most=2), mirror(slots, most=2)
    assert first is not None
    assert second is not None
    slots.touch(first)
    evicted: list[Slot] = []

    third = slots.take_mirror(1, most=2, untouched_since=slots.clock, evicted=evicted)

    assert evicted == [second]
    assert third is second
    assert slots.mirror_granules == 2
    assert slots.take_mirror(1, most=2, untouched_since=0, evicted=evicted) is None, "first is hot"


def test_a_mirrored_page_takes_no_place_of_what_was_touched_lately() -> None:
    """In a full pool it takes the place of a page that was not."""
    slots = pool()
    held = put(slots, 8)
    lately = held[0].touched

    assert mirror(slots, since=lately - 1) is None
    assert mirror(slots, since=lately) is held[0]


def test_a_mirrored_page_goes_before_pages_of_its_age_and_after_much_older_ones() -> None:
    """One that is read all the time stays in a pool that is always full."""
    slots = pool()
    copy = mirror(slots)
    assert copy is not None
    *_, hottest = put(slots, 7)
    slots.touch(copy)
    evicted: list[Slot] = []
    slots.take(1, untouched_since=slots.clock, evicted=evicted)
    assert evicted[0] is not copy, "it was just read"

    for _ in range(3):
        slots.touch(hottest)
    coldest = next(iter(slots._classes[slots.tenants.others, 1].held.values()))
    assert slots.clock - copy.touched < slots.clock - coldest.touched
    assert (slots.clock - copy.touched) * MIRROR_AGE_FACTOR > slots.clock - coldest.touched
    slots.take(1, untouched_since=slots.clock, evicted=evicted)
    assert evicted[1] is copy, "pages of the node's own are not that much older"
    assert slots.mirror_granules == 0


def test_a_mirrored_page_that_was_touched_in_the_batch_lets_another_go() -> None:
    """What is not to be evicted now does not hide what may be."""
    slots = pool(3)
    own, hottest = put(slots, 2)
    slots.touch(own)
    copy = mirror(slots)
    assert copy is not None
    for _ in range(8):
        slots.touch(hottest)
    evicted: list[Slot] = []

    assert slots.take(1, untouched_since=own.touched, evicted=evicted) is own
    assert evicted == [own]


def test_a_page_that_is_set_here_too_is_the_nodes_own() -> None:
    """Then it leaves the share, and ages as any page."""
    slots = pool()
    copy = mirror(slots)
    assert copy is not None

    slots.adopt(copy)

    assert slots.mirror_granules == 0
    assert not copy.is_mirror
    slots.touch(copy)
    slots.release(copy)
    slots.check()
    assert slots.held_count == 0


def test_a_slot_that_is_given_back_is_no_mirror_any_more() -> None:
    """Held, reserved, or in an extent that another size takes."""
    slots = pool()
    held = mirror(slots)
    assert held is not None
    slots.release(held)
    reserved = slots.take_mirror(1, most=8, untouched_since=slots.clock, evicted=[])
    assert reserved is not None
    slots.release(reserved)
    assert slots.mirror_granules == 0

    for _ in range(8):
        assert mirror(slots) is not None
    evicted: list[Slot] = []
    assert slots.take(4, untouched_since=slots.clock, evicted=evicted) is not None

    assert len(evicted) == 4
    assert slots.mirror_granules == 4
    slots.check()


def test_candidates_for_the_disk_are_pages_of_the_nodes_own() -> None:
    """A mirrored page that goes needs no place on disk: its holder has it."""
    slots = pool()
    (own,) = put(slots)
    mirror(slots)

    assert [list(some) for some in slots.coldest_first()] == [[own]]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["own", "mirror", "hold", "touch", "adopt", "release"]),
        st.integers(1, 4),
        st.integers(0, 30),
    ),
    max_size=60,
)


@settings(max_examples=examples(100))
@given(steps=STEPS, most=st.integers(0, 12))
def test_the_sums_hold_whatever_happens(steps: list[tuple[str, int, int]], most: int) -> None:
    """Of what is mirrored, against a slow count; what was touched after a moment is not evicted."""
    slots, live = pool(12), list[Slot]()
    for kind, size, number in steps:
        since, evicted = slots.clock - number, list[Slot]()
        touched = {id(slot): slot.touched for slot in live}
        chosen = live[number % len(live)] if live else None
        if kind in ("own", "mirror"):
            if kind == "own":
                slot = slots.take(size, untouched_since=since, evicted=evicted)
            else:
                slot = slots.take_mirror(size, most=most, untouched_since=since, evicted=evicted)
            assert all(touched[id(gone)] <= since for gone in evicted)
            live = [each for each in live if each not in evicted] + ([slot] if slot else [])
        elif chosen is not None and kind == "release":
            slots.release(chosen)
            live.remove(chosen)
        elif chosen is not None and kind == "hold" and chosen.state != HELD:
            slots.hold([chosen])
        elif chosen is not None and chosen.state == HELD:
            if kind == "touch":
                slots.touch(chosen)
            elif kind == "adopt" and chosen.is_mirror:
                slots.adopt(chosen)
        slots.check()
        mirrored = [slot.extent.size_class.granules for slot in live if slot.is_mirror]
        assert slots.mirror_granules == sum(mirrored) <= most
        held = sum(slot.state == HELD for slot in live)
        assert slots.held_count == held
