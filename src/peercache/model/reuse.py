"""Reuse: how many uses of pages would be hits in memory of any size, estimated from a sample.

A use is a hit in LRU memory of a size if the pages that were used since the last use of its page
fit into that size together with it: its *reuse distance*. SHARDS (Waldspurger and others, FAST'15)
measures it for a sample: the pages whose hash is below a threshold, which falls when the sample is
full. A distance in the sample, divided by the sampled part of all hashes, estimates the true one.

A few hot pages, such as those of a system prompt, may be much of the uses, and a sample has too
many of them or too few. Two things correct that:

* Uses shortly after the last one are counted among all pages: of each PICK_EVERY uses one is looked
  up in the last SHORT_USES. They are hits in memory of more than SHORT_USES pages.
* Of the other uses the sample has more or less than its part of all. The difference is taken from
  the distances in proportion to how often their pages were used. (SHARDS-adj takes it from the
  shortest distance: on traces of conversations its error was three times as large.)

The pages of one call count as used at once, the deepest of the prompt first. So a pool keeps them
(ADR 0036), and so all pages of a prompt that are hits are its leading run.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from peercache.installation.library import function
from peercache.model.runs import U64

SAMPLE_MAX: Final = 5120
"""Pages in the sample."""

SHRUNK_MAX: Final = 4096
"""Pages that are left when the threshold falls, so that it falls rarely."""

SHORT_USES: Final = 128
"""Memory of fewer pages is not estimated."""

PICK_EVERY: Final = 61
"""A prime: prompts have round lengths."""

WAITING_MAX: Final = 16384
"""Uses that are taken into the sample together: it costs a call less than a microsecond."""

ONE_USE_S: Final = 2.0
"""Within it a client uses a page once, however often: an engine asks for a page, then reads it,
and the report of the read comes up to a second later."""

HALVED_S: Final = 3600.0
"""After it what was counted counts half: the estimate is of the last hours."""

MEMORY: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""A node estimates the hit rates of so many times its memory."""

MEMORY_NAMES: Final = tuple([f"{times:g}" for times in MEMORY])

_STEPS_AN_OCTAVE: Final = 8
_EDGES: Final[npt.NDArray[np.float64]] = 2.0 ** (
    np.arange(50 * _STEPS_AN_OCTAVE + 1) / _STEPS_AN_OCTAVE
)
"""Upper bounds of the counted distances, to a petabyte; beyond the last one nothing is a hit."""

_HASHES: Final = 2.0**64

_SPREAD: Final = 0x9E3779B97F4A7C15
"""The golden ratio, of 2**64: hashes times it have evenly spread high bits (Knuth)."""

_ROW_OF_BITS: Final = 15
"""A page's row is looked up in a table of 2**15 places, three times the rows."""

_ROW = np.dtype(
    [("hash", "<u8"), ("client", "<u8"), ("at", "<f8"), ("count", "<f8"), ("size", "<i8"),
     ("number", "<i8"), ("previous", "<i8")]
)  # fmt: skip
"""`struct row` of _reuse.c."""

_CALL = np.dtype([("client", "<u8"), ("at", "<f8"), ("size", "<i8"), ("begin", "<i8")])
"""`struct call` of _reuse.c."""

Call: TypeAlias = tuple[int, int, int, float]
"""How many pages, their mean size, the client, and when."""

_FORGOTTEN: Final = ("uses", "true_uses", "picked", "picked_short", "picked_repeated", "far")
"""What is counted: all uses; without those that are one use with another; picked ones, of these the
short ones, of these such ones; and sampled uses that are not short."""

Numbers: TypeAlias = npt.NDArray[np.float64]


class _Sample(ctypes.Structure):
    """`struct sample` of _reuse.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("rows", "tree", "row_of")],
        *[(name, ctypes.c_void_p) for name in ("counts", "weights", "edges")],
        *[(name, ctypes.c_uint64) for name in ("spread", "threshold")],
        *[(name, ctypes.c_double) for name in ("rate", "one_use_s")],
        *[(name, ctypes.c_int64) for name in ("rows_max", "live_max", "row_of_bits")],
        *[(name, ctypes.c_int64) for name in ("edges_count", "short_uses", "pick_every")],
        *[(name, ctypes.c_int64) for name in ("end", "live", "total", "number", "call", "place")],
        *[(name, ctypes.c_double) for name in _FORGOTTEN],
    )


_CALLS = (ctypes.POINTER(_Sample), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_take = function("peercache_reuse_take", ctypes.c_int, *_CALLS, keeps_gil=True)
_pick = function("peercache_reuse_pick", None, *_CALLS, keeps_gil=True)
_keep = function("peercache_reuse_keep", None, ctypes.POINTER(_Sample), keeps_gil=True)


def hashes_in(packed: bytes, row_bytes: int) -> U64:
    """Return the last 64 bits of the key that begins each packed row: keys are hashes already."""
    return np.frombuffer(packed, np.uint64)[1 :: row_bytes // 8]


@final
class ReuseSample:
    """A sample of pages in the order of their uses, and how far apart these were.

    Sizes and distances have one unit, bytes or blocks. Constant memory.
    """

    def __init__(self, reach: float = math.inf, seed: int = 0) -> None:
        """Start without a use.

        reach: greater distances need not be known.
        seed:  64 bits that no client knows: it could choose keys that are looked up at one place.
        """
        self._reach = reach
        self._calls: list[Call] = []
        """First those of the last SHORT_USES that were taken, then those that wait."""
        self._hashes: U64 = np.empty(WAITING_MAX, np.uint64)
        """Of these calls, of each the deepest pages first."""
        self._end = self._taken = self._taken_calls = 0
        self._counts: Numbers = np.zeros(len(_EDGES) + 1)
        """Sampled uses that are not short, by distance; last those of pages new to the sample."""
        self._weights: Numbers = np.zeros(len(_EDGES) + 1)
        """The same, each use times the uses of its page so far."""
        self._rows = np.zeros(2 * SAMPLE_MAX, _ROW)
        """One for each page in the sample, the last used one last, and rows of size 0."""
        self._index = (np.zeros(2 * SAMPLE_MAX + 1, np.int64), np.zeros(2**_ROW_OF_BITS, np.int32))
        parts = (self._rows, *self._index, self._counts, self._weights, _EDGES)
        self._sample = _Sample(
            *[part.ctypes.data for part in parts], _SPREAD ^ seed | 1, 2**64 - 1, 1.0, ONE_USE_S,
            len(self._rows), SAMPLE_MAX, _ROW_OF_BITS, len(_EDGES), SHORT_USES, PICK_EVERY,
        )  # fmt: skip
        self._at = -math.inf

    def use(self, hashes: U64, size: int, client: int = 0, now: float = 0.0) -> None:
        """Take the pages that a client used in one call, the begin of the prompt first.

        hashes: evenly spread over 64 bits; size: the mean of these pages, at least 1.
        """
        count = len(hashes)
        end = self._end + count
        if end > len(self._hashes):
            self._take()
            end = self._end + count
            if end > len(self._hashes):
                self._hashes = np.resize(self._hashes, end)
        if count:
            # Those before the deepest ones are used after them.
            self._hashes[self._end : end] = hashes[::-1]
            self._calls.append((count, size, client, now))
            self._end = end

    def uses(self) -> float:
        """Return how many uses the estimate is made from; those of earlier hours count less."""
        self._take()
        return max(0.0, float(self._sample.true_uses))

    def hit_rates(self, sizes: Sequence[float]) -> list[float]:
        """Return the part of all uses that memory of each size would serve; NaN before any."""
        self._take()
        sample, counts = self._sample, self._counts
        if not sample.picked:
            return [math.nan] * len(sizes)
        true = sample.picked - sample.picked_repeated
        short = (sample.picked_short - sample.picked_repeated) / true if true else 0.0
        far = sample.uses * (1 - sample.picked_short / sample.picked) * sample.rate
        if counts.any() and far:
            # What is too much comes from the pages with the most uses, in proportion to these.
            too_much = counts.sum() * (1 - far / sample.far)
            counts = counts - too_much * self._weights / self._weights.sum()
        within = np.interp(sizes, _EDGES, np.cumsum(counts[:-1])) / max(counts.sum(), 1e-9)
        rates: list[float] = np.clip(short + (1 - short) * within, 0.0, 1.0).tolist()
        return rates

    def _take(self) -> None:
        """Take the calls that wait."""
        if self._taken == self._end:
            return
        counts, sizes, clients, times = zip(*self._calls, strict=True)
        calls = np.zeros(len(counts) + 1, _CALL)
        calls["size"][:-1], calls["client"][:-1], calls["at"][:-1] = sizes, clients, times
        np.cumsum(counts, out=calls["begin"][1:])
        self._forget(times[-1])
        sample, waiting = self._sample, self._end - self._taken
        sample.uses += waiting
        sample.true_uses += waiting
        sample.call, sample.place = self._taken_calls, self._taken
        there = (sample, self._hashes.ctypes.data, calls.ctypes.data, len(counts))
        _pick(*there)
        while _take(*there):
            self._shrink()
        self._keep_last()

    def _keep_last(self) -> None:
        """Keep the last SHORT_USES, for those that come."""
        kept, begin = 0, len(self._calls)
        while begin and kept < SHORT_USES:
            begin -= 1
            kept += self._calls[begin][0]
        del self._calls[:begin]
        if kept > SHORT_USES:
            count, size, client, now = self._calls[0]
            self._calls[0] = (count - kept + SHORT_USES, size, client, now)
            kept = SHORT_USES
        self._hashes[:kept] = self._hashes[self._end - kept : self._end]
        self._sample.number += self._end - kept
        self._end = self._taken = kept
        self._taken_calls = len(self._calls)

    def _forget(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self._at) / HALVED_S)
        self._at = now
        for name in _FORGOTTEN:
            setattr(self._sample, name, kept * getattr(self._sample, name))
        self._counts *= kept
        self._weights *= kept

    def _shrink(self) -> None:
        """Drop pages beyond reach; if that is not enough, sample less."""
        sample = self._sample
        rows = self._rows[: sample.end]
        used = np.cumsum(rows["size"])
        rows["size"][used[-1] - used >= self._reach * sample.rate] = 0
        _keep(sample)
        if sample.end > SHRUNK_MAX:
            rows = self._rows[: sample.end]
            sample.threshold = int(np.partition(rows["hash"], SHRUNK_MAX - 1)[SHRUNK_MAX - 1])
            rows["size"][rows["hash"] > sample.threshold] = 0
            _keep(sample)
            before, sample.rate = sample.rate, (sample.threshold + 1) / _HASHES
            sample.far *= sample.rate / before
            self._counts *= sample.rate / before
            self._weights *= sample.rate / before
