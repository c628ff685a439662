"""The location cache: records a reader remembers.

Always safe, because a stale record fails verification. Absence is never remembered: a page may
appear anywhere at any moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np

from peercache.records import RECORD, RECORD_BYTES, RESIDENT, Records
from peercache.records import from_bytes as records_from_bytes

EXISTS_TRUSTS_S = 1.0
"""How old a record may be to answer `exists` without asking: a page evicted meanwhile only
shortens the get that follows."""


_Entry: TypeAlias = tuple[float, int, bytes]
"""When a record was stored (monotonic seconds), its holder, and the packed record."""

NOT_RESIDENT = 0
"""Stands for the holder of a page that is not in its memory: no incarnation is 0."""


class LocationCache:
    """A bounded map from page key to the record last seen, least recently used first out."""

    def __init__(self, *, entries_max: int) -> None:
        """Hold at most `entries_max` records (about 250 bytes each); 0 remembers nothing."""
        self._entries_max = entries_max
        self._entries: dict[bytes, _Entry] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """Return how many records are remembered."""
        return len(self._entries)

    def find(self, keys: Sequence[bytes], *, not_before: float = -np.inf) -> list[bytes | None]:
        """Return the packed record of each key, or None; touch what was found.

        not_before: records stored earlier than this (monotonic seconds) do not count.
        """
        found: list[bytes | None] = []
        with self._lock:
            entries = self._entries
            for key in keys:
                entry = entries.pop(key, None)
                if entry is None:
                    found.append(None)
                    continue
                entries[key] = entry
                found.append(entry[2] if entry[0] >= not_before else None)
        return found

    def holders(self, keys: Sequence[bytes], *, not_before: float) -> set[int] | None:
        """Return who holds the keys, or None unless all are resident by records that new."""
        try:
            with self._lock:
                found = [self._entries[key] for key in keys]
        except KeyError:
            return None
        if not found or min(found)[0] < not_before:
            return None
        holders = {entry[1] for entry in found}
        return None if NOT_RESIDENT in holders else holders

    def store(self, records: Records, now: float) -> None:
        """Remember records, one a key."""
        if not self._entries_max or not len(records):
            return
        blob = records.tobytes()
        packed = [blob[i : i + RECORD_BYTES] for i in range(0, len(blob), RECORD_BYTES)]
        holders = np.where(records["flags"] & RESIDENT, records["holder"], NOT_RESIDENT).tolist()
        with self._lock:
            entries = self._entries
            for holder, record in zip(holders, packed, strict=True):
                key = record[:16]
                entries.pop(key, None)
                entries[key] = (now, holder, record)
            while len(entries) > self._entries_max:
                del entries[next(iter(entries))]

    def drop(self, records: Records) -> None:
        """Forget these very records; a newer one under the same key stays."""
        blob = records.tobytes()
        with self._lock:
            for start in range(0, len(blob), RECORD_BYTES):
                record = blob[start : start + RECORD_BYTES]
                entry = self._entries.get(record[:16])
                if entry is not None and entry[2] == record:
                    del self._entries[record[:16]]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget whatever is remembered under these keys."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


def unpack(
    found: Sequence[bytes | None],
) -> tuple[Records, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return (records, known): one record a key, zeros where it is not known."""
    known = np.array([record is not None for record in found], np.bool_)
    blank = bytes(RECORD.itemsize)
    return records_from_bytes(b"".join(record or blank for record in found)).copy(), known
