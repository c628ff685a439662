"""Retained slots: never evicted, within what their tenant may have, and found in no search."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.pool.slots import Slot
from peercache.actors.tenants import Tenant, Tenants
from peercache.config.entries import parse_quotas
from peercache.model.keys import Namespace
from tests.examples import examples
from tests.unit.actors.slots_rig import Rig


def rig_of(text: str, *, whole: int = 64, units: int = 16) -> tuple[Rig, dict[str, Tenant]]:
    """Return a pool of `units` units, and its tenants a, b and the others."""
    tenants = Tenants(parse_quotas(text), whole=whole)
    named = {name: tenants.of(Namespace(name).space_tag()) for name in "ab"}
    return Rig(whole, units_about=units, tenants=tenants), named | {"-": tenants.others}


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
    extents = [e for e in dict.fromkeys(rig.slots._units) if e is not None]
    for extent in extents:
        retained = [slot for slot in extent.slots if slot.retained_until]
        assert extent.retained == len(retained)
        pages[extent.size_class.tenant] += len(retained) * extent.size_class.granules
        if retained:
            blocked[extent.size_class.tenant] += rig.slots._extent_granules(extent)
    every = [slot for extent in extents for slot in extent.slots if slot.retained_until]
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
    """One in each extent: the ninth of sixteen is refused, and one beside another is not."""
    rig, _ = plain()
    slots = [rig.put(1) for _ in range(64)]

    assert retain(rig, *slots[::4]) == 8
    assert retain(rig, slots[1]) == 1


def test_a_tenant_retains_what_it_is_sure_of_and_no_more() -> None:
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
        for tenant in named.values():
            others = sum(other.blocked for other in named.values() if other is not tenant)
            assert others <= rig.slots.granules - tenant.quota or not rig.slots.tenants.are_several
