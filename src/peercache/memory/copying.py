"""Copies of whole batches between a segment and the caller's memory, in the caller's thread.

Owns    nothing: both sides belong to somebody else, who keeps them alive during the call.
Keeps   O(1) GIL hand-offs a portion: a busy thread in the engine takes up to 5 ms for each.
        Bytes are copied in order, so whatever ends a copy early leaves a leading run.
        An address of the engine's that is not there ends the copy; it kills no process.
Limits  PORTION_BYTES between two looks at the clock; 1024 runs a side with the kernel's copy.

The kernel calls one side of `process_vm_readv` remote: it pins that side's pages. It can pin a
segment's pages always, but not memory that a driver mapped (page-locked host buffers of CUDA), so
the segment is the remote side both ways, and the caller's memory the local one.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peercache.memory.compiled import HAS_SCATTER, scatter
from peercache.memory.kernel import CALL_BYTES_MAX, HAS_VECTOR_COPY, IOV_MAX, vector_copy
from peercache.model.runs import I64, U64, PageRuns
from peercache.observability.log import get_logger

PORTION_BYTES = 32 * 2**20
"""Bytes between two looks at the clock: 3 ms at 10 GB/s, so that waiting for the GIL at the end of
a portion (up to 5 ms) does not cost several times the copy itself."""

LATE_PORTION_BYTES = 4 * 2**20
"""Portion when the deadline is near: 2.5 ms even at the 1.6 GB/s of untouched memory."""

NEAR_S = 0.03
"""How near: a whole portion at 1.6 GB/s takes 21 ms, and the hand-off of the GIL 5. Not more:
with a busy thread beside it, small portions are the slower ones."""

RUNS_MAX = 2**31
"""The compiled copy has no limit of runs."""

Iov: TypeAlias = npt.NDArray[np.uint64]
Mover: TypeAlias = Callable[[Iov, Iov, bool, Callable[[], bool]], int]
"""(ours, segment's, to_segment, is_late) → leading bytes moved; 0 or less: none can be."""

assert PORTION_BYTES <= CALL_BYTES_MAX


class Side:
    """One side of a copy: runs of memory, in order, as the kernel wants them.

    `ends[i]` is where run i ends, counted in bytes from the beginning of the batch.
    """

    def __init__(self, addresses: U64, sizes: U64) -> None:
        """Take (n,) addresses and sizes; neighbours in memory become one run."""
        keep = sizes > 0
        if not keep.all():
            addresses, sizes = addresses[keep], sizes[keep]
        if len(sizes) > 1:
            first = np.empty(len(sizes), np.bool_)
            first[0] = True
            np.not_equal(addresses[1:], addresses[:-1] + sizes[:-1], out=first[1:])
            if not first.all():
                addresses, sizes = addresses[first], np.add.reduceat(sizes, first.nonzero()[0])
        self._iov = np.empty((len(sizes), 2), np.uint64)
        self._iov[:, 0] = addresses
        self._iov[:, 1] = sizes
        self.ends: I64 = sizes.cumsum(dtype=np.int64)

    def total(self) -> int:
        """Return the bytes of all runs."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def reach(self, position: int, runs_max: int) -> int:
        """Return how far one call can go from `position` with `runs_max` entries."""
        if len(self.ends) <= runs_max:
            return int(self.ends[-1])
        first = int(self.ends.searchsorted(position, side="right"))
        return int(self.ends[min(first + runs_max, len(self.ends)) - 1])

    def cut(self, position: int, until: int) -> Iov:
        """Return the (address, size) entries of bytes `position` to `until`."""
        if position == 0 and until == int(self.ends[-1]):
            return self._iov
        first = int(self.ends.searchsorted(position, side="right"))
        last = int(self.ends.searchsorted(until, side="left"))
        cut: Iov = self._iov[first : last + 1].copy()
        cut[-1, 1] -= np.uint64(int(self.ends[last]) - until)
        skipped = np.uint64(position - int(self.ends[first]) + int(self._iov[first, 1]))
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
    mover: Mover | None = None,
) -> int:
    """Copy pages between the caller's runs and their slots; return how many leading pages.

    page_runs:      the caller's memory, n pages.
    slot_addresses: (n,) uint64, where each page's slot begins in our mapping of the segment; a slot
                    is one contiguous range of `page_runs.lengths[i]` bytes.
    to_slots:       True copies from the caller into the slots.
    deadline:       in seconds of `clock`; overrun by one portion at most.
    mover:          what moves the bytes; tests name one, otherwise the best that works here.

    Pages after the count that is returned may have been copied in part. Never raises.
    """
    lengths = page_runs.lengths
    first, last = (
        (int(page_runs.starts[0]), int(page_runs.starts[-1])) if len(page_runs) else (0, 0)
    )
    copied = copy_runs(
        Side(page_runs.addresses[first:last], page_runs.sizes[first:last]),
        Side(slot_addresses, lengths),
        to_segment=to_slots,
        deadline=deadline,
        clock=clock,
        mover=mover,
    )
    return int(lengths.cumsum(dtype=np.int64).searchsorted(copied, side="right"))


def copy_runs(
    ours: Side,
    segment: Side,
    *,
    to_segment: bool,
    deadline: float,
    portion_bytes: int = PORTION_BYTES,
    clock: Callable[[], float] = time.monotonic,
    mover: Mover | None = None,
) -> int:
    """Copy one side to the other; return the leading bytes that are in place.

    The runs of the two sides may be cut differently; their totals are equal.
    """
    total = ours.total()
    assert total == segment.total(), (total, segment.total())
    assert 0 < portion_bytes <= CALL_BYTES_MAX, portion_bytes
    move = mover or best_mover()
    runs_max = RUNS_MAX if move is by_compiled else IOV_MAX
    position = 0
    while position < total:
        left_s = deadline - clock()
        if left_s <= 0:
            break
        portion = min(portion_bytes, LATE_PORTION_BYTES) if left_s < NEAR_S else portion_bytes
        until = min(
            position + portion, ours.reach(position, runs_max), segment.reach(position, runs_max)
        )
        moved = move(
            ours.cut(position, until),
            segment.cut(position, until),
            to_segment,
            lambda: clock() >= deadline,
        )
        if moved <= 0:
            if move is by_compiled and vector_copy_works():
                # Something is not there: the kernel finds out how far it goes.
                move, runs_max = by_kernel, IOV_MAX
                continue
            break
        position += moved
    return position


def by_compiled(ours: Iov, segment: Iov, to_segment: bool, is_late: Callable[[], bool]) -> int:  # noqa: ARG001, FBT001 - the shape of a Mover
    """Move a portion in one call of the compiled helper."""
    return scatter(ours, segment, to_segment=to_segment)


def by_kernel(ours: Iov, segment: Iov, to_segment: bool, is_late: Callable[[], bool]) -> int:  # noqa: ARG001, FBT001 - the shape of a Mover
    """Move a portion in one call of the kernel."""
    return vector_copy(ours, segment, to_remote=to_segment)


def by_memmove(ours: Iov, segment: Iov, to_segment: bool, is_late: Callable[[], bool]) -> int:  # noqa: FBT001 - the shape of a Mover
    """Move a portion piece by piece, where the kernel's copy is forbidden.

    One GIL hand-off a piece, so the clock is asked before each; a bad address is a crash here.
    """
    our_ends = ours[:, 1].cumsum(dtype=np.uint64)
    segment_ends = segment[:, 1].cumsum(dtype=np.uint64)
    ends = np.union1d(our_ends, segment_ends)
    begins = np.concatenate((np.zeros(1, np.uint64), ends[:-1]))
    mine = _addresses_at(ours, our_ends, begins)
    theirs = _addresses_at(segment, segment_ends, begins)
    to, source = (theirs, mine) if to_segment else (mine, theirs)
    moved = 0
    for target, origin, end in zip(to.tolist(), source.tolist(), ends.tolist(), strict=True):
        if is_late():
            break
        ctypes.memmove(target, origin, end - moved)
        moved = end
    return moved


def _addresses_at(iov: Iov, ends: U64, positions: U64) -> U64:
    index = np.searchsorted(ends, positions, side="right")
    found: U64 = iov[index, 0] + (positions - (ends[index] - iov[index, 1]))
    return found


@functools.cache
def vector_copy_works() -> bool:
    """Return whether the kernel's copy may be used here: seccomp can forbid it. Asked once."""
    if not HAS_VECTOR_COPY:
        return False
    source = np.arange(64, dtype=np.uint8)
    for to_remote in (False, True):
        target = np.zeros(64, np.uint8)
        local, remote = (source, target) if to_remote else (target, source)
        moved = vector_copy(_halves(local), _halves(remote), to_remote=to_remote)
        if moved != source.size or not np.array_equal(source, target):
            reason = errno.errorcode.get(-moved, str(moved)) if moved < 0 else f"{moved} bytes"
            get_logger().warning("memory.vector_copy_missing", reason=reason)
            return False
    return True


def _halves(memory: npt.NDArray[np.uint8]) -> Iov:
    address = memory.ctypes.data
    half = memory.size // 2
    return np.array([[address, half], [address + half, half]], np.uint64)


def best_mover() -> Mover:
    """Return the compiled copy, else the kernel's, or `memmove` where that is forbidden."""
    if HAS_SCATTER:
        return by_compiled
    return by_kernel if vector_copy_works() else by_memmove
