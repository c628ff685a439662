"""DiskWrites: pages on their way from the pool to the disk.

A page waits in a queue that is bounded in bytes and drops pages beyond that: if the disk is slower
than its writers, pages are missing on disk, but no memory and no time is lost. Nothing is pinned in
the pool in the meantime. Before a job takes places, the pool is asked which of its pages are still
in memory; the store reads the pool as any reader does, so a page that is evicted later is not
written either.

Before a graceful stop every page that is only in memory is written, hottest first, as far as time
allows. And pages that were stored before the disk was open are written once it is. Pages beyond the
queue's bytes wait in a `Flush`, which keeps only their records.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.open_index import OpenIndex
from peercache.actors.effects import Effect, NotifyPool
from peercache.actors.mailboxes import (
    PagesHeld,
    PagesStored,
    RequestHeld,
    RequestResident,
    Resident,
)
from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    Write,
    WriteDone,
)
from peercache.model.keys import KEY, Tag, Tags, tags_of
from peercache.model.records import Records
from peercache.model.runs import I64

WRITE_BYTES_MAX: Final = 16 * 2**20
"""Of one job: 10 ms of a fast disk, so that loads wait no longer behind it."""

WRITE_PAGES_MAX: Final = 1024
"""Of one job, where pages are small."""

WRITES_MAX: Final = 4
"""Jobs at once: while the disk writes one, the next ones are submitted already."""

WRITE_S: Final = 10.0
"""How long a job may take: a slow disk writes all jobs at once in a second or two."""

DROPPED: Final = {
    DISK_CHANGED: "changed",
    DISK_FULL: "full",
    DISK_LATE: "late",
    DISK_UNTRIED: "late",
}
"""Why a page was not written, by the store's outcome; other outcomes count as "failed"."""

MAY_BE_TRIED_AGAIN: Final = ("full", "no_room", "late", "failed")
"""Reasons after which a retry may succeed, if the page is still in memory."""


@final
@attrs.define(eq=False)
class _Job:
    keys: bytes
    entries: I64
    lengths: I64


@final
@attrs.define(eq=False)
class DiskWrites:
    """The pages that wait to be written, and those that are being written.

    delay_s: the least time that a page waits: its commit is published and answered first, by the
             same processors.
    """

    open_index: OpenIndex
    queue_bytes_max: int
    delay_s: float = 0.0
    _waiting: deque[tuple[float, Records, int]] = attrs.field(factory=deque)
    """Start of the wait, records, and their namespace; oldest first."""
    _waiting_bytes: int = 0
    _asked: dict[int, tuple[Records, Tags]] = attrs.field(factory=dict)
    """Pages, with their namespaces, for which the pool was asked whether they are in memory."""
    _questions: int = 0
    _jobs: dict[int, _Job] = attrs.field(factory=dict)
    _late: dict[tuple[int, int], int] = attrs.field(factory=dict)
    """By job and index: the entries of pages that may still be written."""
    trouble: str = ""
    """Why the last pages were not written, "" if they were."""
    has_failed: bool = False
    """Whether a page was not written for which a retry may succeed; the retry resets it."""
    _sequence: int = 0
    """The last write sequence; it increases across restarts."""

    @property
    def waiting_bytes(self) -> int:
        """Return how many bytes wait in the queue."""
        return self._waiting_bytes

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing is written."""
        return not self._waiting and not self._asked and not self._jobs

    @property
    def pages_left(self) -> int:
        """Return how many pages wait or are being written."""
        waiting = sum(len(records) for _, records, _ in self._waiting)
        asked = sum(len(records) for records, _ in self._asked.values())
        return waiting + asked + sum(len(job.entries) for job in self._jobs.values())

    def fitting(self, records: Records) -> int:
        """Return how many of these pages, counted from the first one, fit into the queue."""
        sizes = np.cumsum(records["length"].astype(np.int64))
        return int((sizes <= self.queue_bytes_max - self._waiting_bytes).sum())

    def begin(self, newest_sequence: int) -> None:
        """Start to number writes after the newest sequence on disk."""
        self._sequence = newest_sequence

    def note_stored(self, stored: PagesStored, now: float) -> list[Effect]:
        """Report to the pool which of the pages that it stored are on disk already.

        A page of another length is deleted from disk: the newest counts.
        """
        index, records = self.open_index.index, stored.records
        if index is None:
            return []
        entries = index.find(records["key"].tobytes())
        there = np.flatnonzero(entries >= 0)
        if not len(there):
            return []
        lengths = index.lengths(entries[there])
        is_same = lengths == records["length"][there]
        same = there[is_same]
        index.touch(entries[same], self.open_index.unix_s(now))
        effects = self.open_index.written(records["key"][same].tobytes(), lengths[is_same])
        gone = index.remove(entries[there[~is_same]])
        self.open_index.count_lost("replaced", gone.count)
        return [*effects, *self.open_index.forgotten(gone)]

    def add(self, stored: PagesStored, now: float) -> list[int]:
        """Queue as many pages as there is room for; return their generations."""
        index, records = self.open_index.index, stored.records
        if index is None:
            return []
        records = records[~index.knows(records["key"].tobytes())]
        sizes = records["length"].astype(np.int64)
        fits = np.cumsum(sizes) <= self.queue_bytes_max - self._waiting_bytes
        self._drop("queue_full", len(records) - int(fits.sum()))
        if fits.any():
            self._waiting.append((now, records[fits], stored.namespace))
            self._waiting_bytes += int(sizes[fits].sum())
        queued: list[int] = records["generation"][fits].tolist()
        return queued

    def pump(self, now: float) -> list[Effect]:
        """Ask the pool about the pages of the next jobs, up to the limit of jobs in flight."""
        effects: list[Effect] = []
        while self.deadline() <= now:
            records, tags = self._take(now)
            self._questions += 1
            self._asked[self._questions] = records, tags
            keys, generations = records["key"].tobytes(), records["generation"].tobytes()
            asked = RequestResident(self._questions, keys, generations, self.open_index.may_expire)
            effects.append(NotifyPool(asked))
        return effects

    def deadline(self) -> float:
        """Return when the next job may begin; inf if nothing waits, or too many are in flight."""
        if not self._waiting or len(self._jobs) + len(self._asked) >= WRITES_MAX:
            return inf
        return self._waiting[0][0] + self.delay_s

    def begin_resident(self, answer: Resident, now: float) -> list[Effect]:
        """Begin a job with the pages that are still in memory."""
        # The disk may have ended in the meantime.
        records, tags = self._asked.pop(answer.number, (None, None))
        if records is None or tags is None:
            return []
        here = np.frombuffer(answer.resident, np.bool_)
        self._drop("changed", len(records) - int(here.sum()))
        used = (self.open_index.unix_s(now) - answer.ages[here]).astype(np.int64)
        return self._begin(records[here], tags[here], now, used) if here.any() else []

    def done(self, done: WriteDone) -> list[Effect]:
        """Take the outcome of a job."""
        number, job = done.job, self._jobs.pop(done.job)
        index = self.open_index.index
        if index is None:
            return []
        states = np.frombuffer(done.outcomes, np.uint8)
        if done.checksums is not None:
            is_done = states == DISK_DONE
            index.note_checksums(job.entries[is_done], done.checksums[is_done])
        self._note_trouble(states)
        for state in np.unique(states[states != DISK_DONE]).tolist():
            self._drop(DROPPED.get(state, "failed"), int((states == state).sum()))
        effects = self._finish(index, job, np.flatnonzero(states == DISK_DONE))
        # The pool was not notified of pages that were not written, and the store has no rows of
        # them.
        index.refuse(job.entries[states == DISK_FULL])
        index.abandon(job.entries[(states == DISK_CHANGED) | (states == DISK_UNTRIED)])
        has_failed = np.isin(states, [DISK_DONE, *DROPPED], invert=True)
        index.abandon(job.entries[has_failed])
        for at in np.flatnonzero(states == DISK_LATE).tolist():
            self._late[number, at] = int(job.entries[at])
        return effects

    def _note_trouble(self, states: npt.NDArray[np.uint8]) -> None:
        if (states == DISK_FULL).any():
            self.trouble = (
                "the file system is full, or at disk_free_floor: free some room, or lower disk_size"
            )
        elif (states == DISK_FAILED).any():
            self.trouble = "writes to it fail: see the kernel's log, or name another disk_path"
        elif (states == DISK_DONE).any():
            self.trouble = ""

    def late_ended(self, number: int, indices: tuple[int, ...]) -> None:
        """Free the places that a call past its deadline may have written to until now."""
        ended = [self._late.pop((number, at), None) for at in indices]
        entries = [entry for entry in ended if entry is not None]
        if self.open_index.index is not None and entries:
            self.open_index.index.abandon(np.array(entries, np.int64))

    def stop(self) -> None:
        """Forget everything: the disk has ended."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._asked.clear()
        self._late.clear()

    def _take(self, now: float) -> tuple[Records, Tags]:
        """Return the oldest pages of the queue, as many as one job takes, and their namespaces."""
        parts: list[Records] = []
        namespaces: list[Tag] = []
        size = count = 0
        while self._waiting and size < WRITE_BYTES_MAX and count < WRITE_PAGES_MAX:
            if self._waiting[0][0] + self.delay_s > now:
                break
            since, records, namespace = self._waiting.popleft()
            sizes = np.cumsum(records["length"].astype(np.int64))
            room = max(1, int((sizes <= WRITE_BYTES_MAX - size).sum()))
            room = min(room, WRITE_PAGES_MAX - count)
            part, rest = records[:room], records[room:]
            if len(rest):
                self._waiting.appendleft((since, rest, namespace))
            size += int(sizes[len(part) - 1])
            count += len(part)
            self._waiting_bytes -= int(sizes[len(part) - 1])
            parts.append(part)
            namespaces += [namespace] * len(part)
            if len(rest):
                break
        return np.concatenate(parts), tags_of(namespaces)

    def _begin(self, records: Records, tags: Tags, now: float, used: I64) -> list[Effect]:
        shared = self.open_index
        assert shared.index is not None, "a question outlived the index"
        sequences = np.arange(1, len(records) + 1, dtype=np.uint64) + np.uint64(self._sequence)
        self._sequence += len(records)
        keys, lengths = records["key"].tobytes(), records["length"].astype(np.uint64)
        begun = shared.index.begin(keys, tags, lengths, sequences, used)
        effects = shared.forgotten(begun.gone)
        shared.count_evicted(begun.gone)
        chosen = np.flatnonzero(begun.entries >= 0)
        fitting = int(shared.index.fits(lengths).sum())
        self._drop("too_large", len(records) - fitting)
        self._drop("no_room", fitting - len(chosen))
        if not len(chosen):
            return effects
        # Sorted by place, so that one call writes neighbours.
        order = np.argsort(begun.places, kind="stable")
        chosen = chosen[order]
        job, entries = shared.next_job(), begun.entries[chosen]
        self._jobs[job] = _Job(
            records["key"][chosen].tobytes(), entries, lengths[chosen].astype(np.int64)
        )
        write = Write(
            job, records[chosen], tags[chosen], begun.places[order], sequences[chosen],
            now + WRITE_S,
        )  # fmt: skip
        return [*effects, write]

    def _finish(self, index: DiskIndex, job: _Job, written: I64) -> list[Effect]:
        """Notify the pool of pages that are on disk now; drop the rows of those removed since."""
        is_held, places = index.finish(job.entries[written])
        held = written[is_held]
        lengths = job.lengths[held]
        self.open_index.metrics.disk_pages_written.inc(len(held))
        self.open_index.metrics.disk_bytes_written.inc(int(lengths.sum()))
        keys = np.frombuffer(job.keys, KEY)[held].tobytes()
        return [*self.open_index.rows_gone(places), *self.open_index.written(keys, lengths)]

    def _drop(self, reason: str, count: int) -> None:
        self.has_failed |= bool(count) and reason in MAY_BE_TRIED_AGAIN
        if count:
            self.open_index.metrics.disk_writes_dropped.labels(reason).inc(count)


PART_PAGES: Final = 4096
"""Pages that are handed to the writes at a time: less than a millisecond of the loop."""


@final
@attrs.define(eq=False)
class Flush:
    """The pages that wait for room in the queue of writes.

    is_final: the node stops, so pages that are stored from now on are written at once too.
    """

    _writes: DiskWrites
    is_final: bool = False
    _questions: int = 0
    _parts: deque[PagesStored] = attrs.field(factory=deque)

    def ask(self) -> list[Effect]:
        """Ask the pool for all pages that are only in memory."""
        self._questions += 1
        return [NotifyPool(RequestHeld())]

    def take(self, held: PagesHeld) -> None:
        """Handle the answer."""
        self._questions -= 1
        for group in held.groups:
            for begin in range(0, len(group.records), PART_PAGES):
                part = group.records[begin : begin + PART_PAGES]
                self._parts.append(PagesStored(part, group.namespace))

    def feed(self, now: float) -> None:
        """Hand over pages as long as the queue of writes has room."""
        while self._parts:
            part = self._parts[0]
            count = self._writes.fitting(part.records)
            if not count:
                if not self._writes.is_idle:
                    return
                # It is larger than the whole queue: the writes count it as dropped.
                count = 1
            self._writes.add(PagesStored(part.records[:count], part.namespace), now)
            self._parts.popleft()
            if count < len(part.records):
                self._parts.appendleft(PagesStored(part.records[count:], part.namespace))

    def left(self) -> int | None:
        """Return how many pages of a final flush are not written yet; None until that is known."""
        if self._questions or not self.is_final:
            return None
        return sum(len(part.records) for part in self._parts) + self._writes.pages_left

    def stop(self) -> None:
        """Forget everything: the disk has ended."""
        self._parts.clear()
