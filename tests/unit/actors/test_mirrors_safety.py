"""What mirrored pages are kept from, one line of it at a time."""

from __future__ import annotations

import random

import numpy as np

from peercache.actors.effects import Send
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.reservations import LATELY_S, LOOK_FRACTION, Mirrors, Shares
from peercache.actors.pool.slots import Slot, SlotAllocator
from peercache.model.ids import Incarnation
from peercache.model.keys import tag_of
from peercache.wire.messages.pool import REFUSED_FULL, RESERVED, Granted, ReserveMirror
from tests.unit.actors.test_slots_mirrors import mirror, pool, put
from tests.unit.actors.test_tenants import tenant_of, tenants_of

GRANULE = 4096

# --- removals -------------------------------------------------------------------------------------


def test_a_removal_without_timeout_voids_what_was_asked_for_before_it() -> None:
    """Also where a sender says that it waits for less than no time."""
    mirrors = Mirrors(8)
    mirrors.removed(1, -5.0, 100.0)

    assert mirrors.is_void(1, 99.0)
    assert not mirrors.is_void(1, 100.5)


def test_the_removal_of_one_geometry_voids_it_and_no_other() -> None:
    """A namespace is its space and the engine's geometry."""
    mirrors = Mirrors(8)
    mirrors.removed(tag_of(5, 7), 5.0, 100.0)

    assert mirrors.is_void(tag_of(5, 7), 101.0)
    assert not mirrors.is_void(tag_of(5, 8), 101.0)


# --- what is hot ----------------------------------------------------------------------------------


def test_what_was_touched_lately_is_known_by_a_bounded_number_of_looks() -> None:
    """However often a slot is asked for; and what was hot an hour ago is not."""
    mirrors = Mirrors(8)
    touches, looks = [], []
    for step in range(2000):
        touches.append(mirrors.begin(100.0 + step * 0.05, step))
        looks.append(len(mirrors._looks))

    assert max(looks) <= 1 / LOOK_FRACTION + 2
    for step, untouched_since in enumerate(touches):
        began = step - LATELY_S / 0.05
        slack = LATELY_S * LOOK_FRACTION / 0.05 + 1
        assert untouched_since == -1 or began - slack <= untouched_since <= began
    assert touches[-1] > 1700


# --- the share ------------------------------------------------------------------------------------


def test_a_client_mirrors_no_more_at_once_than_it_may_write() -> None:
    """Clients that stop keep what they have reserved."""
    made = Pool(
        incarnation=Incarnation(77), granule=GRANULE, page_bytes=8 * GRANULE,
        usable_bytes=8 * GRANULE, client_uncommitted_max=2 * GRANULE, rng=random.Random(1),
        mirror_share=1.0,
    )  # fmt: skip
    lengths = np.full(4, GRANULE, "<u8").tobytes()
    keys = b"".join(number.to_bytes(16, "big") for number in range(4))

    answer = made.on_message(Origin(1, 3), ReserveMirror(5, 1, 1, keys, lengths), 100.0)[-1]
    made.check()

    assert isinstance(answer, Send)
    assert isinstance(answer.message, Granted)
    assert answer.message.states == bytes((RESERVED, RESERVED, REFUSED_FULL, REFUSED_FULL))


def test_a_mirror_takes_room_of_its_namespaces_tenant() -> None:
    """Not of all others: a namespace with a quota mirrors within it."""
    tenants = tenants_of("a=50%", 8)
    tenant = tenant_of(tenants, "a")
    assert tenant is not tenants.others
    slots = SlotAllocator(granules=8, usable=8, tenants=tenants)

    (slot,), _ = Mirrors(8).take_slots(
        slots, bytearray((RESERVED,)), [1], own=0, shares=Shares.of(granules=8, client_max=8),
        untouched_since=0, tenant=tenant,
    )  # fmt: skip

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
    put(slots, 2)
    evicted: list[Slot] = []

    slots.take_many(1, 2, untouched_since=slots.clock, evicted=evicted)

    assert evicted == copies
