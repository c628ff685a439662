"""Following: the last changes of what this node holds, and the questions that wait for the next.

Owns the changes since the first follower asked, and answers each question from them and from the
table of records. It keeps nothing about a follower but a question that waits; without followers it
does nothing, and the publisher asks it nothing but `is_followed`.

A change gets the next number. A follower names the last number that it has. Where the changes after
it are no longer in the ring, the follower begins again, and reads the table in slices. Each slice
is true as of the last change sent with it, so changes and slices that are applied in the order of
the answers always give what the node held at that change.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.effects import Effect, Send
from peercache.actors.origin import Origin
from peercache.actors.publisher.streams import RecordTable
from peercache.model.records import CHANGE, GONE, ON_DISK, RESIDENT, Changes, Records
from peercache.wire.messages.directory import (
    ALL_ROWS,
    CHANGES_A_MESSAGE_MAX,
    ReportChanges,
    RequestChanges,
)
from peercache.wire.messages.session import Refused

CHANGES_KEPT: Final = 2**17
"""Changes that a follower may be behind before it begins again: 3 MiB, and two seconds of a node
that stores and evicts 50,000 pages a second."""

FOLLOWERS_MAX: Final = 64
"""Questions that wait; each costs an answer of its own for the same change."""

GATHER_S: Final = 0.01
"""How long a change waits for others before it is told: a hundred answers a second a follower, and
none of them within the answer to a commit."""

TIMEOUT_MAX_S: Final = 10.0
"""How long a question waits at most, whatever it asks for."""

FOLLOWED_S: Final = 30.0
"""How long after the last question changes are kept."""


@final
@attrs.define(eq=False)
class Following:
    """What followers of one node are told. `is_followed`: whether changes are to be added."""

    incarnation: int
    table: RecordTable
    is_followed: bool = False
    due: float = inf
    """When `on_tick` has something to do."""
    _kept: Changes = attrs.field(factory=lambda: np.empty(0, CHANGE))
    """Change n lies in row n % CHANGES_KEPT."""
    _last: int = 1
    """The number of the last change; the first one that is told is 2, as 0 and below name none."""
    _floor: int = 1
    """The changes behind this one are kept."""
    _waiting: dict[Origin, tuple[RequestChanges, float]] = attrs.field(factory=dict)
    """By follower: its question, and until when it waits."""
    _asked_at: float = -inf
    _tell_at: float = inf

    @property
    def followers(self) -> int:
        """The followers whose questions wait; one that reads, or is away, is not among them."""
        return len(self._waiting)

    def stored(self, records: Records, now: float) -> None:
        """Note records that are in force from now on."""
        changes = changes_of(records)
        self._add(changes, now)

    def gone(self, keys: Records, now: float) -> None:
        """Note pages that this node holds no longer. keys: (n,) V16."""
        changes = np.zeros(len(keys), CHANGE)
        changes["key"], changes["tier"] = keys, GONE
        self._add(changes, now)

    def ask(self, origin: Origin, asked: RequestChanges, now: float) -> list[Effect]:
        """Answer a question now, or let it wait for a change."""
        self._asked_at = now
        if not self.is_followed:
            self.is_followed = True
            self._kept = np.empty(CHANGES_KEPT, CHANGE)
        self._waiting.pop(origin, None)
        until = now + min(max(asked.timeout_s, 0.0), TIMEOUT_MAX_S)
        effects: list[Effect] = []
        if self._is_far_behind(asked) or until <= now:
            effects = [Send(origin, self._answer(asked))]
        elif len(self._waiting) >= FOLLOWERS_MAX:
            detail = f"this node has {FOLLOWERS_MAX} followers already: try again later"
            effects = [Send(origin, Refused(asked.request, "busy", detail))]
        else:
            self._waiting[origin] = asked, until
            if asked.after < self._last:
                self._tell_at = min(self._tell_at, now + GATHER_S)
        self._schedule()
        return effects

    def on_tick(self, now: float) -> list[Effect]:
        """Answer what has waited for a change or long enough; stop without followers."""
        if now < self.due:
            return []
        self._tell_at = inf
        effects: list[Effect] = []
        for origin, (asked, until) in list(self._waiting.items()):
            if asked.after < self._last or until <= now:
                del self._waiting[origin]
                effects.append(Send(origin, self._answer(asked)))
        if not self._waiting and self._asked_at + FOLLOWED_S <= now:
            # What comes now has no numbers: who comes back with the last one has missed it.
            self.is_followed, self._kept = False, np.empty(0, CHANGE)
            self._last += 1
            self._floor = self._last
        self._schedule()
        return effects

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self._waiting) <= FOLLOWERS_MAX, f"{len(self._waiting)} followers wait"
        assert self._last - self._floor <= CHANGES_KEPT, "changes are counted that are not kept"

    def _add(self, changes: Changes, now: float) -> None:
        """Give changes their numbers, and keep the last ones."""
        first, self._last = self._last + 1, self._last + len(changes)
        self._floor = max(self._floor, self._last - CHANGES_KEPT)
        kept = changes[-CHANGES_KEPT:]
        first += len(changes) - len(kept)
        start = first % CHANGES_KEPT
        fitting = min(len(kept), CHANGES_KEPT - start)
        self._kept[start : start + fitting] = kept[:fitting]
        self._kept[: len(kept) - fitting] = kept[fitting:]
        if self._waiting and self._tell_at == inf:
            self._tell_at = now + GATHER_S
            self.due = min(self.due, self._tell_at)

    def _begins_again(self, asked: RequestChanges) -> bool:
        is_other = asked.incarnation != self.incarnation
        return is_other or not self._floor <= asked.after <= self._last

    def _is_far_behind(self, asked: RequestChanges) -> bool:
        """Return whether a follower has more to read than what is gathered for all."""
        is_reading = asked.row < ALL_ROWS or self._last - asked.after >= CHANGES_A_MESSAGE_MAX
        return is_reading or self._begins_again(asked)

    def _answer(self, asked: RequestChanges) -> ReportChanges:
        is_resync = self._begins_again(asked)
        since = self._last if is_resync else asked.after
        after = min(self._last, since + CHANGES_A_MESSAGE_MAX)
        numbers = np.arange(since + 1, after + 1) % CHANGES_KEPT
        changes = self._kept[numbers].tobytes()
        row, held = 0 if is_resync else asked.row, b""
        if after == self._last:
            # Only then are the rows of now those as of the last change told.
            row, held = self._slice(row)
        return ReportChanges(asked.request, self.incarnation, is_resync, after, changes, held, row)

    def _slice(self, row: int) -> tuple[int, bytes]:
        """Return the pages in the next rows of the table, and the row behind them."""
        live = self.table.live
        if row >= len(live):
            return ALL_ROWS, b""
        end = min(row + CHANGES_A_MESSAGE_MAX, len(live))
        records = self.table.records[row:end][live[row:end]]
        return (end if end < len(live) else ALL_ROWS), changes_of(records).tobytes()

    def _schedule(self) -> None:
        self.due = min([self._tell_at, *(until for _, until in self._waiting.values())])
        if self.is_followed and not self._waiting:
            self.due = min(self.due, self._asked_at + FOLLOWED_S)


def changes_of(records: Records) -> Changes:
    """Return records as the changes that told of them."""
    changes = np.empty(len(records), CHANGE)
    changes["key"], changes["length"] = records["key"], records["length"]
    is_in_memory = (records["flags"] & np.uint32(RESIDENT)) != 0
    changes["tier"] = np.where(is_in_memory, RESIDENT, ON_DISK)
    return changes
