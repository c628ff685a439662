"""The cache of locations: the records that a client has seen last, by page key.

It is always safe, because a stale record fails verification. It never remembers an absence: a page
may appear anywhere at any moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from threading import Lock
from typing import TypeAlias, final

import numpy as np

from peercache.model.records import RECORD_BYTES, RESIDENT, ROW, Records

EVICTED_PART = 64
"""A full cache drops 1/64 of its records at once. A dict walks over the gaps at its front whenever
its oldest entry is looked up: one at a time, 128 of 262,144 took 9 ms, together 0.1."""

_Entry: TypeAlias = tuple[float, int, bytes]
"""When a record was stored (monotonic seconds), its holder, and the packed record."""

NOT_RESIDENT = 0
"""Stands for the holder of a page that is not in its holder's memory: no incarnation is 0."""


@final
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
        """Return the packed record of each key, or None; what was found becomes most recent.

        not_before: records stored earlier than this (monotonic seconds) do not count.
        """
        with self._lock:
            entries = self._entries
            taken = list(map(entries.pop, keys, repeat(None)))
            found = [entry for entry in taken if entry]
            if len(found) == len(keys):
                # The fast path of a get: moved to the end with few steps a key.
                entries.update(zip(keys, found, strict=True))
            else:
                # A key that is repeated was there at its first place only.
                known = {key: entry for key, entry in zip(keys, taken, strict=True) if entry}
                entries.update(known)
                taken = [known.get(key) for key in keys]
        return [entry[2] if entry and entry[0] >= not_before else None for entry in taken]

    def holders(self, keys: Sequence[bytes], *, not_before: float) -> set[int] | None:
        """Return the holders of the keys, or None unless all are resident by records that new."""
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
            # A record that was there already moves to the end.
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
        """Forget the records of these keys."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
