"""Disk: which pages of this node are on its disk, and how they are written and loaded.

Owns    the index of the disk and its eviction; the pages that wait to be written; the writes and
        loads in flight.
Takes   PagesStored, PagesDemoted, PagesRemoved, Resident, PageAges, PagesColdest, PagesHeld and
        PagesSought, from the pool; RequestLoad, from the promote actor; RequestFlush and, by way of
        the pool, NamespaceNamed, from the node; the results of the page store (`actors.ports`).
Sends   PagesWritten, PagesForgotten, RequestResident, RequestAges, RequestColdest and RequestHeld
        to the pool, which numbers and sends all records; PagesFound, PagesLoaded, LateEnded and
        DiskEnded to the promote actor; RemovalDone to the pool; Write, Load, Forget and NoteUse to
        the page store.
Keeps   the pool is notified of each page that is added to the disk or removed from it, in that
        order. A removed page is never reported as on disk. A place that the store may still write
        to stays allocated.
Limits  the bytes that wait to be written; those of `writes`, `expiry` and `open_index`.

Without a disk, before it is open and after it has ended, no page is on disk.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.disk.expiry import DiskExpiry
from peercache.actors.disk.index import DiskIndex, Gone
from peercache.actors.disk.key_table import NO_ROW
from peercache.actors.disk.open_index import (
    ANSWERS_MAX,
    DiskLoads,
    EarlyRemovals,
    OpenIndex,
    PendingRemoval,
    PendingRemovals,
    indexed_of,
)
from peercache.actors.disk.writes import DiskWrites, Flush
from peercache.actors.effects import Effect, NotifyPool, NotifyPromote
from peercache.actors.mailboxes import (
    DiskIndexed,
    DiskMessage,
    NamespaceNamed,
    PageAges,
    PagesColdest,
    PagesDemoted,
    PagesForgotten,
    PagesFound,
    PagesHeld,
    PagesRemoved,
    PagesSought,
    PagesStored,
    RequestColdest,
    RequestFlush,
    RequestLoad,
    Resident,
)
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DiskEnded,
    DiskOpened,
    DiskRoom,
    ForgetDone,
    LateEnded,
    LoadDone,
    NoteUse,
    WriteDone,
)
from peercache.model.keys import KEY, KEY_BYTES, TAG, split_keys
from peercache.model.room import QuotaRule
from peercache.model.runs import I64
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import Clear, Remove

REPORT_S: Final = 0.05
"""Pause between two batches of reports after opening or ending, at the rate of `report_rate`."""

LOOK_S: Final = 1.0
"""How often figures are updated, and retries are due."""

LOOK_AHEAD_S: Final = 0.1
"""How often, with `write_policy = on_evict`, the pool is asked for its eviction candidates."""

AHEAD_FRACTION: Final = 0.75
"""How full the pool may be before its coldest pages are written."""

NOTE_USE_S: Final = 10.0
"""Maximum age of the recorded order of use, with which a restart begins."""

REOPEN_S: Final = 10.0
"""Back-off before a retry, after a full file system or pages that could not be written."""

SEQUENCES_A_SECOND_BITS: Final = 20
"""Sequences of one run of the node are above those of all earlier runs, so that an index that is
rebuilt from slots has the right order, unless more than 2**20 pages a second were written."""

REMOVE_TIMEOUT_S: Final = 0.1
"""How long a removal waits for the disk, so that a restart does not bring the pages back."""


@final
@attrs.define(kw_only=True, eq=False)
class DiskTier:
    """The disk actor of one node. Does no I/O: the page store performs its effects.

    writes_through: pages are written after their commit; else when the pool is about to evict them.
    report_rate:      records a second that are reported after opening.
    quotas:         the part of the disk that each namespace is guaranteed.
    ttl_s:          how long after their last use pages are deleted; 0: never. A rule of `quotas`
                    may say otherwise.
    """

    writes_through: bool = True
    queue_bytes_max: int
    report_rate: int
    ttl_s: float = 0.0
    write_delay_s: float = 0.0
    metrics: Metrics = attrs.field(factory=Metrics)
    quotas: tuple[QuotaRule, ...] = ()
    open_index: OpenIndex = attrs.field(init=False)
    writes: DiskWrites = attrs.field(init=False)
    loads: DiskLoads = attrs.field(init=False)
    _expiry: DiskExpiry = attrs.field(init=False)
    _flush: Flush = attrs.field(init=False)
    _usable_bytes: float = inf
    """What the file system has room for; the disk's own limit is in the index."""
    _is_behind: bool = False
    """Whether pages were stored before the disk was open."""
    _unreported: bytes = b""
    """Keys of pages to report: those found at the start, hottest first, or those to withdraw."""
    _report_at: float = inf
    _looks_at: float = inf
    _ahead_at: float = inf
    _written_ahead: dict[int, None] = attrs.field(factory=dict)
    """Generations of pages that were among the coldest at the last check, and were queued."""
    _note_at: float = inf
    _reopen_at: float = inf
    _noted_clock: int = 0
    _removals: PendingRemovals = attrs.field(factory=PendingRemovals)
    _early: EarlyRemovals = attrs.field(factory=EarlyRemovals)

    def __attrs_post_init__(self) -> None:
        """Start without a disk."""
        self.open_index = OpenIndex(self.metrics, self.quotas, self.ttl_s)
        self.writes = DiskWrites(self.open_index, self.queue_bytes_max, self.write_delay_s)
        self.loads = DiskLoads(self.open_index)
        self._expiry = DiskExpiry(self.open_index)
        self._flush = Flush(self.writes)

    @property
    def index(self) -> DiskIndex | None:
        """Return the index of the open disk, or None."""
        return self.open_index.index

    @property
    def is_open(self) -> bool:
        """Return whether a disk is open."""
        return self.index is not None

    def on_message(self, sender: Origin, message: DiskMessage, now: float) -> list[Effect]:  # noqa: ARG002 - all messages come from this node
        """Handle one message; the effects must be performed in the order of the list."""
        effects = self._apply(message, now)
        if self.is_open:
            self._flush.feed(now)
            effects += self.writes.pump(now)
        return effects

    def _apply(self, message: DiskMessage, now: float) -> list[Effect]:
        match message:
            case NamespaceNamed(name):
                self.open_index.name(name)
                return []
            case PagesStored():
                effects = self.writes.note_stored(message, now)
                self._is_behind |= not self.is_open
                if self.writes_through or self._flush.is_final:
                    self.writes.add(message, now)
                return effects
            case PagesDemoted():
                return self._demoted(message, now)
            case PagesRemoved():
                return self._remove(message, now)
            case Resident():
                return self.writes.begin_resident(message, now)
            case PageAges():
                return self._expiry.take(message, now)
            case PagesColdest():
                self._write_ahead(message, now)
                return []
            case PagesHeld():
                self._flush.take(message)
                return []
            case RequestFlush():
                self._flush.is_final = True
                return self._flush.ask()
            case PagesSought():
                return self._find(message, now)
            case RequestLoad():
                return self.loads.begin(message, now)
            case WriteDone():
                return self.writes.done(message)
            case LoadDone():
                return self.loads.done(message)
            case LateEnded(job, indices):
                self.writes.late_ended(job, indices)
                return self.loads.late_ended(job, indices)
            case ForgetDone(job):
                return self._removals.done(job)
            case DiskOpened():
                return self._open(indexed_of(message), now)
            case DiskIndexed():
                return self._open(message, now)
            case DiskEnded():
                return self._ended(message, now)
            case DiskRoom(usable_bytes):
                self._usable_bytes = usable_bytes
                return []
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Answer removals whose timeout has passed, send pending reports, maintain the disk."""
        effects = self._removals.expire(now)
        if self._report_at <= now:
            effects += self._report(now)
        if self.is_open:
            effects += self._look_after(now)
            effects += self.writes.pump(now)
        return effects

    def deadline(self) -> float:
        """Return when a removal's timeout passes, or the disk needs maintenance."""
        due = min(self._report_at, self._removals.deadline())
        if not self.is_open:
            return due
        due = min(due, self._expiry.deadline())
        return min(due, self.writes.deadline(), self._looks_at, self._ahead_at)

    @property
    def trouble(self) -> str:
        """Return why an open disk does not accept pages, "" if it does."""
        return self.writes.trouble if self.is_open else ""

    def flush_left(self) -> int | None:
        """Return how many pages a final flush still has to write; None while that is not known."""
        return self._flush.left()

    def check(self) -> None:
        """Assert the totals, in constant time."""
        assert 0 <= self.writes.waiting_bytes <= self.queue_bytes_max, "the queue is too long"
        assert len(self._removals) <= ANSWERS_MAX, "too many removals wait"
        if self.index is not None:
            self.index.check()

    def figures(self) -> dict[str, int]:
        """Return the figures for Stats.

        disk_bytes_usable: the capacity, or what the file system has room for if that is less.
        """
        figures = {} if self.index is None else self.index.figures()
        if figures:
            usable = min(figures["disk_bytes"], self._usable_bytes)
            figures["disk_bytes_usable"] = int(max(usable, figures["disk_bytes_used"]))
        return {
            "disk_open": int(self.is_open),
            **figures,
            "disk_bytes_waiting": self.writes.waiting_bytes,
            "disk_loads": len(self.loads),
        }

    # --- beginning and end ------------------------------------------------------------------------

    def _open(self, indexed: DiskIndexed, now: float) -> list[Effect]:
        """Adopt the pages on disk; they are reported in batches, hottest first."""
        opened, index = indexed.opened, indexed.index
        assert isinstance(index, DiskIndex), "the index is made by indexed_of"
        self.open_index.open(index, unix_s=opened.unix_s, now=now)
        self._expiry.begin(now)
        newest = int(opened.entries["sequence"].max()) if len(opened.entries) else 0
        # A slot that was evicted and never rewritten is in no index, and may have a higher
        # sequence.
        self.writes.begin(max(newest, opened.unix_s << SEQUENCES_A_SECOND_BITS))
        self._unreported = np.ascontiguousarray(opened.entries["key"][::-1]).tobytes()
        self._report_at = now
        self._looks_at = now
        self._note_at = now + NOTE_USE_S
        self._reopen_at = now + REOPEN_S
        self._noted_clock = index.clock
        if not self.writes_through:
            self._ahead_at = now
        # Pages that clients stored meanwhile were not written.
        behind = self._flush.ask() if self.writes_through and self._is_behind else []
        # The pool was not notified of any of these pages, so only their rows are deleted.
        return [*self.open_index.rows_gone(self._early.take(index).places), *behind]

    def _ended(self, ended: DiskEnded, now: float) -> list[Effect]:
        """Continue without a disk: pages that were only on it are no longer found."""
        index, self.open_index.index = self.index, None
        if index is not None:
            self._unreported = index.entries(index.hottest_first())["key"].tobytes()
            self._report_at = now
        self.writes.stop()
        self._flush.stop()
        self._early.stop()
        self._show()
        return [NotifyPromote(ended), *self._removals.expire(inf)]

    def _report(self, now: float) -> list[Effect]:
        """Notify the pool of a batch of pages that are on disk, or no longer are."""
        size = KEY_BYTES * max(1, int(self.report_rate * REPORT_S))
        part, self._unreported = self._unreported[:size], self._unreported[size:]
        self._report_at = now + REPORT_S if self._unreported else inf
        if self.index is None:
            return [NotifyPool(PagesForgotten(part))] if part else []
        entries = self._unexpired(part, now)
        there = np.flatnonzero(entries >= 0)
        keys = np.frombuffer(part, KEY)[there].tobytes()
        return self.open_index.written(keys, self.index.lengths(entries[there]))

    # --- maintenance of the disk ------------------------------------------------------------------

    def _unexpired(self, keys: bytes, now: float) -> I64:
        """Return the entry of each page, -1 if it is not on disk, or there for too long."""
        assert self.index is not None, "no page is looked for without a disk"
        entries = self.index.find(keys)
        there = np.flatnonzero(entries >= 0)
        entries[there[self.open_index.have_expired(entries[there], now)]] = NO_ROW
        return entries

    def _look_after(self, now: float) -> list[Effect]:
        effects = self._expiry.look(now)
        if self._ahead_at <= now:
            self._ahead_at = now + LOOK_AHEAD_S
            if self.writes.is_idle:
                effects.append(NotifyPool(RequestColdest(AHEAD_FRACTION)))
        if self._looks_at <= now:
            self._looks_at = now + LOOK_S
            self._show()
            effects += self._note_use(now)
            if self._reopen_at <= now and self.index is not None:
                self._reopen_at = now + REOPEN_S
                self.index.reopen()
                if self.writes.has_failed:
                    self.writes.has_failed = False
                    self._written_ahead.clear()
        return effects

    def _write_ahead(self, coldest: PagesColdest, now: float) -> None:
        """Write the coldest pages that were not written yet, once while they are among the coldest.

        Those that failed are tried again after REOPEN_S. If the disk has no room for all of them,
        they evict each other, and would be written again and again.
        """
        before, self._written_ahead = self._written_ahead, {}
        for stored in coldest.groups:
            generations = stored.records["generation"].tolist()
            again = {generation: None for generation in generations if generation in before}
            is_new = np.array([generation not in again for generation in generations], np.bool_)
            new = PagesStored(stored.records[is_new], stored.namespace)
            self._written_ahead |= again | dict.fromkeys(self.writes.add(new, now))

    def _note_use(self, now: float) -> list[Effect]:
        """Have the store record the pages used since the last time, coldest first."""
        index = self.index
        if self._note_at > now or index is None:
            return []
        self._note_at = now + NOTE_USE_S
        used, self._noted_clock = index.touched_since(self._noted_clock), index.clock
        if not len(used):
            return []
        rows = index.rows(used)
        return [NoteUse(np.ascontiguousarray(rows["place"]), rows["used"].astype(np.int64))]

    def _show(self) -> None:
        figures = self.figures()
        self.metrics.disk_open.set(figures["disk_open"])
        self.metrics.disk_pages.set(figures.get("disk_pages", 0))
        for state in ("used", "in_flight"):
            self.metrics.disk_bytes.labels(state).set(figures.get(f"disk_bytes_{state}", 0))
        taken = figures.get("disk_bytes", 0) - figures.get("disk_bytes_free", 0)
        free = max(0, figures.get("disk_bytes_usable", 0) - taken)
        self.metrics.disk_bytes.labels("free").set(free)
        self.metrics.disk_bytes.labels("waiting").set(figures["disk_bytes_waiting"])

    # --- messages of the pool ---------------------------------------------------------------------

    def _demoted(self, demoted: PagesDemoted, now: float) -> list[Effect]:
        """Mark pages that left memory as hot: they were used while they were in memory."""
        if self.index is not None:
            entries = self.index.find(demoted.keys)
            used = self.open_index.unix_s(now - demoted.age_s)
            self.index.touch(entries[entries >= 0], used)
        return []

    def _find(self, sought: PagesSought, now: float) -> list[Effect]:
        """Report to the promote actor which pages are on disk."""
        count = len(sought.keys) // KEY_BYTES
        lengths, namespaces = np.zeros(count, np.int64), np.zeros(count, TAG)
        if self.index is not None:
            entries = self._unexpired(sought.keys, now)
            there = entries >= 0
            rows = self.index.rows(entries[there])
            lengths[there], namespaces[there] = rows["length"], rows["namespace"]
        return [NotifyPromote(PagesFound(sought.number, sought.resident, lengths, namespaces))]

    def _remove(self, removed: PagesRemoved, now: float) -> list[Effect]:
        """Remove pages from disk, and report to the client how many were removed in total."""
        message, index = removed.message, self.index
        count, until = len(removed.keys) // KEY_BYTES, now + REMOVE_TIMEOUT_S
        if index is None:
            self._early.add(message)
            return [PendingRemoval(removed.origin, message, count, until).answer()]
        gone = _removed_from(index, message)
        went = dict.fromkeys(split_keys(removed.keys))
        count += sum(key not in went for key in split_keys(gone.keys))
        removal = PendingRemoval(removed.origin, message, count, until)
        if not len(gone.places) or len(self._removals) >= ANSWERS_MAX:
            return [*self.open_index.forgotten(gone), removal.answer()]
        job = self.open_index.next_job()
        self._removals.add(job, removal)
        return self.open_index.forgotten(gone, job=job)


def _removed_from(index: DiskIndex, message: Remove | Clear) -> Gone:
    """End the entries that a removal names, those that are being written included."""
    if isinstance(message, Clear):
        return index.remove(index.of_namespaces([message.namespace]))
    named = np.unique(index.live(message.keys))
    named = named[named >= 0]
    return index.remove(named[index.are_of_space(named, message.namespace)])
