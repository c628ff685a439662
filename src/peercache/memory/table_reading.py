"""Reads a directory table that another process writes: a batch of keys in one compiled call.

`_table_reading.c` does the work, and explains why it is correct. Nothing in the table is trusted
before it is checked, and invalid content ends the batch with a reason: the caller asks the owner.

Owns    a read-only mapping, or only a descriptor if another user may truncate the file.
Keeps   nothing is unmapped during a lookup: lookups and `close` exclude each other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import Any, final

import numpy as np

from peercache.installation.library import function
from peercache.memory.attached import opened
from peercache.memory.kernel import address_of
from peercache.memory.layout import table_name
from peercache.model.ids import Incarnation
from peercache.model.keys import KEY_BYTES
from peercache.model.reads import TICK_AGE_MAX_S, Looked
from peercache.model.records import RECORD_BYTES
from peercache.trust.sharing import Sharing

HOLDERS_MAX = 8
"""Holders of one key in a result, as many as in an owner's answer."""

KEYS_MAX = 2048
"""Keys of one compiled call, which keeps the GIL: half a millisecond."""

_FOUND_BYTES = 64
_LISTED_MAX = 64
_TICK_AGE_MAX_NS = int(TICK_AGE_MAX_S * 1e9)
_NO_PLACES = np.empty(0, np.uint32)
_NO_PLACES.flags.writeable = False

TORN = "torn"
"""The table changed during each attempt, or a search in it does not end."""

REASONS = {
    -1: "cut_short",
    -2: "foreign",
    -3: "other_version",
    -4: "malformed",
    -5: TORN,
}
"""Why a table is not used, by the return value of the compiled part."""


class Unusable(Exception):
    """A table that cannot be read now. reason: one of REASONS, or "closed"."""

    def __init__(self, reason: str) -> None:
        """Set the reason."""
        super().__init__(f"a directory table is not used: {reason}")
        self.reason = reason


class _Reading(ctypes.Structure):
    """The same as `struct reading`."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("file", ctypes.c_int64),
        ("bytes", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("found", ctypes.c_void_p),
        ("found_max", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("is_torn", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("authority", ctypes.c_uint64),
        ("tick_ns", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 15),
    )


def _call(name: str, *arguments: Any) -> Any:
    # The call keeps the GIL: getting it back may take five milliseconds, a call takes microseconds.
    return function(
        f"peercache_reading_{name}", ctypes.c_int64, ctypes.c_void_p, *arguments, keeps_gil=True
    )


_U64 = ctypes.c_uint64
_begin = _call("begin")
_look = _call("look", ctypes.c_char_p, _U64, _U64, _U64, _U64)
_end = _call("end", ctypes.c_void_p, ctypes.c_void_p)
_batch = _call("batch", ctypes.c_char_p, _U64, _U64, _U64, ctypes.c_void_p, ctypes.c_void_p)


@final
class TableReader:
    """Reads one table. The caller must ensure that only one thread uses it at a time."""

    def __init__(self, *, address: int, file: int, size_bytes: int, incarnation: int) -> None:
        """Read the table of a node, which must keep its address as long as this is used.

        address:    address of the mapped table, of `size_bytes`; 0 to read the file by `pread`.
        file:       its descriptor; -1 for memory of this process without a file.
        """
        self._room = 0
        self._found: Any = None
        self._into: Any = None
        self._places: Any = None
        self._reading = _Reading(
            at=address or None, file=file, bytes=size_bytes, incarnation=incarnation
        )
        self._at = ctypes.addressof(self._reading)

    def batch(self, keys: bytes, ring: int, now_s: float, asker: int) -> Looked:
        """Look up keys; raise Unusable if this table cannot be read now.

        ring:  version of the ring on which the caller considers the table's node an owner, as a
               number.
        now_s: seconds of CLOCK_MONOTONIC, read before the call.
        asker: a number of the caller: with many holders, callers begin at different ones.
        """
        if len(keys) <= KEYS_MAX * KEY_BYTES:
            return self._part(keys, ring, now_s, asker)
        parts = [
            self._part(keys[begin : begin + KEYS_MAX * KEY_BYTES], ring, now_s, asker)
            for begin in range(0, len(keys), KEYS_MAX * KEY_BYTES)
        ]
        places = [part.places + np.uint32(at * KEYS_MAX) for at, part in enumerate(parts)]
        return Looked(
            b"".join(part.records for part in parts),
            np.concatenate(places),
            all(part.is_final for part in parts),
            all(part.is_at_work for part in parts),
        )

    def _part(self, keys: bytes, ring: int, now_s: float, asker: int) -> Looked:
        count = len(keys) // KEY_BYTES
        self._have_room(count)
        found = _batch(self._at, keys, count, asker, HOLDERS_MAX, self._into, self._places)
        return self._looked(found, ring, now_s)

    # --- the parts of a batch, with the owner's work between them: for simulations and tests ----

    def begin(self, keys_max: int) -> None:
        """Begin a batch of at most `keys_max` keys; raise Unusable."""
        self._have_room(keys_max)
        _raised(_begin(self._at))

    def look(self, keys: bytes, place: int, asker: int) -> None:
        """Look up the batch's next keys, after `place` others; raise Unusable."""
        _raised(_look(self._at, keys, len(keys) // KEY_BYTES, place, asker, HOLDERS_MAX))

    def end(self, ring: int, now_s: float) -> Looked:
        """Return the result of the batch; raise Unusable, with reason "torn" to repeat it."""
        return self._looked(_end(self._at, self._into, self._places), ring, now_s)

    def _looked(self, found: int, ring: int, now_s: float) -> Looked:
        _raised(found)
        reading = self._reading
        # The tick may also be later than `now_s`: the owner has ticked since the caller read the
        # clock.
        is_at_work = abs(int(now_s * 1e9) - reading.tick_ns) <= _TICK_AGE_MAX_NS
        is_final = is_at_work and ring != 0 and reading.authority == ring and not reading.is_torn
        if not found:
            return Looked(b"", _NO_PLACES, is_final, is_at_work)
        return Looked(
            ctypes.string_at(self._into, found * RECORD_BYTES),
            np.frombuffer(ctypes.string_at(self._places, found * 4), np.uint32),
            is_final,
            is_at_work,
        )

    def _have_room(self, keys: int) -> None:
        if keys <= self._room:
            return
        found_max = keys * HOLDERS_MAX + _LISTED_MAX
        self._found = ctypes.create_string_buffer(found_max * _FOUND_BYTES)
        self._into = ctypes.create_string_buffer(found_max * RECORD_BYTES)
        self._places = ctypes.create_string_buffer(found_max * 4)
        self._reading.found = ctypes.addressof(self._found)
        self._reading.found_max = found_max
        self._room = keys


def _raised(result: int) -> None:
    if result < 0:
        raise Unusable(REASONS[result])


_REMOVALS_AT = 272
"""Where `removals` is in the header (`_table_layout.h`)."""


@final
class AttachedTable:
    """A table of another process. Every method may be called from any thread."""

    def __init__(self, file: int, incarnation: Incarnation, *, by_kernel: bool) -> None:
        """Map a verified file; use `open`."""
        size = os.fstat(file).st_size
        self.by_kernel = by_kernel
        self._file = file
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        address = 0
        if not by_kernel:
            self._mapping = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ)
            address = address_of(np.frombuffer(self._mapping, np.uint8))
        self._reader: TableReader | None = TableReader(
            address=address, file=file, size_bytes=size, incarnation=incarnation
        )

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        incarnation: Incarnation,
        sharing: Sharing | None = None,
    ) -> AttachedTable:
        """Open the table of a node, a file in this folder.

        sharing: the users whose files are read; None: this process's user and root.
        Raises PeerUnreachable if there is no such file here, Rejected if it is not a file of a
        sharing uid, or not open to us. Its content is checked with each lookup.
        """
        sharing = sharing if sharing is not None else Sharing.of()
        path = Path(folder) / table_name(incarnation)
        with opened(path, os.O_RDONLY, sharing, "table") as file:
            by_kernel = sharing.may_change_under_us(os.fstat(file))
            return cls(file, incarnation, by_kernel=by_kernel)

    def look(self, keys: bytes, ring: int, now_s: float, asker: int) -> Looked:
        """Look up packed keys, as `TableReader.batch`; raise Unusable, also after `close`."""
        with self._lock:
            if self._reader is None:
                raise Unusable("closed")
            return self._reader.batch(keys, ring, now_s, asker)

    def removals(self) -> int:
        """Return how often pages were removed, as far as the table's node knows; 0 once closed."""
        with self._lock:
            if self._reader is None:
                return 0
            packed = (
                os.pread(self._file, 8, _REMOVALS_AT)
                if self._mapping is None
                else self._mapping[_REMOVALS_AT : _REMOVALS_AT + 8]
            )
            return int.from_bytes(packed, "little")

    def close(self) -> None:
        """Unmap, after a running lookup. May be repeated."""
        with self._lock:
            if self._reader is None:
                return
            self._reader = None
            if self._mapping is not None:
                self._mapping.close()
            os.close(self._file)
