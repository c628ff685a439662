"""Flush: pages that are only in memory, on their way to disk in one go.

Before a graceful stop every such page is written, hottest first, as far as time allows. And pages
that were stored before the disk was open are written once it is. The queue of spills is bounded in
bytes; the pages beyond wait here, of which only their records are kept.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

import attrs

from peercache.actors.disk.spills import Spills
from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import HeldAsked, PagesHeld, PagesStored

PART_PAGES: Final = 4096
"""Pages that are handed over to the spills at a time: below a millisecond of the loop."""


@final
@attrs.define(eq=False)
class Flush:
    """The pages that wait for room in the queue of spills.

    is_final: the node stops, so pages that are stored from now on are written at once too.
    """

    _spills: Spills
    is_final: bool = False
    _questions: int = 0
    _parts: deque[PagesStored] = attrs.field(factory=deque)

    def ask(self) -> list[Effect]:
        """Ask the pool for all pages that are only in memory."""
        self._questions += 1
        return [TellPool(HeldAsked())]

    def take(self, held: PagesHeld) -> None:
        """Take the answer."""
        self._questions -= 1
        for group in held.groups:
            for begin in range(0, len(group.records), PART_PAGES):
                part = group.records[begin : begin + PART_PAGES]
                self._parts.append(PagesStored(part, group.namespace))

    def feed(self, now: float) -> None:
        """Hand over as many pages as the queue of spills has room for."""
        while self._parts:
            part = self._parts[0]
            count = self._spills.fitting(part.records)
            if not count:
                if not self._spills.is_idle:
                    return
                # Larger than the whole queue: the spills count it as dropped.
                count = 1
            self._spills.add(PagesStored(part.records[:count], part.namespace), now)
            self._parts.popleft()
            if count < len(part.records):
                self._parts.appendleft(PagesStored(part.records[count:], part.namespace))

    def left(self) -> int | None:
        """Return how many pages of a final flush are not written yet; None before that is known."""
        if self._questions or not self.is_final:
            return None
        return sum(len(part.records) for part in self._parts) + self._spills.pages_left

    def stop(self) -> None:
        """Forget everything: the disk has ended."""
        self._parts.clear()
