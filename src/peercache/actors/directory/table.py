"""The packed table of a shard's records: which holders have which pages. A record takes 64 bytes
and its index entry.

Owns the memory of the table, a file or private (`_table_memory.c`, `_table_ahead.c`), which
`_table.c`, `_table_finding.c` and `_table_batches.c` work on. Each method is one compiled call
per batch. The table does not know streams or the view: a holder is an entry with records, and
answers name it or not.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from peercache.installation.library import function
from peercache.model.keys import KEY_BYTES
from peercache.model.process import ForkGuard
from peercache.model.records import BUCKETS, RECORD_BYTES

ROWS_MAX = 2**27
"""Most records of a table, the own pool's included: 8.6 GB, and the links of a row have no more
bits. Address space is reserved for all of them, but no memory."""

SLOTS_MIN = 4096
"""Slots of a new table's index: 32 KiB. An index is never smaller."""

SEED_BYTES = 16

RING_VERSION_BYTES = 8
"""Length of `HashRing.version`. The version of zeros stands for no ring; no ring has it."""

_BYTES_AT = 24
"""Where `bytes` is in the header (`memory/_table_layout.h`)."""

_HELD = np.dtype([("holder", "<u8"), ("place", "<u4"), ("entry", "<u2"), ("flags", "<u2")])
"""`struct held`: a holder of one key of a batch."""

_TABLE = ctypes.c_void_p
_ENTRY = ctypes.c_int64
_BYTES = (ctypes.c_char_p, ctypes.c_uint64)


def _call(name: str, result: Any, *arguments: Any) -> Any:
    # The calls keep the GIL: a call takes microseconds, at most a millisecond, while getting the
    # GIL back may take five.
    return function(f"peercache_table_{name}", result, *arguments, keeps_gil=True)


_new = _call(
    "new", _TABLE, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64
)  # fmt: skip
_free = _call("free", None, _TABLE)
_begin = _call("begin", ctypes.c_int64, _TABLE, ctypes.c_uint64, ctypes.c_int)
_serve = _call("serve", ctypes.c_int, _TABLE, _ENTRY, ctypes.c_int)
_sweep = _call("sweep", ctypes.c_int64, _TABLE, _ENTRY, ctypes.c_uint64)
_tend = _call("tend", ctypes.c_int, _TABLE, ctypes.c_uint64)
_put = _call("put", ctypes.c_int, _TABLE, _ENTRY, *_BYTES, ctypes.c_void_p)
_drop = _call("drop", ctypes.c_int, _TABLE, _ENTRY, *_BYTES, ctypes.c_void_p)
_replace = _call("replace", ctypes.c_int, _TABLE, _ENTRY, *_BYTES, *_BYTES, ctypes.c_void_p)
_locate = _call(
    "locate", ctypes.c_int64, _TABLE, *_BYTES, ctypes.c_uint64, ctypes.c_uint64,
    ctypes.c_void_p, ctypes.c_uint64,
)  # fmt: skip
_overlap = _call(
    "overlap", ctypes.c_int64, _TABLE, *_BYTES, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p
)  # fmt: skip
_has = _call("has", ctypes.c_int, _TABLE, _ENTRY, *_BYTES, ctypes.c_void_p)
_read = _call(
    "read", ctypes.c_int64, _TABLE, _ENTRY, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p,
    ctypes.c_uint64,
)  # fmt: skip
_content = _call(
    "content", ctypes.c_int64, _TABLE, _ENTRY, ctypes.c_void_p, ctypes.c_void_p
)  # fmt: skip
_authorise = _call("authorise", None, _TABLE, ctypes.c_uint64)
_tick = _call("tick", None, _TABLE, ctypes.c_uint64)
_count_removal = _call("count_removal", None, _TABLE)
_figures = _call("figures", None, _TABLE, ctypes.c_void_p)
_ahead_new = _call("ahead_new", ctypes.c_void_p, _TABLE)
_ahead_ask = _call("ahead_ask", None, ctypes.c_void_p, _TABLE)
_ahead_end = _call("ahead_end", None, ctypes.c_void_p)


class Change(NamedTuple):
    """What a batch has changed: records that are new, that were removed, and that found no room."""

    fresh: int
    gone: int
    refused: int


class Figures(NamedTuple):
    """What a table holds.

    epoch:   changes when a growth begins, and when its old index is no longer used.
    records: the records held, those of ended holders included.
    slots:   of the index, and of the one that it grows from.
    size_bytes: memory that the table may occupy.
    authority:  the version of the ring that was last granted, as a number; 0 after a revocation.
    tick_ns:    time of the last tick.
    """

    epoch: int
    records: int
    slots: int
    size_bytes: int
    authority: int
    tick_ns: int


@final
class DirectoryTable:
    """The records of some holders, by key and by holder.

    Entries are small numbers that `begin` gives. Invalid arguments (an entry that is not in use,
    bytes that are not whole records) raise ValueError and change nothing.
    """

    def __init__(
        self, seed: bytes, *, answer_max: int, rows_max: int = ROWS_MAX, slots_min: int = SLOTS_MIN,
        file: int = -1, incarnation: int = 0, loads_ahead: bool = False,
    ) -> None:  # fmt: skip
        """Reserve address space; raise MemoryError if there is none.

        seed:     SEED_BYTES that no peer knows: an attacker could use them to make keys that
                  collide.
        answer_max: most records of one answer.
        file:     descriptor of an empty file for the table, so that other processes can read it; -1
                  for private memory. Private memory is also used if the file has no room
                  (`is_shared`). The caller may close it afterwards.
        incarnation: the owner's, so that a reader can verify the owner.
        loads_ahead: whether a thread loads the file's memory before it is used (`_table_ahead.c`).
            It does not change what the table holds or returns.
        """
        if len(seed) != SEED_BYTES:
            raise ValueError(f"{len(seed)} bytes of a seed, {SEED_BYTES} are needed")
        table, self.is_shared = None, False
        for each in [file, -1] if file >= 0 else [-1]:
            rows = rows_max
            table = _new(seed, rows, slots_min, each, incarnation)
            while not table and rows > slots_min:
                # A limit of the address space (`ulimit -v`) or of the file size does not allow that
                # much.
                rows //= 2
                table = _new(seed, rows, slots_min, each, incarnation)
            if table:
                self.is_shared = each >= 0
                break
        if not table:
            raise MemoryError(f"no address space for a directory of {rows_max} records")
        self._table = table
        self._ahead: int | None = _ahead_new(table) if loads_ahead and self.is_shared else None
        # Not at interpreter exit: a node's thread may still call `tick`, and the kernel frees the
        # memory anyway.
        weakref.finalize(self, _let_go, table, self._ahead, ForkGuard()).atexit = False
        self._answer_max = answer_max
        self._answer = (ctypes.c_char * (answer_max * RECORD_BYTES))()
        self._change = (ctypes.c_uint64 * 3)()
        self._is_growing = False

    @property
    def place(self) -> tuple[int, int]:
        """The address at which the table begins, and how many bytes it spans."""
        return self._table, ctypes.c_uint64.from_address(self._table + _BYTES_AT).value

    @property
    def is_growing(self) -> bool:
        """Whether `tend` has work, as of the last change."""
        return self._is_growing

    # --- holders ----------------------------------------------------------------------------------

    def begin(self, holder: int, *, is_served: bool) -> int | None:
        """Give a holder an entry without records; None if the table has too many."""
        entry: int = _begin(self._table, holder, is_served)
        return None if entry < 0 else entry

    def serve(self, entry: int, *, is_served: bool) -> None:
        """Set whether answers name this holder from now on."""
        _check(_serve(self._table, entry, is_served))

    def sweep(self, entry: int, records_max: int) -> int:
        """Remove up to `records_max` records of a holder that ended; return how many were removed.

        If that is fewer than `records_max`, no record is left, and the entry may be given to
        another holder.
        """
        swept: int = _check(_sweep(self._table, entry, records_max))
        self._is_growing = self.tend(0)
        return swept

    def count(self, entry: int) -> int:
        """Return how many records a holder has."""
        count: int = _check(_content(self._table, entry, None, None))
        return count

    def content(self, entry: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Return how many records a holder has in each bucket, and the XOR of their digests."""
        counts, digests = np.empty(BUCKETS, np.uint32), np.empty(BUCKETS, np.uint64)
        _check(_content(self._table, entry, counts.ctypes.data, digests.ctypes.data))
        return counts, digests

    def read(self, entry: int, bucket: int | None = None) -> bytes:
        """Return a holder's records of one bucket, or all of them."""
        first, last = (0, BUCKETS - 1) if bucket is None else (bucket, bucket)
        count = _check(_read(self._table, entry, first, last, None, 0))
        into = ctypes.create_string_buffer(count * RECORD_BYTES)
        _check(_read(self._table, entry, first, last, into, count))
        return into.raw

    # --- batches ----------------------------------------------------------------------------------

    def put(self, entry: int, packed: bytes) -> Change:
        """Take the records that are newer than those held; refuse either all or none."""
        return self._changed(_put(self._table, entry, packed, len(packed), self._change))

    def drop(self, entry: int, packed: bytes) -> Change:
        """Remove each record that is not newer than its drop."""
        return self._changed(_drop(self._table, entry, packed, len(packed), self._change))

    def replace(self, entry: int, buckets: bytes, packed: bytes) -> Change:
        """Replace the content of these buckets; ignore records of other buckets."""
        done = _replace(
            self._table, entry, buckets, len(buckets), packed, len(packed), self._change
        )
        return self._changed(done)

    def has(self, entry: int, packed: bytes) -> list[bool]:
        """Return for each record whether this very one is held: key, place and generation."""
        held = np.empty(len(packed) // RECORD_BYTES, np.bool_)
        _check(_has(self._table, entry, packed, len(packed), held.ctypes.data))
        answer: list[bool] = held.tolist()
        return answer

    def locate(self, keys: bytes, asker: int, holders_max: int) -> tuple[int, bytes]:
        """Return how many served records these keys have, and the first `answer_max` of them.

        They come in key order, those of one key oldest first, of at most `holders_max` holders:
        each asker begins at a holder that depends on its number, so that askers spread over the
        copies.
        """
        answer = self._answer
        count = _check(
            _locate(self._table, keys, len(keys), asker, holders_max, answer, self._answer_max)
        )
        return count, memoryview(answer)[: min(count, self._answer_max) * RECORD_BYTES].tobytes()

    def overlap(
        self, keys: bytes, asker: int, holders_max: int
    ) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
        """Return the served holders of these keys, and the flags of their records.

        flags: (holders, keys) uint8; 0 where a holder has no record of a key. For a key with more
        than `holders_max` holders, that many are returned, chosen as `locate` does.
        """
        pages = len(keys) // KEY_BYTES
        held: npt.NDArray[np.void] = np.empty(pages * holders_max, _HELD)
        count = _check(_overlap(self._table, keys, len(keys), asker, holders_max, held.ctypes.data))
        held = held[:count]
        entries = held["entry"]
        named = np.bincount(entries)
        used = named.nonzero()[0]
        identities, rows = np.empty(len(named), np.uint64), np.empty(len(named), np.intp)
        identities[entries], rows[used] = held["holder"], np.arange(len(used))
        flags = np.zeros((len(used), pages), np.uint8)
        flags[rows[entries], held["place"]] = held["flags"]
        return tuple(identities[used].tolist()), flags

    # --- authority --------------------------------------------------------------------------------

    def grant(self, ring: bytes) -> None:
        """Allow readers to treat a missing key as absent, for keys that this node owns on this
        ring.

        ring: the version of the ring for which this table has all records of live holders. The
              grant holds until `revoke`, as long as `tick` is called often enough.
        """
        if len(ring) != RING_VERSION_BYTES:
            raise ValueError(f"{len(ring)} bytes of a ring's version, {RING_VERSION_BYTES} it has")
        _authorise(self._table, int.from_bytes(ring, "little"))

    def revoke(self) -> None:
        """Undo `grant`: the table may lack the record of a key that exists."""
        _authorise(self._table, 0)

    def tick(self, now_s: float) -> None:
        """Publish that the owner is active. now_s: seconds of the host's CLOCK_MONOTONIC."""
        _tick(self._table, int(now_s * 1e9))

    def count_removal(self) -> None:
        """Notify readers that have cached locations that pages were removed."""
        _count_removal(self._table)

    @property
    def authority(self) -> bytes | None:
        """The version of the ring that was granted, None after `revoke` and at the start."""
        word = self.figures().authority
        return word.to_bytes(RING_VERSION_BYTES, "little") if word else None

    # --- growth -----------------------------------------------------------------------------------

    def tend(self, slots_max: int) -> bool:
        """Do a bounded step of a growth that is under way; return whether it is unfinished."""
        self._is_growing = bool(_tend(self._table, slots_max))
        self._load_ahead()
        return self._is_growing

    def figures(self) -> Figures:
        """Return what the table holds."""
        figures = (ctypes.c_uint64 * 6)()
        _figures(self._table, figures)
        return Figures(*figures)

    def _changed(self, done: int) -> Change:
        self._is_growing = bool(_check(done))
        self._load_ahead()
        return Change(*self._change)

    def _load_ahead(self) -> None:
        if self._ahead is not None:
            _ahead_ask(self._ahead, self._table)


def _let_go(table: int, ahead: int | None, fork: ForkGuard) -> None:
    if fork.is_child:
        return  # The shared table does not exist any more (`memory.kernel`).
    if ahead is not None:
        _ahead_end(ahead)
    _free(table)


def _check(result: int) -> int:
    if result < 0:
        raise ValueError("no such entry, or not whole records")
    return result
