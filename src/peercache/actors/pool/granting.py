"""Granting: a slot for each page of a Reserve, and the candidates of the next evictions."""

from __future__ import annotations

from itertools import islice

from peercache.actors.mailboxes import PagesStored
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.slots import Slot, SlotAllocator
from peercache.model.keys import KEY_BYTES
from peercache.wire.messages.pool import REFUSED_FULL, RESERVED, Reserve

BATCH_PAGES_MAX = 16_384
"""Pages of one Reserve: what a Put carries at most, and 50 ms of the pool's time."""

AHEAD_PART = 8
"""Slots may be reserved ahead in at most 1/8 of the pool, by all clients together: they are in use
in the next moments, or come back within three seconds."""

COLDEST_MAX = 1024
"""Pages of one size that are looked at ahead of their eviction: a millisecond."""


def take_slots(
    slots: SlotAllocator,
    states: bytearray,
    granules: list[int],
    *,
    uncommitted: int,
    uncommitted_max: int,
    untouched_since: int,
) -> tuple[list[Slot | None], list[Slot]]:
    """Return a slot for each page that is RESERVED, or make it REFUSED_FULL; and the evicted slots.

    granules:    of each page.
    uncommitted: granules that this client has reserved already, of `uncommitted_max`.
    """
    taken: list[Slot | None] = [None] * len(states)
    evicted: list[Slot] = []
    full: dict[int, None] = {}
    take = slots.take
    for index, state in enumerate(states):
        if state != RESERVED:
            continue
        size = granules[index]
        # One page is always allowed, or a large one could never be stored.
        over = uncommitted and uncommitted + size > uncommitted_max
        # A size without room stays so for the rest of the batch: looking again is slow.
        slot = (
            None
            if over or size in full
            else take(size, untouched_since=untouched_since, evicted=evicted)
        )
        if slot is None:
            states[index] = REFUSED_FULL
            full[size] = None
        else:
            taken[index] = slot
            uncommitted += size
    return taken, evicted


def problem_of(reserve: Reserve) -> str:
    """Return what is malformed about a Reserve, a sentence for a person; "" for nothing."""
    count = len(reserve.lengths) // 8
    if len(reserve.lengths) != count * 8 or len(reserve.keys) not in (0, count * KEY_BYTES):
        return "keys and lengths do not agree"
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
