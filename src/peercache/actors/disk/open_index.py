"""The index of an open disk, and the consequences of its changes: index rows are deleted, and the
pool is notified.

Removals: answers wait until the disk has deleted the rows. Nothing is written to a disk before it
is open, so the order of early removals does not matter: when it opens, all of them take one look-up
and one removal, however many messages there were.

Loads: an entry is pinned as long as its page is loaded into a slot that the promote actor has
reserved, so its place is not reused in the meantime.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.index import DiskIndex, Gone
from peercache.actors.effects import Effect, NotifyPool, NotifyPromote
from peercache.actors.mailboxes import (
    DiskIndexed,
    PagesForgotten,
    PagesLoaded,
    PagesWritten,
    RemovalDone,
    RequestLoad,
)
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    DISK_REPLACED,
    DISK_UNTRIED,
    DiskOpened,
    Forget,
    LateEnded,
    Load,
    LoadDone,
)
from peercache.actors.tenants import TenantMetrics, Tenants
from peercache.model.keys import KEY, KEY_BYTES, Tag, tags_of
from peercache.model.room import QuotaRule
from peercache.model.runs import I64, U64
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import Clear, Remove, Removed

PLACES_A_FORGET_MAX: Final = 4096
"""Places of one Forget: some milliseconds of the store's index."""

NAMES_MAX: Final = 1024
"""Namespaces whose names are kept while there is no disk."""


@final
@attrs.define(eq=False)
class OpenIndex:
    """State that all parts of the disk actor share.

    index: None before the store is open, and after it has ended.
    """

    metrics: Metrics = attrs.field(factory=Metrics)
    quotas: tuple[QuotaRule, ...] = ()
    ttl_s: float = 0.0
    """How long after their last use pages of namespaces expire whose rules do not say; 0: never."""
    index: DiskIndex | None = None
    _names: dict[str, None] = attrs.field(factory=dict)
    """The latest namespaces with known names."""
    _tenant_metrics: TenantMetrics = attrs.field(init=False)
    _jobs: int = 0
    _unix_s: float = 0.0

    def open(self, index: DiskIndex, *, unix_s: int, now: float) -> None:
        """Start with an open disk. unix_s: the wall clock's time at `now`."""
        self.index = index
        self._unix_s = unix_s - now
        tenants = Tenants(self.quotas, whole=index.capacity_bytes, disk=True, ttl_s=self.ttl_s)
        for name in self._names:
            tenants.named(name)
        index.share_between(tenants)
        self._tenant_metrics = TenantMetrics(self.metrics, tenants, "disk", 1)

    def name(self, name: str) -> None:
        """Note that there is a namespace of this name."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]
        index = self.index
        if index is not None and index.tenants.named(name) is not None:
            index.share_between(index.tenants)
            self._tenant_metrics.renew()

    def unix_s(self, now: float) -> int:
        """Return the wall clock's time: as at the start, whatever steps it has made since."""
        return max(0, int(self._unix_s + now))

    @property
    def may_expire(self) -> bool:
        """Return whether pages on disk have a time to live."""
        return self.index is not None and self.index.tenants.may_expire

    def have_expired(self, entries: I64, now: float) -> npt.NDArray[np.bool_]:
        """Return which entries were not used for the time to live of their namespace."""
        index = self.index
        assert index is not None, "no page on disk expires without a disk"
        if not index.tenants.may_expire:
            return np.zeros(len(entries), np.bool_)
        namespaces, used = index.used(entries)
        times = np.array([tenant.ttl_s for tenant in index.tenants.all()])
        ttl_s = times[index.tenants.numbers(namespaces)]
        unused_s = self.unix_s(now) - used.astype(np.float64)
        expired: npt.NDArray[np.bool_] = (ttl_s > 0) & (unused_s > ttl_s)
        return expired

    def next_job(self) -> int:
        """Return a number that no other job of the store has had."""
        self._jobs += 1
        return self._jobs

    def written(self, keys: bytes, lengths: I64) -> list[Effect]:
        """Notify the pool that these pages are on disk."""
        return [NotifyPool(PagesWritten(keys, lengths))] if keys else []

    def forgotten(self, gone: Gone, *, job: int = 0) -> list[Effect]:
        """Delete the rows of ended entries, and notify the pool. job: the number in ForgetDone."""
        effects = self.rows_gone(gone.places, job=job)
        if gone.keys:
            effects.append(NotifyPool(PagesForgotten(gone.keys)))
        return effects

    def rows_gone(self, places: U64, *, job: int = 0) -> list[Effect]:
        """Delete the rows of these places. job: the number in ForgetDone."""
        if not len(places) and not job:
            return []
        cuts = range(PLACES_A_FORGET_MAX, len(places), PLACES_A_FORGET_MAX)
        parts = np.split(places, list(cuts))
        # The store keeps their order, so when the last one is done, all rows are deleted.
        return [*(Forget(part) for part in parts[:-1]), Forget(parts[-1], job)]

    def count_evicted(self, gone: Gone) -> None:
        """Count pages that were evicted from the disk to make room."""
        self.count_lost("evicted", gone.count)
        if gone.count and self.index is not None:
            self._tenant_metrics.count_evicted(self.index.tenants.counted(gone.namespaces))

    def count_expired(self, gone: Gone) -> None:
        """Count pages that were not used for their time to live."""
        self.count_lost("expired", gone.count)
        if gone.count and self.index is not None:
            self._tenant_metrics.count_expired(self.index.tenants.counted(gone.namespaces))

    def count_lost(self, reason: str, count: int) -> None:
        """Count pages that were lost from the disk, by reason."""
        if count:
            self.metrics.disk_pages_lost.labels(reason).inc(count)


def indexed_of(opened: DiskOpened) -> DiskIndexed:
    """Build the index of what is on disk; takes seconds, so it runs in a thread, not in the
    loop.
    """
    index = DiskIndex(capacity_bytes=opened.usable_bytes, slab_bytes=opened.slab_bytes)
    # What was used in the future, by a clock that has been set back since, was used now.
    opened.entries["used"] = np.minimum(opened.entries["used"], opened.unix_s)
    index.load(opened.entries)
    return DiskIndexed(opened, index)


ANSWERS_MAX: Final = 1024
"""Removals that may wait at once; further ones are answered immediately."""

KEYS_MAX: Final = 2**18
"""Pages of early removals, repeated or not: 4 MiB. Further ones are dropped."""

NAMESPACES_MAX: Final = 1024
"""Namespaces of early clears, each counted once: more than a node has models."""


@final
@attrs.frozen(eq=False)
class PendingRemoval:
    """A removal that waits for its index rows to be deleted. count: the pages that it removed."""

    origin: Origin
    message: Remove | Clear
    count: int
    until: float

    def answer(self) -> Effect:
        """Answer the client, after what the pool has still to publish."""
        removed = Removed(self.message.request, self.count)
        return NotifyPool(RemovalDone(self.origin, removed, self.message.timeout_s))


@final
@attrs.define(eq=False)
class PendingRemovals:
    """The removals that wait for the disk, by their Forget's job."""

    _pending: dict[int, PendingRemoval] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return how many removals wait."""
        return len(self._pending)

    def add(self, job: int, removal: PendingRemoval) -> None:
        """Let a removal wait for its ForgetDone."""
        self._pending[job] = removal

    def done(self, job: int) -> list[Effect]:
        """Answer the removal of this job, unless its timeout has passed already."""
        removal = self._pending.pop(job, None)
        return [] if removal is None else [removal.answer()]

    def expire(self, now: float) -> list[Effect]:
        """Answer the removals whose timeout has passed."""
        over = [job for job, removal in self._pending.items() if removal.until <= now]
        return [self._pending.pop(job).answer() for job in over]

    def deadline(self) -> float:
        """Return when the next timeout passes; inf without removals."""
        oldest = next(iter(self._pending.values()), None)
        return inf if oldest is None else oldest.until


@final
@attrs.define(eq=False)
class EarlyRemovals:
    """Removals that arrive before the disk is open; empty once it is open, or has ended."""

    _keys: dict[Tag, bytearray] = attrs.field(factory=dict)
    _keys_bytes: int = 0
    _namespaces: dict[Tag, None] = attrs.field(factory=dict)
    _is_over: bool = False

    def add(self, message: Remove | Clear) -> None:
        """Keep what must be removed, as far as there is room."""
        if self._is_over:
            return
        if isinstance(message, Remove):
            keys = message.keys[: KEYS_MAX * KEY_BYTES - self._keys_bytes]
            if keys:
                self._keys.setdefault(message.namespace, bytearray()).extend(keys)
                self._keys_bytes += len(keys)
        elif len(self._namespaces) < NAMESPACES_MAX:
            self._namespaces[message.namespace] = None

    def take(self, index: DiskIndex) -> Gone:
        """End the removed entries of an index that was just loaded."""
        gone = [index.of_namespaces(list(self._namespaces))]
        for namespace, keys in self._keys.items():
            written = index.find(bytes(keys))
            written = written[written >= 0]
            gone.append(written[index.are_of_space(written, namespace)])
        self.stop()
        return index.remove(np.unique(np.concatenate(gone)))

    def stop(self) -> None:
        """Keep nothing from now on."""
        self._is_over = True
        self._keys.clear()
        self._keys_bytes = 0
        self._namespaces.clear()


LOST: Final = (
    (DISK_DAMAGED, "damaged"),
    (DISK_FAILED, "failed"),
    (DISK_REPLACED, "overwritten"),
)
"""Outcomes after which a page is no longer on disk, and their reasons in metrics."""


@final
@attrs.define(eq=False)
class _Load:
    """A job of the store. positions: of its pages in the RequestLoad; outcomes: those of all
    pages; unix_s: when it began.
    """

    wanted: int
    positions: I64
    entries: I64
    outcomes: bytearray
    unix_s: int
    late: dict[int, None] = attrs.field(factory=dict)


@final
@attrs.define(eq=False)
class DiskLoads:
    """The loads in flight."""

    open_index: OpenIndex
    _loads: dict[int, _Load] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return the number of loads in flight."""
        return len(self._loads)

    def begin(self, wanted: RequestLoad, now: float) -> list[Effect]:
        """Load the pages that are still on disk; answer at once if there are none."""
        count, index = len(wanted.lengths), self.open_index.index
        outcomes = bytearray((DISK_UNTRIED,)) * count
        if index is None:
            return [_answer(wanted.job, outcomes)]
        entries = index.find(wanted.keys)
        for at in np.flatnonzero(entries < 0).tolist():
            outcomes[at] = DISK_DAMAGED
        there = np.flatnonzero(entries >= 0)
        # A page that was stored again with another length stays DISK_UNTRIED.
        chosen = there[index.lengths(entries[there]) == wanted.lengths[there]]
        if not len(chosen):
            return [_answer(wanted.job, outcomes)]
        entries = entries[chosen]
        index.pin(entries)
        job = self.open_index.next_job()
        began = self.open_index.unix_s(now)
        self._loads[job] = _Load(wanted.job, chosen, entries, outcomes, began)
        rows = index.rows(entries)
        load = Load(
            job,
            np.frombuffer(wanted.keys, KEY)[chosen].tobytes(),
            np.full(len(chosen), tags_of([wanted.namespace])),
            wanted.lengths[chosen].astype(np.uint64),
            np.ascontiguousarray(rows["place"]),
            wanted.offsets[chosen],
            wanted.until,
            np.ascontiguousarray(rows["checksum"]),
        )
        return [load]

    def done(self, done: LoadDone) -> list[Effect]:
        """Handle the outcome of a job: remove damaged pages from disk, notify the promote actor."""
        load, index = self._loads[done.job], self.open_index.index
        effects: list[Effect] = []
        results = np.frombuffer(done.outcomes, np.uint8).copy()
        if index is None:
            results[results == DISK_DONE] = DISK_UNTRIED
        else:
            # A page that was removed while it was loaded must not come back.
            results[(results == DISK_DONE) & ~index.is_held(load.entries)] = DISK_UNTRIED
            is_done = results == DISK_DONE
            index.note_checksums(load.entries[is_done], done.checksums[is_done])
            for outcome, reason in LOST:
                wrong = load.entries[results == outcome]
                self.open_index.count_lost(reason, len(wrong))
                if len(wrong):
                    effects += self.open_index.forgotten(index.remove(wrong))
        checksums = np.zeros(len(load.outcomes), np.uint64)
        checksums[load.positions] = done.checksums
        for at, outcome in zip(load.positions.tolist(), results.tolist(), strict=True):
            load.outcomes[at] = outcome
        load.late = dict.fromkeys(np.flatnonzero(results == DISK_LATE).tolist())
        effects.append(_answer(load.wanted, load.outcomes, checksums))
        if not load.late:
            self._release(done.job)
        return effects

    def late_ended(self, job: int, indices: tuple[int, ...]) -> list[Effect]:
        """Notify the promote actor of slots that are no longer written to."""
        load = self._loads.get(job)
        ended = [at for at in indices if load is not None and at in load.late]
        if load is None or not ended:
            return []
        for at in ended:
            del load.late[at]
        if not load.late:
            self._release(job)
        positions = load.positions[ended].tolist()
        return [NotifyPromote(LateEnded(load.wanted, tuple(positions)))]

    def _release(self, job: int) -> None:
        load, index = self._loads.pop(job), self.open_index.index
        if index is not None:
            held = load.entries[index.is_held(load.entries)]
            index.touch(held[::-1], load.unix_s)
            index.unpin(load.entries)


def _answer(job: int, outcomes: bytearray, checksums: U64 | None = None) -> Effect:
    if checksums is None:
        checksums = np.zeros(len(outcomes), np.uint64)
    return NotifyPromote(PagesLoaded(job, bytes(outcomes), checksums))
