"""The location cache: records a reader remembers.

Always safe, because a stale record fails verification. Absence is never remembered: a page may
appear anywhere at any moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peercache.model.records import RECORD, RECORD_BYTES, RESIDENT, ROW, Records
from peercache.model.records import from_bytes as records_from_bytes

EXISTS_TRUSTS_S = 1.0
"""How old a record may be to answer `exists` without asking: a page evicted meanwhile only
shortens the get that follows."""

EVICTED_PART = 64
"""A full cache lets go of 1/64 of its records at once. A dict walks over the gaps at its front each
time that its oldest entry is asked for: one at a time, 128 of 262,144 took 9 ms, together 0.1."""


_Entry: TypeAlias = tuple[float, int, bytes]
"""When a record was stored (monotonic seconds), its holder, and the packed record."""

NOT_RESIDENT = 0
"""Stands for the holder of a page that is not in its memory: no incarnation is 0."""


class LocationCache:
    """A bounded map from page key to the record last seen, least recently used first out."""

    def __init__(self, *, entries_max: int) -> None:
        """Hold at most `entries_max` records (about 250 bytes each); 0 remembers nothing.

        Whenever there are more, a 64th of the oldest goes.
        """
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
        with self._lock:
            entries = self._entries
            taken = list(map(entries.pop, keys, repeat(None)))
            found = [entry for entry in taken if entry]
            if len(found) == len(keys):
                # What a get of known pages is: moved to the end with few steps a key.
                entries.update(zip(keys, found, strict=True))
            else:
                # A key that is repeated was there at its first place only.
                known = {key: entry for key, entry in zip(keys, taken, strict=True) if entry}
                entries.update(known)
                taken = [known.get(key) for key in keys]
        return [entry[2] if entry and entry[0] >= not_before else None for entry in taken]

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

    def has_any_at(self, holder: int, keys: Sequence[bytes]) -> bool:
        """Return whether any of the keys was last seen in the memory of this holder."""
        with self._lock:
            get = self._entries.get
            return any(entry[1] == holder for key in keys if (entry := get(key)) is not None)

    def store(self, records: Records, now: float) -> None:
        """Remember records, one a key."""
        if not self._entries_max or not len(records):
            return
        keys, packed = records["key"].tolist(), records.view(ROW).tolist()
        holders = np.where(records["flags"] & RESIDENT, records["holder"], NOT_RESIDENT).tolist()
        with self._lock:
            entries = self._entries
            # What was there already moves to the end.
            deque(map(entries.pop, keys, repeat(None)), maxlen=0)
            entries.update(zip(keys, zip(repeat(now), holders, packed, strict=False), strict=True))
            if len(entries) > self._entries_max:
                kept = self._entries_max - self._entries_max // EVICTED_PART
                for key in list(islice(entries, len(entries) - kept)):
                    del entries[key]

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
) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Return (records, known): one record a key, zeros where it is not known."""
    packed = [record for record in found if record]
    if len(packed) == len(found):
        return records_from_bytes(b"".join(packed)).copy(), np.ones(len(found), np.bool_)
    known = np.array([record is not None for record in found], np.bool_)
    blank = bytes(RECORD.itemsize)
    return records_from_bytes(b"".join(record or blank for record in found)).copy(), known
