"""Slots of mirrored and of retained pages: their shares, who goes first, and who stays."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.pool.reservations import Shares, Terms, take_slots
from peercache.actors.pool.size_classes import HELD, MIRROR_AGE_FACTOR, Slot
from peercache.actors.pool.slots import PERIOD_S, SlotAllocator
from peercache.actors.tenants import Tenant
from peercache.wire.messages.pool import RESERVED
from tests.examples import examples
from tests.unit.actors.slots_rig import Rig
from tests.unit.actors.test_tenants import rig_of, tenant_of, tenants_of


def pool(granules: int = 8) -> SlotAllocator:
    """Return an allocator whose pages of one granule each have an extent of their own."""
    return SlotAllocator(granules=granules, usable=granules)


def put_own(slots: SlotAllocator, count: int = 1, size: int = 1) -> list[Slot]:
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
    held = put_own(slots, 8)
    lately = held[0].touched

    assert mirror(slots, since=lately - 1) is None
    assert mirror(slots, since=lately) is held[0]


def test_a_mirrored_page_goes_before_pages_of_its_age_and_after_much_older_ones() -> None:
    """One that is read all the time stays in a pool that is always full."""
    slots = pool()
    slots.pass_time(0.0)
    copy = mirror(slots)
    assert copy is not None
    _, coldest, *_, hottest = put_own(slots, 7)
    slots.pass_time(PERIOD_S)
    slots.touch(copy)
    evicted: list[Slot] = []
    slots.take(1, untouched_since=slots.clock, evicted=evicted)
    assert evicted[0] is not copy, "it was just read"

    for _ in range(5):
        slots.touch(hottest)
    assert slots.clock - copy.touched < slots.clock - coldest.touched
    assert (slots.clock - copy.touched) * MIRROR_AGE_FACTOR > slots.clock - coldest.touched
    slots.take(1, untouched_since=slots.clock, evicted=evicted)
    assert evicted[1] is copy, "pages of the node's own are not that much older"
    assert slots.mirror_granules == 0


def test_a_mirrored_page_that_was_touched_in_the_batch_lets_another_go() -> None:
    """What is not to be evicted now does not hide what may be."""
    slots = pool(3)
    own, hottest = put_own(slots, 2)
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
    (own,) = put_own(slots)
    mirror(slots)

    assert [list(some) for some in slots.coldest_first()] == [[own]]


MIRROR_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["own", "mirror", "hold", "touch", "adopt", "release"]),
        st.integers(1, 4),
        st.integers(0, 30),
    ),
    max_size=60,
)


@settings(max_examples=examples(100))
@given(steps=MIRROR_STEPS, most=st.integers(0, 12))
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


def test_a_mirror_takes_room_of_its_namespaces_tenant() -> None:
    """Not of all others: a namespace with a quota mirrors within it."""
    tenants = tenants_of("a=50%", 8)
    tenant = tenant_of(tenants, "a")
    assert tenant is not tenants.others
    slots = SlotAllocator(granules=8, usable=8, tenants=tenants)

    terms = Terms(0, tenant, Shares.of(granules=8, client_max=8), 0, mirrors_max=8)
    (slot,), _ = take_slots(slots, bytearray((RESERVED,)), [1], terms)

    assert slot is not None
    assert slot.extent.size_class.tenant is tenant


def test_a_mirror_in_anothers_place_is_reserved_and_a_mirror() -> None:
    """It counts in both sums until it is given back."""
    slots = pool()
    first, second = mirror(slots, most=2), mirror(slots, most=2)
    assert first is not None
    assert second is not None
    reserved, mirrored = slots.reserved_granules, slots.mirror_granules

    third = slots.take_mirror(1, most=2, untouched_since=slots.clock, evicted=[])

    assert third is first
    assert (slots.reserved_granules, slots.mirror_granules) == (reserved + 1, mirrored)
    assert third.is_mirror
    slots.hold([third])
    assert third.extent.size_class.mirrors[third.first] is third
    for slot in (second, third):
        slots.release(slot)
    assert (slots.reserved_granules, slots.mirror_granules) == (reserved, 0)
    slots.check()


def test_a_batch_of_the_nodes_own_evicts_mirrors_as_single_pages_do() -> None:
    """The copy of what is elsewhere goes before a page that only this node has."""
    slots = pool(4)
    copies = [mirror(slots), mirror(slots)]
    put_own(slots, 2)
    evicted: list[Slot] = []

    slots.take_many(1, 2, untouched_since=slots.clock, evicted=evicted)

    assert evicted == copies


def plain(whole: int = 64, units: int = 16) -> tuple[Rig, Tenant]:
    rig = Rig(whole, units_about=units)
    return rig, rig.slots.tenants.others


def retain(rig: Rig, *slots: Slot, until: float = 1.0) -> int:
    """Retain slots; return how many are."""
    count = sum(rig.slots.retain(slot, until) for slot in slots)
    check(rig)
    return count


def check(rig: Rig) -> None:
    """Compare what is counted of retained slots with a slow count."""
    rig.check()
    pages: Counter[Tenant] = Counter()
    blocked: Counter[Tenant] = Counter()
    extents = rig.extents()
    for extent, granules in extents:
        retained = [slot for slot in extent.slots if slot.retained_until]
        assert extent.retained == len(retained)
        pages[extent.size_class.tenant] += len(retained) * extent.size_class.granules
        if retained:
            blocked[extent.size_class.tenant] += granules
    every = [slot for extent, _ in extents for slot in extent.slots if slot.retained_until]
    assert rig.slots.retained_count == len(every)
    for tenant in rig.slots.tenants.all():
        assert (tenant.retained, tenant.blocked) == (pages[tenant], blocked[tenant]), tenant


def test_a_retained_slot_is_not_evicted_and_the_others_are() -> None:
    rig, _ = plain()
    slots = [rig.put(1) for _ in range(64)]
    assert retain(rig, *slots[:8]) == 8

    for _ in range(200):
        rig.put(1)

    assert all(rig.held.get(slot.first) is slot for slot in slots[:8])
    assert set(rig.evicted) == {slot.first for slot in slots[8:]}


def test_many_slots_at_once_pass_over_retained_ones() -> None:
    """The batch that is taken without a step a slot meets none of them either."""
    rig, _ = plain()
    slots = [rig.put(1) for _ in range(64)]
    retain(rig, *slots[:8])
    gone: list[Slot] = []

    taken = rig.slots.take_many(1, 64, untouched_since=rig.slots.clock, evicted=gone)

    assert len(taken) == 56
    assert not {slot.first for slot in gone} & {slot.first for slot in slots[:8]}


def test_another_size_gets_no_extent_with_a_retained_slot() -> None:
    """Not even where all pages of the extent are the coldest of the pool."""
    rig, _ = plain()
    slots = [rig.put(1) for _ in range(64)]
    retain(rig, slots[0], slots[8])

    for _ in range(30):
        rig.put(4)

    assert {slots[0].first, slots[8].first} <= set(rig.held)


def test_a_slot_that_is_let_go_is_the_hottest_and_goes_in_its_turn() -> None:
    rig, _ = plain(16, 4)
    slots = [rig.put(1) for _ in range(16)]
    retain(rig, *slots[:2])
    for slot in slots[:2]:
        rig.slots.let_go(slot)
        check(rig)

    for _ in range(16):
        rig.put(1)

    assert rig.evicted == [slot.first for slot in slots[2:] + slots[:2]]


@pytest.mark.parametrize("is_touched", [False, True])
def test_a_retained_slot_that_is_freed_counts_no_longer(is_touched: bool) -> None:
    """A removal does not ask for how long a page was to stay."""
    rig, tenant = plain()
    slot = rig.put(3)
    retain(rig, slot)
    if is_touched:
        rig.slots.touch(slot)

    rig.release(slot)

    check(rig)
    assert (tenant.retained, tenant.blocked, slot.retained_until) == (0, 0, 0.0)


def test_namespaces_without_a_quota_retain_a_quarter() -> None:
    rig, tenant = plain()
    slots = [rig.put(1) for _ in range(64)]

    assert retain(rig, *slots) == 16
    assert (tenant.retained, tenant.blocked) == (16, 16)
    assert retain(rig, *slots[:16], until=2.0) == 16, "they may be renewed"


def test_retained_slots_apart_do_not_block_more_than_half() -> None:
    """One in each extent: the ninth of sixteen is refused, and one next to another is not."""
    rig, _ = plain()
    slots = [rig.put(1) for _ in range(64)]

    assert retain(rig, *slots[::4]) == 8
    assert retain(rig, slots[1]) == 1


def test_a_tenant_retains_what_it_is_guaranteed_and_no_more() -> None:
    rig, named = rig_of("a=25%;b=0%")
    slots = [rig.put(1, named["a"]) for _ in range(32)]

    assert retain(rig, *slots) == 16
    assert retain(rig, rig.put(1, named["b"])) == 0


def test_what_is_retained_never_keeps_a_tenant_from_its_quota() -> None:
    """Even where a borrower has retained a page in each of its extents, as far as it may."""
    rig, named = rig_of("a=50%;b=50%")
    borrowed = [rig.put(1, named["a"]) for _ in range(64)]
    assert retain(rig, *borrowed[::4]) == 8, "that block half of the pool, its quota"

    own = [rig.put(1, named["b"]) for _ in range(32)]

    assert all(slot.first in rig.held for slot in own)
    assert named["b"].taken == 32
    assert all(slot.first in rig.held for slot in borrowed[::4])


def test_where_quotas_take_all_the_others_retain_nothing() -> None:
    rig, named = rig_of("a=50%;b=50%")

    assert retain(rig, rig.put(1, named["-"])) == 0


def test_a_mirrored_page_that_is_retained_is_like_any_other() -> None:
    rig, _ = plain()
    gone: list[Slot] = []
    slot = rig.slots.take_mirror(1, most=8, untouched_since=0, evicted=gone)
    assert slot is not None
    rig.reserved[slot.first] = slot
    rig.hold(slot)

    assert retain(rig, slot) == 1
    assert (slot.is_mirror, rig.slots.mirror_granules) == (False, 0)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), quotas=st.sampled_from(["", "a=40%;b=30%", "a=50%;b=50%"]))
def test_no_story_evicts_a_retained_slot_or_counts_it_wrongly(seed: int, quotas: str) -> None:
    """Random sizes, tenants and ends; `check` counts slowly after each step."""
    rng = random.Random(seed)
    rig, named = rig_of(quotas)
    retained: dict[int, Slot] = {}
    for _ in range(150):
        step, slots = rng.random(), list(rig.held.values())
        if step < 0.55 or not slots:
            slot = rig.take(rng.choice((1, 1, 1, 2, 5)), tenant=rng.choice(list(named.values())))
            if slot is not None:
                rig.hold(slot)
        elif step < 0.75:
            slot = rng.choice(slots)
            if rig.slots.retain(slot, 1.0):
                retained[slot.first] = slot
        elif step < 0.85 and retained:
            rig.slots.let_go(retained.pop(rng.choice(list(retained))))
        elif step < 0.92:
            slot = rng.choice(slots)
            retained.pop(slot.first, None)
            rig.release(slot)
        else:
            rig.slots.touch(rng.choice(slots))
        check(rig)
        assert all(rig.held.get(first) is slot for first, slot in retained.items())
        tenants = rig.slots.tenants.all()
        for tenant in tenants:
            others = sum(other.blocked for other in tenants if other is not tenant)
            assert others <= rig.slots.granules - tenant.quota or not rig.slots.tenants.are_several
