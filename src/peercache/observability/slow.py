"""The slowest calls of clients, with what made pages misses: as SLOWLOG of Redis.

A client notes the slowest calls since its last report, and sends them with it. Its home node keeps
the slowest ones of the last hour. Both are bounded: a call that is fast, as most are, costs the
client one comparison.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import final

import attrs

from peercache.model.status import SlowCall
from peercache.observability.latency import PAGE, SECONDS_MAX, SERIES
from peercache.observability.reasons import MISS_REASONS

SLOW_CALL = "slow_call"
"""Prefix, before a slash and a number, of a noted call in a report."""

REPORTED_MAX = 8
"""Calls in one report, each second."""

KEPT_MAX = 64
KEPT_S = 3600.0

_WRITTEN = re.compile(r"(\d{1,3}) (\d[\d.e+-]{0,15}) (\d{1,10}) (\d{1,16})((?: [a-z_]+=\d{1,10})*)")


@attrs.frozen
class CallNote:
    """One call of a client.

    series: its index in SERIES; pages: those that it was about; number: of the call, as in the
            client's log; missed: pages that it did not serve, by reason.
    """

    series: int
    seconds: float
    pages: int
    number: int
    missed: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls, series: int, seconds: float, pages: int, number: int,
        missed: Mapping[str, int] | Iterable[str],
    ) -> CallNote:  # fmt: skip
        """Return a note. missed: pages by reason, or the reason of each; "" is none."""
        counted = missed if isinstance(missed, Mapping) else Counter(missed)
        reasons = tuple((why, count) for why, count in counted.items() if why and count)
        return cls(series, seconds, pages, number, reasons)

    def __str__(self) -> str:
        """Return the note as a report carries it."""
        missed = "".join(f" {why}={count}" for why, count in self.missed)
        return f"{self.series} {self.seconds:.6g} {self.pages} {self.number}{missed}"

    @classmethod
    def read(cls, text: object) -> CallNote | None:
        """Return the note in a report; None if no correct client writes it."""
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            return None
        try:
            series, seconds = int(found[1]), float(found[2])
        except ValueError:
            return None
        pairs = [pair.partition("=") for pair in found[5].split()]
        missed = tuple((why, int(count)) for why, _, count in pairs)
        is_known = series < len(SERIES) and SERIES[series][0] != PAGE
        if not is_known or seconds > SECONDS_MAX or not {why for why, _ in missed} <= _REASONS:
            return None
        return cls(series, seconds, int(found[3]), int(found[4]), missed)


_REASONS = frozenset(MISS_REASONS)


@final
class SlowestCalls:
    """The slowest calls of one client since its last report. Thread-safe."""

    def __init__(self) -> None:
        """Start without calls."""
        self.floor = -1.0
        """A call that took no longer is not among the slowest."""
        self._lock = Lock()
        self._heap: list[tuple[float, int, CallNote]] = []

    def add(self, note: CallNote) -> None:
        """Add a call that took longer than `floor`."""
        with self._lock:
            heapq.heappush(self._heap, (note.seconds, note.number, note))
            if len(self._heap) > REPORTED_MAX:
                heapq.heappop(self._heap)
                self.floor = self._heap[0][0]

    def take(self) -> list[CallNote]:
        """Return the calls, and start again."""
        with self._lock:
            taken, self._heap, self.floor = self._heap, [], -1.0
        return [note for _, _, note in taken]


@final
class SlowLog:
    """The slowest calls of all clients of a node in the last KEPT_S. Thread-safe."""

    def __init__(self) -> None:
        """Start without calls."""
        self._lock = Lock()
        self._kept: list[tuple[float, float, str, CallNote]] = []
        self._floor, self._expires = -1.0, KEPT_S
        """The fastest kept call of a full log, and when the oldest one goes."""

    def add(self, client: str, note: CallNote, now: float) -> None:
        """Add a call; times are of one monotonic clock."""
        with self._lock:
            if note.seconds <= self._floor and now < self._expires:
                return
            kept = [each for each in self._kept if now - each[1] < KEPT_S]
            kept.append((note.seconds, now, client, note))
            if len(kept) > KEPT_MAX:
                kept.remove(min(kept, key=lambda each: each[:2]))
            self._kept = kept
            self._expires = min(at for _, at, _, _ in kept) + KEPT_S
            self._floor = min(each[0] for each in kept) if len(kept) == KEPT_MAX else -1.0

    def listed(self, now: float) -> tuple[SlowCall, ...]:
        """Return the calls, the slowest first."""
        with self._lock:
            kept = [each for each in self._kept if now - each[1] < KEPT_S]
        kept.sort(key=lambda each: -each[0])
        return tuple([_shown(client, note, now - at) for _, at, client, note in kept])


def _shown(client: str, note: CallNote, age_s: float) -> SlowCall:
    operation, tier, outcome = SERIES[note.series]
    return SlowCall(
        operation=operation, tier=tier, outcome=outcome, seconds=note.seconds, pages=note.pages,
        call=note.number, age_s=age_s, client=client, missed=dict(note.missed),
    )  # fmt: skip
