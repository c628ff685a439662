"""What pages cost to read, from each holder's memory and from its disk.

`ReadCosts` is the only place that knows: `Reader` adds each read that it has completed, `Locator`
reads the cheaper of two equally distant holders, and `client/decline.py` compares the cost of a
prefix with that of computing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import RESIDENT, Records
from peercache.observability.reasons import DEADLINE

MEASURED_S = 10.0
"""How long the measurements of a holder are used: load changes."""

MEASURED_BYTES = 2**18
"""Smaller reads measure latency rather than the holder's load."""

MEASURED_MAX = 1024
"""The most sources with measurements."""

BYTE_S = 0.5e-9
"""The assumed seconds per byte of a holder without a recent read: 2 GB/s."""

KEPT = 0.7
"""The weight of earlier reads after one more."""

SPREAD_MIN = 0.1
"""How much the sizes of reads must differ to show latency and throughput, as a fraction of them."""

Source: TypeAlias = tuple[int, bool]
"""A holder, and whether its pages are only on its disk."""

Line: TypeAlias = tuple[float, float]
"""Seconds of a read, and those of each byte."""

Seconds: TypeAlias = npt.NDArray[np.float64]

Mask: TypeAlias = npt.NDArray[np.bool_]


@attrs.define(eq=False)
class _Reads:
    """The recent reads of one source: sums of their bytes and seconds, with weights."""

    at: float
    weight: float = 0.0
    size: float = 0.0
    took_s: float = 0.0
    size_size: float = 0.0
    size_took: float = 0.0

    def add(self, size: int, took_s: float, now: float) -> None:
        kept = KEPT if now - self.at < MEASURED_S else 0.0
        self.at = now
        self.weight = kept * self.weight + 1.0
        self.size = kept * self.size + size
        self.took_s = kept * self.took_s + took_s
        self.size_size = kept * self.size_size + size * size
        self.size_took = kept * self.size_took + size * took_s

    def line(self) -> Line:
        size, took_s = self.size / self.weight, self.took_s / self.weight
        variance = self.size_size / self.weight - size * size
        if variance > (SPREAD_MIN * size) ** 2:
            byte_s = max((self.size_took / self.weight - size * took_s) / variance, 0.0)
            if byte_s * size <= took_s:
                return took_s - byte_s * size, byte_s
        # Of reads of one size the whole time may be that of their bytes.
        return 0.0, took_s / size


@final
class ReadCosts:
    """How fast each holder has recently served this client, and its outstanding bytes. Thread-safe.

    Of equally distant holders, the least loaded one is read. Small differences are ignored: then
    each client has its own order, so that together they read from all.
    """

    def __init__(self, *, salt: int, clock: Callable[[], float]) -> None:
        """Start without measurements. salt: a number that is unique to this client."""
        self._salt = salt | 1
        self._clock = clock
        self._lock = Lock()
        self._in_flight: dict[int, int] = {}
        self._reads: dict[Source, _Reads] = {}

    def begin(self, reads: Sequence[PeerRead]) -> None:
        """Record that these reads of holders' memory begin."""
        with self._lock:
            for read in reads:
                holder = read.member.incarnation
                self._in_flight[holder] = self._in_flight.get(holder, 0) + _size_of(read)

    def end(self, reads: Sequence[PeerRead], answers: Sequence[Fetched], took_s: float) -> None:
        """Record the end of reads that began together, and what they cost.

        answers: none if they were given up. took_s: the time from the first to the last one.
        """
        with self._lock:
            for read in reads:
                holder = read.member.incarnation
                left = self._in_flight.get(holder, 0) - _size_of(read)
                if left > 0:
                    self._in_flight[holder] = left
                else:
                    self._in_flight.pop(holder, None)
        for read, fetched in zip(reads, answers, strict=False):
            memory = (read.member.incarnation, False)
            alone_s = took_s if len(reads) == 1 else fetched.took_s
            if not fetched.failure:
                self.add(memory, _size_of(read), alone_s)
            elif fetched.failure == DEADLINE:
                self.add_cut_off(memory, read.lengths.tolist(), alone_s)

    def add(self, source: Source, size: int, took_s: float) -> None:
        """Record how long `size` bytes of a source took."""
        if size <= 0 or took_s <= 0.0:
            return
        now = self._clock()
        with self._lock:
            # The source that was read last is the last one.
            reads = self._reads.pop(source) if source in self._reads else _Reads(now)
            self._reads[source] = reads
            reads.add(size, took_s, now)
            if len(self._reads) > MEASURED_MAX:
                del self._reads[next(iter(self._reads))]

    def add_cut_off(self, source: Source, sizes: Sequence[int], took_s: float) -> None:
        """Record that pages of these sizes did not all arrive within a time.

        How many did is not known: a single page took at least that long, and measurements by which
        several would have arrived are wrong.
        """
        if len(sizes) == 1:
            self.add(source, sizes[0], took_s)
            return
        line = self.line_of(source, age_max_s=math.inf)
        if line is not None and line[0] + line[1] * sum(sizes) < took_s:
            with self._lock:
                self._reads.pop(source, None)

    def line_of(self, source: Source, *, age_max_s: float = MEASURED_S) -> Line | None:
        """Return what a read of a source costs; None if the last one is older than that."""
        now = self._clock()
        with self._lock:
            reads = self._reads.get(source)
            return None if reads is None or now - reads.at >= age_max_s else reads.line()

    def cost_of(self, holder: int) -> tuple[int, int]:
        """Return the sort key of holders: less is better."""
        now = self._clock()
        with self._lock:
            size = self._in_flight.get(holder, 0) + MEASURED_BYTES
            reads, cost_s = self._reads.get((holder, False)), size * BYTE_S
            is_recent = reads is not None and now - reads.at < MEASURED_S
            if reads is not None and is_recent and reads.size >= MEASURED_BYTES * reads.weight:
                latency_s, byte_s = reads.line()
                cost_s = latency_s + size * byte_s
        own_order = holder * self._salt % 2**64
        return math.floor(math.log2(cost_s)), own_order


def _size_of(read: PeerRead) -> int:
    """Estimate the bytes of a read: the pages of a batch nearly always have the same size."""
    return int(read.lengths[0]) * len(read.lengths)


def by_source(records: Records) -> list[tuple[Source, Mask | None]]:
    """Return which of these records are of each source, (n,) bool; None: all of them.

    Empty records, of pages that are not known any more, have the source (0, True).
    """
    holders, on_disk = records["holder"], (records["flags"] & RESIDENT) == 0
    if (holders == holders[0]).all() and (on_disk == on_disk[0]).all():
        return [((int(holders[0]), bool(on_disk[0])), None)]
    sources = dict.fromkeys(zip(holders.tolist(), on_disk.tolist(), strict=True))
    return [(each, (holders == each[0]) & (on_disk == each[1])) for each in sources]


def cheapest(
    lengths: npt.NDArray[np.unsignedinteger],
    sources: Sequence[tuple[Line, Mask | None]],
    compute_s: Seconds,
    deadline_s: float,
) -> int:
    """Return how many leading pages to read, so that reading them and computing the rest is fast.

    lengths: (n,) bytes. compute_s: (n,) seconds that each page takes to compute.
    sources: what a read costs, and which of at least n pages are of it; pages of no source cost
             nothing.

    deadline_s: how long a read may take.

    Sources are read at the same time. Of equally fast prefixes the longest is returned.
    """
    read_s = np.zeros(len(lengths) + 1)
    for (latency_s, byte_s), pages in sources:
        chosen = None if pages is None else pages[: len(lengths)]
        took_s = np.cumsum(lengths if chosen is None else lengths * chosen) * byte_s
        took_s += latency_s if chosen is None else latency_s * np.maximum.accumulate(chosen)
        np.maximum(read_s[1:], took_s, out=read_s[1:])
    read_s[read_s > deadline_s] = np.inf
    read_s[1:] -= np.cumsum(compute_s)
    return len(lengths) - int(np.argmin(read_s[::-1]))
