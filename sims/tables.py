"""The directory tables of a run: a client's compiled reader, with the owner's work in between.

A batch is read in parts. Between two of them time passes, in which the actor may change its table,
another incarnation may start, or the table's index may be rebuilt; the process may also be paused.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable

import trio
import trio.lowlevel

from peercache.actors.directory.table import SLOTS_MIN, DirectoryTable
from peercache.memory.table_reading import HOLDERS_MAX, TORN, TableReader, Unusable
from peercache.model.hash_ring import HashRing
from peercache.model.keys import KEY_BYTES, split_keys
from peercache.model.member import Member
from peercache.model.reads import Looked
from peercache.model.records import BUCKETS, RECORD_BYTES
from peercache.paths.steps import ReadTable
from sims import stored
from sims.memory import NodeMemory, Truth
from sims.places import Place
from sims.trace import Violation

TRIES = 4
"""The same as in the compiled batch."""

STOPPED_S = (0.0, 0.0, 0.0, 0.0005, 0.02)
"""How long a process may be descheduled between two parts: any time counts as a pause, because a
batch takes microseconds."""

STOPPED_MAX_S = 4.0

AIMED = 0.985
"""A process is paused until its table changes if a drawn number is above this."""


WORDS_OF_INDEX = 4
"""Where an index begins, its slots, the used ones, and those that name a row."""


class Header(ctypes.Structure):
    """The beginning of a table, as in `memory/_table_layout.h`."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("authority", ctypes.c_uint64),
        ("tick_ns", ctypes.c_uint64),
        ("seed", ctypes.c_uint64 * 2),
        ("holders_at", ctypes.c_uint64),
        ("rows_at", ctypes.c_uint64),
        ("index", ctypes.c_uint64 * 8),
        ("current", ctypes.c_uint64),
        ("rows_ready", ctypes.c_uint64),
        ("holders_ready", ctypes.c_uint64),
        ("slots_min", ctypes.c_uint64),
        ("slots_max", ctypes.c_uint64),
        ("rows_max", ctypes.c_uint64),
        ("rows_used", ctypes.c_uint64),
        ("rows_live", ctypes.c_uint64),
        ("holders_used", ctypes.c_uint64),
        ("index_ready", ctypes.c_uint64 * 2),
        ("next_capacity", ctypes.c_uint64),
        ("moved", ctypes.c_uint64),
    )


UNUSED, SERVED = 0, 2
HOLDER_BYTES = 24 + BUCKETS * (8 + 4 + 4)
"""Size of a holder's entry, as in `memory/_table_layout.h`; its state follows its identity."""


def header_of(table: DirectoryTable) -> Header:
    """Return the header of a table, as it is in its memory."""
    return Header.from_address(table.place[0])


def table_file(name: str) -> int:
    """Return a file for a table: private memory would be freed while a reader uses it."""
    return os.memfd_create(name)


def make_index_again(table: DirectoryTable) -> None:
    """Make a table's index grow, which the few pages of a run would never do."""
    header = header_of(table)
    if not header.next_capacity and not table.is_growing:
        header.moved = 0
        # As large as it is: in a smaller one its rows may find no slot.
        header.next_capacity = header.index[WORDS_OF_INDEX * header.current + 1]
    while table.tend(SLOTS_MIN):
        pass


def turn_of(table: DirectoryTable) -> tuple[int, ...]:
    """Return the holders of a table's entries, and the ring for which it has authority."""
    header = header_of(table)
    at = table.place[0] + header.holders_at
    holders = [
        ctypes.c_uint64.from_address(at + entry * HOLDER_BYTES).value
        for entry in range(header.holders_used)
    ]
    return header.authority, *holders


class Observed:
    """The state of a table during one batch, from the owner's side."""

    def __init__(self, table: DirectoryTable, keys: bytes) -> None:
        """Observe the initial state."""
        self._table = table
        self._keys = {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
        self.ever: set[bytes] = set()
        self.always = self._look()

    def look(self) -> None:
        """Observe the table before the batch continues."""
        self.always &= self._look()

    def check(self, looked: Looked, who: str) -> None:
        """Fail unless the batch found all records that were there all the time, and no others."""
        found = _split(looked.records)
        for record in found:
            if record not in self.ever:
                raise Violation("table-record", f"{who} read {record.hex()}, which never was there")
        there, of_key = set(found), Counter(record[:KEY_BYTES] for record in found)
        for _, record in self.always:
            # With many holders only some are returned, different ones for each asker.
            if record not in there and of_key[record[:KEY_BYTES]] < HOLDERS_MAX:
                raise Violation("table-lost", f"{who} did not find {record.hex()}")

    def _look(self) -> set[tuple[int, bytes]]:
        """Return the records that answers name, with the entry of their holder.

        A holder that ends and comes back has another entry: its records were gone in between.
        Records of a holder that is not served yet may be returned once it is.
        """
        served: set[tuple[int, bytes]] = set()
        header = header_of(self._table)
        for entry in range(header.holders_used):
            at = self._table.place[0] + header.holders_at + entry * HOLDER_BYTES
            state = ctypes.c_uint32.from_address(at + 8).value
            if state == UNUSED:
                continue
            records = [r for r in _split(self._table.read(entry)) if r[:KEY_BYTES] in self._keys]
            self.ever.update(records)
            if state == SERVED:
                served.update((entry, record) for record in records)
        return served


class SimTables:
    """The tables that one client reads."""

    def __init__(
        self,
        place: Place,
        linked: Callable[[int], NodeMemory | None],
        rng: random.Random,
        asker: int,
        *,
        may_stop: Callable[[], bool],
        ring: Callable[[], HashRing],
        truth: Truth,
    ) -> None:
        """Start without open tables.

        linked: the memory of an incarnation, by its file's name. may_stop: whether the process may
                be paused for long now. ring: that of the client.
        """
        self._place = place
        self._linked = linked
        self._rng = rng
        self._asker = asker
        self._may_stop = may_stop
        self._ring = ring
        self._truth = truth
        self._opened: dict[int, DirectoryTable] = {}

    def nodes(self) -> Iterable[int]:
        """Return the nodes whose tables can be read now."""
        return self._opened

    def follow(self, members: Iterable[Member]) -> None:
        """Open the tables of the live members of this host; keep those that are open."""
        opened = {}
        for member in members:
            node = member.incarnation
            if member.boot_id != self._place.host:
                continue
            memory = self._linked(node)
            table = self._opened.get(node, memory.table if memory is not None else None)
            if table is not None:
                opened[node] = table
        self._opened = opened

    async def look(self, step: ReadTable) -> Looked | None:
        """Perform a step, with time between its parts."""
        table = self._opened.get(step.peer)
        if table is None:
            return None
        ring = self._ring()
        is_known = ring.version == step.ring
        before = {
            key: held
            for key in (split_keys(step.keys) if is_known else ())
            if (held := stored.lacking(step.peer, key, ring, self._truth))
        }
        for _ in range(TRIES):
            looked = await self._batch(table, step)
            if looked is not None:
                if looked.is_final:
                    found = {record[:KEY_BYTES] for record in _split(looked.records)}
                    stored.check_table(step.peer, found, before, ring, self._truth)
                return looked
        return None

    async def _batch(self, table: DirectoryTable, step: ReadTable) -> Looked | None:
        try:
            return await self._read(table, step)
        except Unusable as unusable:
            if unusable.reason != TORN:
                raise Violation("table-unusable", f"{self._place.name}: {unusable}") from None
            return None

    async def _read(self, table: DirectoryTable, step: ReadTable) -> Looked:
        address, size = table.place
        reader = TableReader(address=address, file=-1, size_bytes=size, incarnation=step.peer)
        count = len(step.keys) // KEY_BYTES
        is_split = self._rng.random() < 0.5
        ring, now_s = int.from_bytes(step.ring, "little"), trio.current_time()
        if is_split:
            await self._pause(table)
        observed = Observed(table, step.keys)
        reader.begin(count)
        at = 0
        while at < count:
            part = self._rng.randint(1, count - at) if is_split else count
            keys = step.keys[at * KEY_BYTES : (at + part) * KEY_BYTES]
            reader.look(keys, at, self._asker)
            at += part
            if is_split:
                await self._pause(table)
                observed.look()
        looked = reader.end(ring, now_s)
        observed.check(looked, self._place.name)
        return looked

    async def _pause(self, table: DirectoryTable) -> None:
        stopped_s = self._rng.choice(STOPPED_S)
        drawn = self._rng.random()
        if drawn < 0.015 and self._may_stop():
            stopped_s = self._rng.uniform(0.2, STOPPED_MAX_S)
        if self._rng.random() < 0.1:
            make_index_again(table)
        if stopped_s:
            self._place.pause(trio.current_time(), stopped_s)
        await trio.lowlevel.checkpoint()
        await self._place.awake()
        if drawn >= AIMED and self._may_stop():
            await self._stop_for_a_change(table)

    async def _stop_for_a_change(self, table: DirectoryTable) -> None:
        """Pause until the state on which a batch relies has changed, or a little longer."""
        began, until = turn_of(table), trio.current_time() + STOPPED_MAX_S
        while turn_of(table) == began and trio.current_time() < until and self._may_stop():
            self._place.pause(trio.current_time(), STOPPED_S[-1])
            await self._place.awake()


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]
