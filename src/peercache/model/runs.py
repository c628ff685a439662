"""Runs: where the bytes of a batch are in the caller's memory.

A page is gathered from, or scattered into, one or more *runs*: (address, size) pieces. A batch is a
few flat arrays, so that no step of the data path creates a Python object per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class PageRuns:
    """Where the pages of a batch are in memory: each consists of one or more runs.

    addresses: (runs,) uint64, the address of each run.
    sizes:     (runs,) uint64, its size in bytes.
    starts:    (pages + 1,) int64, the first run of each page; the last entry is the number of runs.
    lengths:   (pages,) uint64, the size of each page; computed if not given.
    """

    addresses: U64
    sizes: U64
    starts: I64
    lengths: U64 = attrs.field()

    @lengths.default
    def _lengths(self) -> U64:
        total = np.zeros(len(self.sizes) + 1, np.uint64)
        np.cumsum(self.sizes, out=total[1:])
        return total[self.starts[1:]] - total[self.starts[:-1]]

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.starts) - 1

    @classmethod
    def of(cls, segments: Sequence[Sequence[tuple[int, int]]]) -> PageRuns:
        """Build from one list of (address, bytes) for each page."""
        starts = np.zeros(len(segments) + 1, np.int64)
        np.cumsum([len(page) for page in segments], out=starts[1:])
        flat = np.array([run for page in segments for run in page], np.uint64).reshape(-1, 2)
        return cls(flat[:, 0].copy(), flat[:, 1].copy(), starts)

    @classmethod
    def regular(cls, addresses: npt.ArrayLike, sizes: npt.ArrayLike, pages: int) -> PageRuns:
        """Build from flat lists in which every page has the same number of runs.

        addresses, sizes: (pages * runs,) or (pages, runs): addresses, and bytes.
        """
        flat = np.ascontiguousarray(addresses, np.uint64).reshape(-1)
        flat_sizes = np.ascontiguousarray(sizes, np.uint64).reshape(-1)
        starts = np.arange(pages + 1, dtype=np.int64)
        if len(flat) == pages:
            return cls(flat, flat_sizes, starts, flat_sizes)
        return cls(flat, flat_sizes, starts * (len(flat) // pages if pages else 0))

    @classmethod
    def joined(cls, parts: Sequence[PageRuns]) -> PageRuns:
        """Return the pages of several batches as one; their sizes may differ."""
        if len(parts) == 1:
            return parts[0]
        begins = np.cumsum([0, *(len(part.sizes) for part in parts)])
        starts = [part.starts[:-1] + begin for part, begin in zip(parts, begins, strict=False)]
        return cls(
            np.concatenate([np.empty(0, np.uint64), *(part.addresses for part in parts)]),
            np.concatenate([np.empty(0, np.uint64), *(part.sizes for part in parts)]),
            np.concatenate([*starts, begins[-1:]]).astype(np.int64),
        )

    def between(self, begin: int, end: int) -> PageRuns:
        """Return the runs of the pages from `begin` up to `end`, without a copy."""
        starts = self.starts[begin : end + 1]
        runs = slice(starts[0], starts[-1])
        lengths = self.lengths[begin:end]
        return PageRuns(self.addresses[runs], self.sizes[runs], starts - starts[0], lengths)

    def take(self, pages: npt.NDArray[np.intp]) -> PageRuns:
        """Return the runs of the chosen pages, in the order given."""
        if len(pages) == len(self) and (pages == np.arange(len(self))).all():
            return self
        counts = (self.starts[1:] - self.starts[:-1])[pages]
        starts = np.zeros(len(pages) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        index = np.repeat(self.starts[:-1][pages], counts) + within
        return PageRuns(self.addresses[index], self.sizes[index], starts)


class UnusableBuffers(Exception):
    """The caller's buffers cannot be used; the message says which and why."""


def runs_of_buffers(buffers: Sequence[Any], *, writable: bool) -> tuple[list[memoryview], PageRuns]:
    """Return the runs of one buffer per page, and views that keep the buffers in place."""
    held: list[memoryview] = []
    addresses: list[int] = []
    for place, buffer in enumerate(buffers):
        try:
            view = memoryview(buffer)
        except Exception as error:  # A closed mmap, a released view; a class may raise anything.
            raise UnusableBuffers(f"buffer {place} gives no buffer: {error}") from error
        if "O" in view.format:
            raise UnusableBuffers(f"buffer {place} holds references to objects, not bytes")
        if not view.c_contiguous:
            raise UnusableBuffers(f"buffer {place} is not C-contiguous")
        if writable and view.readonly:
            raise UnusableBuffers(f"buffer {place} is read-only")
        held.append(view)
        addresses.append(_address_of(view))
    return held, PageRuns.regular(
        np.array(addresses, np.uint64),
        np.array([view.nbytes for view in held], np.uint64),
        len(held),
    )


def _address_of(view: memoryview) -> int:
    if not view.readonly:
        return addressof(Begin.from_buffer(view))
    address: int = (
        np.frombuffer(view, np.uint8).__array_interface__["data"][0] if view.nbytes else 0
    )
    return address
