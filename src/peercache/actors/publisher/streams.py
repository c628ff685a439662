"""Outgoing record streams: what each directory owner should hold, and what a new ring moves.

A holder keeps its records in one table of numbered rows. Each owner has a stream: numbered
messages, a state for each row, and the digest of the rows that the owner should hold, which is
exactly what was sent to it and not withdrawn. Nothing here sends: a stream makes the messages and
keeps the books.

A holder of a million records must not stop for half a second because one node came. So the rows of
a new ring are looked at a few thousand at a time, and wait in bins of about equal heat: sorting one
bin after the other costs what sorting all of them at once would, but never in one step.

A row is held by its owners on the ring, and by nodes that owned it on a ring before. Those rings
are remembered while rows may still be on their way, so that no step has to ask each of a thousand
streams whether it holds a row.
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
"""Numbers of rows in a RecordTable."""

ABSENT = 0
SENT = 1
CONFIRMED = 2
"""States of a row in a stream: not at this owner, sent to it, acknowledged by it."""

PENDING_MAX = 1024
"""Messages of one stream whose acknowledgement is awaited: at 128 records, 131,072 records."""

ASK_FIRST_S = 0.02
"""How long an acknowledgement may be missing before a summary asks: a Put that was lost is there
again well within a commit's timeout. Each further question takes twice as long."""

ASK_DOUBLINGS_MAX = 7

NUMBER_MAX = 2**62
"""Highest number that an owner may ask for: there must be some left of the 64 bits of a message."""

SENT_AGAIN_MAX = 64
"""Messages of a stream that are sent again at once: 8,192 records, a long set. What lacks more is
repaired by buckets, at a rate."""

_ROWS_AT_FIRST = 1024
NO_ROWS: Rows = np.empty(0, np.intp)

# Each call takes microseconds: to get the GIL back may take five milliseconds. What lasts is passed
# by its place, a batch as bytes: to ask numpy for the place of an array takes longer than the call.
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
    """The records of this node, in rows for numpy. A row is reused after its record went."""

    records: Records = attrs.field(factory=lambda: np.zeros(_ROWS_AT_FIRST, RECORD))
    digests: npt.NDArray[np.uint64] = attrs.field(
        factory=lambda: np.zeros(_ROWS_AT_FIRST, np.uint64)
    )
    live: npt.NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(_ROWS_AT_FIRST, np.bool_))
    moving: npt.NDArray[np.bool_] = attrs.field(factory=lambda: np.zeros(_ROWS_AT_FIRST, np.bool_))
    """Rows whose owners changed, and which former owners may still hold."""
    rows: dict[bytes, int] = attrs.field(factory=dict)
    free: list[int] = attrs.field(factory=lambda: list(range(_ROWS_AT_FIRST - 1, -1, -1)))
    places: tuple[int, int, int] = attrs.field(init=False)
    """Where `records`, `digests` and `live` lie."""

    def __attrs_post_init__(self) -> None:
        """Note where the rows are."""
        self._note_places()

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.rows)

    @property
    def buckets(self) -> npt.NDArray[np.uint8]:
        """The bucket of each row's record, (n,) uint8: byte 0 of its key."""
        return self.records.view(np.uint8).reshape(-1, RECORD_BYTES)[:, 0]

    def find(self, keys: list[bytes]) -> Rows:
        """Return the row of each key, (n,); -1 where there is none."""
        return np.array([self.rows.get(key, -1) for key in keys], np.intp)

    def are_new(self, keys: list[bytes]) -> bool:
        """Return whether the table has none of these keys."""
        return self.rows.keys().isdisjoint(keys)

    def add(self, keys: Sequence[bytes], packed: bytes) -> Rows:
        """Put records whose keys are new into rows of their own; return these."""
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
        # Behind those that are free already: rows are given out from the lowest on.
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
    """A message whose acknowledgement is awaited.

    rows, generations: the records it put into force.
    waiter, positions: the commit that waits, and for which of its records; 0: none.
    repairs: it puts whole buckets into force, and with them what earlier messages said of those.
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

    number:    of the last message sent.
    content:   what the owner should hold of this node once it has applied that message.
    pending:   the messages not acknowledged, in order of their numbers.
    repairing: buckets that the owner holds otherwise wait for their repair.
    unsure:      the owner may have let go of the records: ask until it answers.
    lagging:   it has let a commit wait for a whole timeout, and no summary has matched since.
    complete:  the version of the ring on which the owner knows that it has everything.
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
    """Where the buckets of `content` and `_state` are."""
    _asks: int = 0
    """Questions since the last summary that matched."""
    _asked_number: int = -1
    _asked_ring: bytes = b""
    _asked_buckets: npt.NDArray[np.uint64] = attrs.field(
        factory=lambda: np.zeros(BUCKETS, np.uint64)
    )
    _wanted: int = 0
    """The owner counts no hand-over of a lower number."""
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
        """Send these rows' records, new to the owner or not."""
        records = self.table.records[rows]
        sent = Sent(now, rows, records["generation"], waiter, positions, again=again)
        return self.put_told(sent, records.tobytes())

    def put_told(self, sent: Sent, packed: bytes) -> Put:
        """Send the packed records of its rows, which other streams may send, too."""
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
        """Withdraw records that are in the books no more, should the owner hold them still."""
        drops = np.empty(len(stale), DROP)
        drops["key"], drops["generation"] = stale["key"], stale["generation"]
        self._await(Sent(now, NO_ROWS, np.empty(0, np.uint64)))
        return Delete(self.number, drops.tobytes())

    def retract(self, rows: Rows) -> None:
        """Take rows out of the books before their records change; a message must follow."""
        self._hold(rows, is_held=False)

    def confirm(self, number: int) -> list[Sent]:
        """Take the acknowledgement of one message; return what it settled, oldest first.

        A repair may cover the records of earlier messages: they are settled with it.
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
        """Take a matching summary: every message up to `number` is in force. Return them."""
        if number > self.number:
            return []  # It answers no message of this stream.
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
        """State what the owner should hold; remember it, to compare with the answer.

        ring: the version of the ring on which this is all that the owner owns, b"" for none.
        """
        if ring and self._asked_number == self.number:
            self.number += 1  # An answer to the last question says nothing about this one.
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
        """Ask at a time, and again until a summary matches."""
        self.unsure = True
        self._asks = 0
        self.asked_at = at - ASK_FIRST_S

    def go_on_from(self, number: int) -> None:
        """Number the next summary at least so: the owner doubts all that was sent before.

        A number that is further ahead than an owner asks for is passed over.
        """
        if self._wanted < number <= min(self.number + NUMBERS_AHEAD_MAX, NUMBER_MAX):
            self._wanted = number
            self.number = max(self.number, number)
            # An answer to an earlier question says nothing about the next hand-over.
            self._asked_number = -1

    def send_again(self, number: int, now: float) -> tuple[list[Put], list[Sent]]:
        """Put again what the owner has not acknowledged of the messages up to a number.

        Returns those messages, and what of the earlier ones is of no interest any more. A message
        is repeated once: what differs then is repaired by buckets.
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
                # Its page is gone, or stored again: the later message speaks for it.
                rest = Sent(now, NO_ROWS, sent.generations[:0], sent.waiter, positions[~same])
                settled.append(rest)
        return puts, settled

    def differ(self, number: int, theirs: npt.NDArray[np.uint64]) -> bool:
        """Take the digests that an owner holds instead; return whether there is now a repair due.

        Only the answer to the last summary counts, and only once: the buckets have changed since,
        but what differed when it was asked is what must be repaired.
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
        others are put at once after that.
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
        """Begin again at an owner that holds nothing of this node: each row must be put again."""
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
        """Enter rows into the books, as far as they are not there, or take them out."""
        records, digests, _ = self.table.places
        self._states()
        changed: int = _hold(records, digests, rows.tobytes(), len(rows), *self._places, is_held)
        self.content.count += changed if is_held else -changed

    def _await(self, sent: Sent) -> None:
        self.number += 1
        self.pending[self.number] = sent
        if len(self.pending) > PENDING_MAX:
            # Its waiter still has other owners, and its timeout; its rows are confirmed by the
            # next summary that matches.
            self._forgotten = next(iter(self.pending))
            del self.pending[self._forgotten]

    def _confirm_rows(self, sent: Sent) -> None:
        self._states()
        records, states, rows = self.table.places[0], self._places[1], sent.rows
        _confirm(records, rows.tobytes(), sent.generations.tobytes(), len(rows), states)

    def _confirm_forgotten(self) -> Sent:
        """Confirm what was sent and is in no message that is still awaited."""
        self._forgotten = 0
        state = self._states()
        settled = state == SENT
        for later in self.pending.values():
            settled[later.rows] = False
        rows = np.flatnonzero(settled)
        state[rows] = CONFIRMED
        return Sent(self.asked_at, rows, self.table.records["generation"][rows])

    def _covers(self, sent: Sent) -> bool:
        """Return whether all that a message put into force is confirmed by now."""
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
"""Rows looked at in one step: two milliseconds with the rings of a thousand nodes."""

SAMPLED_MAX: Final = 4096
"""Rows whose heat is looked at to part the bins: 16 to each of the 256 bins of a large table."""

BIN_ROWS: Final = 4096
"""Rows of a bin, about: sorting them takes half a millisecond."""

BINS_MAX: Final = 256

RINGS_MAX: Final = 16
"""Former rings remembered. With more of them, within one hand-over, all streams are asked."""

_FIRST_BIT: Final = np.uint64(63)


@final
@attrs.define(eq=False)
class RingHandover:
    """The rows that a change of the ring may have moved: to be looked at, then to be handed over.

    former: the rings on which rows may have been told that are on their way still; None if those
            were too many to remember.
    """

    table: RecordTable
    former: list[HashRing] | None = attrs.field(factory=list, init=False)
    _before: HashRing | None = attrs.field(default=None, init=False)
    """What the rows not looked at were told by; None: by several rings, so each row is taken."""
    _is_moving_only: bool = attrs.field(default=False, init=False)
    """Rows that move already are looked at again, and no others."""
    _next: int = attrs.field(default=0, init=False)
    _end: int = attrs.field(default=0, init=False)
    """The rows from `_next` to `_end` were not looked at yet."""
    _edges: npt.NDArray[np.uint64] = attrs.field(factory=lambda: np.empty(0, np.uint64), init=False)
    """The least heat of each bin but the coldest, ascending."""
    _bins: list[list[Rows]] = attrs.field(factory=lambda: [[]], init=False)
    """Coldest first. Each row is in one of them at most."""
    _count: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        """Return how many rows wait to be handed over, as far as they were looked at."""
        return self._count

    @property
    def has_more(self) -> bool:
        """Whether rows may be taken: not while the hottest may be among those not looked at."""
        return self._count > 0 and not self.is_looking

    @property
    def is_looking(self) -> bool:
        """Whether there are rows that were not looked at yet."""
        return self._next < self._end

    @property
    def is_idle(self) -> bool:
        """Whether no row waits, looked at or not."""
        return not (self.is_looking or self._count)

    def begin(self, before: HashRing | None) -> None:
        """Look at all rows, after the ring has turned from `before`; None: from whatever it was.

        A turn within a turn looks at everything again: the records are then of several rings.
        """
        if before is None or self.is_looking or self._count:
            self._before = None
        else:
            self._before = before
            if not self.table.moving.any():
                self.former = []
        if before is not None and self.former is not None:
            self.former = [*self.former, before] if len(self.former) < RINGS_MAX else None
        self._is_moving_only = False
        self._start()

    def leave(self) -> None:
        """Look again at all rows that are on their way: their former owners may be left now."""
        self._before, self._is_moving_only = None, True
        self._start()

    def _start(self) -> None:
        # Rows that come later are told by the ring as it is now.
        self._next, self._end = 0, len(self.table.live)
        self._count = 0
        self._part_bins()

    def look(self, ring: HashRing) -> None:
        """Look at the next rows: those whose set of owners is another one now wait from now on."""
        table = self.table
        first, self._next = self._next, min(self._end, self._next + LOOKED_AT_MAX)
        rows = first + np.flatnonzero(table.live[first : self._next])
        if self._before is not None:
            keys = table.records["key"][rows]
            old, new = self._before.owners(keys), ring.owners(keys)
            if old.shape == new.shape:
                # Most keys keep their owners in order; only of the others the sets are compared.
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
        """Take rows to hand over: the newest commits first, what is on disk behind them all."""
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
        """Forget the former rings if no row is on its way any more."""
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
    """Yield each owner other than the own node, and the positions that it owns, ascending.

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
    """Return by what rows are ordered: whether in memory, then the generation, below 2**63."""
    resident = ((records["flags"] & RESIDENT) != 0).astype(np.uint64)
    heat: npt.NDArray[np.uint64] = records["generation"] & ~(np.uint64(1) << _FIRST_BIT)
    heat |= resident << _FIRST_BIT
    return heat
