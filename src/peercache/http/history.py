"""History: what the members of the cluster counted lately, asked for while something looks at it.

Owns    one row of rates for each member and step, the row of their sum, and what happened to
        members: `History`. There are two: of 15 minutes, and in longer steps of three hours.
Takes   requests for pages, and the clock: `Watching`.
Sends   questions to the members, through the node's gatherer.
Keeps   a cluster that nothing looks at, and that is not small, asks nothing of its members.
Limits  POINTS steps, EVENTS_MAX events, and HISTORY_BYTES_MAX each: members beyond count in the
        sum only. One question to all members each STEP_S, WATCHED_S after the last look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.model.status import (
    DEGRADED,
    DRAINING,
    LEAVING,
    NO_ANSWER,
    OK,
    Latencies,
    MemberStatus,
    Status,
)
from peercache.observability.log import get_logger
from peercache.observability.reasons import FABRICS, MISS_REASONS

STEP_S = 5.0
LONG_STEP_S = 60.0
POINTS = 180  # 15 minutes, and three hours.
EVENTS_MAX = 200
HISTORY_BYTES_MAX = 16 * 1024**2
BUCKETS_MAX = 32  # More than a histogram of ours has; another member's is its own affair.

RATE_MAX = 1e30

Rates: TypeAlias = npt.NDArray[np.float64]
"""Counts a second: shape (columns,) of one step, (POINTS,) of one column."""

EVERY_MEMBER: Final = ""
"""The name of the sum of all members."""

_TOTALS = (
    "pages_hit",
    "pages_missed",
    "pages_set",
    "pages_promoted",
    "disk_pages_written",
    "bytes_read",
    "bytes_written",
    "pages_taken_over",
    "pages_not_moved",
    *(f"pages_hit/{fabric}" for fabric in FABRICS),
)
_FIGURES = ("evicted", "evicted_disk", "pages_given")
"""Totals that are no counters in a status."""
_REASONS = tuple(f"pages_missed/{reason}" for reason in sorted(MISS_REASONS))
OPERATIONS = ("get", "set", "exists")
_BUCKETS = tuple(f"{operation}/{place}" for operation in OPERATIONS for place in range(BUCKETS_MAX))

COLUMNS: Mapping[str, int] = {
    name: place for place, name in enumerate((*_TOTALS, *_FIGURES, *_REASONS, *_BUCKETS))
}
MEMBERS_MAX = HISTORY_BYTES_MAX // (POINTS * len(COLUMNS) * 4)


_CHANGES = {
    NO_ANSWER: "stopped answering",
    DEGRADED: "became degraded",
    DRAINING: "began to drain",
    LEAVING: "began to leave",
    "left": "left",
}
"""What happened to a member that is in this state, and was not a step earlier."""

_RETURNS = {DEGRADED: "recovered", NO_ANSWER: "answers again"}
"""What happened to a member that is ok, and was in this state a step earlier."""


@attrs.frozen
class Event:
    """What happened to a member. at: when it was noticed; state: of the member since then."""

    at: float
    name: str
    state: str
    what: str


@attrs.define(eq=False)
class _Track:
    """One member. totals: as it last reported them; at: when."""

    incarnation: str
    at: float
    totals: Rates
    rates: npt.NDArray[np.float32] | None
    """Shape (POINTS, columns), NaN where it reported nothing; None beyond the bound."""


@final
class History:
    """The rates of the members over the last POINTS steps, and what happened to them."""

    def __init__(self, step_s: float = STEP_S) -> None:
        """Begin without a step."""
        self.step_s = step_s
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._states: dict[str, tuple[str, str]] | None = None
        self._tracks: dict[str, _Track] = {}
        self._sum = _unknown()
        self._at = np.full(POINTS, np.nan)
        self._steps = 0
        self._last: float | None = None
        self._bounds: dict[str, tuple[float, ...]] = {}

    @property
    def now(self) -> float:
        """When the last step was taken."""
        return self._last or 0.0

    @property
    def seconds(self) -> float:
        """How far it reaches back."""
        found = self._at[np.isfinite(self._at)]
        return float(found.max() - found.min()) if len(found) else 0.0

    def take(self, now: float, members: Sequence[MemberStatus]) -> None:
        """Add a step at a time of a steady clock, in seconds."""
        self._skip(now)
        place = self._advance()
        self._at[place] = now
        reported = [
            rates
            for member in members
            if member.answers and (rates := self._rates_of(member.status, now, place)) is not None
        ]
        self._sum[place] = np.sum(reported, axis=0) if reported else np.nan
        self._note_events(now, members)
        for name in [n for n, track in self._tracks.items() if now - track.at > self._window_s]:
            del self._tracks[name]

    def take_if_due(self, now: float, members: Sequence[MemberStatus]) -> None:
        """Add a step if the last one is as old as a step is long."""
        if self._last is None or now - self._last >= self.step_s - STEP_S / 2:
            self.take(now, members)

    @property
    def _window_s(self) -> float:
        return POINTS * self.step_s

    def _note_events(self, now: float, members: Sequence[MemberStatus]) -> None:
        """Compare the states of the members with those of the last step."""
        before = self._states
        self._states = {
            each.status.name: (each.status.state, each.status.incarnation)
            for each in members[: 10 * MEMBERS_MAX]
        }
        for name, (state, incarnation) in self._states.items():
            if before is None or before.get(name) == (state, incarnation):
                continue
            what = _CHANGES.get(state, "")
            if name not in before:
                what = "joined" if state == OK else what
            elif state == OK:
                was, was_incarnation = before[name]
                is_same = was_incarnation == incarnation
                what = _RETURNS.get(was, "began to serve") if is_same else "restarted"
            elif before[name][0] == state:
                what = ""
            if what:
                self.events.append(Event(now, name, state, what))
        while self.events and now - self.events[0].at > self._window_s:
            self.events.popleft()

    def _skip(self, now: float) -> None:
        """Leave the steps empty in which nothing was taken: each place is `step_s` wide."""
        last = now if self._last is None else self._last
        for _ in range(min(POINTS, round((now - last) / self.step_s) - 1)):
            self._at[self._advance()] = np.nan
        self._last = now

    def _advance(self) -> int:
        """Go to the next step, which is empty; return its place."""
        place = self._steps % POINTS
        self._steps += 1
        self._sum[place] = np.nan
        for track in self._tracks.values():
            if track.rates is not None:
                track.rates[place] = np.nan
        return place

    def _rates_of(self, status: Status, now: float, place: int) -> Rates | None:
        """Note a member's totals; return its rates since the last ones, None without any."""
        totals, track = self._totals_of(status), self._tracks.get(status.name)
        if track is None:
            is_kept = len(self._tracks) < MEMBERS_MAX
            # Beyond the bound a member has its totals only, and ten times as many have those.
            if is_kept or len(self._tracks) < 10 * MEMBERS_MAX:
                rates = _unknown() if is_kept else None
                self._tracks[status.name] = _Track(status.incarnation, now, totals, rates)
            return None
        is_same = track.incarnation == status.incarnation
        # What a restarted node counts it has counted since its start.
        grown = np.maximum(totals - track.totals, 0.0) if is_same else totals
        # A member may report any number; the rows are of float32.
        with np.errstate(over="ignore"):
            found: Rates = np.minimum(grown / max(now - track.at, 0.001), RATE_MAX)
        track.incarnation, track.at, track.totals = status.incarnation, now, totals
        if track.rates is not None:
            track.rates[place] = found
        return found

    def _totals_of(self, status: Status) -> Rates:
        totals = np.zeros(len(COLUMNS))
        by_name: dict[str, float] = {}
        for name, value in status.counters.items():
            by_name[name] = value
            counter = name.partition("/")[0]
            if counter != name:
                by_name[counter] = by_name.get(counter, 0.0) + value
        for name, value in by_name.items():
            if (column := COLUMNS.get(name)) is not None:
                totals[column] = value
        totals[COLUMNS["evicted"]] = status.pool.evicted
        totals[COLUMNS["evicted_disk"]] = status.disk.evicted
        totals[COLUMNS["pages_given"]] = status.spilled.given
        for operation in OPERATIONS:
            self._take_buckets(operation, status.latency.get(operation, Latencies()), totals)
        return totals

    def _take_buckets(self, operation: str, latencies: Latencies, totals: Rates) -> None:
        if (
            len(latencies.counts) != len(latencies.bounds) + 1
            or len(latencies.counts) > BUCKETS_MAX
        ):
            return
        # Buckets of another version's bounds cannot be added to these.
        if (
            self._bounds.setdefault(operation, latencies.bounds) == latencies.bounds
            and latencies.bounds
        ):
            first = COLUMNS[f"{operation}/0"]
            totals[first : first + len(latencies.counts)] = latencies.counts

    def series(self, column: str, member: str = EVERY_MEMBER) -> Rates:
        """Return a column's rates, the oldest first: shape (POINTS,), NaN where unknown."""
        # The column alone: to put whole rows in order costs a hundred times as much.
        only = slice(COLUMNS[column], COLUMNS[column] + 1)
        return self._ordered(member, only)[:, 0].astype(np.float64)

    def last(self, column: str, member: str = EVERY_MEMBER) -> float:
        """Return a column's newest known rate; NaN where nothing is known."""
        found = self.series(column, member)
        found = found[np.isfinite(found)]
        return float(found[-1]) if len(found) else float("nan")

    def members(self) -> list[str]:
        """Return the members that have rates of their own, by name."""
        return sorted(name for name, track in self._tracks.items() if track.rates is not None)

    def mean(self, column: str, seconds: float, member: str = EVERY_MEMBER) -> float:
        """Return a column's mean rate over the last seconds; NaN where nothing is known."""
        found = self.series(column, member)[-max(1, int(seconds / self.step_s)) :]
        found = found[np.isfinite(found)]
        return float(found.mean()) if len(found) else float("nan")

    def quantiles(self, operation: str, share: float, member: str = EVERY_MEMBER) -> Rates:
        """Return the seconds that this share of the calls of each step did not exceed."""
        return self._quantiles(operation, share, self._buckets(operation, member))

    def quantile(
        self, operation: str, share: float, seconds: float, member: str = EVERY_MEMBER
    ) -> float:
        """Return the seconds that this share of the calls of the last seconds did not exceed."""
        buckets = self._buckets(operation, member)[-max(1, int(seconds / self.step_s)) :]
        known = buckets[np.isfinite(buckets).all(axis=1)]
        return float(self._quantiles(operation, share, known.sum(axis=0, keepdims=True))[0])

    def _buckets(self, operation: str, member: str) -> Rates:
        first = COLUMNS[f"{operation}/0"]
        size = len(self._bounds.get(operation, ())) + 1
        return self._ordered(member, slice(first, first + size)).astype(np.float64)

    def _quantiles(self, operation: str, share: float, counts: Rates) -> Rates:
        """Return the quantile of each row of cumulative counts, as Prometheus interpolates it."""
        bounds = np.array(self._bounds.get(operation, ()))
        found = np.full(len(counts), np.nan)
        if not len(bounds):
            return found
        rows = np.flatnonzero(counts[:, -1] > 0)  # NaN is not.
        known = counts[rows]
        rank = share * known[:, -1]
        place = (known < rank[:, None]).sum(axis=1)
        within = np.minimum(place, len(bounds) - 1)
        each = np.arange(len(rows))
        low = np.where(within, bounds[within - 1], 0.0)
        before = np.where(within, known[each, within - 1], 0.0)
        width = np.maximum(known[each, within] - before, 1e-12)
        part = np.clip((rank - before) / width, 0.0, 1.0)
        found[rows] = low + (bounds[within] - low) * part
        return found

    def _ordered(self, member: str, columns: slice) -> npt.NDArray[np.float32]:
        """Return these columns of the rows of a member, the oldest first."""
        rows = self._sum
        if member != EVERY_MEMBER:
            track = self._tracks.get(member)
            rows = _unknown() if track is None or track.rates is None else track.rates
        found: npt.NDArray[np.float32] = rows[:, columns]
        return np.roll(found, -(self._steps % POINTS), axis=0)


def _unknown() -> npt.NDArray[np.float32]:
    return np.full((POINTS, len(COLUMNS)), np.nan, np.float32)


WATCHED_S = POINTS * STEP_S
"""A page that was looked at this long ago has nothing left to show."""

SMALL_MEMBERS_MAX = 16
"""Up to this many members are always watched, so that the first look shows what led to it: all of
them ask each other at most 48 times a second in all."""


class Gather(Protocol):
    """Asks all members how they are."""

    def __call__(self, *, detail: bool = False) -> Awaitable[Sequence[MemberStatus]]:
        """Return every member; those that do not answer in a second, too."""


@final
class Watching:
    """What a node with an HTTP port knows of all members."""

    def __init__(self, gather: Gather) -> None:
        """Ask nothing yet."""
        self.history = History()
        self.long = History(LONG_STEP_S)
        self._gather = gather
        self._looked_at = float("-inf")
        self._members = 0

    async def members(self, *, detail: bool = False) -> Sequence[MemberStatus]:
        """Return every member for a page, by its name."""
        self._looked_at = trio.current_time()
        members = _without_past(await self._gather(detail=detail))
        return sorted(members, key=lambda member: member.status.name)

    async def run(self) -> None:
        """Take a step of history each STEP_S until cancelled."""
        while True:
            now = trio.current_time()
            if self._members <= SMALL_MEMBERS_MAX or now - self._looked_at <= WATCHED_S:
                try:
                    await self._step()
                except Exception:
                    # What cannot be gathered is no reason to end a node that serves.
                    get_logger().exception("http.history_failed")
            await trio.sleep(max(0.1, now + STEP_S - trio.current_time()))

    async def _step(self) -> None:
        members = _without_past(await self._gather())
        self._members = len(members)
        self.take(trio.current_time(), members)

    def take(self, now: float, members: Sequence[MemberStatus]) -> None:
        """Add a step to the histories."""
        self.history.take(now, members)
        self.long.take_if_due(now, members)


def _without_past(members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Return members without those of which a later start answers at the same address."""
    living = {member.status.name for member in members if member.answers}
    return [member for member in members if member.answers or member.status.name not in living]
