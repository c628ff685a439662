"""Loads: pages on their way from the disk into slots that the promote actor has reserved.

An entry is pinned as long as its page is loaded, so its place is not given out meanwhile.
"""

from __future__ import annotations

from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.open_index import OpenIndex
from peercache.actors.effects import Effect, TellPromote
from peercache.actors.mailboxes import LoadWanted, PagesLoaded
from peercache.actors.storage_port import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    DISK_REPLACED,
    DISK_UNTRIED,
    LateEnded,
    Load,
    LoadDone,
)
from peercache.model.keys import KEY
from peercache.model.runs import I64, U64

LOST: Final = (
    (DISK_DAMAGED, "damaged"),
    (DISK_FAILED, "failed"),
    (DISK_REPLACED, "overwritten"),
)
"""Outcomes after which a page is on disk no longer, and the reasons that metrics give."""


@final
@attrs.define(eq=False)
class _Load:
    """A job of the store. positions: of its pages in the LoadWanted; outcomes: of all of that."""

    wanted: int
    positions: I64
    entries: I64
    outcomes: bytearray
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

    def begin(self, wanted: LoadWanted) -> list[Effect]:
        """Load the pages that are still on disk; answer at once if there are none."""
        count, index = len(wanted.lengths), self.open_index.index
        outcomes = bytearray((DISK_UNTRIED,)) * count
        if index is None:
            return [_answer(wanted.job, outcomes)]
        entries = index.find(wanted.keys)
        for at in np.flatnonzero(entries < 0).tolist():
            outcomes[at] = DISK_DAMAGED
        there = np.flatnonzero(entries >= 0)
        # A page that was stored anew in another length stays DISK_UNTRIED.
        chosen = there[index.lengths(entries[there]) == wanted.lengths[there]]
        if not len(chosen):
            return [_answer(wanted.job, outcomes)]
        entries = entries[chosen]
        index.pin(entries)
        job = self.open_index.next_job()
        self._loads[job] = _Load(wanted.job, chosen, entries, outcomes)
        load = Load(
            job,
            np.frombuffer(wanted.keys, KEY)[chosen].tobytes(),
            np.full(len(chosen), wanted.namespace, np.uint64),
            wanted.lengths[chosen].astype(np.uint64),
            np.ascontiguousarray(index.rows(entries)["place"]),
            wanted.offsets[chosen],
            wanted.until,
        )
        return [load]

    def done(self, done: LoadDone) -> list[Effect]:
        """Take the outcome of a job: damaged pages leave the disk, the promote actor is told."""
        load, index = self._loads[done.job], self.open_index.index
        effects: list[Effect] = []
        said = np.frombuffer(done.outcomes, np.uint8).copy()
        if index is None:
            said[said == DISK_DONE] = DISK_UNTRIED
        else:
            # A page that was removed while it was loaded must not come back.
            said[(said == DISK_DONE) & ~index.is_held(load.entries)] = DISK_UNTRIED
            for outcome, reason in LOST:
                wrong = load.entries[said == outcome]
                self.open_index.count_lost(reason, len(wrong))
                if len(wrong):
                    effects += self.open_index.forgotten(index.remove(wrong))
        checksums = np.zeros(len(load.outcomes), np.uint64)
        checksums[load.positions] = done.checksums
        for at, outcome in zip(load.positions.tolist(), said.tolist(), strict=True):
            load.outcomes[at] = outcome
        load.late = dict.fromkeys(np.flatnonzero(said == DISK_LATE).tolist())
        effects.append(_answer(load.wanted, load.outcomes, checksums))
        if not load.late:
            self._release(done.job)
        return effects

    def late_ended(self, job: int, indices: tuple[int, ...]) -> list[Effect]:
        """Tell the promote actor of slots that are written to no longer."""
        load = self._loads.get(job)
        ended = [at for at in indices if load is not None and at in load.late]
        if load is None or not ended:
            return []
        for at in ended:
            del load.late[at]
        if not load.late:
            self._release(job)
        positions = load.positions[ended].tolist()
        return [TellPromote(LateEnded(load.wanted, tuple(positions)))]

    def _release(self, job: int) -> None:
        load, index = self._loads.pop(job), self.open_index.index
        if index is not None:
            index.touch(load.entries[index.is_held(load.entries)][::-1])
            index.unpin(load.entries)


def _answer(job: int, outcomes: bytearray, checksums: U64 | None = None) -> Effect:
    if checksums is None:
        checksums = np.zeros(len(outcomes), np.uint64)
    return TellPromote(PagesLoaded(job, bytes(outcomes), checksums))
