"""Promotes: pages on their way from the disk back into the pool, and who waits for them.

The tier is a client of its own pool: it reserves slots, has the store load pages straight into
them, and commits what arrived. A reservation ends when the store is done with its slots, never by
time: a read that is stuck may still write.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.askers import Askers
from peercache.actors.disk.bookkeeping import DiskBooks, split
from peercache.actors.disk.unread import Unread
from peercache.actors.effects import Effect, TellPool
from peercache.actors.origin import Origin
from peercache.actors.storage_port import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    Forget,
    Load,
)
from peercache.model.keys import KEY_BYTES
from peercache.model.runs import I64, U64
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Remove,
    Reserve,
)
from peercache.wire.messages.promote import LATER, LOST, PROMOTED, Promote

LOAD_BYTES_MAX: Final = 8 * 2**20
LOAD_PAGES_MAX: Final = 64
"""Of one job: what the first page of a batch waits for at most, and what a stuck read keeps."""

LOADS_MAX: Final = 8
"""Jobs at once: enough to keep a fast disk busy in both directions."""

LOAD_S: Final = 5.0
"""How long a job may take. Its askers have their own patience."""

WANTED_MAX: Final = 65_536
"""Pages that wait to be loaded; more are asked for again by whoever still wants them."""

ASKED_MAX: Final = 16_384
"""Pages of one question that are looked at: what a reader asks for, and a megabyte of answer."""

PORTION_PART: Final = 4
"""An answer brings a quarter of the pool at most: the reader reads it before it asks for more."""

HELD_PART: Final = 2
"""Half of the pool may be loaded, or just loaded and not read yet: what was promoted for one reader
is not evicted by what is promoted for the next."""

FULL_AGAIN_S: Final = 0.02
"""Pause after the pool had no room: everything was reserved."""


@final
@attrs.define(eq=False)
class _Job:
    """One load. namespace: of all its pages; chosen: which of them go into a slot.

    places: of its entries, which keep them as long as they are pinned.
    """

    namespace: int
    keys: list[bytes]
    entries: I64
    places: U64
    lengths: I64
    chosen: list[int] = attrs.field(factory=list)
    written: bytearray = attrs.field(factory=bytearray)
    checksums: list[int] = attrs.field(factory=list)
    again: list[bytes] = attrs.field(factory=list)
    """Pages for which there was no slot now."""
    late: dict[int, None] = attrs.field(factory=dict)
    """Indices of `chosen` whose slots may still be written to."""
    removed: dict[bytes, None] = attrs.field(factory=dict)
    """Removed by somebody after its commit was under way."""


@final
@attrs.define(eq=False)
class Promotes:
    """Who wants which pages of the disk, and what is being loaded.

    pool_bytes: how much of the pool is usable now.
    wish_rate:  bytes a second that are loaded for nobody who waits.
    """

    books: DiskBooks
    askers: Askers
    pool_bytes: Callable[[], int]
    wish_rate: int
    now: float = -inf
    """Of the step under way."""
    _wanted: dict[bytes, None] = attrs.field(factory=dict)
    """What is to be loaded, the first first."""
    _jobs: dict[int, _Job] = attrs.field(factory=dict)
    _loading: dict[bytes, int] = attrs.field(factory=dict)
    _loading_bytes: int = 0
    _unread: Unread = attrs.field(factory=Unread)
    _full_until: float = -inf
    _allowance: float = 0.0
    _allowed_at: float = -inf

    # --- questions --------------------------------------------------------------------------------

    def ask(self, origin: Origin, message: Promote) -> list[Effect]:
        """Take a question: answered at once if nothing of it must be loaded first."""
        # Whoever asks for more has read what it was promised before.
        self._unread.read_by(origin.identity)
        index, keys = self.books.index, split(message.keys)
        looked_at = message.keys[: KEY_BYTES * ASKED_MAX]
        found = np.empty(0, np.int64) if index is None else index.find(looked_at)
        states = self._judge(keys[:ASKED_MAX], found)
        if message.patience_s <= 0:
            self._wish(keys, states, found)
            return []
        wanted = self._portion(states, found, self._portion_bytes())
        states += bytes((LATER,)) * (len(keys) - len(states))
        for at in wanted:
            if keys[at] not in self._loading:
                self._wanted.setdefault(keys[at])
        return self.askers.admit(origin, message, keys, states, wanted, self.now)

    def deadline(self) -> float:
        """Return when room must be looked for again."""
        due = inf
        if self._wanted:
            if len(self._jobs) < LOADS_MAX:
                due = min(due, self._unread.deadline())
            due = min(due, self._full_until) if self._full_until > -inf else due
        return due

    # --- loading ----------------------------------------------------------------------------------

    def pump(self) -> list[Effect]:
        """Begin jobs: reserve slots for the first of what is wanted."""
        self._unread.expire(self.now)
        if self.now < self._full_until:
            return []
        self._full_until = -inf
        effects: list[Effect] = []
        while self._wanted and len(self._jobs) < LOADS_MAX and self._has_room():
            effects += self._begin()
        return effects

    def granted(self, granted: Granted) -> list[Effect]:
        """Take the slots of a job, and have the store load into them."""
        job, index = self._jobs[granted.sequence], self.books.index
        effects: list[Effect] = []
        for at, state in enumerate(granted.states):
            if state == RESERVED:
                job.chosen.append(at)
            elif state == REFUSED_FULL:
                job.again.append(job.keys[at])
                self._full_until = self.now + FULL_AGAIN_S
            else:
                # Of another length than the one in memory, or larger than this pool: of no use.
                effects += self.askers.settle(job.keys[at], PROMOTED if state == HERE else LOST)
        job.written = bytearray(len(job.keys))
        job.checksums = [0] * len(job.keys)
        if not job.chosen:
            return [*effects, *self._over(granted.sequence)]
        if index is None:
            return [*effects, self._commit(granted.sequence, job)]
        offsets = np.frombuffer(granted.offsets, "<u8")[job.chosen]
        load = Load(
            granted.sequence,
            b"".join([job.keys[at] for at in job.chosen]),
            np.full(len(job.chosen), job.namespace, np.uint64),
            job.lengths[job.chosen].astype(np.uint64),
            job.places[job.chosen],
            offsets,
            self.now + LOAD_S,
        )
        return [*effects, load]

    def done(self, number: int, outcomes: bytes, checksums: list[int]) -> list[Effect]:
        """Take the outcome of a load; commit, unless a slot may still be written to."""
        job, index = self._jobs[number], self.books.index
        effects: list[Effect] = []
        damaged: list[int] = []
        held = index.is_held(job.entries).tolist() if index is not None else []
        for place, (at, outcome) in enumerate(zip(job.chosen, outcomes, strict=True)):
            if outcome == DISK_DONE:
                # What was removed meanwhile must not come back.
                job.written[at] = bool(held and held[at])
                job.checksums[at] = checksums[place]
            elif outcome == DISK_LATE:
                job.late[place] = None
            elif outcome in (DISK_DAMAGED, DISK_FAILED):
                damaged.append(at)
                self._count_lost(outcome)
            if not job.written[at] and outcome not in (DISK_LATE, DISK_DAMAGED, DISK_FAILED):
                effects += self.askers.settle(job.keys[at], LATER)
        if damaged and index is not None:
            # Of no use to anybody: its place is written anew when the load lets go of it.
            effects += self.books.forgotten(index.remove(job.entries[damaged]))
        for at in damaged:
            effects += self.askers.settle(job.keys[at], LOST)
        return effects if job.late else [*effects, self._commit(number, job)]

    def late_ended(self, number: int, indices: tuple[int, ...]) -> list[Effect]:
        """Hear that these slots are written to no more; the reservation may end with the last."""
        job = self._jobs.get(number)
        if job is None:
            return []
        effects: list[Effect] = []
        for place in indices:
            if place in job.late:
                del job.late[place]
                effects += self.askers.settle(job.keys[job.chosen[place]], LATER)
        return effects if job.late else [*effects, self._commit(number, job)]

    def committed(self, committed: Committed) -> list[Effect]:
        """Hear what is in the pool now: whoever waits for it may read it."""
        job = self._jobs[committed.sequence]
        effects: list[Effect] = []
        tried = [at for at in job.chosen if job.written[at]]
        arrived = [at for at in tried if committed.states[at] in (COMMITTED, HERE)]
        readers: dict[int, None] = {}
        for at in arrived:
            readers |= self.askers.identities(job.keys[at])
            effects += self.askers.settle(job.keys[at], PROMOTED)
        if arrived:
            self._unread.add(self.now, int(job.lengths[arrived].sum()), readers)
            self._count_loaded(job, arrived)
        ours = [job.keys[at] for at in arrived if committed.states[at] == COMMITTED]
        removed = [key for key in ours if key in job.removed]
        if removed:
            effects.append(TellPool(Remove(0, b"".join(removed))))
        return [*effects, *self._over(committed.sequence)]

    def removed(self, keys: bytes) -> None:
        """Hear that somebody removed pages: a commit under way must not bring them back."""
        for key in split(keys):
            job = self._jobs.get(self._loading.get(key, 0))
            if job is not None:
                job.removed[key] = None

    def stop(self) -> list[Effect]:
        """The disk has ended: nothing will be loaded any more."""
        self._wanted.clear()
        for job in self._jobs.values():
            if job.late:
                # From now on nobody tells which of its pages were removed before it is committed.
                job.written = bytearray(len(job.keys))
        effects: list[Effect] = []
        for key in self.askers.waited_for():
            if key not in self._loading:
                effects += self.askers.settle(key, LOST)
        return effects

    def check(self) -> None:
        """Assert what costs nothing to look at."""
        assert len(self._jobs) <= LOADS_MAX, f"{len(self._jobs)} loads at once"
        assert self._loading_bytes >= 0, f"{self._loading_bytes} bytes loading"
        assert self._unread.size >= 0, f"{self._unread.size} bytes unread"
        assert bool(self._loading) == bool(self._jobs), "pages loading in no job"

    @property
    def loads(self) -> int:
        """Return how many loads are under way."""
        return len(self._jobs)

    # --- below ------------------------------------------------------------------------------------

    def _judge(self, keys: list[bytes], found: I64) -> bytearray:
        """Return the state of each page as things are. found: their entries, if there is a disk."""
        find = self.books.pages.find
        entries = found.tolist() if len(found) else [-1] * len(keys)
        return bytearray(
            PROMOTED if find(key) is not None else LATER if entry >= 0 else LOST
            for key, entry in zip(keys, entries, strict=True)
        )

    def _portion(self, states: bytearray, found: I64, bytes_max: float) -> list[int]:
        """Return the first places that are to be loaded, up to so many bytes but at least one."""
        index = self.books.index
        places = [at for at, state in enumerate(states) if state == LATER]
        if index is None or not places:
            return []
        sums = np.cumsum(index.lengths(found[places]))
        room = max(0, WANTED_MAX - len(self._wanted))
        return places[: min(room, max(1, int((sums <= bytes_max).sum())))]

    def _wish(self, keys: list[bytes], states: bytearray, found: I64) -> None:
        """Load for nobody who waits: no more than the rate allows."""
        passed_s = min(1.0, self.now - self._allowed_at)
        self._allowance = min(self._allowance + self.wish_rate * passed_s, float(self.wish_rate))
        self._allowed_at = self.now
        index = self.books.index
        if index is None or self._allowance <= 0:
            return
        wanted = self._portion(states, found, min(self._allowance, self._portion_bytes()))
        new = [at for at in wanted if keys[at] not in self._loading]
        self._allowance -= float(index.lengths(found[new]).sum())
        for at in new:
            self._wanted.setdefault(keys[at])

    def _portion_bytes(self) -> int:
        return self.pool_bytes() // PORTION_PART

    def _has_room(self) -> bool:
        held = self._loading_bytes + self._unread.size
        return not held or held < self.pool_bytes() // HELD_PART

    def _begin(self) -> list[Effect]:
        """Take what is wanted first, all of one namespace, and reserve slots for it."""
        index = self.books.index
        assert index is not None, "nothing is wanted of a tier that is off"
        keys = list(islice(self._wanted, LOAD_PAGES_MAX))
        entries = index.find(b"".join(keys))
        effects: list[Effect] = []
        for at in np.flatnonzero(entries < 0).tolist():
            del self._wanted[keys[at]]
            effects += self.askers.settle(keys[at], LOST)
        there = np.flatnonzero(entries >= 0)
        if not len(there):
            return effects
        rows = index.rows(entries[there])
        same = rows["namespace"] == rows["namespace"][0]
        sums = np.cumsum(np.where(same, rows["length"], 0).astype(np.int64))
        fits = same & (sums <= max(min(LOAD_BYTES_MAX, self._portion_bytes()), sums[0]))
        chosen, rows = there[fits], rows[fits]
        job = _Job(
            int(rows["namespace"][0]),
            [keys[at] for at in chosen.tolist()],
            entries[chosen],
            np.ascontiguousarray(rows["place"]),
            rows["length"].astype(np.int64),
        )
        number = self.books.next_job()
        self._jobs[number] = job
        index.pin(job.entries)
        self._loading_bytes += int(job.lengths.sum())
        for key in job.keys:
            del self._wanted[key]
            self._loading[key] = number
        packed, lengths = b"".join(job.keys), rows["length"].astype("<u8").tobytes()
        reserve = Reserve(number, number, job.namespace, packed, lengths)
        return [*effects, TellPool(reserve)]

    def _commit(self, number: int, job: _Job) -> Effect:
        checksums = np.array(job.checksums, "<u8").tobytes()
        return TellPool(Commit(number, number, bytes(job.written), checksums, 0.0))

    def _over(self, number: int) -> list[Effect]:
        """End a job: its slots are nobody's, or a page's."""
        job, index = self._jobs.pop(number), self.books.index
        self._loading_bytes -= int(job.lengths.sum())
        effects: list[Effect] = []
        if index is not None:
            index.touch(job.entries[index.is_held(job.entries)][::-1])
            places = index.unpin(job.entries)
            if len(places):
                effects.append(Forget(places))
        for key in job.keys:
            del self._loading[key]
        again = [key for key in job.again if index is not None and self.askers.want(key)]
        self._wanted = {**dict.fromkeys(again), **self._wanted}
        for key in job.keys:
            if key not in self._wanted:
                effects += self.askers.settle(key, LATER if index is not None else LOST)
        return effects

    def _count_loaded(self, job: _Job, arrived: list[int]) -> None:
        metrics = self.books.metrics
        if metrics is not None and arrived:
            metrics.pages_promoted.inc(len(arrived))
            metrics.bytes_promoted.inc(int(job.lengths[arrived].sum()))

    def _count_lost(self, outcome: int) -> None:
        if self.books.metrics is not None:
            reason = "damaged" if outcome == DISK_DAMAGED else "failed"
            self.books.metrics.disk_pages_lost.labels(reason).inc()
