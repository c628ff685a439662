"""The location cache: the records that a client has seen last, by page key, in packed memory.

It is always safe, because a stale record fails verification. It never remembers an absence: a page
may appear anywhere at any moment. Every operation is one compiled call a batch: `exists` of known
pages, which an engine asks for each prompt, is little else.
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
"""Places for the keys that belong together: of them the least recently used goes."""

HEADER_BYTES: Final = 64
SET_BYTES: Final = 64 + WAYS * 72
LINE_BYTES: Final = 64

HOLDERS_MAX: Final = 64
"""Holders of one batch; of more, `holders` says nothing."""


@final
class LocationCache:
    """A bounded map from page key to the record last seen. Thread-safe."""

    def __init__(self, *, entries_max: int) -> None:
        """Hold at most `entries_max` records (76 bytes each); 0 remembers nothing.

        The memory is taken as records come. A cache that is nearly full may lack a few more of the
        least recently used records than its size says: each key has WAYS places.
        """
        self._ways = min(WAYS, entries_max)
        self._sets = entries_max // WAYS if entries_max >= WAYS else min(1, entries_max)
        self._lock = Lock()
        self._compiled = _compiled()
        self._holders = np.zeros(HOLDERS_MAX, np.uint64)
        self._holders_at = ctypes.addressof(Begin.from_buffer(self._holders))
        self.epoch = 0
        """Changes with each `end`: what a call has found out before is not stored after it."""
        self.clear()

    def __len__(self) -> int:
        """Return how many records are remembered."""
        return int(self._header[2])

    def find(self, keys: PageKeys, *, not_before: float = -np.inf) -> tuple[Records, Any]:
        """Return the record of each key, zeros where none is known, and which are known, (n,) bool.

        not_before: records stored earlier than this (monotonic seconds) do not count. What is there
        becomes most recent.
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
        """Return the holders of the keys, or None unless all are resident by records that new.

        are_touched: whether the holders must have been told, too, that the pages will be read.
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
        """Remember records, one a key.

        epoch:       from before the caller asked for them; None: they are of now.
        are_touched: the caller tells their holders now that the pages are about to be read.
        """
        self.store_packed(records.tobytes(), now, epoch=epoch, are_touched=are_touched)

    def store_packed(
        self, packed: bytes, now: float, *, epoch: int | None = None, are_touched: bool = False
    ) -> None:
        """Remember records as they came in a message."""
        if self._sets:
            count = len(packed) // RECORD_BYTES
            with self._lock:
                if epoch is not None and epoch != self.epoch:
                    return
                self._compiled.store(self._at, packed, count, now, are_touched)

    def drop(self, records: Records) -> None:
        """Forget these very records; a newer one under the same key stays."""
        packed = records.tobytes()
        with self._lock:
            self._compiled.drop(self._at, packed, len(records))

    def forget(self, keys: PageKeys) -> None:
        """Forget the records of these keys."""
        packed = keys.tobytes()
        with self._lock:
            self._compiled.forget(self._at, packed, len(keys))

    def end(self, keys: PageKeys | None = None) -> None:
        """Forget pages that were removed, all without keys; no call that has begun stores them."""
        with self._lock:
            self.epoch += 1
        if keys is None:
            self.clear()
        else:
            self.forget(keys)

    def clear(self) -> None:
        """Forget everything."""
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
