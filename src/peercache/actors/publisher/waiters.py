"""Requests that wait at the publisher: commits and removals for owners, followers for changes.

A client's set is done when its pages are in the pool; the client also needs to know that others can
find them. Each commit waits here until all owners that are not lagging have acknowledged its
records, or until its timeout passes, and is answered exactly once. A commit may name pages that an
earlier commit has published, and that may still wait for owners: it joins that wait.

`Following` keeps the changes since the first follower asked, and answers each request from them and
from the table of records. The only state of a follower is its waiting request. Without followers it
does nothing, and the publisher only checks `is_followed`.

Each change gets the next number. A follower names the last number that it has. If the changes after
it are no longer kept, the follower starts again, and reads the table in slices. Each slice is true
as of the last change sent with it, so changes and slices that are applied in the order of the
answers always give what the node held at that change.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, NotifyDirectory, NotifyPool, Send
from peercache.actors.mailboxes import CommitAnswered, PagesCommitted, RemovalDone
from peercache.actors.origin import Origin
from peercache.actors.publisher.streams import (
    CONFIRMED,
    SENT,
    OutgoingStream,
    RecordTable,
    Rows,
    by_owner,
)
from peercache.model.hash_ring import HashRing
from peercache.model.records import CHANGE, GONE, ON_DISK, RESIDENT, Changes, Records, keys_of
from peercache.wire.messages.directory import (
    ALL_ROWS,
    CHANGES_A_MESSAGE_MAX,
    ReportChanges,
    RequestChanges,
)
from peercache.wire.messages.pool import Committed
from peercache.wire.messages.session import Refused

WAITERS_MAX = 4096
"""Commits that wait at a time: further ones are answered with what is acknowledged so far."""

TIMEOUT_MAX_S = 60.0
"""Longest that a commit may wait: far beyond any operation's deadline."""


LAGGING_S = 0.05
"""An owner that delays a commit for this long is lagging. A commit with a nearer deadline has a
shorter timeout, which does not make the owner lagging."""


@attrs.frozen(eq=False)
class _Joined:
    """Rows of an earlier commit that one owner has not acknowledged yet."""

    rows: Rows
    generations: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.intp]

    def part(self, chosen: npt.NDArray[np.bool_]) -> _Joined:
        """Return the chosen ones."""
        return _Joined(self.rows[chosen], self.generations[chosen], self.positions[chosen])


@attrs.define(eq=False)
class _Waiter:
    """A waiting commit. Its records are those that it made, followed by those that were here
    already.

    unknown: how many owners have not acknowledged all records; unknown_parts: the difference from
             that for each record; awaited: by owner, the number of records that the answer waits
             for; joined: by owner, the records that an earlier commit has sent to it.
    """

    committed: PagesCommitted
    since: float
    unknown: int = 0
    unknown_parts: npt.NDArray[np.int32] | None = None
    awaited: dict[int, int] = attrs.field(factory=dict)
    joined: dict[int, _Joined] = attrs.field(factory=dict)

    @property
    def count(self) -> int:
        """The number of its records."""
        return len(self.committed.records) + len(self.committed.here)

    def change(self, positions: npt.NDArray[np.intp], by: int) -> None:
        """Note that `by` more owners have not acknowledged these records."""
        if len(positions) == self.count:
            # Nearly every message has all records of its commit.
            self.unknown += by
            return
        if self.unknown_parts is None:
            self.unknown_parts = np.zeros(self.count, np.int32)
        self.unknown_parts[positions] += by

    def known(self) -> int:
        """Return how many records all their owners have acknowledged."""
        if self.unknown_parts is None:
            return 0 if self.unknown else self.count
        return int(np.count_nonzero(self.unknown_parts == -self.unknown))


REMOVAL_FRACTION = 0.25
"""The fraction of its timeout that a removal waits for owners: the disk has used some of it before,
and the answer must arrive in time."""


@attrs.frozen(eq=False)
class _Removal:
    """owners: by owner, the number of its last message; lagging owners are not waited for."""

    done: RemovalDone
    owners: dict[int, int]
    lagging: frozenset[int]

    @property
    def is_over(self) -> bool:
        """Whether it has nothing to wait for."""
        return self.owners.keys() <= self.lagging

    def answer(self) -> Effect:
        """Answer, and name the owners that may not have applied it yet."""
        removed = attrs.evolve(self.done.removed, missed=tuple(sorted(self.owners)))
        return NotifyDirectory(RemovalDone(self.done.origin, removed))


@attrs.define(eq=False)
class WaitingCommits:
    """The commits without an answer. Each has a number from 1 on, its waiter; 0 is no commit.

    Removals are among them: they wait until owners have acknowledged that the pages are gone.
    """

    waiters: dict[int, _Waiter] = attrs.field(factory=dict)
    due: float = inf
    """When `expire` is due: the next timeout; inf if nothing waits."""
    _timeout: list[tuple[float, int]] = attrs.field(factory=list)
    """When each waiter's timeout passes: a heap, which may contain answered ones."""
    _last: int = 0
    _joining: dict[int, None] = attrs.field(factory=dict)
    """The waiters that have joined the wait of an earlier commit."""
    _removals: dict[int, _Removal] = attrs.field(factory=dict)

    def admit(self, committed: PagesCommitted, now: float) -> int:
        """Let a commit wait; return its number."""
        waiter = self._number(now + min(committed.timeout_s, TIMEOUT_MAX_S))
        self.waiters[waiter] = _Waiter(committed, now)
        return waiter

    def remove(
        self, done: RemovalDone, streams: Mapping[int, OutgoingStream], now: float
    ) -> list[Effect]:
        """Let a removal wait for owners to acknowledge; answer at once if that is not needed."""
        owners = {o: each.number for o, each in streams.items() if each.awaits(each.number)}
        lagging = frozenset(owner for owner in owners if streams[owner].lagging)
        removal = _Removal(done, owners, lagging)
        wait_s = min(done.timeout_s, TIMEOUT_MAX_S) * REMOVAL_FRACTION
        if removal.is_over or wait_s <= 0 or len(self._removals) >= WAITERS_MAX // 4:
            return [removal.answer()]
        self._removals[self._number(now + wait_s)] = removal
        return []

    def _number(self, until: float) -> int:
        """Return a new number with this deadline."""
        if len(self._timeout) >= 2 * WAITERS_MAX:
            # Before the new one, which is not among the waiters yet.
            self._timeout = [
                entry
                for entry in self._timeout
                if entry[1] in self.waiters or entry[1] in self._removals
            ]
            heapify(self._timeout)
        self._last += 1
        heappush(self._timeout, (until, self._last))
        self.due = self._timeout[0][0]
        return self._last

    def expect(
        self, waiter: int, owner: int, positions: npt.NDArray[np.intp], *, is_awaited: bool
    ) -> None:
        """Note that these records of a waiter were sent to an owner; the answer may wait."""
        waiting = self.waiters[waiter]
        waiting.change(positions, 1)
        if is_awaited and len(positions):
            waiting.awaited[owner] = waiting.awaited.get(owner, 0) + len(positions)

    def acknowledge(self, waiter: int, owner: int, positions: npt.NDArray[np.intp]) -> None:
        """Note that an owner has acknowledged these of a waiter's records."""
        waiting = self.waiters.get(waiter)
        if waiting is None:
            return
        waiting.change(positions, -1)
        if owner in waiting.awaited:
            waiting.awaited[owner] -= len(positions)
            if not waiting.awaited[owner]:
                del waiting.awaited[owner]

    def join(
        self,
        waiter: int,
        own: int,
        table: RecordTable,
        rings: list[HashRing],
        streams: Mapping[int, OutgoingStream],
    ) -> None:
        """Also wait for owners that have not acknowledged the pages that were here already.

        own: this node, which does not count as owner. rings: the current one, then the recent
             former ones.
        """
        waiting = self.waiters[waiter]
        here = waiting.committed.here
        places = len(waiting.committed.records) + np.arange(len(here))
        if not len(rings[0]):
            # Before the first view there are no known owners, and nothing is published.
            self.expect(waiter, 0, places, is_awaited=True)
            return
        rows = table.find(keys_of(here))
        assert (rows >= 0).all(), "the pool has a page that it has not reported"
        tables = [ring.owners(here["key"]) for ring in rings]
        for owner, owned in by_owner(own, *tables):
            stream = streams.get(owner)
            if stream is None:
                continue  # An owner on a former ring, which has left.
            state = stream.state(rows[owned])
            is_owner = (tables[0][owned] == np.uint64(owner)).any(axis=1)
            # A row that a former owner does not have at all was withdrawn from it.
            unknown = owned[np.where(is_owner, state != CONFIRMED, state == SENT)]
            if len(unknown):
                joined = _Joined(rows[unknown], here["generation"][unknown], places[unknown])
                waiting.joined[owner] = joined
                self._joining[waiter] = None
                self.expect(waiter, owner, joined.positions, is_awaited=not stream.lagging)

    def look(self, stream: OutgoingStream) -> list[Effect]:
        """Answer the commits that waited only for what this owner has acknowledged now."""
        effects: list[Effect] = []
        for number, removal in list(self._removals.items()):
            if stream.owner in removal.owners and not stream.awaits(removal.owners[stream.owner]):
                del removal.owners[stream.owner]
                if removal.is_over:
                    effects.append(self._removals.pop(number).answer())
        for waiter in list(self._joining):
            waiting = self.waiters[waiter]
            joined = waiting.joined.get(stream.owner)
            if joined is None:
                continue
            table, rows = stream.table, joined.rows
            in_force = table.live[rows] & (table.records["generation"][rows] == joined.generations)
            # A page that is gone, or stored again, has a later message that covers it.
            settled = ~in_force | (stream.state(rows) == CONFIRMED)
            if settled.any():
                self.acknowledge(waiter, stream.owner, joined.positions[settled])
                waiting.joined[stream.owner] = joined.part(~settled)
                effects += self.answer_if_done(waiter)
        return effects

    def give_up(self, owner: int) -> list[Effect]:
        """Stop waiting for an owner; answer the commits that waited only for it."""
        effects: list[Effect] = []
        for waiter, waiting in list(self.waiters.items()):
            if waiting.awaited.pop(owner, None) is not None:
                effects += self.answer_if_done(waiter)
        return effects

    def answer_if_done(self, waiter: int) -> list[Effect]:
        """Answer a commit if it has nothing to wait for, no timeout, or if too many wait."""
        waiting = self.waiters.get(waiter)
        if waiting is None:
            return []
        has_timeout = waiting.committed.timeout_s > 0
        if not waiting.awaited or not has_timeout or len(self.waiters) > WAITERS_MAX:
            return self._answer(waiter)
        return []

    def expire(self, now: float) -> tuple[list[Effect], set[int]]:
        """Answer those whose timeout has passed; also return the owners that are lagging."""
        effects: list[Effect] = []
        lagging: set[int] = set()
        while self._timeout and self._timeout[0][0] <= now:
            waiter = heappop(self._timeout)[1]
            waiting = self.waiters.get(waiter)
            if waiting is not None and now - waiting.since >= LAGGING_S:
                lagging.update(waiting.awaited)
            effects += self._answer(waiter)
            if (removal := self._removals.pop(waiter, None)) is not None:
                effects.append(removal.answer())
        self.due = self._timeout[0][0] if self._timeout else inf
        return effects, lagging

    def _answer(self, waiter: int) -> list[Effect]:
        # Removed before it is answered, so that a later acknowledgement or timeout does not find
        # it.
        waiting = self.waiters.pop(waiter, None)
        if waiting is None:
            return []
        self._joining.pop(waiter, None)
        committed = waiting.committed
        answer = Committed(
            committed.request,
            committed.sequence,
            committed.states,
            committed.records.tobytes() + committed.here.tobytes(),
            waiting.known(),
            committed.ahead,
            committed.offsets,
        )
        answered = NotifyDirectory(CommitAnswered(committed.origin, answer))
        return [answered, *(NotifyPool(fact) for fact in committed.then)]


CHANGES_KEPT: Final = 2**17
"""Changes that a follower may be behind before it must start again: 3 MiB, and two seconds of a
node that stores and evicts 50,000 pages a second."""

FOLLOWERS_MAX: Final = 64
"""Requests that wait; each costs an answer of its own for the same change."""

GATHER_S: Final = 0.01
"""How long a change waits for more changes before it is sent: at most a hundred answers a second
for each follower, and none of them delays the answer to a commit."""

FOLLOW_TIMEOUT_MAX_S: Final = 10.0
"""The longest that a request waits, whatever timeout it has."""

FOLLOWED_S: Final = 30.0
"""How long changes are kept after the last request."""


@final
@attrs.define(eq=False)
class Following:
    """The changes for followers of one node. `is_followed`: whether changes must be added."""

    incarnation: int
    table: RecordTable
    is_followed: bool = False
    due: float = inf
    """When `on_tick` is due."""
    _kept: Changes = attrs.field(factory=lambda: np.empty(0, CHANGE))
    """Change n is in row n % CHANGES_KEPT."""
    _last: int = 1
    """The number of the last change. The first one has number 2: 0 and below mean none."""
    _floor: int = 1
    """The changes after this one are kept."""
    _waiting: dict[Origin, tuple[RequestChanges, float]] = attrs.field(factory=dict)
    """By follower: its request, and how long it waits."""
    _asked_at: float = -inf
    _answer_at: float = inf

    @property
    def followers(self) -> int:
        """The followers with a waiting request; one that reads, or is away, does not count."""
        return len(self._waiting)

    def stored(self, records: Records, now: float) -> None:
        """Add changes for new records."""
        changes = changes_of(records)
        self._add(changes, now)

    def gone(self, keys: Records, now: float) -> None:
        """Add changes for pages that this node no longer holds. keys: (n,) V16."""
        changes = np.zeros(len(keys), CHANGE)
        changes["key"], changes["tier"] = keys, GONE
        self._add(changes, now)

    def ask(self, origin: Origin, asked: RequestChanges, now: float) -> list[Effect]:
        """Answer a request now, or let it wait for a change."""
        self._asked_at = now
        if not self.is_followed:
            self.is_followed = True
            self._kept = np.empty(CHANGES_KEPT, CHANGE)
        self._waiting.pop(origin, None)
        until = now + min(max(asked.timeout_s, 0.0), FOLLOW_TIMEOUT_MAX_S)
        effects: list[Effect] = []
        if self._is_far_behind(asked) or until <= now:
            effects = [Send(origin, self._answer(asked))]
        elif len(self._waiting) >= FOLLOWERS_MAX:
            detail = f"this node has {FOLLOWERS_MAX} followers already: try again later"
            effects = [Send(origin, Refused(asked.request, "busy", detail))]
        else:
            self._waiting[origin] = asked, until
            if asked.after < self._last:
                self._answer_at = min(self._answer_at, now + GATHER_S)
        self._schedule()
        return effects

    def on_tick(self, now: float) -> list[Effect]:
        """Answer requests with a change, or after their timeout; stop without followers."""
        self._answer_at = inf
        effects: list[Effect] = []
        for origin, (asked, until) in list(self._waiting.items()):
            if asked.after < self._last or until <= now:
                del self._waiting[origin]
                effects.append(Send(origin, self._answer(asked)))
        if not self._waiting and self._asked_at + FOLLOWED_S <= now:
            # Changes from now on have no numbers: a follower that comes back with the last one has
            # missed them.
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
        """Number the changes, and keep the last ones."""
        first, self._last = self._last + 1, self._last + len(changes)
        self._floor = max(self._floor, self._last - CHANGES_KEPT)
        kept = changes[-CHANGES_KEPT:]
        first += len(changes) - len(kept)
        start = first % CHANGES_KEPT
        fitting = min(len(kept), CHANGES_KEPT - start)
        self._kept[start : start + fitting] = kept[:fitting]
        self._kept[: len(kept) - fitting] = kept[fitting:]
        if self._waiting and self._answer_at == inf:
            self._answer_at = now + GATHER_S
            self.due = min(self.due, self._answer_at)

    def _begins_again(self, asked: RequestChanges) -> bool:
        is_other = asked.incarnation != self.incarnation
        return is_other or not self._floor <= asked.after <= self._last

    def _is_far_behind(self, asked: RequestChanges) -> bool:
        """Return whether a follower is behind by more than the changes gathered for all."""
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
            # Only then do the current rows match the last change that was sent.
            row, held = self._slice(row)
        return ReportChanges(asked.request, self.incarnation, is_resync, after, changes, held, row)

    def _slice(self, row: int) -> tuple[int, bytes]:
        """Return the pages in the next rows of the table, and the row after them."""
        live = self.table.live
        if row >= len(live):
            return ALL_ROWS, b""
        end = min(row + CHANGES_A_MESSAGE_MAX, len(live))
        records = self.table.records[row:end][live[row:end]]
        return (end if end < len(live) else ALL_ROWS), changes_of(records).tobytes()

    def _schedule(self) -> None:
        self.due = min([self._answer_at, *(until for _, until in self._waiting.values())])
        if self.is_followed and not self._waiting:
            self.due = min(self.due, self._asked_at + FOLLOWED_S)


def changes_of(records: Records) -> Changes:
    """Return records as changes."""
    changes = np.empty(len(records), CHANGE)
    changes["key"], changes["length"] = records["key"], records["length"]
    is_in_memory = (records["flags"] & np.uint32(RESIDENT)) != 0
    changes["tier"] = np.where(is_in_memory, RESIDENT, ON_DISK)
    return changes
