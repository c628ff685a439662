"""Retaining: the pages of a pool that are not evicted before a time that a client named.

The times are those of the loop's clock, which no step of the wall clock moves. A heap has the ends,
so neither an eviction nor a tick looks at pages that are still retained. A page that is removed, or
retained for longer, leaves a stale end behind; those are swept out once they are the most.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final, TypeAlias, final

from peercache.actors.pool.page_table import Page
from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.wire.messages.retain import NOT_HERE, OVER_QUOTA, RETAINED

RETAIN_MAX_S: Final = 30 * 86_400.0
"""Longest time that a page is retained for by one message; it may be renewed."""

LAPSES_MAX: Final = 4096
"""Pages that lapse in one tick: some milliseconds."""

LAPSE_PAUSE_S: Final = 0.001
"""Pause after such a tick: the messages that wait come before the pages that are left."""

STALE_ENDS_MIN: Final = 1024
"""So many stale ends are not worth a sweep."""

End: TypeAlias = tuple[float, int, Slot]


@final
class Retention:
    """Which pages of one pool are retained, and until when."""

    def __init__(self, slots: SlotAllocator) -> None:
        """Retain nothing yet."""
        self._slots = slots
        self._ends: list[End] = []
        self._numbered = 0
        self._pauses_until = -math.inf

    def retain(self, pages: Sequence[Page | None], seconds: float, now: float) -> bytes:
        """Retain pages for so long, the first ones first; return the state of each, one byte.

        A page that is retained for longer stays so. 0 seconds, or what is no time, let pages go.
        None: a page that is not here.
        """
        until = now + min(seconds, RETAIN_MAX_S) if seconds > 0 else 0.0
        states = bytearray(len(pages))
        self._numbered += len(pages)
        for index, page in enumerate(pages):
            if page is None:
                states[index] = NOT_HERE
            elif not until:
                states[index] = RETAINED
                if page.slot.retained_until:
                    self._slots.let_go(page.slot)
            else:
                # Of equal ends the last page lapses first: a chain loses its tail first.
                states[index] = self._retain(page.slot, until, self._numbered - index)
        self.sweep()
        return bytes(states)

    def lapse(self, now: float) -> None:
        """Let pages go whose time is over, LAPSES_MAX at most; the next ones after a pause."""
        ends = self._ends
        for _ in range(LAPSES_MAX):
            if not ends or ends[0][0] > now:
                break
            until, _, slot = heapq.heappop(ends)
            if slot.retained_until == until:
                self._slots.let_go(slot)
        else:
            self._pauses_until = now + LAPSE_PAUSE_S
        self.sweep()

    def deadline(self) -> float:
        """Return when the next page may lapse."""
        return max(self._ends[0][0], self._pauses_until) if self._ends else math.inf

    def sweep(self) -> None:
        """Keep one end of each retained page, where most ends are stale: after any page went."""
        ends = self._ends
        if len(ends) > 2 * self._slots.retained_count + STALE_ENDS_MIN:
            live = {end[2].first: end for end in ends if end[2].retained_until == end[0]}
            self._ends = list(live.values())
            heapq.heapify(self._ends)

    def check(self) -> None:
        """Assert the bound, in constant time."""
        most = 2 * self._slots.retained_count + STALE_ENDS_MIN
        assert self._slots.retained_count <= len(self._ends) <= most, f"{len(self._ends)} ends"

    def _retain(self, slot: Slot, until: float, number: int) -> int:
        if slot.retained_until >= until:
            return RETAINED
        if not self._slots.retain(slot, until):
            return OVER_QUOTA
        heapq.heappush(self._ends, (until, number, slot))
        return RETAINED
