"""Turning: which records a new ring moves: looked at in slices, handed over hottest first. Pure.

A holder of a million records must not stop for half a second because one node came. So the rows
are looked at a few thousand at a time, and wait in bins of about equal heat: sorting one bin after
the other costs what sorting all of them at once would, but never in one step.

A row is held by its owners on the ring, and by nodes that owned it on a ring before. Those rings
are remembered while rows may still be on their way, so that no step has to ask each of a thousand
streams whether it holds a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.publisher.streams import NO_ROWS, RecordTable, Rows
from peercache.model.hash_ring import HashRing
from peercache.model.records import RESIDENT, Records

LOOKED_AT_MAX: Final = 4096
"""Rows looked at in one step: two milliseconds with the rings of a thousand nodes."""

SAMPLED_MAX: Final = 4096
"""Rows whose heat is looked at to part the bins: 16 to each of the 256 bins of a large table."""

BIN_ROWS: Final = 4096
"""Rows of a bin, about: sorting them takes half a millisecond."""

BINS_MAX: Final = 256

RINGS_MAX: Final = 16
"""Former rings remembered. With more of them, within one hand-over, all streams are asked."""

_FIRST_BIT: Final = np.uint64(63)


@final
@attrs.define(eq=False)
class Turning:
    """The rows that a change of the ring may have moved: to be looked at, then to be handed over.

    former: the rings on which rows may have been told that are on their way still; None if those
            were too many to remember.
    """

    table: RecordTable
    former: list[HashRing] | None = attrs.field(factory=list, init=False)
    _before: HashRing | None = attrs.field(default=None, init=False)
    """What the rows not looked at were told by; None: by several rings, so each row is taken."""
    _is_moving_only: bool = attrs.field(default=False, init=False)
    """Rows that move already are looked at again, and no others."""
    _next: int = attrs.field(default=0, init=False)
    _end: int = attrs.field(default=0, init=False)
    """The rows from `_next` to `_end` were not looked at yet."""
    _edges: npt.NDArray[np.uint64] = attrs.field(factory=lambda: np.empty(0, np.uint64), init=False)
    """The least heat of each bin but the coldest, ascending."""
    _bins: list[list[Rows]] = attrs.field(factory=lambda: [[]], init=False)
    """Coldest first. Each row is in one of them at most."""
    _count: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        """Return how many rows wait to be handed over, as far as they were looked at."""
        return self._count

    @property
    def has_more(self) -> bool:
        """Whether rows may be taken: not while the hottest may be among those not looked at."""
        return self._count > 0 and not self.is_looking

    @property
    def is_looking(self) -> bool:
        """Whether there are rows that were not looked at yet."""
        return self._next < self._end

    @property
    def is_idle(self) -> bool:
        """Whether no row waits, looked at or not."""
        return not (self.is_looking or self._count)

    def begin(self, before: HashRing | None) -> None:
        """Look at all rows, after the ring has turned from `before`; None: from whatever it was.

        A turn within a turn looks at everything anew: the records are then of several rings.
        """
        if before is None or self.is_looking or self._count:
            self._before = None
        else:
            self._before = before
            if not self.table.moving.any():
                self.former = []
        if before is not None and self.former is not None:
            self.former = [*self.former, before] if len(self.former) < RINGS_MAX else None
        self._is_moving_only = False
        self._start()

    def leave(self) -> None:
        """Look again at all rows that are on their way: their former owners may be left now."""
        self._before, self._is_moving_only = None, True
        self._start()

    def _start(self) -> None:
        # Rows that come later are told by the ring as it is now.
        self._next, self._end = 0, len(self.table.live)
        self._count = 0
        self._part_bins()

    def look(self, ring: HashRing) -> None:
        """Look at the next rows: those whose set of owners is another one now wait from now on."""
        table = self.table
        first, self._next = self._next, min(self._end, self._next + LOOKED_AT_MAX)
        rows = first + np.flatnonzero(table.live[first : self._next])
        if self._before is not None:
            keys = table.records["key"][rows]
            old, new = self._before.owners(keys), ring.owners(keys)
            if old.shape == new.shape:
                # Most keys keep their owners in order; only of the others the sets are compared.
                other = np.flatnonzero((old != new).any(axis=1))
                before, after = np.sort(old[other], axis=1), np.sort(new[other], axis=1)
                rows = rows[other[(before != after).any(axis=1)]]
        if self._is_moving_only:
            rows = rows[table.moving[rows]]
        if not len(rows):
            return
        table.moving[rows] = True
        self._count += len(rows)
        places = np.searchsorted(self._edges, _heat(table.records[rows]), side="right")
        order = np.argsort(places, kind="stable")
        cuts = np.flatnonzero(np.diff(places[order])) + 1
        for part in np.split(order, cuts):
            self._bins[int(places[part[0]])].append(rows[part])

    def take(self, rows_max: int) -> Rows:
        """Take rows to hand over: the newest commits first, what is on disk behind them all."""
        if not self.has_more:
            return NO_ROWS
        taken: list[Rows] = []
        while rows_max > 0 and self._bins:
            if not (hottest := self._bins[-1]):
                self._bins.pop()
                continue
            rows = np.concatenate(hottest)
            rows = rows[np.argsort(_heat(self.table.records[rows]), kind="stable")[::-1]]
            taken.append(rows[:rows_max])
            self._bins[-1] = [rows[rows_max:]] if len(rows) > rows_max else []
            rows_max -= len(taken[-1])
        together = np.concatenate(taken)
        self._count -= len(together)
        return together[self.table.live[together]]

    def settled(self) -> None:
        """Forget the former rings if no row is on its way any more."""
        if self.former != [] and not (self.is_looking or self._count or self.table.moving.any()):
            self.former = []

    def _part_bins(self) -> None:
        table = self.table
        step = max(1, len(table.live) // SAMPLED_MAX)
        sampled = np.arange(0, len(table.live), step)
        heat = np.sort(_heat(table.records[sampled[table.live[sampled]]]))
        bins = min(BINS_MAX, max(1, len(table) // BIN_ROWS), max(1, len(heat)))
        self._edges = heat[[len(heat) * at // bins for at in range(1, bins)]]
        self._bins = [[] for _ in range(bins)]


def by_owner(
    own: int, *tables: npt.NDArray[np.uint64]
) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each owner other than the own node, and the positions that it owns, ascending.

    tables: the owners of some rows, (n, replicas) uint64, on one ring or on several.
    """
    owners = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)
    flat = owners.ravel()
    order = np.argsort(flat, kind="stable")
    grouped = flat[order]
    cuts = [0, *(np.flatnonzero(grouped[1:] != grouped[:-1]) + 1).tolist(), len(flat)]
    for start, end in pairwise(cuts):
        if start < end and (owner := int(grouped[start])) != own:
            positions = order[start:end] // owners.shape[1]
            if len(tables) > 1:  # It owned some of them on several rings.
                positions = positions[np.diff(positions, prepend=-1) != 0]
            yield owner, positions


def _heat(records: Records) -> npt.NDArray[np.uint64]:
    """Return by what rows are ordered: whether in memory, then the generation, below 2**63."""
    resident = ((records["flags"] & RESIDENT) != 0).astype(np.uint64)
    heat: npt.NDArray[np.uint64] = records["generation"] & ~(np.uint64(1) << _FIRST_BIT)
    heat |= resident << _FIRST_BIT
    return heat
