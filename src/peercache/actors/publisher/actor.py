"""Publisher: sends this node's records to directory owners until they acknowledge, and to
followers.

Owns    the records of the own pool, and one outgoing stream to each other node of the ring.
Takes   PagesCommitted, RecordsChanged and RemovalDone, from the pool; RingChanged, from the ring;
        Republish, from membership; Acknowledged, SummaryMatches, SummaryDiffers, RequestSummary,
        RequestFreshSummary and VerifyRecords, from owners; RequestChanges, from followers.
Sends   Put, Delete, Repair, StreamSummary and HandedOver, to owners; CommitAnswered and
        RemovalDone, to the directory, for the client of a commit or a removal; ReportChanges and
        Refused to followers.
Keeps   a stream's digest covers exactly what was sent to its owner and not withdrawn; a former
        owner keeps a record until each new one has acknowledged it, and `former_s` longer; a commit
        is answered exactly once, as soon as all owners that are not lagging have acknowledged it.
Limits  HAND_OVER_ROWS_MAX, FORMER_RINGS_MAX, RECORDS_A_MESSAGE_MAX, SUMMARIES_A_SECOND, and those
        of `streams` and `waiters`.

Nothing is sent to this node itself: the pool notifies its shard directly. So this node does not
count as an owner that has acknowledged.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
from typing_extensions import assert_never

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import (
    OwnerAnswer,
    PagesCommitted,
    PublisherMessage,
    RecordsChanged,
    RemovalDone,
    Republish,
    RingChanged,
)
from peercache.actors.origin import Origin
from peercache.actors.publisher.streams import (
    ABSENT,
    CONFIRMED,
    OutgoingStream,
    RecordTable,
    RingHandover,
    Rows,
    Sent,
    by_owner,
    newest_of,
)
from peercache.actors.publisher.waiters import WAITERS_MAX, Following, WaitingCommits
from peercache.model.hash_ring import HashRing
from peercache.model.records import (
    BUCKETS,
    RECORD_BYTES,
    RECORDS_A_MESSAGE_MAX,
    Records,
    from_bytes,
    keys_of,
)
from peercache.observability.metrics import Metrics
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Put,
    Repair,
    RequestChanges,
    RequestFreshSummary,
    RequestSummary,
    SummaryDiffers,
    SummaryMatches,
    VerifyRecords,
)

SLICE_S = 0.05
"""Pause between two slices of re-publishing: the rate is averaged over this time."""

STEP_S = 0.005
"""Pause between two steps of one slice, in which other messages are handled."""

FORMER_S = 600.0
"""How long after a change former owners keep records and are sent new ones: hosts that come and go
during an upgrade cost no second hand-over, and a reader with an older view finds what is stored."""

FORMER_MIN_S = 10.0
"""The minimum after the last of several changes: longer than an owner with an older ring trusts a
holder from which it receives nothing."""

FORMER_RINGS_MAX = 4
"""Former rings whose owners are sent new records. More changes within FORMER_S mean that many nodes
come and go, and each changes few owners."""

SPREAD_S = 0.0005
"""Pause between two streams that are sent a new ring: a thousand take half a second."""

HAND_OVER_ROWS_MAX = 4096
"""Rows handed over in one step, divided by the number of rings that they may have been sent by."""

SCATTERED_OWNERS = 64
SCATTERED_ROWS_MAX = 128
"""The same with more owners than that: almost every row needs a message of its own to its former
owner, and one acknowledgement of the new owner triggers all of them. 25,000 rows a second."""

ALL_STREAMS_ROWS_MAX = 64
"""The same if every stream must be checked for a row: a thousand streams."""

SUMMARIES_A_SECOND = 8
"""Regular summaries that a node sends: 16 owners get one every two seconds, a thousand owners one
in two minutes. They are not needed to find lost messages: a message without an acknowledgement
causes a summary within ASK_FIRST_S."""


@final
@attrs.define(kw_only=True, eq=False)
class Publisher:
    """Keeps every directory owner's copy of this node's records up to date."""

    incarnation: int
    republish_rate: float
    summary_s: float
    rng: random.Random
    metrics: Metrics = attrs.field(factory=Metrics)
    former_s: float = FORMER_S
    _table: RecordTable = attrs.field(factory=RecordTable, init=False)
    _streams: dict[int, OutgoingStream] = attrs.field(factory=dict, init=False)
    """By owner, in the ring's order."""
    _ring: HashRing = attrs.field(init=False)
    _former_until: float = attrs.field(default=-math.inf, init=False)
    """The time until which former owners keep their records and are sent new ones."""
    _recent: list[HashRing] = attrs.field(factory=list, init=False)
    """The last former rings of that time. Not those of `RingHandover`, which has none if no row
    moves, or if too many rings have changed: an owner may still have one of them."""
    _is_leaving: bool = attrs.field(default=False, init=False)
    """Whether records must be withdrawn from former owners when that time is over."""
    _is_complete: bool = attrs.field(default=False, init=False)
    """Whether the hand-over for this ring is complete."""
    _number_floor: int = attrs.field(default=0, init=False)
    """At least the number of any stream that ended: the same owner may come back, and would ignore
    numbers that it has seen."""
    _turning: RingHandover = attrs.field(init=False)
    """Rows that must be sent to new owners."""
    _allowance: float = attrs.field(init=False)
    """Records that may be re-published now; below zero after a large bucket."""
    _allowed_at: float = attrs.field(default=-math.inf, init=False)
    _waiting: WaitingCommits = attrs.field(factory=WaitingCommits, init=False)
    _following: Following = attrs.field(init=False)
    _due: float = attrs.field(default=math.inf, init=False)

    def __attrs_post_init__(self) -> None:
        """Start without owners, with a full allowance."""
        self._ring = HashRing([], virtual_nodes=1, replicas=1)
        self._turning = RingHandover(self._table)
        self._following = Following(self.incarnation, self._table)
        self._allowance = self._burst()

    @property
    def followers(self) -> int:
        """The number of followers that wait for the next change on this node."""
        return self._following.followers

    def lagging(self) -> frozenset[int]:
        """Return the owners that commits do not wait for."""
        return frozenset(owner for owner, stream in self._streams.items() if stream.lagging)

    def on_message(self, sender: Origin, message: PublisherMessage, now: float) -> list[Effect]:
        """Handle a change of the pool or the ring, or an owner's answer."""
        match message:
            case PagesCommitted():
                return self._commit(message, now)
            case RecordsChanged(records, drops):
                # Records before drops: a drop ends only records that are not newer.
                published = self._publish(newest_of(records), now)
                return [*published, *self._drop(newest_of(drops), now)]
            case RemovalDone():
                removed = self._waiting.remove(message, self._streams, now)
                self._due = min(self._due, self._waiting.due)
                return removed
            case Acknowledged() | SummaryMatches() | SummaryDiffers():
                return self._on_owner(sender.identity, message, now)
            case VerifyRecords(doubted):
                return self._withdraw_stale(sender.identity, from_bytes(doubted), now)
            case RingChanged(ring):
                return self._turn(ring, now)
            case RequestSummary() | RequestFreshSummary():
                stream = self._streams.get(sender.identity)
                if stream is not None:
                    # Not before the next summary is due anyway: its answer may be on the way.
                    stream.unsure, stream.complete = True, b""
                    if isinstance(message, RequestFreshSummary):
                        stream.go_on_from(message.number)
                    self._due = self._next_due(now)
                return []
            case Republish():
                for stream in self._streams.values():
                    stream.ask_soon(now)
                self._due = now
                return []
            case RequestChanges():
                return self._following.ask(sender, message, now)
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Answer commits after their timeout, continue to re-publish, send overdue summaries."""
        effects: list[Effect] = []
        if self._waiting.due <= now:
            effects, lagging = self._waiting.expire(now)
            for owner in sorted(lagging & self._streams.keys()):
                self._streams[owner].lagging = True
                effects += self._waiting.give_up(owner)
        if self._is_leaving and self._former_until <= now and self._turning.is_idle:
            self._is_leaving = False
            self._turning.leave()
        effects += self._republish(now)
        for owner, stream in self._streams.items():
            # An owner that is known to differ gets no summary until it has been repaired.
            if stream.ask_at() <= now and not stream.repairing:
                next_at = now + self._summary_s() * (0.9 + 0.2 * self.rng.random())
                is_notified = stream.complete == self._ring.version or not self._is_complete
                ring = b"" if is_notified else self._ring.version
                effects.append(Send(owner, stream.summary(now, next_at, ring)))
        self._due = self._next_due(now)
        if self._following.due <= now:
            effects += self._following.on_tick(now)
        return effects

    def deadline(self) -> float:
        """Return when a commit's timeout passes, a slice may be sent, or a summary is due."""
        return min(self._due, self._following.due)

    def check(self) -> None:
        """Assert the invariants that are cheap to check."""
        table = self._table
        assert len(table.rows) + len(table.free) == len(table.live), "a row lost or used twice"
        assert len(self._waiting.waiters) <= WAITERS_MAX, "too many waiters"
        assert self.incarnation not in self._streams, "a stream to this node itself"
        if self._following.is_followed:
            self._following.check()

    # --- the pool ---------------------------------------------------------------------------------

    def _commit(self, committed: PagesCommitted, now: float) -> list[Effect]:
        """Publish what was committed; answer when owners that are not lagging have acknowledged."""
        waiter = self._waiting.admit(committed, now)
        effects = self._publish(committed.records, now, waiter)
        if len(committed.here):
            rings = [self._ring, *self._former(now)]
            self._waiting.join(waiter, self.incarnation, self._table, rings, self._streams)
        self._due = min(self._due, self._waiting.due)
        return [*effects, *self._waiting.answer_if_done(waiter)]

    def _publish(self, records: Records, now: float, waiter: int = 0) -> list[Effect]:
        """Store new records, and send them to their owners and to nodes that have older ones."""
        if not len(records):
            return []
        table, keys = self._table, keys_of(records)
        if self._ring.is_everywhere and len(keys) <= RECORDS_A_MESSAGE_MAX and table.are_new(keys):
            return self._publish_everywhere(keys, records, now, waiter)
        assert len(set(keys)) == len(keys), "the pool names a key twice in one batch"
        rows = table.find(keys)
        updated = np.flatnonzero(rows >= 0)
        elsewhere: dict[int, npt.NDArray[np.intp]] = {}
        if len(updated):
            # The pool's numbers only increase; a record that is reported twice is sent and awaited
            # again.
            old = table.records["generation"][rows[updated]]
            assert (old <= records["generation"][updated]).all(), "an older record after a newer"
            elsewhere = self._retract_everywhere(rows, updated)
        rows = table.store(keys, rows, records)
        if self._following.is_followed:
            self._following.stored(records, now)
        tables = self._owners(rows, now)
        owners = np.concatenate(tables, axis=1)
        if waiter and not len(self._ring):
            # Before the first view there are no known owners, and nothing is published.
            self._waiting.expect(waiter, 0, np.arange(len(rows)), is_awaited=True)
        effects: list[Effect] = []
        for owner, owned in by_owner(self.incarnation, *tables):
            stream = self._streams.get(owner)
            if stream is None:
                continue  # An owner on a former ring, which has left.
            if waiter:
                self._waiting.expect(waiter, owner, owned, is_awaited=not stream.lagging)
            effects += self._put(stream, rows, owned, now, waiter)
            if (placed := elsewhere.pop(owner, None)) is not None:
                also = placed[(owners[placed] != np.uint64(owner)).all(axis=1)]
                effects += self._put(self._streams[owner], rows, also, now)
        for owner, positions in elsewhere.items():
            effects += self._put(self._streams[owner], rows, positions, now)
        return effects

    def _publish_everywhere(
        self, keys: list[bytes], records: Records, now: float, waiter: int
    ) -> list[Effect]:
        """Send new records to all nodes, each of which owns every key: all get the same message."""
        packed = records.tobytes()
        rows = self._table.add(keys, packed)
        if self._following.is_followed:
            self._following.stored(records, now)
        if self._former(now):
            self._table.moving[rows] = True
        positions = np.arange(len(rows))
        sent = Sent(now, rows, records["generation"], waiter, positions)
        effects: list[Effect] = []
        for owner, stream in self._streams.items():
            if waiter:
                self._waiting.expect(waiter, owner, positions, is_awaited=not stream.lagging)
            effects.append(self._send(stream, stream.put_packed(sent, packed), now))
        return effects

    def _former(self, now: float) -> list[HashRing]:
        """Return the recent former rings whose owners are sent new records."""
        return [] if now >= self._former_until else self._recent

    def _owners(self, rows: Rows, now: float) -> list[npt.NDArray[np.uint64]]:
        """Return the owners of new rows, on this ring and on the recent former ones."""
        keys = self._table.records["key"][rows]
        former = self._former(now)
        if not former:
            return [self._ring.owners(keys)]
        self._table.moving[rows] = True
        return [self._ring.owners(keys), *(ring.owners(keys) for ring in former)]

    def _retract_everywhere(
        self, rows: Rows, updated: npt.NDArray[np.intp]
    ) -> dict[int, npt.NDArray[np.intp]]:
        """Remove changing rows from every stream; return, by owner, those that it must be sent."""
        placed: dict[int, npt.NDArray[np.intp]] = {}
        for stream, positions in self._holders(rows[updated]):
            held = updated[positions]
            stream.retract(rows[held])
            placed[stream.owner] = held
        return placed

    def _holders(self, rows: Rows) -> Iterator[tuple[OutgoingStream, npt.NDArray[np.intp]]]:
        """Yield each stream that has some of these rows, and their positions, ascending.

        A row is in the streams of its owners, and, while it moves, in those of its former owners.
        """
        turning, keys = self._turning, self._table.records["key"][rows]
        is_moving = turning.is_looking or bool(self._table.moving[rows].any())
        if self._ring.is_everywhere or (is_moving and turning.former is None):
            every: npt.NDArray[np.intp] = np.arange(len(rows))
            asked = [(owner, every) for owner in self._streams]
        else:
            rings = [self._ring, *(turning.former or [])] if is_moving else [self._ring]
            asked = list(by_owner(self.incarnation, *[ring.owners(keys) for ring in rings]))
        for owner, positions in asked:
            stream = self._streams.get(owner)
            if stream is None:
                continue  # It was an owner, and has left the ring.
            if len(held := positions[stream.state(rows[positions]) != ABSENT]):
                yield stream, held

    def _drop(self, drops: Records, now: float) -> list[Effect]:
        """Withdraw records from all owners, unless they are newer than their drop."""
        if not len(drops):
            return []
        table, keys = self._table, keys_of(drops)
        rows = table.find(keys)
        ends = (rows >= 0) & (table.records["generation"][rows] <= drops["generation"])
        chosen = np.flatnonzero(ends)
        rows, generations = rows[chosen], drops["generation"][chosen]
        effects: list[Effect] = []
        for stream, held in self._holders(rows):
            effects += self._delete(stream, rows[held], generations[held], now)
        table.release([keys[at] for at in chosen.tolist()], rows)
        if self._following.is_followed:
            self._following.gone(drops["key"][chosen], now)
        return effects

    # --- the ring ---------------------------------------------------------------------------------

    def _turn(self, ring: HashRing, now: float) -> list[Effect]:
        """Follow the ring: hand over exactly the rows whose set of owners has changed."""
        before, self._ring = self._ring, ring
        streams: dict[int, OutgoingStream] = {}
        for owner in ring.members:
            if owner != self.incarnation:
                # Also to an owner of nothing: it may still hold what it once owned.
                streams[owner] = self._streams.get(owner) or self._new_stream(owner, now)
        # One number is skipped: an owner that knows the ended stream then notices the gap.
        ended = (stream.number + 1 for stream in self._streams.values())
        self._number_floor = max([self._number_floor, *ended])
        effects: list[Effect] = []
        for gone in sorted(self._streams.keys() - streams.keys()):
            effects += self._waiting.give_up(gone)
        self._streams = streams
        self._is_complete = False
        if len(before):
            if self._former_until <= now:
                self._former_until, self._recent = now + self.former_s, []
            least_until = now + min(self.former_s, FORMER_MIN_S)
            self._former_until = max(self._former_until, least_until)
            self._is_leaving = self.former_s > 0
            self._recent = [*self._recent, before][-FORMER_RINGS_MAX:]
        self._turning.begin(before, self._recent)
        return [*effects, *self._go_on(now)]

    def _new_stream(self, owner: int, now: float) -> OutgoingStream:
        return OutgoingStream(
            owner=owner,
            table=self._table,
            number=self._number_floor,
            summary_at=now + self.summary_s * (0.5 + self.rng.random()),
        )

    def _summary_s(self) -> float:
        """Return how long a stream waits for its next regular summary."""
        return max(self.summary_s, len(self._streams) / SUMMARIES_A_SECOND)

    def _go_on(self, now: float) -> list[Effect]:
        """Do the first step of a hand-over or of a repair at once."""
        effects = self._republish(now)
        self._due = self._next_due(now)
        return effects

    def _republish(self, now: float) -> list[Effect]:
        """Do one step of a repair and of the hand-over, within the rate."""
        earned = self.republish_rate * (now - self._allowed_at)
        self._allowance = min(self._burst(), self._allowance + earned)
        self._allowed_at = now
        effects: list[Effect] = []
        turning = self._turning
        if turning.is_looking:
            turning.look(self._ring)
        stream = next((s for s in self._streams.values() if s.repairing), None)
        if stream is not None and self._allowance > 0:
            for part in stream.repair(self._slice(RECORDS_A_MESSAGE_MAX), now):
                effects.append(self._send(stream, part, now))
                self._allowance -= 1 + len(part.records) // RECORD_BYTES
        if turning.has_more and self._allowance > 0:
            effects += self._hand_over(turning.take(self._slice(self._rows_a_step())), now)
        if now >= self._former_until:
            turning.settled()
        if turning.is_idle and not self._is_complete:
            self._is_complete = True
            for turn, stream in enumerate(self._streams.values()):
                if stream.complete != self._ring.version:
                    stream.ask_soon(now + turn * SPREAD_S)
            self._due = now
        return effects

    def _rows_a_step(self) -> int:
        former = self._turning.former
        if former is None:
            return ALL_STREAMS_ROWS_MAX
        most = HAND_OVER_ROWS_MAX // (1 + len(former))
        return most if len(self._streams) <= SCATTERED_OWNERS else min(most, SCATTERED_ROWS_MAX)

    def _hand_over(self, rows: Rows, now: float) -> list[Effect]:
        """Send rows to those of their current owners that have never been sent them."""
        effects: list[Effect] = []
        for owner, owned in by_owner(
            self.incarnation, self._ring.owners(self._table.records["key"][rows])
        ):
            stream = self._streams[owner]
            missing = owned[stream.state(rows[owned]) == ABSENT]
            effects += self._put(stream, rows, missing, now)
            self._allowance -= len(missing)
        self._allowance -= len(rows) / 16  # Checking rows that were all sent costs something, too.
        return [*effects, *self._settle(rows, now)]

    def _settle(self, rows: Rows, now: float) -> list[Effect]:
        """Withdraw rows from former owners if all current owners have acknowledged."""
        if now < self._former_until:
            return []
        rows = rows[self._table.moving[rows]]
        if not len(rows):
            return []
        owners = self._ring.owners(self._table.records["key"][rows])
        arrived = np.ones(len(rows), np.bool_)
        for owner, owned in by_owner(self.incarnation, owners):
            arrived[owned] &= self._streams[owner].state(rows[owned]) == CONFIRMED
        rows, owners = rows[arrived], owners[arrived]
        effects: list[Effect] = []
        for stream, held in self._holders(rows):
            left = rows[held[(owners[held] != np.uint64(stream.owner)).all(axis=1)]]
            generations = self._table.records["generation"][left]
            effects += self._delete(stream, left, generations, now)
        self._table.moving[rows] = False
        return effects

    # --- owners -----------------------------------------------------------------------------------

    def _on_owner(self, owner: int, answer: OwnerAnswer, now: float) -> list[Effect]:
        stream = self._streams.get(owner)
        if stream is None:
            return []  # It left the ring while it answered.
        match answer:
            case Acknowledged(number):
                return self._settled(owner, stream.confirm(number), now)
            case SummaryMatches(number):
                return self._settled(owner, stream.confirm_all(number), now)
            case SummaryDiffers(number, buckets):
                if len(buckets) == 8 * BUCKETS:
                    # It doubts this stream until it is notified again that the hand-over is
                    # complete.
                    stream.complete = b""
                    return self._repair(stream, number, np.frombuffer(buckets, "<u8"), now)
                self.metrics.messages_dropped.labels("malformed").inc()
                return []

    def _settled(self, owner: int, messages: list[Sent], now: float) -> list[Effect]:
        """Answer the commits of these messages, and withdraw the rows that they handed over."""
        # Without a timeout to come, nothing waits.
        is_awaited = self._waiting.due < math.inf
        effects = self._waiting.look(self._streams[owner]) if is_awaited else []
        for sent in messages:
            self._waiting.acknowledge(sent.waiter, owner, sent.positions)
            effects += self._waiting.answer_if_done(sent.waiter)
            effects += self._settle(sent.rows, now)
        return effects

    def _withdraw_stale(self, owner: int, doubted: Records, now: float) -> list[Effect]:
        """Withdraw from an owner those of its doubted records that are no longer valid."""
        stream = self._streams.get(owner)
        doubted = doubted[doubted["holder"] == np.uint64(self.incarnation)]
        if stream is None or not len(doubted):
            return []
        rows = self._table.find(keys_of(doubted))
        in_force = self._table.records["generation"][rows]
        stale = doubted[(rows < 0) | (in_force > doubted["generation"])]
        if not len(stale):
            return []
        return [
            self._send(stream, stream.withdraw(stale[part], now), now)
            for part in _parts(np.arange(len(stale)))
        ]

    def _repair(
        self, stream: OutgoingStream, number: int, theirs: npt.NDArray[np.uint64], now: float
    ) -> list[Effect]:
        """Send again the records that differ at an owner."""
        puts, settled = stream.send_again(number, now)
        if puts or settled:
            again = [self._send(stream, put, now) for put in puts]
            return [*again, *self._settled(stream.owner, settled, now)]
        unchanged = number == stream.number
        if not stream.differ(number, theirs):
            return []
        self.metrics.repairs.inc()
        if unchanged and not theirs.any() and stream.content.count > RECORDS_A_MESSAGE_MAX:
            # It has dropped everything: publish again, hottest first, instead of by bucket.
            stream.restart()
            stream.lagging = True
            effects = self._waiting.give_up(stream.owner)
            self._is_complete = False
            self._turning.begin(None)
            return [*effects, *self._go_on(now)]
        return self._go_on(now)

    # --- sending ----------------------------------------------------------------------------------

    def _put(
        self,
        stream: OutgoingStream,
        rows: Rows,
        positions: npt.NDArray[np.intp],
        now: float,
        waiter: int = 0,
    ) -> list[Effect]:
        """Send the rows at these positions, cut into messages."""
        return [
            self._send(stream, stream.put(rows[part], now, waiter, part), now)
            for part in _parts(positions)
        ]

    def _delete(
        self, stream: OutgoingStream, rows: Rows, generations: npt.NDArray[np.uint64], now: float
    ) -> list[Effect]:
        """Withdraw rows, cut into messages."""
        return [
            self._send(stream, stream.delete(rows[part], generations[part], now), now)
            for part in _parts(np.arange(len(rows)))
        ]

    def _send(self, stream: OutgoingStream, message: Put | Delete | Repair, now: float) -> Effect:
        self._due = min(self._due, max(now, stream.ask_at()))
        return Send(stream.owner, message)

    def _burst(self) -> float:
        return max(1.0, self.republish_rate * SLICE_S)

    def _slice(self, most: int) -> int:
        return max(1, min(most, int(self._allowance)))

    def _next_due(self, now: float) -> float:
        turning, due = self._turning, self._waiting.due
        if self._is_leaving and turning.is_idle:
            due = min(due, max(self._former_until, now + STEP_S))
        is_repairing = False
        for stream in self._streams.values():
            if stream.repairing:
                is_repairing = True
            else:
                due = min(due, stream.ask_at())
        if turning.is_looking:
            return min(due, now + STEP_S)
        if turning.has_more or is_repairing:
            return min(due, now + (STEP_S if self._allowance > 0 else SLICE_S))
        return due


def _parts(positions: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Cut a batch into the parts that one message may carry; an empty batch has no part."""
    size = RECORDS_A_MESSAGE_MAX
    return [positions[at : at + size] for at in range(0, len(positions), size)]
