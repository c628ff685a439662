"""Copies whole batches between a segment and the caller's memory, in the caller's thread.

Owns    nothing: the caller keeps both sides alive during the call.
Keeps   one GIL hand-off per portion: a busy thread in the engine keeps the GIL for up to 5 ms.
        Bytes are copied in order, so a copy that ends early leaves a leading run. An unmapped
        address of the engine ends the copy, and does not kill a process.
Limits  PORTION_BYTES between two checks of the clock.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin, function
from peercache.model.runs import I64, U64, PageRuns

PORTION_BYTES = 32 * 2**20
"""Bytes between two checks of the clock: 3 ms at 10 GB/s, so that waiting for the GIL at the end of
a portion (up to 5 ms) does not cost several times the copy itself."""

LATE_PORTION_BYTES = 4 * 2**20
"""Portion if the deadline is near: 2.5 ms even at the 1.6 GB/s of untouched memory."""

NEAR_S = 0.03
"""When a deadline counts as near: a full portion at 1.6 GB/s takes 21 ms, and the hand-off of the
GIL 5. Not more: with another busy thread, small portions are slower."""

Pieces: TypeAlias = npt.NDArray[np.uint64]
"""(n, 2) addresses and sizes, in order, none of them empty."""

_scatter = function(
    "peercache_scatter",
    ctypes.c_uint64,
    *(ctypes.c_void_p, ctypes.c_uint64) * 2,
    ctypes.c_uint64,
    ctypes.c_int,
)

_scatter_by_kernel = function(
    "peercache_scatter_by_kernel",
    ctypes.c_uint64,
    *(ctypes.c_void_p, ctypes.c_uint64) * 2,
    ctypes.c_int,
)


class Side:
    """One side of a copy: runs of memory, in order, in the form for the compiled copy.

    total: the bytes of all runs.
    """

    def __init__(self, addresses: U64, sizes: U64) -> None:
        """Take (n,) addresses and sizes; adjacent ones become one run."""
        self.total = int(sizes.sum())
        if np.count_nonzero(sizes) < len(sizes):
            keep = sizes > 0
            addresses, sizes = addresses[keep], sizes[keep]
        if len(sizes) > 1:
            apart = addresses[1:] != addresses[:-1] + sizes[:-1]
            if np.count_nonzero(apart) < len(apart):
                first = np.append(0, apart.nonzero()[0] + 1)
                addresses, sizes = addresses[first], np.add.reduceat(sizes, first)
        self._pieces = np.empty((len(sizes), 2), np.uint64)
        self._pieces[:, 0] = addresses
        self._pieces[:, 1] = sizes
        self._ends: I64 | None = None

    def cut(self, position: int, until: int) -> Pieces:
        """Return the pieces of bytes `position` to `until`."""
        if position == 0 and until == self.total:
            return self._pieces
        if self._ends is None:
            # The end of each run, in bytes from the start of the batch.
            self._ends = self._pieces[:, 1].cumsum(dtype=np.int64)
        ends = self._ends
        first = int(ends.searchsorted(position, side="right"))
        last = int(ends.searchsorted(until, side="left"))
        cut: Pieces = self._pieces[first : last + 1].copy()
        cut[-1, 1] -= np.uint64(int(ends[last]) - until)
        skipped = np.uint64(position - int(ends[first]) + int(self._pieces[first, 1]))
        cut[0, 0] += skipped
        cut[0, 1] -= skipped
        return cut


def copy_pages(
    page_runs: PageRuns,
    slot_addresses: U64,
    *,
    to_slots: bool,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    by_kernel: bool = False,
) -> int:
    """Copy pages between the caller's runs and their slots; return how many leading pages.

    page_runs:      the caller's memory, n pages.
    slot_addresses: (n,) uint64, the address of each page's slot in our mapping of the segment; a
                    slot is one contiguous range of `page_runs.lengths[i]` bytes.
    to_slots:       True copies from the caller into the slots.
    deadline:       in seconds of `clock`; exceeded by one portion at most.
    by_kernel:      use the kernel's own copy, at half the speed: slots that are unmapped during the
                    copy end the copy, not this process.

    Pages after the returned count may be partly copied. Never raises.
    """
    lengths = page_runs.lengths
    first, last = (int(page_runs.starts[0]), int(page_runs.starts[-1])) if len(lengths) else (0, 0)
    ours = Side(page_runs.addresses[first:last], page_runs.sizes[first:last])
    copied = copy_runs(
        ours,
        Side(slot_addresses, lengths),
        to_segment=to_slots,
        deadline=deadline,
        clock=clock,
        by_kernel=by_kernel,
    )
    if copied == ours.total:
        return len(lengths)
    return int(lengths.cumsum(dtype=np.int64).searchsorted(copied, side="right"))


def copy_runs(
    ours: Side,
    segment: Side,
    *,
    to_segment: bool,
    deadline: float,
    portion_bytes: int = PORTION_BYTES,
    clock: Callable[[], float] = time.monotonic,
    by_kernel: bool = False,
) -> int:
    """Copy one side to the other; return the number of leading bytes copied.

    The runs of the two sides may be divided differently; their totals are equal.
    """
    total = ours.total
    assert total == segment.total, (total, segment.total)
    assert portion_bytes > 0, portion_bytes
    position = 0
    while position < total:
        left_s = deadline - clock()
        if left_s <= 0:
            break
        portion = min(portion_bytes, LATE_PORTION_BYTES) if left_s < NEAR_S else portion_bytes
        until = min(position + portion, total)
        copied = scatter(
            ours.cut(position, until),
            segment.cut(position, until),
            to_segment=to_segment,
            by_kernel=by_kernel,
        )
        position += copied
        if position < until:
            break  # An address is not mapped.
    return position


def scatter(ours: Pieces, segment: Pieces, *, to_segment: bool, by_kernel: bool = False) -> int:
    """Copy between two lists of pieces with equal totals in one call; return the bytes copied.

    They are the leading bytes, and fewer than all if a piece is not mapped at one of its ends.
    (With more than 512 pieces on a side, only some are checked.) by_kernel: also if one is unmapped
    during the copy.
    """
    copied: int
    mine = (ctypes.addressof(Begin.from_buffer(ours)), len(ours))
    theirs = (ctypes.addressof(Begin.from_buffer(segment)), len(segment))
    if by_kernel:
        copied = _scatter_by_kernel(*mine, *theirs, to_segment)
        return copied
    total = int(ours[:, 1].sum())
    to, origin = (theirs, mine) if to_segment else (mine, theirs)
    copied = _scatter(*to, *origin, total, to_segment)
    return copied


@cache
def kernel_copies() -> bool:
    """Return whether this process may use the kernel's own copy: a sandbox may forbid it."""
    source, target = np.ones(1, np.uint64), np.zeros(1, np.uint64)
    pieces = [np.array([[a.ctypes.data, a.nbytes]], np.uint64) for a in (source, target)]
    return all(
        scatter(*pieces, to_segment=to_segment, by_kernel=True) == source.nbytes
        for to_segment in (True, False)
    )
