"""Disk tier: which pages of this node are on its disk, and their ways there and back.

Owns    the index of the disk and who goes when it is full; the pages that wait to be written; the
        loads under way and who waits for them.
Hears   Promote, from readers; PagesStored, PagesRemoved, Granted and Committed, from the pool; the
        facts of the page store (`actors.storage_port`).
Says    Promoted and Removed, to whoever asked; Reserve, Commit and Remove, to the pool, as a client
        of its own; RecordsChanged to directory and publisher; Spill, Load, Forget and NoteUse.
Keeps   a page on disk has a record exactly while it is not in memory, and each change of it takes
        the next number of the node; what was removed is not told again; a slot that the store may
        still write to stays reserved.
Limits  the bytes that wait to be written; those of `spills`, `promotes`, `askers` and `early` in
        `disk_state`; REMOVALS_MAX.

Without a disk, before it is open and after it has ended, every question is answered "lost".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.disk.askers import Askers
from peercache.actors.disk.bookkeeping import DiskBooks, indexed_of, split
from peercache.actors.disk.early_removals import EarlyRemovals
from peercache.actors.disk.index import DiskIndex, Gone
from peercache.actors.disk.promotes import Promotes
from peercache.actors.disk.spills import Spills
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import (
    DISK_TIER,
    DiskHears,
    DiskIndexed,
    PagesRemoved,
    PagesStored,
)
from peercache.actors.origin import Origin
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.storage_port import (
    DiskEnded,
    DiskOpened,
    ForgetDone,
    LateEnded,
    LoadDone,
    NoteUse,
    SpillDone,
)
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import Clear, Committed, Granted, Remove, Removed
from peercache.wire.messages.promote import Promote

TELL_S: Final = 0.05
"""Pause between two parts of what is told after opening or ending: the rate is kept over this."""

LOOK_S: Final = 1.0
"""How often figures are shown, ages are looked at, and lasting things are tried again."""

LOOK_AHEAD_S: Final = 0.1
"""How often, with `write_policy = on_evict`, it is looked who will be evicted soon."""

AHEAD_PART: Final = 0.75
"""How full the pool may be before its coldest pages are written."""

NOTE_USE_S: Final = 10.0
"""How old the order of use is that a restart begins with."""

REOPEN_S: Final = 10.0
"""How soon a file system that was full is tried again, and what could not be written."""

SEQUENCES_A_SECOND_BITS: Final = 20
"""What is written in this life is newer than all that was written before, to whoever makes an index
from slots, unless more pages a second than 2**20 were written."""

REMOVE_PATIENCE_S: Final = 0.1
"""How long a removal is not answered, so that a restart does not bring the pages back."""

REMOVALS_MAX: Final = 1024
"""Removals that wait at once; beyond, they are answered at once."""


@final
@attrs.define(eq=False)
class _Removal:
    origin: Origin
    request: int
    count: int
    until: float


@final
@attrs.define(kw_only=True, eq=False)
class DiskTier:
    """The disk tier of one node. Does no I/O: the page store does what it says.

    pages:      of the node's memory, and the numbers of all changes.
    pool_bytes: how much of the pool is usable now.
    coldest:    with write_policy on_evict: the pages that the pool would evict first, as many as
                there must be room for, or none while there is room.
    tell_rate:  records a second that are told after opening.
    wish_rate:  bytes a second that are loaded for nobody who waits.
    """

    pages: PageTable
    pool_bytes: Callable[[], int]
    coldest: Callable[[float], list[PagesStored]] | None = None
    queue_bytes_max: int
    wish_rate: int
    tell_rate: int
    ttl_s: float = 0.0
    spill_delay_s: float = 0.0
    metrics: Metrics | None = None
    books: DiskBooks = attrs.field(init=False)
    spills: Spills = attrs.field(init=False)
    promotes: Promotes = attrs.field(init=False)
    askers: Askers = attrs.field(init=False)
    _untold: bytes = b""
    """Keys of pages that lay there at the start, hottest first, or that are to be withdrawn."""
    _tell_at: float = inf
    _looks_at: float = inf
    _ahead_at: float = inf
    _written_ahead: dict[int, None] = attrs.field(factory=dict)
    """Generations of pages that were among the coldest the last time, and queued."""
    _note_at: float = inf
    _reopen_at: float = inf
    _removals: dict[int, _Removal] = attrs.field(factory=dict)
    _noted_clock: int = 0
    _early: EarlyRemovals = attrs.field(factory=EarlyRemovals)

    def __attrs_post_init__(self) -> None:
        """Start without a disk."""
        self.books = DiskBooks(self.pages, self.metrics)
        self.spills = Spills(self.books, self.queue_bytes_max, self.spill_delay_s)
        self.askers = Askers(self.pages, self.metrics)
        self.promotes = Promotes(self.books, self.askers, self.pool_bytes, self.wish_rate)

    @property
    def is_open(self) -> bool:
        """Return whether there is a disk just now."""
        return self.books.index is not None

    def on_disk(self, pages: Sequence[Page]) -> list[int]:
        """Tell the pool under which lengths pages, that leave memory now, are on disk; 0: not."""
        return self.books.on_disk(pages)

    def on_message(self, sender: Origin, message: DiskHears, now: float) -> list[Effect]:
        """Take one message; the effects must be performed in the order of the list."""
        self.askers.now = self.promotes.now = now
        effects = self._apply(sender, message, now)
        if self.is_open:
            effects += self.spills.pump(now)
            effects += self.promotes.pump()
        return effects

    def _apply(self, sender: Origin, message: DiskHears, now: float) -> list[Effect]:
        match message:
            case Promote():
                return self.promotes.ask(sender, message)
            case PagesStored():
                effects = self.spills.replace(message)
                if self.coldest is None:
                    self.spills.add(message, now)
                return effects
            case PagesRemoved():
                return self._remove(message, now)
            case Granted():
                return self.promotes.granted(message)
            case Committed():
                return self.promotes.committed(message)
            case SpillDone(job, outcomes):
                return self.spills.done(job, outcomes)
            case LoadDone(job, outcomes, checksums):
                return self.promotes.done(job, outcomes, checksums.tolist())
            case LateEnded(job, indices):
                spilled = self.spills.late_ended(job, indices)
                return [*spilled, *self.promotes.late_ended(job, indices)]
            case ForgetDone(job):
                removal = self._removals.pop(job, None)
                return [] if removal is None else _removed(removal)
            case DiskOpened():
                return self._open(indexed_of(message), now)
            case DiskIndexed():
                return self._open(message, now)
            case DiskEnded():
                return self._ended(now)
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Answer who has waited long enough, tell what is untold, look after the disk."""
        self.askers.now = self.promotes.now = now
        effects = self.askers.expire()
        for job in [job for job, removal in self._removals.items() if removal.until <= now]:
            effects += _removed(self._removals.pop(job))
        if self._tell_at <= now:
            effects += self._tell(now)
        if self.is_open:
            effects += self._look_after(now)
            effects += self.spills.pump(now)
            effects += self.promotes.pump()
        return effects

    def deadline(self) -> float:
        """Return when somebody's patience is over, or the disk must be looked after."""
        removal = next(iter(self._removals.values()), None)
        due = min(
            self.askers.deadline(),
            self._tell_at,
            inf if removal is None else removal.until,
        )
        if not self.is_open:
            return due
        due = min(due, self.promotes.deadline(), self.spills.deadline())
        return min(due, self._looks_at, self._ahead_at)

    def check(self) -> None:
        """Assert the sums, in constant time."""
        self.promotes.check()
        assert 0 <= self.spills.waiting_bytes <= self.queue_bytes_max, "the queue is too long"
        assert len(self._removals) <= REMOVALS_MAX, "too many removals wait"
        if self.books.index is not None:
            self.books.index.check()

    def figures(self) -> dict[str, int]:
        """Return the figures for Stats."""
        index = self.books.index
        return {
            "disk_open": int(self.is_open),
            **({} if index is None else index.figures()),
            "disk_bytes_waiting": self.spills.waiting_bytes,
            "disk_loads": self.promotes.loads,
        }

    # --- beginning and end ------------------------------------------------------------------------

    def _open(self, indexed: DiskIndexed, now: float) -> list[Effect]:
        """Take what lies there; it is told little by little, hottest first."""
        opened, index = indexed.opened, indexed.index
        assert isinstance(index, DiskIndex), "the index is made by indexed_of"
        self.books.open(index, unix_s=opened.unix_s, now=now)
        newest = int(opened.entries["sequence"].max()) if len(opened.entries) else 0
        # A slot that was evicted and never written again is in no index, and may have a higher one.
        self.spills.begin(max(newest, opened.unix_s << SEQUENCES_A_SECOND_BITS))
        self._untold = np.ascontiguousarray(opened.entries["key"][::-1]).tobytes()
        self._tell_at = now
        self._looks_at = now
        self._note_at = now + NOTE_USE_S
        self._reopen_at = now + REOPEN_S
        self._noted_clock = index.clock
        if self.coldest is not None:
            self._ahead_at = now
        # Of none of them anything was told yet, so there is nothing to withdraw.
        return self.books.forgotten(Gone(b"", self._early.take(index).places))

    def _ended(self, now: float) -> list[Effect]:
        """Go on without a disk: what was on it only is found no more."""
        index, self.books.index = self.books.index, None
        if index is not None:
            self._untold = index.entries(index.hottest_first())["key"].tobytes()
            self._tell_at = now
        self.spills.stop()
        self._early.stop()
        self._show()
        effects = self.promotes.stop()
        for removal in self._removals.values():
            effects += _removed(removal)
        self._removals.clear()
        return effects

    def _tell(self, now: float) -> list[Effect]:
        """Tell of a part of what is untold: that it is there, or that it is no more."""
        size = 16 * max(1, int(self.tell_rate * TELL_S))
        part, self._untold = self._untold[:size], self._untold[size:]
        self._tell_at = now + TELL_S if self._untold else inf
        index = self.books.index
        if index is None:
            return self.books.withdrawn(part)
        entries = index.find(part)
        there = np.flatnonzero(entries >= 0)
        keys = np.frombuffer(part, "V16")[there].tobytes()
        lengths: list[int] = index.lengths(entries[there]).tolist()
        return self.books.published(keys, lengths)

    # --- looking after the disk -------------------------------------------------------------------

    def _look_after(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._ahead_at <= now:
            self._ahead_at = now + LOOK_AHEAD_S
            if self.spills.is_idle and self.coldest is not None:
                self._write_ahead(self.coldest(AHEAD_PART), now)
        if self._looks_at <= now:
            self._looks_at = now + LOOK_S
            self._show()
            effects += self._expire(now)
            effects += self._note_use(now)
            if self._reopen_at <= now and self.books.index is not None:
                self._reopen_at = now + REOPEN_S
                self.books.index.reopen()
                if self.spills.has_failed:
                    self.spills.has_failed = False
                    self._written_ahead.clear()
        return effects

    def _write_ahead(self, coldest: list[PagesStored], now: float) -> None:
        """Write those of the coldest pages that were not written yet, once while they stay such.

        Those that failed are tried again with all other lasting things, after a pause. Where the
        disk has no room for all of them they push each other out, and would be written again and
        again.
        """
        before, self._written_ahead = self._written_ahead, {}
        for stored in coldest:
            generations = stored.records["generation"].tolist()
            again = {generation: None for generation in generations if generation in before}
            is_new = np.array([generation not in again for generation in generations], np.bool_)
            new = PagesStored(stored.records[is_new], stored.namespace)
            self._written_ahead |= again | dict.fromkeys(self.spills.add(new, now))

    def _expire(self, now: float) -> list[Effect]:
        """Delete what is older than its time to live."""
        index = self.books.index
        if not self.ttl_s or index is None:
            return []
        old = index.written_before(max(0, self.books.unix_s(now) - int(self.ttl_s)))
        if not len(old):
            return []
        gone = index.remove(old)
        if self.metrics is not None:
            self.metrics.disk_pages_lost.labels("expired").inc(gone.count)
        return self.books.forgotten(gone)

    def _note_use(self, now: float) -> list[Effect]:
        """Let the store note what was used since the last time, coldest first."""
        index = self.books.index
        if self._note_at > now or index is None:
            return []
        self._note_at = now + NOTE_USE_S
        used, self._noted_clock = index.touched_since(self._noted_clock), index.clock
        if not len(used):
            return []
        return [NoteUse(np.ascontiguousarray(index.entries(used)["place"]))]

    def _show(self) -> None:
        if self.metrics is not None:
            figures = self.figures()
            self.metrics.disk_open.set(figures["disk_open"])
            self.metrics.disk_pages.set(figures.get("disk_pages", 0))
            for state in ("used", "in_flight", "free"):
                self.metrics.disk_bytes.labels(state).set(figures.get(f"disk_bytes_{state}", 0))
            self.metrics.disk_bytes.labels("waiting").set(figures["disk_bytes_waiting"])

    # --- removing ---------------------------------------------------------------------------------

    def _remove(self, removed: PagesRemoved, now: float) -> list[Effect]:
        """Remove from disk what somebody wants gone, and tell how many pages went in all."""
        message, index = removed.message, self.books.index
        removal = _Removal(
            removed.origin, message.request, len(removed.keys) // 16, now + REMOVE_PATIENCE_S
        )
        if index is None:
            self.promotes.removed(removed.keys)
            self._early.add(message)
            return _removed(removal)
        gone = self._gone(index, message)
        self.promotes.removed(gone.keys if isinstance(message, Clear) else message.keys)
        went = dict.fromkeys(split(removed.keys))
        removal.count += sum(key not in went for key in split(gone.keys))
        if not gone.count or len(self._removals) >= REMOVALS_MAX:
            return [*self.books.forgotten(gone), *_removed(removal)]
        job = self.books.next_job()
        self._removals[job] = removal
        return self.books.forgotten(gone, job=job)

    def _gone(self, index: DiskIndex, message: Remove | Clear) -> Gone:
        """End the entries that a removal names, those that are being written included."""
        if isinstance(message, Clear):
            return index.remove(index.of_namespaces([message.namespace]))
        written = index.find(message.keys)
        gone = index.remove(np.unique(written[written >= 0]))
        writing = self.spills.removed(message.keys)
        return Gone(gone.keys, np.concatenate([gone.places, writing]))


def _removed(removal: _Removal) -> list[Effect]:
    """Answer, unless the tier itself has asked."""
    if removal.origin == DISK_TIER:
        return []
    return [Send(removal.origin, Removed(removal.request, removal.count))]
