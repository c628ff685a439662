"""Expiry: the pages on disk that were not used for the time to live of their namespace.

A look examines the next part of the index. The disk does not learn how a page in memory is used, so
before pages expire the pool is asked for their ages; one that was used there stays. The time of the
last use is in the index on disk, in Unix seconds, so the time without a node counts.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.open_index import OpenIndex
from peercache.actors.effects import Effect, NotifyPool
from peercache.actors.mailboxes import PageAges, RequestAges
from peercache.model.runs import I64

LOOK_S: Final = 1.0
"""Pause after the whole index was examined."""

PAUSE_S: Final = 0.05
"""Pause after a part of it."""

ROWS_A_LOOK: Final = 2**17
"""Entries that are examined at once: half a millisecond. 10 million take four seconds."""

EXPIRES_MAX: Final = 4096
"""Pages that expire at once: one Forget, and some milliseconds of the pool. A million take 13 s."""

COMPARES_MAX: Final = 2**14
"""Entries whose namespaces are looked up at once, where these have different times: a millisecond.
The others are compared with the shortest time only."""


@final
@attrs.define(eq=False)
class DiskExpiry:
    """Which part of the index is examined next, and when."""

    open_index: OpenIndex
    _next: int = 0
    _due: float = inf

    def begin(self, now: float) -> None:
        """Start with an open disk, if any namespace has a time to live."""
        self._next, self._due = 0, now if self.open_index.may_expire else inf

    def deadline(self) -> float:
        """Return when the next look is due; inf while the pool is asked."""
        return self._due

    def look(self, now: float) -> list[Effect]:
        """Ask the pool about pages that have expired, as far as the disk knows."""
        index = self.open_index.index
        if self._due > now or index is None:
            return []
        shortest_s = min(tenant.ttl_s or inf for tenant in index.tenants.all())
        first, self._next, self._due = self._next, self._next + ROWS_A_LOOK, now + PAUSE_S
        if self._next >= index.end:
            self._next, self._due = 0, now + LOOK_S
        if shortest_s == inf:
            return []
        moment = max(0, int(self.open_index.unix_s(now) - shortest_s))
        old = index.used_before(moment, first, ROWS_A_LOOK)
        old = self._first(old, COMPARES_MAX, now)
        old = self._first(old[self.open_index.have_expired(old, now)], EXPIRES_MAX, now)
        if not len(old):
            return []
        self._due = inf
        return [NotifyPool(RequestAges(index.keys(old)))]

    def _first(self, entries: I64, most: int, now: float) -> I64:
        """Return so many of these entries; the next look begins after them."""
        if len(entries) > most:
            entries = entries[:most]
            self._next, self._due = int(entries[-1]) + 1, now + PAUSE_S
        return entries

    def take(self, answer: PageAges, now: float) -> list[Effect]:
        """Delete those pages that were not used in memory either."""
        index = self.open_index.index
        if index is None:
            return []
        self._due = now + (PAUSE_S if self._next else LOOK_S)
        entries = index.find(answer.keys)
        there = entries >= 0
        entries, ages = entries[there], answer.ages[there]
        is_here = np.isfinite(ages)
        used: I64 = (self.open_index.unix_s(now) - ages[is_here]).astype(np.int64)
        index.touch(entries[is_here], np.maximum(used, 0))
        gone = index.remove(entries[self.open_index.have_expired(entries, now)])
        self.open_index.count_expired(gone)
        return self.open_index.forgotten(gone)
