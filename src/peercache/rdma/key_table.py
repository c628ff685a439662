"""The table of memory keys: cuts ranges at the borders of registered pieces, a batch at a time.

Both ends of a READ use it: a reader's table has the lkeys of its destinations, and the table of a
peer has the rkeys of its published memory, both by address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.runs import I64, U64

Piece: TypeAlias = tuple[int, int, int]
"""(begin, length, key) of one registered piece of memory."""


@attrs.frozen(eq=False)
class Cut:
    """Ranges, cut so that one key covers each part.

    sources: (parts,) int64, the range of each part; the parts of a range are neighbours.
    begins:  (parts,) uint64, the address of each part.
    lengths: (parts,) uint64, the bytes of each part, never 0.
    keys:    (parts,) uint64, the key of each part.
    covered: (ranges,) bool, whether keys cover the whole range. Other ranges have no parts.
    is_whole: whether no range was cut: each is within one piece.
    """

    sources: I64
    begins: U64
    lengths: U64
    keys: U64
    covered: npt.NDArray[np.bool_]
    is_whole: bool = False


@attrs.frozen(eq=False)
class MemoryKeys:
    """Registered pieces, sorted by begin and by end. Immutable: a change creates a new table."""

    begins: U64
    ends: U64
    keys: U64

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> MemoryKeys:
        """Build the table from pieces in any order; they may overlap."""
        table = np.array(sorted(pieces), np.uint64).reshape(-1, 3)
        begins, ends = table[:, 0], table[:, 0] + table[:, 1]
        # A piece inside another adds nothing, and would hide the rest of the larger one.
        further = np.ones(len(table), np.bool_)
        further[1:] = ends[1:] > np.maximum.accumulate(ends)[:-1]
        return cls(begins[further], ends[further], table[further, 2])

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.begins)

    def cut(self, begins: U64, lengths: U64) -> Cut:
        """Cut (n,) ranges at the borders of pieces. An empty range is covered and has no part."""
        ends = begins + lengths
        # The fast path of nearly every batch: each range is within one piece.
        first = self.begins.searchsorted(begins, side="right") - 1
        if len(self) and lengths.all() and (first >= 0).all() and (self.ends[first] >= ends).all():
            every = np.arange(len(begins), dtype=np.int64)
            whole = np.ones(len(begins), np.bool_)
            return Cut(every, begins, lengths, self.keys[first], whole, is_whole=True)
        left = np.flatnonzero(lengths)
        at = begins[left]
        parts: list[tuple[I64, U64, U64, U64]] = []
        covered = np.ones(len(begins), np.bool_)
        # Each round cuts one part off every range; usually there is one round, rarely two.
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
    """Join the rounds in the order of the ranges, and drop ranges that are not covered."""
    none = np.empty(0, np.uint64)
    sources = np.concatenate([part[0] for part in parts] or [np.empty(0, np.int64)])
    begins = np.concatenate([part[1] for part in parts] or [none])
    lengths = np.concatenate([part[2] for part in parts] or [none])
    keys = np.concatenate([part[3] for part in parts] or [none])
    if len(parts) > 1:
        # Stable: the rounds yield the parts of one range in their order.
        order = np.argsort(sources, kind="stable")
        sources, begins, lengths, keys = sources[order], begins[order], lengths[order], keys[order]
    if not covered.all():
        whole = covered[sources]
        sources, begins, lengths, keys = sources[whole], begins[whole], lengths[whole], keys[whole]
    return Cut(sources, begins, lengths, keys, covered)
