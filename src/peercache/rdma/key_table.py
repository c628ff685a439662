"""Which key opens which memory: ranges cut at the borders of registered pieces, a batch at a time.

The same table serves both sides of a READ: lkeys by address for our destinations, rkeys by offset
for the owner's page memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.runs import I64, U64

Piece: TypeAlias = tuple[int, int, int]
"""(begin, length, key) of memory that one key opens."""


@attrs.frozen(eq=False)
class Cut:
    """Ranges, cut so that each part is opened by one key.

    sources: (parts,) int64, the range that each part is of; parts of a range follow each other.
    begins:  (parts,) uint64, where each part begins.
    lengths: (parts,) uint64, its bytes, never 0.
    keys:    (parts,) uint64, what opens it.
    covered: (ranges,) bool, whether the whole range is open. Only such ranges have parts.
    is_whole: whether the parts are the ranges as they were: each lies within one piece.
    """

    sources: I64
    begins: U64
    lengths: U64
    keys: U64
    covered: npt.NDArray[np.bool_]
    is_whole: bool = False


@attrs.frozen(eq=False)
class MemoryKeys:
    """Registered pieces, by begin and by end. Never changed: a new table takes its place."""

    begins: U64
    ends: U64
    keys: U64

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> MemoryKeys:
        """Build from (begin, length, key) in any order; they may overlap."""
        table = np.array(sorted(pieces), np.uint64).reshape(-1, 3)
        begins, ends = table[:, 0], table[:, 0] + table[:, 1]
        # A piece inside another one opens nothing more, and would hide the rest of the other.
        further = np.ones(len(table), np.bool_)
        further[1:] = ends[1:] > np.maximum.accumulate(ends)[:-1]
        return cls(begins[further], ends[further], table[further, 2])

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.begins)

    def cut(self, begins: U64, lengths: U64) -> Cut:
        """Cut (n,) ranges at the borders of pieces. A range of no bytes is covered, by no part."""
        ends = begins + lengths
        # What nearly every batch is: each range within one piece.
        first = self.begins.searchsorted(begins, side="right") - 1
        if len(self) and lengths.all() and (first >= 0).all() and (self.ends[first] >= ends).all():
            everyone = np.arange(len(begins), dtype=np.int64)
            whole = np.ones(len(begins), np.bool_)
            return Cut(everyone, begins, lengths, self.keys[first], whole, is_whole=True)
        left = np.flatnonzero(lengths)
        at = begins[left]
        parts: list[tuple[I64, U64, U64, U64]] = []
        covered = np.ones(len(begins), np.bool_)
        # One round cuts the next part off every range: mostly there is one, seldom two.
        while len(left):
            piece = self.begins.searchsorted(at, side="right") - 1
            known = piece >= 0
            if known.any():
                known &= self.ends[piece] > at
            if not known.all():
                covered[left[~known]] = False
                left, at, piece = left[known], at[known], piece[known]
            if not len(left):
                break
            until = np.minimum(self.ends[piece], ends[left])
            parts.append((left, at, until - at, self.keys[piece]))
            more = until < ends[left]
            left, at = left[more], until[more]
        return _joined(parts, covered)


def _joined(parts: list[tuple[I64, U64, U64, U64]], covered: npt.NDArray[np.bool_]) -> Cut:
    """Put the rounds together, in the order of the ranges, without those that are not covered."""
    none = np.empty(0, np.uint64)
    sources = np.concatenate([part[0] for part in parts] or [np.empty(0, np.int64)])
    begins = np.concatenate([part[1] for part in parts] or [none])
    lengths = np.concatenate([part[2] for part in parts] or [none])
    keys = np.concatenate([part[3] for part in parts] or [none])
    if len(parts) > 1:
        # Stable: the parts of one range come out of the rounds in their order.
        order = np.argsort(sources, kind="stable")
        sources, begins, lengths, keys = sources[order], begins[order], lengths[order], keys[order]
    if not covered.all():
        whole = covered[sources]
        sources, begins, lengths, keys = sources[whole], begins[whole], lengths[whole], keys[whole]
    return Cut(sources, begins, lengths, keys, covered)
