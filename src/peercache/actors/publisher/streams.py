"""Outgoing record streams: what each directory owner should hold, and what a new ring moves.

A holder keeps its records in one table of numbered rows. Each owner has a stream: numbered
messages, a state for each row, and the digest of the rows that the owner should hold, which is
exactly what was sent to it and not withdrawn. Nothing here sends: a stream creates the messages and
does the bookkeeping.

A holder of a million records must not stop for half a second because one node joined. So the rows
are checked against a new ring a few thousand at a time, and wait in bins of about equal heat:
sorting the bins one after another costs as much as sorting all rows, but never in one step.

A row is held by its owners on the ring, and by nodes that owned it on a former ring. Former rings
are remembered while rows still move, so that no step has to check each of a thousand streams for a
row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.installation.library import function
from peercache.model.hash_ring import HashRing
from peercache.model.records import (
    BUCKETS,
    DROP,
    NUMBERS_AHEAD_MAX,
    RECORD,
    RECORD_BYTES,
    RECORDS_A_MESSAGE_MAX,
    RESIDENT,
    Content,
    Records,
    keys_of,
)
from peercache.wire.messages.directory import Delete, HandedOver, Put, Repair, StreamSummary

Rows = npt.NDArray[np.intp]
"""Row numbers in a RecordTable."""

ABSENT = 0
SENT = 1
CONFIRMED = 2
"""States of a row in a stream: not at this owner, sent to it, acknowledged by it."""

PENDING_MAX = 1024
"""Unacknowledged messages of one stream: at 128 records each, 131,072 records."""

ASK_FIRST_S = 0.02
"""How long an acknowledgement may be missing before a summary asks for it: a lost Put is sent again
well within a commit's timeout. Each further summary waits twice as long."""

ASK_DOUBLINGS_MAX = 7

NUMBER_MAX = 2**62
"""Highest number that an owner may ask for: some of the 64 bits of a message must remain."""

SENT_AGAIN_MAX = 64
"""Messages of a stream that are sent again at once: 8,192 records, a long set. If more are missing,
buckets are repaired at a limited rate."""

_ROWS_AT_FIRST = 1024
NO_ROWS: Rows = np.empty(0, np.intp)

# The calls keep the GIL: each takes microseconds, while getting the GIL back may take five
# milliseconds. Long-lived arrays are passed by their addresses, a batch as bytes: asking numpy for
# the address of an array takes longer than the call.
_store = function(
    "peercache_streams_store", None, *[ctypes.c_void_p] * 3, *[ctypes.c_char_p] * 2,
    ctypes.c_uint64, keeps_gil=True,
)  # fmt: skip
_hold = function(
    "peercache_streams_hold", ctypes.c_uint64, *[ctypes.c_void_p] * 2, ctypes.c_char_p,
    ctypes.c_uint64, *[ctypes.c_void_p] * 2, ctypes.c_int, keeps_gil=True,
)  # fmt: skip
_confirm = function(
    "peercache_streams_confirm", None, ctypes.c_void_p, *[ctypes.c_char_p] * 2, ctypes.c_uint64,
    ctypes.c_void_p, keeps_gil=True,
)  # fmt: skip


@attrs.define(eq=False)
class RecordTable:
    """The records of this node, in rows for numpy. A row is reused after its record was removed."""

    records: Records = attrs.field(factory=lambda: np.zeros(_ROWS_AT_FIRST, RECORD))
    digests: npt.NDArray[np.uint64] = attrs.field(
        factory=lambda: np.zeros(_ROWS_AT_FIRST, np.uint64)
    )
    live: npt.NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(_ROWS_AT_FIRST, np.bool_))
    moving: npt.NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(_ROWS_AT_FIRST, np.bool_))
    """Rows with changed owners, which former owners may still hold."""
    rows: dict[bytes, int] = attrs.field(factory=dict)
    free: list[int] = attrs.field(factory=lambda: list(range(_ROWS_AT_FIRST - 1, -1, -1)))
    places: tuple[int, int, int] = attrs.field(init=False)
    """The addresses of `records`, `digests` and `live`."""

    def __attrs_post_init__(self) -> None:
        """Record the addresses of the arrays."""
        self._note_places()

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.rows)

    @property
    def buckets(self) -> npt.NDArray[np.uint8]:
        """The bucket of each row's record, (n,) uint8: byte 0 of its key."""
        return self.records.view(np.uint8).reshape(-1, RECORD_BYTES)[:, 0]

    def find(self, keys: list[bytes]) -> Rows:
        """Return the row of each key, (n,); -1 if it has none."""
        return np.array([self.rows.get(key, -1) for key in keys], np.intp)

    def are_new(self, keys: list[bytes]) -> bool:
        """Return whether the table has none of these keys."""
        return self.rows.keys().isdisjoint(keys)

    def add(self, keys: Sequence[bytes], packed: bytes) -> Rows:
        """Put records with new keys into new rows; return the rows."""
        count, before = len(keys), len(self.rows)
        while len(self.free) < count:
            self._grow()
        first = len(self.free) - count
        placed = self.free[first:][::-1]
        del self.free[first:]
        self.rows.update(zip(keys, placed, strict=True))
        assert len(self.rows) == before + count, "a key is there already, or comes twice"
        return self._fill(np.array(placed, np.intp), packed)

    def store(self, keys: list[bytes], rows: Rows, records: Records) -> Rows:
        """Put records into their rows, or into new ones where the row is -1; return all rows."""
        placed = rows.tolist()
        for at, (key, row) in enumerate(zip(keys, placed, strict=True)):
            if row < 0:
                if not self.free:
                    self._grow()
                placed[at] = self.rows[key] = self.free.pop()
        return self._fill(np.array(placed, np.intp), records.tobytes())

    def release(self, keys: list[bytes], rows: Rows) -> None:
        """Free the rows of these keys; no stream may hold them any more."""
        for key in keys:
            del self.rows[key]
        self.live[rows] = False
        self.moving[rows] = False
        self.free.extend(rows.tolist())

    def _fill(self, rows: Rows, packed: bytes) -> Rows:
        assert len(packed) == RECORD_BYTES * len(rows), "no record for each row"
        _store(*self.places, rows.tobytes(), packed, len(rows))
        return rows

    def _grow(self) -> None:
        size = len(self.live)
        # Behind those that are free already: the lowest rows are allocated first.
        self.free = [*range(2 * size - 1, size - 1, -1), *self.free]
        self.records = _doubled(self.records)
        self.digests = _doubled(self.digests)
        self.live = _doubled(self.live)
        self.moving = _doubled(self.moving)
        self._note_places()

    def _note_places(self) -> None:
        self.places = self.records.ctypes.data, self.digests.ctypes.data, self.live.ctypes.data


@attrs.define(eq=False)
class Sent:
    """A message that is not acknowledged yet.

    rows, generations: the records that it set.
    waiter, positions: the waiting commit, and which of its records it waits for; 0: no commit.
    repairs: it sets whole buckets, which replaces earlier messages about them.
    again:   it repeats a message that was lost.
    """

    at: float
    rows: Rows
    generations: npt.NDArray[np.uint64]
    waiter: int = 0
    positions: npt.NDArray[np.intp] = NO_ROWS
    repairs: bool = False
    again: bool = False


@attrs.define(eq=False, kw_only=True)
class OutgoingStream:
    """The stream to one owner.

    number:    the number of the last message sent.
    content:   what the owner should hold of this node once it has applied that message.
    pending:   the messages not acknowledged, in order of their numbers.
    repairing: buckets that differ at the owner, and wait for their repair.
    unsure:      the owner may have dropped the records: ask until it answers.
    lagging:   it delayed a commit for a whole timeout, and no summary has matched since.
    complete:  the version of the ring for which the owner was notified that it has everything.
    """

    owner: int
    table: RecordTable
    number: int
    summary_at: float
    asked_at: float = -np.inf
    unsure: bool = False
    lagging: bool = False
    complete: bytes = b""
    content: Content = attrs.field(factory=Content)
    pending: dict[int, Sent] = attrs.field(factory=dict)
    repairing: bool = False
    _differing: npt.NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(BUCKETS, np.bool_))
    _state: npt.NDArray[np.uint8] = attrs.field(factory=lambda: np.zeros(0, np.uint8))
    _places: tuple[int, int] = (0, 0)
    """The addresses of the buckets of `content` and of `_state`."""
    _asks: int = 0
    """Summaries sent since the last one that matched."""
    _asked_number: int = -1
    _asked_ring: bytes = b""
    _asked_buckets: npt.NDArray[np.uint64] = attrs.field(
        factory=lambda: np.zeros(BUCKETS, np.uint64)
    )
    _wanted: int = 0
    """The owner ignores a hand-over with a lower number."""
    _forgotten: int = 0
    """The last message whose acknowledgement is no longer awaited, until a summary settles it."""

    def state(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Return the state of each row at this owner."""
        return self._states()[rows]

    def put(
        self,
        rows: Rows,
        now: float,
        waiter: int = 0,
        positions: npt.NDArray[np.intp] = NO_ROWS,
        *,
        again: bool = False,
    ) -> Put:
        """Send the records of these rows, whether or not they are new to the owner."""
        records = self.table.records[rows]
        sent = Sent(now, rows, records["generation"], waiter, positions, again=again)
        return self.put_packed(sent, records.tobytes())

    def put_packed(self, sent: Sent, packed: bytes) -> Put:
        """Send packed records of rows, which other streams may send, too."""
        self._hold(sent.rows, is_held=True)
        self._await(sent)
        return Put(self.number, packed)

    def delete(self, rows: Rows, generations: npt.NDArray[np.uint64], now: float) -> Delete:
        """Withdraw these rows, all of which the owner should hold."""
        drops = np.empty(len(rows), DROP)
        drops["key"] = self.table.records["key"][rows]
        drops["generation"] = generations
        self.retract(rows)
        self._await(Sent(now, NO_ROWS, np.empty(0, np.uint64)))
        return Delete(self.number, drops.tobytes())

    def withdraw(self, stale: Records, now: float) -> Delete:
        """Withdraw records that are not in this stream any more, if the owner still holds them."""
        drops = np.empty(len(stale), DROP)
        drops["key"], drops["generation"] = stale["key"], stale["generation"]
        self._await(Sent(now, NO_ROWS, np.empty(0, np.uint64)))
        return Delete(self.number, drops.tobytes())

    def retract(self, rows: Rows) -> None:
        """Remove rows from this stream before their records change; a message must follow."""
        self._hold(rows, is_held=False)

    def confirm(self, number: int) -> list[Sent]:
        """Handle the acknowledgement of one message; return the messages it settled, oldest first.

        A repair may cover the records of earlier messages: those are settled with it.
        """
        sent = self.pending.pop(number, None)
        if sent is None:
            return []
        self._confirm_rows(sent)
        if not sent.repairs:
            return [sent]
        earlier = [n for n, older in self.pending.items() if n < number and self._covers(older)]
        return [*(self.pending.pop(n) for n in earlier), sent]

    def confirm_all(self, number: int) -> list[Sent]:
        """Handle a matching summary: all messages up to `number` are applied. Return them."""
        if number > self.number:
            return []  # It does not answer a message of this stream.
        settled = [self.pending.pop(n) for n in list(self.pending) if n <= number]
        for sent in settled:
            self._confirm_rows(sent)
        if number == self._asked_number and self._asked_ring:
            self.complete = self._asked_ring
        self.unsure, self.lagging = number < self._wanted, False
        self._asks = 0
        if 0 < self._forgotten <= number:
            settled.append(self._confirm_forgotten())
        return settled

    def summary(self, now: float, next_at: float, ring: bytes = b"") -> StreamSummary | HandedOver:
        """Return a summary of what the owner should hold; remember it, to compare with the answer.

        ring: the version of the ring for which this is all that the owner owns; b"" if it is not.
        """
        if ring and self._asked_number == self.number:
            self.number += 1  # An answer to the last summary does not apply to this one.
        self.summary_at = next_at
        self.asked_at = now
        self._asks = min(self._asks + 1, ASK_DOUBLINGS_MAX)
        self._asked_number = self.number
        self._asked_ring = ring
        self._asked_buckets = self.content.buckets.copy()
        stated = (self.number, self.content.count, self.content.digest())
        return HandedOver(*stated, ring) if ring else StreamSummary(*stated)

    def ask_at(self) -> float:
        """Return when a summary is due: soon after an answer should have come."""
        pause_s: float = ASK_FIRST_S * 2**self._asks
        return min(self.summary_at, self.waits_since() + pause_s)

    def ask_soon(self, at: float) -> None:
        """Send a summary at a time, and again until one matches."""
        self.unsure = True
        self._asks = 0
        self.asked_at = at - ASK_FIRST_S

    def go_on_from(self, number: int) -> None:
        """Give the next summary at least this number: the owner doubts all that was sent before.

        A number that is further ahead than an owner ever asks for is ignored.
        """
        if self._wanted < number <= min(self.number + NUMBERS_AHEAD_MAX, NUMBER_MAX):
            self._wanted = number
            self.number = max(self.number, number)
            # An answer to an earlier summary does not apply to the next hand-over.
            self._asked_number = -1

    def send_again(self, number: int, now: float) -> tuple[list[Put], list[Sent]]:
        """Send again the unacknowledged records of the messages up to a number.

        Returns the new messages, and the earlier ones that need no acknowledgement any more. A
        message is repeated once: records that still differ then are repaired by bucket.
        """
        if number != self._asked_number:
            return [], []
        lost = [n for n, s in self.pending.items() if n <= number and len(s.rows)]
        if len(lost) > SENT_AGAIN_MAX or any(self.pending[n].again for n in lost):
            return [], []
        if lost:
            self._asked_number = -1
            self.unsure = True
        puts: list[Put] = []
        settled: list[Sent] = []
        for sent in [self.pending.pop(n) for n in lost]:
            same = self.table.records["generation"][sent.rows] == sent.generations
            same &= self.state(sent.rows) != ABSENT
            positions = sent.positions if len(sent.positions) else np.arange(len(sent.rows))
            if same.any():
                puts.append(
                    self.put(sent.rows[same], now, sent.waiter, positions[same], again=True)
                )
            if sent.waiter and not same.all():
                # Its page is gone, or stored again: a later message covers it.
                rest = Sent(now, NO_ROWS, sent.generations[:0], sent.waiter, positions[~same])
                settled.append(rest)
        return puts, settled

    def differ(self, number: int, theirs: npt.NDArray[np.uint64]) -> bool:
        """Handle the differing digests of an owner; return whether a repair is due now.

        Only the answer to the last summary counts, and only once: the buckets have changed since,
        but the buckets that differed at that time are those to repair.
        """
        if number != self._asked_number:
            return False
        self._asked_number = -1
        differing = theirs != self._asked_buckets
        self._differing |= differing
        self.repairing = bool(self._differing.any())
        return bool(differing.any())

    def repair(self, records_max: int, now: float) -> list[Repair | Put]:
        """Send again the first of the differing buckets: at least one, and about `records_max`.

        A bucket with more records than a message may have is replaced by the first of them, and the
        others are sent directly afterwards.
        """
        held = np.flatnonzero(self._states())
        counts = np.bincount(self.table.buckets[held], minlength=BUCKETS)
        due = np.flatnonzero(self._differing)
        fitting = int((np.cumsum(counts[due]) <= records_max).sum())
        due = due[: max(1, fitting)]
        self._differing[due] = False
        self.repairing = bool(self._differing.any())
        named = np.zeros(BUCKETS, np.bool_)
        named[due] = True
        rows = held[named[self.table.buckets[held]]]
        self._state[rows] = SENT
        first, rest = rows[:RECORDS_A_MESSAGE_MAX], rows[RECORDS_A_MESSAGE_MAX:]
        records = self.table.records[first]
        self._await(Sent(now, first, records["generation"], repairs=True))
        repair = Repair(self.number, due.astype(np.uint8).tobytes(), records.tobytes())
        cuts = range(0, len(rest), RECORDS_A_MESSAGE_MAX)
        return [repair, *(self.put(rest[at : at + RECORDS_A_MESSAGE_MAX], now) for at in cuts)]

    def restart(self) -> None:
        """Start again at an owner that holds nothing of this node: each row must be sent again."""
        self.content = Content()
        self._state = np.zeros(len(self._state), np.uint8)
        self._note_places()
        self.pending.clear()
        self.complete = b""
        self._differing[:] = False
        self.repairing = False

    def awaits(self, number: int) -> bool:
        """Return whether the owner may lack a message up to this number."""
        return bool(self._forgotten) or next(iter(self.pending), number + 1) <= number

    def waits_since(self) -> float:
        """Return since when an answer of this owner is overdue; inf if none is."""
        if self.unsure:
            return self.asked_at
        oldest = next(iter(self.pending.values()), None)
        return np.inf if oldest is None else max(oldest.at, self.asked_at)

    def _hold(self, rows: Rows, *, is_held: bool) -> None:
        """Add rows that are not in this stream yet, or remove them."""
        records, digests, _ = self.table.places
        self._states()
        changed: int = _hold(records, digests, rows.tobytes(), len(rows), *self._places, is_held)
        self.content.count += changed if is_held else -changed

    def _await(self, sent: Sent) -> None:
        self.number += 1
        self.pending[self.number] = sent
        if len(self.pending) > PENDING_MAX:
            # Its waiter still waits for other owners, or its timeout; the next matching summary
            # confirms its rows.
            self._forgotten = next(iter(self.pending))
            del self.pending[self._forgotten]

    def _confirm_rows(self, sent: Sent) -> None:
        self._states()
        records, states, rows = self.table.places[0], self._places[1], sent.rows
        _confirm(records, rows.tobytes(), sent.generations.tobytes(), len(rows), states)

    def _confirm_forgotten(self) -> Sent:
        """Confirm the rows that were sent and are in no unacknowledged message."""
        self._forgotten = 0
        state = self._states()
        settled = state == SENT
        for later in self.pending.values():
            settled[later.rows] = False
        rows = np.flatnonzero(settled)
        state[rows] = CONFIRMED
        return Sent(self.asked_at, rows, self.table.records["generation"][rows])

    def _covers(self, sent: Sent) -> bool:
        """Return whether all that a message set is confirmed by now."""
        if not len(sent.rows):
            return False
        same = self.table.records["generation"][sent.rows] == sent.generations
        return bool(same.all() and (self.state(sent.rows) == CONFIRMED).all())

    def _states(self) -> npt.NDArray[np.uint8]:
        size = len(self.table.live)
        if len(self._state) < size:
            state = np.zeros(size, np.uint8)
            state[: len(self._state)] = self._state
            self._state = state
            self._note_places()
        return self._state

    def _note_places(self) -> None:
        self._places = self.content.buckets.ctypes.data, self._state.ctypes.data


def newest_of(batch: Records) -> Records:
    """Return the newest record or drop of each key: a page may change twice within a batch."""
    keys = keys_of(batch)
    if len(set(keys)) == len(keys):
        return batch
    order = np.argsort(batch["generation"], kind="stable").tolist()
    return batch[list({keys[at]: at for at in order}.values())]


def _doubled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    larger = np.zeros(2 * len(array), array.dtype)
    larger[: len(array)] = array
    return larger


LOOKED_AT_MAX: Final = 4096
"""Rows checked in one step: two milliseconds with the rings of a thousand nodes."""

SAMPLED_MAX: Final = 4096
"""Rows sampled for the heat limits of the bins: 16 for each of the 256 bins of a large table."""

BIN_ROWS: Final = 4096
"""Approximate number of rows of a bin: sorting them takes half a millisecond."""

BINS_MAX: Final = 256

RINGS_MAX: Final = 16
"""Remembered former rings. If one hand-over has more of them, all streams are checked."""

_FIRST_BIT: Final = np.uint64(63)


@final
@attrs.define(eq=False)
class RingHandover:
    """The rows that a change of the ring may have moved: they are checked, then handed over.

    former: the rings by which rows that still move may have been sent; None if those were too many
            to remember.
    """

    table: RecordTable
    former: list[HashRing] | None = attrs.field(factory=list, init=False)
    _before: HashRing | None = attrs.field(default=None, init=False)
    """The ring by which unchecked rows were sent; None: several rings, so each row is taken."""
    _is_moving_only: bool = attrs.field(default=False, init=False)
    """Check only the rows that move already."""
    _next: int = attrs.field(default=0, init=False)
    _end: int = attrs.field(default=0, init=False)
    """The rows from `_next` to `_end` are not checked yet."""
    _edges: npt.NDArray[np.uint64] = attrs.field(factory=lambda: np.empty(0, np.uint64), init=False)
    """The least heat of each bin but the coldest, ascending."""
    _bins: list[list[Rows]] = attrs.field(factory=lambda: [[]], init=False)
    """Coldest first. Each row is in at most one bin."""
    _count: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        """Return how many checked rows wait to be handed over."""
        return self._count

    @property
    def has_more(self) -> bool:
        """Whether rows may be taken: not while the hottest may be among the unchecked ones."""
        return self._count > 0 and not self.is_looking

    @property
    def is_looking(self) -> bool:
        """Whether there are unchecked rows."""
        return self._next < self._end

    @property
    def is_idle(self) -> bool:
        """Whether no row waits, checked or not."""
        return not (self.is_looking or self._count)

    def begin(self, before: HashRing | None, recent: Sequence[HashRing] = ()) -> None:
        """Check all rows after the ring has changed from `before`; None: from an unknown ring.

        recent: former rings, `before` included, by which new rows are sent too.
        A change during a hand-over checks all rows again: the records are then of several rings.
        """
        if before is None or self.is_looking or self._count:
            self._before = None
        else:
            self._before = before
            if not self.table.moving.any():
                self.former = [ring for ring in recent if ring is not before]
        if before is not None and self.former is not None:
            self.former = [*self.former, before] if len(self.former) < RINGS_MAX else None
        self._is_moving_only = False
        self._start()

    def leave(self) -> None:
        """Check all moving rows again: they may be withdrawn from their former owners now."""
        self._before, self._is_moving_only = None, True
        self._start()

    def _start(self) -> None:
        # Rows that come later are sent by the current ring.
        self._next, self._end = 0, len(self.table.live)
        self._count = 0
        self._part_bins()

    def look(self, ring: HashRing) -> None:
        """Check the next rows: those whose set of owners has changed wait from now on."""
        table = self.table
        first, self._next = self._next, min(self._end, self._next + LOOKED_AT_MAX)
        rows = first + np.flatnonzero(table.live[first : self._next])
        if self._before is not None:
            keys = table.records["key"][rows]
            old, new = self._before.owners(keys), ring.owners(keys)
            if old.shape == new.shape:
                # Most keys keep their owners in the same order; the sets are compared only for the
                # others.
                other = np.flatnonzero((old != new).any(axis=1))
                before, after = np.sort(old[other], axis=1), np.sort(new[other], axis=1)
                rows = rows[other[(before != after).any(axis=1)]]
        if self._is_moving_only:
            rows = rows[table.moving[rows]]
        if not len(rows):
            return
        table.moving[rows] = True
        self._count += len(rows)
        places = np.searchsorted(self._edges, _heat(table.records[rows]), side="right")
        order = np.argsort(places, kind="stable")
        cuts = np.flatnonzero(np.diff(places[order])) + 1
        for part in np.split(order, cuts):
            self._bins[int(places[part[0]])].append(rows[part])

    def take(self, rows_max: int) -> Rows:
        """Take rows to hand over: the newest commits first, pages on disk last."""
        if not self.has_more:
            return NO_ROWS
        taken: list[Rows] = []
        while rows_max > 0 and self._bins:
            if not (hottest := self._bins[-1]):
                self._bins.pop()
                continue
            rows = np.concatenate(hottest)
            rows = rows[np.argsort(_heat(self.table.records[rows]), kind="stable")[::-1]]
            taken.append(rows[:rows_max])
            self._bins[-1] = [rows[rows_max:]] if len(rows) > rows_max else []
            rows_max -= len(taken[-1])
        together = np.concatenate(taken)
        self._count -= len(together)
        return together[self.table.live[together]]

    def settled(self) -> None:
        """Forget the former rings if no row moves any more."""
        if self.former != [] and not (self.is_looking or self._count or self.table.moving.any()):
            self.former = []

    def _part_bins(self) -> None:
        table = self.table
        step = max(1, len(table.live) // SAMPLED_MAX)
        sampled = np.arange(0, len(table.live), step)
        heat = np.sort(_heat(table.records[sampled[table.live[sampled]]]))
        bins = min(BINS_MAX, max(1, len(table) // BIN_ROWS), max(1, len(heat)))
        self._edges = heat[[len(heat) * at // bins for at in range(1, bins)]]
        self._bins = [[] for _ in range(bins)]


def by_owner(
    own: int, *tables: npt.NDArray[np.uint64]
) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each owner except the own node, and the positions that it owns, ascending.

    tables: the owners of some rows, (n, replicas) uint64, on one ring or on several.
    """
    owners = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)
    flat = owners.ravel()
    order = np.argsort(flat, kind="stable")
    grouped = flat[order]
    cuts = [0, *(np.flatnonzero(grouped[1:] != grouped[:-1]) + 1).tolist(), len(flat)]
    for start, end in pairwise(cuts):
        if start < end and (owner := int(grouped[start])) != own:
            positions = order[start:end] // owners.shape[1]
            if len(tables) > 1:  # It owned some of them on several rings.
                positions = positions[np.diff(positions, prepend=-1) != 0]
            yield owner, positions


def _heat(records: Records) -> npt.NDArray[np.uint64]:
    """Return the sort key of rows: whether in memory, then the generation, below 2**63."""
    resident = ((records["flags"] & RESIDENT) != 0).astype(np.uint64)
    heat: npt.NDArray[np.uint64] = records["generation"] & ~(np.uint64(1) << _FIRST_BIT)
    heat |= resident << _FIRST_BIT
    return heat
