"""Granting: a slot for each page of a Reserve, and the candidates of the next evictions."""

from __future__ import annotations

from itertools import islice
from typing import final

import attrs

from peercache.actors.mailboxes import PagesHeld, PagesStored
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant
from peercache.model.keys import KEY_BYTES
from peercache.wire.messages.pool import REFUSED_FULL, RESERVED, Reserve

BATCH_PAGES_MAX = 2048
"""Pages of one Reserve: the Committed that ends it has 65 bytes a page, 130 KiB."""

AHEAD_PART = 8
"""Slots may be reserved ahead in at most 1/8 of the pool, by all clients together: they are in use
in the next moments, or come back within three seconds."""

COLDEST_MAX = 1024
"""Pages of one size that are looked at ahead of their eviction: a millisecond."""


UNCOMMITTED_PART = 2
"""The uncommitted pages of all writers together take at most 1/2 of the pool: writers that stop
keep theirs for as long as they live."""


@final
@attrs.frozen
class Shares:
    """How many granules writers may hold uncommitted.

    together_max: all of them; each_max: one of them, 0 for as many as are left of together_max.

    Without `each_max` a writer's share is what it leaves to the others (the dynamic threshold of
    shared buffers: Choudhury and Hahne, 1998): the first one may take half of what there is, a
    second one half of the rest. So no number of writers that stop takes all of it.
    """

    together_max: int
    each_max: int

    @classmethod
    def of(cls, *, granules: int, client_max: int) -> Shares:
        """Divide a pool of so many granules. client_max: the setting, in granules."""
        return cls(max(granules // UNCOMMITTED_PART, client_max), client_max)

    def allow(self, size: int, *, own: int, together: int) -> bool:
        """Return whether a writer may have one more page.

        own, together: granules that this writer and all writers hold. One page is always allowed
        while there is room for it, and any page to the only writer: else it could never be stored.
        """
        left = self.together_max - together - size
        if not own:
            return left >= 0 or not together
        return left >= 0 and own + size <= (self.each_max or left)

    def allow_all(self, size: int, count: int, own: int, together: int) -> bool:
        """Return whether a writer may have `count` more pages, as `allow` would say one by one.

        Each page leaves less than the one before, so the last one decides.
        """
        before = (count - 1) * size
        left = self.together_max - together - before - size
        return left >= 0 and own + before + size <= (self.each_max or left)


def _one_size(states: bytearray, granules: list[int]) -> int:
    """Return the granules of every page of a batch that is all RESERVED; 0 for any other batch."""
    is_plain = states.count(RESERVED) == len(states) > 0
    return granules[0] if is_plain and granules.count(granules[0]) == len(granules) else 0


def take_slots(
    slots: SlotAllocator,
    states: bytearray,
    granules: list[int],
    *,
    own: int,
    shares: Shares | None,
    untouched_since: int,
    tenant: Tenant,
) -> tuple[list[Slot | None], list[Slot]]:
    """Return a slot for each page that is RESERVED, or make it REFUSED_FULL; and the evicted slots.

    granules: of each page; own: granules that this client has reserved already.
    shares:   None for slots ahead, which have a bound of their own.
    """
    taken: list[Slot | None] = [None] * len(states)
    evicted: list[Slot] = []
    if (size := _one_size(states, granules)) and (
        shares is None or shares.allow_all(size, len(states), own, slots.reserved_granules)
    ):
        # What nearly every batch is.
        many = slots.take_many(
            size, len(states), untouched_since=untouched_since, evicted=evicted, tenant=tenant
        )
        taken[: len(many)] = many
        states[len(many) :] = bytes((REFUSED_FULL,)) * (len(states) - len(many))
        return taken, evicted
    full: dict[int, None] = {}
    take = slots.take
    for index, state in enumerate(states):
        if state != RESERVED:
            continue
        size = granules[index]
        # A size without room stays so for the rest of the batch: looking again is slow.
        slot = None
        if size not in full and (
            shares is None or shares.allow(size, own=own, together=slots.reserved_granules)
        ):
            slot = take(size, untouched_since=untouched_since, evicted=evicted, tenant=tenant)
        if slot is None:
            states[index] = REFUSED_FULL
            full[size] = None
        else:
            taken[index] = slot
            own += size
    return taken, evicted


def problem_of(reserve: Reserve, *, is_mirror: bool) -> str:
    """Return what is malformed about a Reserve, a sentence for a person; "" for nothing.

    is_mirror: its pages were asked of another host, by name.
    """
    count = len(reserve.lengths) // 8
    if len(reserve.lengths) != count * 8 or len(reserve.keys) not in (0, count * KEY_BYTES):
        return "keys and lengths do not agree"
    if is_mirror and not reserve.keys:
        return "no slots are reserved ahead for mirrored pages: it has to name them"
    if count > BATCH_PAGES_MAX:
        return f"{count} pages in one Reserve, {BATCH_PAGES_MAX} at most"
    return ""


def granules_of(lengths: list[int], granule: int) -> list[int]:
    """Return how many granules each page of these lengths (bytes) takes."""
    return [-(-length // granule) for length in lengths]


def states_ahead(lengths: list[int], bytes_max: int, *, granules: int, usable: int) -> bytearray:
    """Return what the pages of a Reserve without keys come to: a slot for each, or none for any.

    granules: that would be reserved ahead, with these, of so many usable ones.
    """
    has_room = granules * AHEAD_PART <= usable
    is_sane = all(0 < length <= bytes_max for length in lengths)
    return bytearray((RESERVED if has_room and is_sane else REFUSED_FULL,)) * len(lengths)


def coldest_pages(slots: SlotAllocator, pages: PageTable, full_part: float) -> list[PagesStored]:
    """Return the eviction candidates of each size, once the pool is so full; by namespace."""
    taken = slots.held_granules + slots.reserved_granules
    if taken <= full_part * slots.usable:
        return []
    by_namespace: dict[int, list[Page]] = {}
    for held in slots.coldest_first():
        for page in pages.in_slots(islice(held, COLDEST_MAX)):
            by_namespace.setdefault(page.namespace, []).append(page)
    return [PagesStored(pages.records(some), tag) for tag, some in by_namespace.items()]


def held_pages(slots: SlotAllocator, pages: PageTable) -> PagesHeld:
    """Return all pages that are not on disk, retained ones first, then the hottest; for a stop."""
    by_namespace: dict[int, list[Page]] = {}
    for held in slots.own_coldest_first():
        for page in reversed(pages.in_slots(held)):
            if not page.disk_length:
                by_namespace.setdefault(page.namespace, []).append(page)
    groups = [PagesStored(pages.records(some), tag) for tag, some in by_namespace.items()]
    return PagesHeld(tuple(groups))
