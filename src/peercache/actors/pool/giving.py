"""Giving: the pages of a pool that drains, hottest first, a portion at a time.

Without mirrored pages, as other nodes hold those.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from typing import Final, final

from peercache.actors.mailboxes import PagesStored, PagesToGive
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.size_classes import HELD, Slot
from peercache.actors.pool.slots import SlotAllocator

PORTION_PAGES: Final = 1024
"""Pages that are named at once: two milliseconds."""

PORTION_BYTES: Final = 256 * 2**20
"""Their bytes, unless one page has more: what is named early may be evicted before it is read."""


@final
class GivingOrder:
    """The order in which pages are handed over; what changes meanwhile is looked at in its turn."""

    def __init__(self, slots: SlotAllocator, granule: int) -> None:
        """Take the pages of this moment; a copy of the list of slots, and no look at any page.

        granule: bytes.
        """
        hottest_first = [list(held)[::-1] for held in slots.own_coldest_first()]
        self.left = sum(map(len, hottest_first))
        self._granule = granule
        self._left_granules = sum(_granules(held[0]) * len(held) for held in hottest_first if held)
        self._slots: Iterator[Slot] = merge(*hottest_first, key=lambda slot: -slot.touched)

    def next(self, pages: PageTable, unfinished: int) -> PagesToGive:
        """Return the next portion, by namespace."""
        by_namespace: dict[int, list[Page]] = {}
        count = size = 0
        while count < PORTION_PAGES and size < PORTION_BYTES:
            slot = next(self._slots, None)
            if slot is None:
                break
            self.left -= 1
            self._left_granules -= _granules(slot)
            if slot.state != HELD or slot.is_mirror:
                continue
            (page,) = pages.in_slots([slot])
            by_namespace.setdefault(page.namespace, []).append(page)
            count, size = count + 1, size + page.length
        groups = tuple(PagesStored(pages.records(some), tag) for tag, some in by_namespace.items())
        return PagesToGive(groups, self.left, unfinished, self._left_granules * self._granule)


def _granules(slot: Slot) -> int:
    return slot.extent.size_class.granules
