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

import math
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from peercache.model.runs import I64, U64

SAMPLE_MAX: Final = 5120
"""Pages in the sample."""

SHRUNK_MAX: Final = 4096
"""Pages that are left when the threshold falls, so that it falls rarely."""

SHORT_USES: Final = 256
"""Memory of fewer pages is not estimated."""

PICK_EVERY: Final = 29
"""A prime: prompts have round lengths."""

PICKED_MANY: Final = 16384
"""So many picked uses show the part of short ones to less than a hundredth: then fewer suffice."""

PICK_RARELY: Final = 127
"""Of so many uses one is picked then, and counts for as many as were picked before."""

WAITING_MAX: Final = 16384
"""Uses that are taken into the sample together: it costs a call some microseconds."""

TOGETHER_MAX: Final = 128
"""Sampled uses that are compared with each other."""

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

_USE = np.dtype(
    [
        ("hash", "<u8"),
        ("size", "<i8"),
        ("client", "<u8"),
        ("at", "<f8"),
        ("number", "<i8"),
        ("call", "<i8"),
        ("count", "<f8"),
    ]
)
"""A use of a page. at: time; number: rising from use to use; call: of the first one of its call."""

Uses: TypeAlias = npt.NDArray[np.void]
Call: TypeAlias = tuple[int, int, int, float]
"""How many pages, their mean size, the client, and when."""


def hashes_in(packed: bytes, row_bytes: int) -> U64:
    """Return the last 64 bits of the key that begins each packed row: keys are hashes already."""
    return np.frombuffer(packed, np.uint64)[1 :: row_bytes // 8]


@final
class ReuseSample:
    """A sample of pages in the order of their uses, and how far apart these were.

    Sizes and distances have one unit, bytes or blocks. Constant memory.
    """

    def __init__(self, reach: float = math.inf) -> None:
        """Start without a use. reach: greater distances need not be known."""
        self._reach = reach
        self._calls: list[Call] = []
        self._hashes: U64 = np.empty(WAITING_MAX, np.uint64)
        """Of the calls that wait, of each the deepest pages first."""
        self._waiting = 0
        self._threshold = np.uint64(2**64 - 1)
        self._number = 0
        self._uses = _Uses()
        self._counts = np.zeros(len(_EDGES) + 1)
        """Sampled uses that are not short, by distance; last those of pages new to the sample."""
        self._weights = np.zeros(len(_EDGES) + 1)
        """The same, each use times the uses of its page so far."""
        self._recent: Uses = np.zeros(SHORT_USES, _USE)
        """The last uses of all pages."""
        # A row for each page in the sample, the last used one last, and rows without a size.
        self._rows: Uses = np.zeros(2 * SAMPLE_MAX, _USE)
        self._end = 0
        self._row_of: dict[int, int] = {}
        self._at = -math.inf

    def use(self, hashes: U64, size: int, client: int = 0, now: float = 0.0) -> None:
        """Take the pages that a client used in one call, the begin of the prompt first.

        hashes: evenly spread over 64 bits; size: the mean of these pages.
        """
        count = len(hashes)
        if self._waiting + count > len(self._hashes):
            self._take()
            if count > len(self._hashes):
                self._hashes = np.empty(count, np.uint64)
        if count:
            # Those before the deepest ones are used after them.
            self._hashes[self._waiting : self._waiting + count] = hashes[::-1]
            self._calls.append((count, size, client, now))
            self._waiting += count

    def uses(self) -> float:
        """Return how many uses the estimate is made from; those of earlier hours count less."""
        self._take()
        return max(0.0, self._uses.true)

    def hit_rates(self, sizes: Sequence[float]) -> list[float]:
        """Return the part of all uses that memory of each size would serve; NaN before any."""
        self._take()
        if not self._uses.picked:
            return [math.nan] * len(sizes)
        short, far, others = self._uses.short, self._uses.far * self._rate, self._counts.sum()
        counts = self._counts
        if others and far:
            # What is too much comes from the pages with the most uses, in proportion to these.
            too_much = others * (1 - far / self._uses.sampled_far)
            counts = counts - too_much * self._weights / self._weights.sum()
        within = np.interp(sizes, _EDGES, np.cumsum(counts[:-1])) / max(counts.sum(), 1e-9)
        rates: list[float] = np.clip(short + (1 - short) * within, 0.0, 1.0).tolist()
        return rates

    @property
    def _rate(self) -> float:
        return (float(self._threshold) + 1.0) / _HASHES

    def _take(self) -> None:
        """Take the calls that wait."""
        if not self._calls:
            return
        counts, sizes, clients, times = zip(*self._calls, strict=True)
        hashes, self._calls, self._waiting = self._hashes[: self._waiting], [], 0
        self._forget(times[-1])
        made: Uses = np.zeros(len(counts), _USE)
        made["size"], made["client"], made["at"] = sizes, clients, times
        made["call"] = self._number + np.cumsum(counts) - counts
        uses = _AllUses(hashes, made, np.repeat(np.arange(len(counts)), counts), self._number)
        self._pick(uses)
        self._uses.all += len(hashes)
        self._uses.true += len(hashes)
        for together in _groups(uses.at((hashes <= self._threshold).nonzero()[0])):
            self._note(together[together["hash"] <= self._threshold])
            self._shrink()
        self._number += len(hashes)

    def _forget(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self._at) / HALVED_S)
        self._at = now
        self._uses.keep(kept)
        self._counts *= kept
        self._weights *= kept

    def _pick(self, uses: _AllUses) -> None:
        """Count which of a part of these uses are short."""
        whole = np.concatenate([self._recent["hash"], uses.hashes])
        every = PICK_EVERY if self._uses.picked < PICKED_MANY else PICK_RARELY
        weight = every / PICK_EVERY
        picked = uses.at(np.arange(-self._number % every, len(uses.hashes), every))
        # Where in `whole` the uses begin that were the last ones when the call began.
        begins = picked["call"] - self._number
        found = sliding_window_view(whole, SHORT_USES)[begins] == picked["hash"][:, None]
        short = found.any(axis=1).nonzero()[0]
        last = begins[short] + SHORT_USES - 1 - found[short, ::-1].argmax(axis=1)
        before = uses.at(np.maximum(last - SHORT_USES, 0))
        is_recent = last < SHORT_USES
        before[is_recent] = self._recent[last[is_recent]]
        self._uses.picked += weight * len(picked)
        self._uses.picked_short += weight * len(short)
        self._uses.picked_repeated += weight * np.count_nonzero(_is_one_use(before, picked[short]))
        newest = uses.at(np.arange(max(0, len(uses.hashes) - SHORT_USES), len(uses.hashes)))
        # To concatenate rows of several fields takes as long as all of the above.
        self._recent[: SHORT_USES - len(newest)] = self._recent[len(newest) :]
        self._recent[SHORT_USES - len(newest) :] = newest

    def _note(self, uses: Uses) -> None:
        """Count the distances of sampled uses of whole calls, and make their pages the newest."""
        begin, count = self._end, len(uses)
        if begin + count > len(self._rows):
            self._keep(self._rows["size"][:begin] > 0)
            begin = self._end
        # In one numbering: first the rows that there are, then these uses.
        before, after = np.full(count, -1), np.full(count, count)
        row_of = self._row_of
        for place, name in enumerate(uses["hash"].tolist()):
            row = row_of.get(name, -1)
            row_of[name] = begin + place
            before[place] = row
            if row >= begin:
                after[row - begin] = place
        self._end = begin + count
        self._rows[begin : self._end] = uses
        is_known = before >= 0
        last = self._rows[before]
        is_repeated = is_known & _is_one_use(last, uses)
        is_far = ~is_known | (uses["call"] - last["number"] > SHORT_USES)
        is_counted = is_far & ~is_repeated
        distances = np.where(is_known, self._distances(begin, before, after), math.inf)[is_counted]
        buckets = np.searchsorted(_EDGES, distances / self._rate)
        so_far = self._rows["count"][begin : self._end]
        so_far[is_known] += last["count"][is_known]
        size = len(self._counts)
        self._counts += np.bincount(buckets, minlength=size)
        self._weights += np.bincount(buckets, so_far[is_counted], minlength=size)
        self._uses.sampled_far += np.count_nonzero(is_far)
        self._uses.true -= np.count_nonzero(is_repeated) / self._rate
        self._rows["size"][before[is_known]] = 0

    def _distances(self, begin: int, before: I64, after: I64) -> npt.NDArray[np.float64]:
        """Return the sizes of the pages used between each use and the one before, with its own."""
        sizes = self._rows["size"][: self._end]
        used, new = np.cumsum(sizes[:begin]), sizes[begin:]
        total = used[-1] if begin else 0
        own: npt.NDArray[np.float64] = new.astype(np.float64)
        is_old = (before >= 0) & (before < begin)
        own[is_old] += total - used[before[is_old]]
        call = self._rows["call"][begin : self._end]
        calls = np.searchsorted(call, call)
        if calls[-1:].any():
            # Of the uses of earlier calls: pages that were used once more are not counted twice.
            places = np.arange(len(new))
            is_earlier = places < calls[:, None]
            is_last = is_earlier & (after >= calls[:, None]) & (places + begin > before[:, None])
            was_since = is_earlier & is_old & (before > before[:, None])
            own += is_last @ new.astype(np.float64) - was_since @ np.where(
                is_old, sizes[before], 0.0
            )
        return own

    def _shrink(self) -> None:
        """If the sample is full, drop pages beyond reach; if that is not enough, sample less."""
        if len(self._row_of) > SAMPLE_MAX:
            sizes = self._rows["size"][: self._end]
            used = np.cumsum(sizes)
            self._keep((sizes > 0) & (used[-1] - used < self._reach * self._rate))
            if self._end > SHRUNK_MAX:
                before, hashes = self._rate, self._rows["hash"][: self._end]
                self._threshold = np.partition(hashes, SHRUNK_MAX - 1)[SHRUNK_MAX - 1]
                self._counts *= self._rate / before
                self._weights *= self._rate / before
                self._uses.sampled_far *= self._rate / before
                self._keep(hashes <= self._threshold)

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Move the rows that are kept to the begin."""
        count = int(np.count_nonzero(kept))
        self._rows[:count] = self._rows[: self._end][kept]
        self._row_of = dict(zip(self._rows["hash"][:count].tolist(), range(count), strict=True))
        self._end = count


@attrs.define
class _Uses:
    """How many uses there were. true: without those that are one use with another.

    picked:      of them the picked ones; sampled_far: those that are sampled and not short.
    """

    all: float = 0.0
    true: float = 0.0
    picked: float = 0.0
    picked_short: float = 0.0
    picked_repeated: float = 0.0
    sampled_far: float = 0.0

    @property
    def short(self) -> float:
        """Return which part of the true uses is short."""
        true = self.picked - self.picked_repeated
        return (self.picked_short - self.picked_repeated) / true if true else 0.0

    @property
    def far(self) -> float:
        """Return how many of all uses are not short."""
        return self.all * (1 - self.picked_short / self.picked)

    def keep(self, part: float) -> None:
        """Let all count less."""
        for field in attrs.fields(type(self)):
            setattr(self, field.name, part * getattr(self, field.name))


@attrs.frozen(eq=False)
class _AllUses:
    """Uses in their order. calls: a use of each call; call_of: its place there, for each use."""

    hashes: U64
    calls: Uses
    call_of: I64
    number: int

    def at(self, places: npt.NDArray[np.intp]) -> Uses:
        """Return uses, whole."""
        found = self.calls[self.call_of[places]]
        found["hash"], found["number"] = self.hashes[places], self.number + places
        found["count"] = 1.0
        return found


def _is_one_use(last: Uses, uses: Uses) -> npt.NDArray[np.bool_]:
    """Return which uses are by the client of the last one, and soon after it."""
    is_same = (last["client"] == uses["client"]) & (uses["at"] - last["at"] <= ONE_USE_S)
    return np.asarray(is_same)


def _groups(uses: Uses) -> Iterator[Uses]:
    """Yield uses of whole calls, TOGETHER_MAX or those of one call."""
    begin = 0
    ends = np.append(np.flatnonzero(np.diff(uses["call"])) + 1, len(uses))
    for end, after in zip(ends.tolist(), [*ends[1:].tolist(), math.inf], strict=True):
        if after - begin > TOGETHER_MAX:
            for part in range(begin, end, SAMPLE_MAX):
                yield uses[part : min(end, part + SAMPLE_MAX)]
            begin = end
