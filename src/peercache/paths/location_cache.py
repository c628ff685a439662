"""The last records that a client has seen, by page key.

`LocationCache` is always safe, because a stale record fails verification. It never caches an
absence: a page may appear anywhere at any moment. Every operation is one compiled call per batch:
an `exists` of known pages, which an engine calls for each prompt, does little else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin, function
from peercache.model.keys import PageKeys
from peercache.model.records import RECORD, RECORD_BYTES, Records

WAYS: Final = 16
"""Places in one set of keys: the least recently used record of a set is evicted."""

HEADER_BYTES: Final = 64
SET_BYTES: Final = 64 + WAYS * 72
LINE_BYTES: Final = 64

HOLDERS_MAX: Final = 64
"""Holders of one batch; with more, `holders` returns None."""


@final
class LocationCache:
    """A bounded map from page key to the last seen record. Thread-safe."""

    def __init__(self, *, entries_max: int) -> None:
        """Hold at most `entries_max` records (76 bytes each); with 0 it stays empty.

        The memory is allocated as records are stored. A nearly full cache may lack a few more of
        the least recently used records than its size suggests: each key has WAYS places.
        """
        self._ways = min(WAYS, entries_max)
        self._sets = entries_max // WAYS if entries_max >= WAYS else min(1, entries_max)
        self._lock = Lock()
        self._compiled = _compiled()
        self._holders = np.zeros(HOLDERS_MAX, np.uint64)
        self._holders_at = ctypes.addressof(Begin.from_buffer(self._holders))
        self.epoch = 0
        """Changes with each `end`: what a call has found before is not stored afterwards."""
        self.clear()

    def __len__(self) -> int:
        """Return the number of cached records."""
        return int(self._header[2])

    def find(self, keys: PageKeys, *, not_before: float = -np.inf) -> tuple[Records, Any]:
        """Return the record of each key, zeros if it is unknown, and which are known, (n,) bool.

        not_before: records stored earlier than this (monotonic seconds) do not count. Records found
                    become the most recently used ones.
        """
        records: Records = np.empty(len(keys), RECORD)
        known = np.empty(len(keys), np.bool_)
        into, marks = (
            ctypes.addressof(Begin.from_buffer(records)),
            ctypes.addressof(Begin.from_buffer(known)),
        )
        with self._lock:
            self._compiled.find(self._at, keys.tobytes(), len(keys), not_before, into, marks)
        return records, known

    def holders(
        self, keys: PageKeys, *, not_before: float, are_touched: bool = False
    ) -> list[int] | None:
        """Return the holders of the keys; None unless recent records of all say "in memory".

        are_touched: whether the holders must also have been notified that the pages will be read.
        """
        packed = keys.tobytes()
        with self._lock:
            found: int = self._compiled.holders(
                self._at, packed, len(keys), not_before, are_touched, self._holders_at, HOLDERS_MAX
            )
            return self._holders[:found].tolist() if found > 0 else None

    def has_any_at(self, holder: int, keys: PageKeys) -> bool:
        """Return whether any of the keys was last seen in the memory of this holder."""
        packed = keys.tobytes()
        with self._lock:
            return bool(self._compiled.any_at(self._at, holder, packed, len(keys)))

    def store(
        self, records: Records, now: float, *, epoch: int | None = None, are_touched: bool = False
    ) -> None:
        """Store records, one per key.

        epoch:       the epoch before the caller requested them; None: they are current.
        are_touched: the caller notifies their holders now that the pages are about to be read.
        """
        self.store_packed(records.tobytes(), now, epoch=epoch, are_touched=are_touched)

    def store_packed(
        self, packed: bytes, now: float, *, epoch: int | None = None, are_touched: bool = False
    ) -> None:
        """Store packed records, as in a message."""
        count = len(packed) // RECORD_BYTES
        with self._lock:
            if self._sets and epoch in (None, self.epoch):
                self._compiled.store(self._at, packed, count, now, are_touched)

    def drop(self, records: Records) -> None:
        """Remove exactly these records; a newer one of the same key stays."""
        packed = records.tobytes()
        with self._lock:
            self._compiled.drop(self._at, packed, len(records))

    def forget(self, keys: PageKeys) -> None:
        """Remove the records of these keys."""
        packed = keys.tobytes()
        with self._lock:
            self._compiled.forget(self._at, packed, len(keys))

    def end(self, keys: PageKeys | None = None) -> None:
        """Forget removed pages, all without `keys`; calls in progress cannot store them again."""
        with self._lock:
            self.epoch += 1
        if keys is None:
            self.clear()
        else:
            self.forget(keys)

    def close(self) -> None:
        """Release the memory and stay empty.

        A closed client is part of reference cycles: until they are collected, which may take
        minutes, it would keep these megabytes.
        """
        with self._lock:
            self._sets = self._ways = 0
        self.clear()

    def clear(self) -> None:
        """Remove all records."""
        memory = np.zeros(LINE_BYTES + HEADER_BYTES + self._sets * SET_BYTES, np.uint8)
        begin = -ctypes.addressof(Begin.from_buffer(memory)) % LINE_BYTES
        header: npt.NDArray[np.uint64] = memory[begin : begin + HEADER_BYTES].view(np.uint64)
        header[:2] = self._sets, self._ways
        with self._lock:
            # `header` keeps the memory alive.
            self._header, self._at = header, ctypes.addressof(Begin.from_buffer(header))


@functools.cache
def _compiled() -> _Calls:
    return _Calls()


@final
class _Calls:
    """The compiled functions. They take a microsecond or a few, so they keep the GIL."""

    def __init__(self) -> None:
        at, keys, count, now = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double

        def named(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found: Callable[..., Any] = function(
                f"peercache_locations_{name}", result, at, *arguments, keeps_gil=True
            )
            return found

        holders = (keys, count, now, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
        self.find = named(
            "find", ctypes.c_int64, keys, count, now, ctypes.c_void_p, ctypes.c_void_p
        )
        self.holders = named("holders", ctypes.c_int64, *holders)
        self.any_at = named("any_at", ctypes.c_int, ctypes.c_uint64, keys, count)
        self.store = named("store", None, keys, count, now, ctypes.c_int)
        self.drop = named("drop", None, keys, count)
        self.forget = named("forget", None, keys, count)
