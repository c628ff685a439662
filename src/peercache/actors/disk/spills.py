"""Spills: pages on their way from the pool to the disk.

A page waits in a queue that is bounded in bytes, and that drops what is too much: a disk that is
slower than its writers costs pages on disk, never memory and never time. Nothing is pinned in the
pool meanwhile: the store reads it as any reader does, and a page that was evicted is not written.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.bookkeeping import DiskBooks, split
from peercache.actors.disk.index import DiskIndex
from peercache.actors.effects import Effect
from peercache.actors.mailboxes import PagesStored
from peercache.actors.storage_port import (
    DISK_CHANGED,
    DISK_DONE,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    Spill,
)
from peercache.model.records import Records
from peercache.model.runs import I64, U64

SPILL_BYTES_MAX: Final = 16 * 2**20
"""Of one job: 10 ms of a fast disk, so that loads do not wait long behind it."""

SPILL_PAGES_MAX: Final = 1024
"""Of one job, where pages are small."""

SPILLS_MAX: Final = 4
"""Jobs at once: while one is written the next ones are at hand."""

SPILL_S: Final = 10.0
"""How long a job may take: a slow disk writes all jobs at once in a second or two."""

DROPPED: Final = {
    DISK_CHANGED: "changed",
    DISK_FULL: "full",
    DISK_LATE: "late",
    DISK_UNTRIED: "late",
}
"""Why a page was not written, by the store's outcome; all others are "failed"."""

MAY_BE_TRIED_AGAIN: Final = ("full", "no_room", "late", "failed")
"""What another time may end otherwise, of a page that still is in memory then."""


@final
@attrs.define(eq=False)
class _Job:
    keys: bytes
    entries: I64
    lengths: I64


@final
@attrs.define(eq=False)
class Spills:
    """What waits to be written, and what is being written.

    delay_s: how long a page waits at least: its commit is to be published and answered first, by
             the same processors.
    """

    books: DiskBooks
    queue_bytes_max: int
    delay_s: float = 0.0
    _waiting: deque[tuple[float, Records, int]] = attrs.field(factory=deque)
    """Since when it waits, records, and their namespace; oldest first."""
    _waiting_bytes: int = 0
    _jobs: dict[int, _Job] = attrs.field(factory=dict)
    _late: dict[tuple[int, int], tuple[bytes, int]] = attrs.field(factory=dict)
    """By job and index: pages that may still be written, and their entries."""
    has_failed: bool = False
    """Whether a page was not written that may be later; whoever tries again says False."""
    _sequence: int = 0
    """The last write sequence: rising over restarts too."""

    @property
    def waiting_bytes(self) -> int:
        """Return how much waits in the queue."""
        return self._waiting_bytes

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits and nothing is written."""
        return not self._waiting and not self._jobs

    def begin(self, newest_sequence: int) -> None:
        """Number what is written after what lies there."""
        self._sequence = newest_sequence

    def replace(self, stored: PagesStored) -> list[Effect]:
        """Delete from disk what was stored anew with another length: the newest counts."""
        index, records = self.books.index, stored.records
        if index is None:
            return []
        entries = index.find(records["key"].tobytes())
        there = np.flatnonzero(entries >= 0)
        lengths = index.lengths(entries[there])
        other = there[lengths != records["length"][there]]
        if not len(other):
            return []
        gone = index.remove(entries[other])
        self._count_lost("replaced", gone.count)
        return self.books.forgotten(gone)

    def add(self, stored: PagesStored, now: float) -> list[int]:
        """Queue pages, as many of them as there is room for; return their generations."""
        index, records = self.books.index, stored.records
        if index is None:
            return []
        known = index.knows(records["key"].tobytes())
        if known.any():
            index.touch(_held(index, records["key"][known].tobytes()))
            records = records[~known]
        sizes = records["length"].astype(np.int64)
        fits = np.cumsum(sizes) <= self.queue_bytes_max - self._waiting_bytes
        self._drop("queue_full", len(records) - int(fits.sum()))
        if fits.any():
            self._waiting.append((now, records[fits], stored.namespace))
            self._waiting_bytes += int(sizes[fits].sum())
        queued: list[int] = records["generation"][fits].tolist()
        return queued

    def pump(self, now: float) -> list[Effect]:
        """Begin jobs, as many as may be under way."""
        effects: list[Effect] = []
        while self.deadline() <= now:
            records, tags = self._take(now)
            if len(records):
                effects += self._begin(records, tags, now)
        return effects

    def deadline(self) -> float:
        """Return when the next job may begin; inf if there is none, or too many are under way."""
        if not self._waiting or len(self._jobs) >= SPILLS_MAX:
            return inf
        return self._waiting[0][0] + self.delay_s

    def done(self, number: int, outcomes: bytes) -> list[Effect]:
        """Take the outcome of a job."""
        job = self._jobs.pop(number)
        index = self.books.index
        if index is None:
            return []
        states = np.frombuffer(outcomes, np.uint8)
        for state in np.unique(states[states != DISK_DONE]).tolist():
            self._drop(DROPPED.get(state, "failed"), int((states == state).sum()))
        effects = self._finish(index, job, np.flatnonzero(states == DISK_DONE))
        # Nothing was ever told of what was not written, and the store has no rows of it.
        index.refuse(job.entries[states == DISK_FULL])
        index.abandon(job.entries[(states == DISK_CHANGED) | (states == DISK_UNTRIED)])
        has_failed = np.isin(states, [DISK_DONE, *DROPPED], invert=True)
        index.abandon(job.entries[has_failed])
        keys = split(job.keys)
        for at in np.flatnonzero(states == DISK_LATE).tolist():
            self._late[number, at] = (keys[at], int(job.entries[at]))
        return effects

    def late_ended(self, number: int, indices: tuple[int, ...]) -> list[Effect]:
        """Let go of places that a late call may have written to until now."""
        ended = [self._late.pop((number, at), None) for at in indices]
        entries = [late[1] for late in ended if late is not None]
        if self.books.index is None or not entries:
            return []
        self.books.index.abandon(np.array(entries, np.int64))
        return []

    def removed(self, keys: bytes) -> U64:
        """End what is being written of these keys; the queue finds out by itself.

        Returns the places that are empty now: none, as all of them are still being written to.
        """
        index = self.books.index
        assert index is not None, "nothing is written to a tier that is off"
        named = dict.fromkeys(split(keys))
        jobs = self._jobs.values()
        under_way = [
            pair for job in jobs for pair in zip(split(job.keys), job.entries.tolist(), strict=True)
        ]
        # Only while it is pinned is an entry's number still that page's.
        writing = [e for key, e in (*under_way, *self._late.values()) if key in named]
        return index.remove(np.array(writing, np.int64)).places

    def stop(self) -> None:
        """Forget everything: the disk has ended."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._late.clear()

    def _take(self, now: float) -> tuple[Records, U64]:
        """Return the oldest of the queue, as many as one job takes, that are still in memory."""
        parts: list[Records] = []
        namespaces: list[int] = []
        size = count = 0
        while self._waiting and size < SPILL_BYTES_MAX and count < SPILL_PAGES_MAX:
            if self._waiting[0][0] + self.delay_s > now:
                break
            since, records, namespace = self._waiting.popleft()
            sizes = np.cumsum(records["length"].astype(np.int64))
            room = max(1, int((sizes <= SPILL_BYTES_MAX - size).sum()))
            room = min(room, SPILL_PAGES_MAX - count)
            part, rest = records[:room], records[room:]
            if len(rest):
                self._waiting.appendleft((since, rest, namespace))
            size += int(sizes[len(part) - 1])
            count += len(part)
            self._waiting_bytes -= int(sizes[len(part) - 1])
            find = self.books.pages.find
            here = [
                (page := find(key)) is not None and page.generation == generation
                for key, generation in zip(
                    part["key"].tolist(), part["generation"].tolist(), strict=True
                )
            ]
            self._drop("changed", here.count(False))
            parts.append(part[np.array(here, np.bool_)])
            namespaces += [namespace] * len(parts[-1])
            if len(rest):
                break
        return np.concatenate(parts), np.array(namespaces, np.uint64)

    def _begin(self, records: Records, tags: U64, now: float) -> list[Effect]:
        books = self.books
        assert books.index is not None
        sequences = np.arange(1, len(records) + 1, dtype=np.uint64) + np.uint64(self._sequence)
        self._sequence += len(records)
        keys, lengths = records["key"].tobytes(), records["length"].astype(np.uint64)
        begun = books.index.begin(keys, tags, lengths, sequences, books.unix_s(now))
        effects = books.forgotten(begun.gone)
        self._count_lost("evicted", begun.gone.count)
        chosen = np.flatnonzero(begun.entries >= 0)
        fitting = int(books.index.fits(lengths).sum())
        self._drop("too_large", len(records) - fitting)
        self._drop("no_room", fitting - len(chosen))
        if not len(chosen):
            return effects
        # In order of their places: neighbours are written by one call.
        order = np.argsort(begun.places, kind="stable")
        chosen = chosen[order]
        job, entries = books.next_job(), begun.entries[chosen]
        self._jobs[job] = _Job(
            records["key"][chosen].tobytes(), entries, lengths[chosen].astype(np.int64)
        )
        spill = Spill(
            job, records[chosen], tags[chosen], begun.places[order], sequences[chosen],
            now + SPILL_S,
        )  # fmt: skip
        return [*effects, spill]

    def _finish(self, index: DiskIndex, job: _Job, written: I64) -> list[Effect]:
        """Pages are on disk; those that were evicted meanwhile are found there from now on."""
        entries = job.entries[written]
        ended = index.finish(entries)
        gone = dict.fromkeys(split(ended.keys))
        keys, lengths = split(job.keys), job.lengths.tolist()
        held = [at for at in written.tolist() if keys[at] not in gone]
        if self.books.metrics is not None:
            self.books.metrics.pages_spilled.inc(len(held))
            self.books.metrics.bytes_spilled.inc(sum(lengths[at] for at in held))
        effects = self.books.forgotten(ended)
        told = b"".join([keys[at] for at in held])
        return [*effects, *self.books.published(told, [lengths[at] for at in held])]

    def _drop(self, reason: str, count: int) -> None:
        self.has_failed |= bool(count) and reason in MAY_BE_TRIED_AGAIN
        if count and self.books.metrics is not None:
            self.books.metrics.spills_dropped.labels(reason).inc(count)

    def _count_lost(self, reason: str, count: int) -> None:
        if count and self.books.metrics is not None:
            self.books.metrics.disk_pages_lost.labels(reason).inc(count)


def _held(index: DiskIndex, keys: bytes) -> I64:
    entries = index.find(keys)
    held: I64 = entries[entries >= 0]
    return held
