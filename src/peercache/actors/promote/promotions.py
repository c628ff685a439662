"""Promotions: the pages that readers want from disk, and the loads that bring them into the pool.

The promote actor is a client of its own pool: it reserves slots, has the disk actor load pages
straight into them, and commits what arrived. A reservation ends when the disk is done with its
slots, never by time: a read that is stuck may still write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.effects import Effect, TellDisk, TellPool
from peercache.actors.mailboxes import LoadWanted, PagesLoaded
from peercache.actors.promote.unread_pages import UnreadPages
from peercache.actors.promote.waiters import Waiters
from peercache.actors.storage_port import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    DISK_REPLACED,
)
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Reserve,
)
from peercache.wire.messages.promote import LATER, LOST, PROMOTED

LOAD_BYTES_MAX: Final = 8 * 2**20
LOAD_PAGES_MAX: Final = 64
"""Of one job: the first page of a batch waits for this much at most, and a stuck read keeps it."""

LOADS_MAX: Final = 8
"""Jobs at once: enough to keep a fast disk busy in both directions."""

LOAD_S: Final = 5.0
"""Deadline of a job. Its readers have their own patience."""

WANTED_MAX: Final = 65_536
"""Pages that wait for a job; readers ask again for those beyond."""

PORTION_PART: Final = 4
"""An answer brings a quarter of the pool at most: the reader reads it before it asks for more."""

HELD_PART: Final = 2
"""Half of the pool may be loading or unread: a promoted page is not evicted by the next promote."""

FULL_AGAIN_S: Final = 0.02
"""Back-off after the pool had no room: everything was reserved."""


@final
@attrs.frozen
class WantedPage:
    """A page on disk, as the disk actor told it."""

    length: int
    namespace: int


@final
@attrs.define(eq=False)
class _Job:
    """One load. chosen: the positions in `keys` of pages that have a slot."""

    namespace: int
    keys: list[bytes]
    lengths: list[int]
    written: bytearray
    checksums: list[int]
    chosen: list[int] = attrs.field(factory=list)
    again: list[int] = attrs.field(factory=list)
    """Positions of pages for which the pool had no slot now."""
    late: dict[int, None] = attrs.field(factory=dict)
    """Indices of `chosen` whose slots may still be written to."""


@final
@attrs.define(eq=False)
class Promotions:
    """The pages that are wanted, and those that are being loaded.

    pool_bytes: how much of the pool is usable now.
    """

    waiters: Waiters
    metrics: Metrics | None = None
    pool_bytes: int = 0
    now: float = -inf
    """Of the step under way."""
    unread: UnreadPages = attrs.field(factory=UnreadPages)
    _wanted: dict[bytes, WantedPage] = attrs.field(factory=dict)
    """Oldest first."""
    _jobs: dict[int, _Job] = attrs.field(factory=dict)
    _loading: dict[bytes, None] = attrs.field(factory=dict)
    _loading_bytes: int = 0
    _last_job: int = 0
    _full_until: float = -inf
    _has_ended: bool = False

    @property
    def portion_bytes(self) -> int:
        """Return how much one answer may bring."""
        return self.pool_bytes // PORTION_PART

    def portion(self, positions: Sequence[int], lengths: Sequence[int], bytes_max: float) -> int:
        """Return how many of these pages to load: up to `bytes_max`, but at least one."""
        if not positions:
            return 0
        sums = np.cumsum(np.array(lengths, np.int64))
        room = max(0, WANTED_MAX - len(self._wanted))
        return min(room, max(1, int((sums <= bytes_max).sum())))

    def want(self, key: bytes, page: WantedPage) -> bool:
        """Queue a page for loading; False if its load is in flight."""
        if key in self._loading:
            return False
        self._wanted.setdefault(key, page)
        return True

    def deadline(self) -> float:
        """Return when to look for room again."""
        due = inf
        if self._wanted:
            if len(self._jobs) < LOADS_MAX:
                due = min(due, self.unread.deadline())
            due = min(due, self._full_until) if self._full_until > -inf else due
        return due

    def pump(self) -> list[Effect]:
        """Begin jobs: reserve slots for the oldest wanted pages."""
        self.unread.expire(self.now)
        if self.now < self._full_until:
            return []
        self._full_until = -inf
        effects: list[Effect] = []
        while self._wanted and len(self._jobs) < LOADS_MAX and self._has_room():
            effects.append(self._begin())
        return effects

    def granted(self, granted: Granted) -> list[Effect]:
        """Take the slots of a job, and have the disk actor load into them."""
        job = self._jobs[granted.sequence]
        effects: list[Effect] = []
        for at, state in enumerate(granted.states):
            if state == RESERVED:
                job.chosen.append(at)
            elif state == REFUSED_FULL:
                job.again.append(at)
                self._full_until = self.now + FULL_AGAIN_S
            else:
                # The page is in memory; or it is larger than this pool, or of another length.
                effects += self.waiters.settle(job.keys[at], PROMOTED if state == HERE else LOST)
        if not job.chosen:
            return [*effects, *self._over(granted.sequence)]
        load = LoadWanted(
            granted.sequence,
            b"".join([job.keys[at] for at in job.chosen]),
            job.namespace,
            np.array([job.lengths[at] for at in job.chosen], np.int64),
            np.frombuffer(granted.offsets, "<u8")[job.chosen],
            self.now + LOAD_S,
        )
        return [*effects, TellDisk(load)]

    def loaded(self, loaded: PagesLoaded) -> list[Effect]:
        """Take the outcome of a load; commit, unless a slot may still be written to."""
        job = self._jobs[loaded.job]
        effects: list[Effect] = []
        checksums: list[int] = loaded.checksums.tolist()
        for index, (at, outcome) in enumerate(zip(job.chosen, loaded.outcomes, strict=True)):
            if outcome == DISK_DONE:
                job.written[at] = True
                job.checksums[at] = checksums[index]
            elif outcome == DISK_LATE:
                job.late[index] = None
            elif outcome in (DISK_DAMAGED, DISK_FAILED, DISK_REPLACED):
                effects += self.waiters.settle(job.keys[at], LOST)
            else:
                effects += self.waiters.settle(job.keys[at], LATER)
        return effects if job.late else [*effects, self._commit(loaded.job, job)]

    def late_ended(self, number: int, indices: Iterable[int]) -> list[Effect]:
        """Note slots that are written to no longer; the reservation ends with the last of them."""
        job = self._jobs[number]
        effects: list[Effect] = []
        for index in indices:
            del job.late[index]
            effects += self.waiters.settle(job.keys[job.chosen[index]], LATER)
        return effects if job.late else [*effects, self._commit(number, job)]

    def committed(self, committed: Committed) -> list[Effect]:
        """Note what is in the pool now, and tell its waiters."""
        job = self._jobs[committed.sequence]
        effects: list[Effect] = []
        arrived = [
            at for at in job.chosen if job.written[at] and committed.states[at] in (COMMITTED, HERE)
        ]
        readers: dict[int, None] = {}
        for at in arrived:
            readers |= self.waiters.identities(job.keys[at])
            effects += self.waiters.settle(job.keys[at], PROMOTED)
        if arrived:
            size = sum(job.lengths[at] for at in arrived)
            self.unread.add(self.now, size, readers)
            if self.metrics is not None:
                self.metrics.pages_promoted.inc(len(arrived))
                self.metrics.bytes_promoted.inc(size)
        return [*effects, *self._over(committed.sequence)]

    def stop(self) -> list[Effect]:
        """Load nothing from now on: the disk has ended."""
        self._has_ended = True
        self._wanted.clear()
        effects: list[Effect] = []
        for key in self.waiters.wanted_keys():
            if key not in self._loading:
                effects += self.waiters.settle(key, LOST)
        return effects

    def check(self) -> None:
        """Assert the sums, in constant time."""
        assert len(self._jobs) <= LOADS_MAX, f"{len(self._jobs)} loads at once"
        assert self._loading_bytes >= 0, f"{self._loading_bytes} bytes loading"
        assert self.unread.size >= 0, f"{self.unread.size} bytes unread"
        assert bool(self._loading) == bool(self._jobs), "pages loading in no job"

    def _has_room(self) -> bool:
        held = self._loading_bytes + self.unread.size
        return not held or held < self.pool_bytes // HELD_PART

    def _begin(self) -> Effect:
        """Take the oldest wanted pages, all of one namespace, and reserve slots for them."""
        namespace = next(iter(self._wanted.values())).namespace
        bytes_max = min(LOAD_BYTES_MAX, self.portion_bytes)
        keys: list[bytes] = []
        lengths: list[int] = []
        size = 0
        for key, page in islice(self._wanted.items(), LOAD_PAGES_MAX):
            if page.namespace != namespace:
                continue
            if keys and size + page.length > bytes_max:
                break
            keys.append(key)
            lengths.append(page.length)
            size += page.length
        self._last_job = number = self._last_job + 1
        count = len(keys)
        self._jobs[number] = _Job(namespace, keys, lengths, bytearray(count), [0] * count)
        self._loading_bytes += size
        for key in keys:
            del self._wanted[key]
            self._loading[key] = None
        sizes = np.array(lengths, "<u8").tobytes()
        return TellPool(Reserve(number, number, namespace, b"".join(keys), sizes))

    def _commit(self, number: int, job: _Job) -> Effect:
        checksums = np.array(job.checksums, "<u8").tobytes()
        return TellPool(Commit(number, number, bytes(job.written), checksums, 0.0))

    def _over(self, number: int) -> list[Effect]:
        """End a job: the pool has its slots back, or pages in them."""
        job = self._jobs.pop(number)
        self._loading_bytes -= sum(job.lengths)
        for key in job.keys:
            del self._loading[key]
        again = {
            job.keys[at]: WantedPage(job.lengths[at], job.namespace)
            for at in job.again
            if not self._has_ended and self.waiters.want(job.keys[at])
        }
        self._wanted = again | self._wanted
        effects: list[Effect] = []
        for key in job.keys:
            if key not in self._wanted:
                effects += self.waiters.settle(key, LOST if self._has_ended else LATER)
        return effects
