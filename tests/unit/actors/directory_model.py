"""A model of the directory's table: dictionaries, an entry at a time, and a list of holders a key.

It is how the shard kept its records before they were packed.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.records import (
    BUCKETS,
    DROP_BYTES,
    RECORD_BYTES,
    from_bytes,
)
from tests.record_digests import buckets_of, digest_of


def split(packed: bytes, unit: int = RECORD_BYTES) -> list[bytes]:
    return [packed[at : at + unit] for at in range(0, len(packed), unit)]


def generation_of(record: bytes) -> int:
    return int.from_bytes(record[32:40], "little")


@attrs.define(eq=False)
class Entry:
    """The records of a holder, by key."""

    holder: int
    is_served: bool
    records: dict[bytes, bytes] = attrs.field(factory=dict)


@attrs.define(eq=False)
class ModelTable:
    """What DirectoryTable does, by the same names."""

    entries: dict[int, Entry] = attrs.field(factory=dict)
    listed: dict[bytes, list[int]] = attrs.field(factory=dict)
    """The holders of each key, oldest first."""

    def begin(self, entry: int, holder: int, *, is_served: bool) -> None:
        self.entries[entry] = Entry(holder, is_served)

    def put(self, entry: int, packed: bytes) -> int:
        """Return how many records are new."""
        own, fresh = self.entries[entry], 0
        for record in split(packed):
            key = record[:16]
            held = own.records.get(key)
            if held is not None and generation_of(held) >= generation_of(record):
                continue
            fresh += held is None
            own.records[key] = record
            holders = self.listed.setdefault(key, [])
            if own.holder not in holders:
                holders.append(own.holder)
        return fresh

    def drop(self, entry: int, packed: bytes) -> int:
        """Return how many records are gone."""
        own, gone = self.entries[entry], 0
        for drop in split(packed, DROP_BYTES):
            held = own.records.get(drop[:16])
            if held is not None and generation_of(held) <= int.from_bytes(drop[16:], "little"):
                del own.records[drop[:16]]
                self._unlist(drop[:16], own.holder)
                gone += 1
        return gone

    def replace(self, entry: int, buckets: bytes, packed: bytes) -> int:
        """Return how many records there are more."""
        own = self.entries[entry]
        before = {key for key in own.records if key[0] in buckets}
        for key in before:
            del own.records[key]
        self.put(entry, b"".join(row for row in split(packed) if row[0] in buckets))
        for key in before - own.records.keys():
            self._unlist(key, own.holder)
        now = {key for key in own.records if key[0] in buckets}
        return len(now) - len(before)

    def keep(self, entry: int, keys: set[bytes]) -> None:
        """Sweep: let all other records of an entry go; without keys the entry ends."""
        own = self.entries[entry]
        for key in own.records.keys() - keys:
            del own.records[key]
            self._unlist(key, own.holder)
        if not own.records:
            del self.entries[entry]

    def locate(self, keys: list[bytes], asker: int, holders_max: int) -> list[bytes]:
        found: list[bytes] = []
        for key in keys:
            # Of a holder that ended and came back, the entry that is served counts.
            served = {
                own.holder: own.records[key]
                for own in self.entries.values()
                if own.is_served and key in own.records
            }
            rows = [served[holder] for holder in self.listed.get(key, ()) if holder in served]
            if len(rows) > holders_max:
                first = asker % len(rows)
                rows = (rows[first:] + rows[:first])[:holders_max]
            found += rows
        return found

    def content(self, entry: int) -> tuple[list[int], npt.NDArray[np.uint64]]:
        """Return how many records each bucket has, and the XOR of their digests."""
        digests = np.zeros(BUCKETS, np.uint64)
        held = from_bytes(b"".join(self.entries[entry].records.values()))
        buckets = buckets_of(held)
        np.bitwise_xor.at(digests, buckets, digest_of(held))
        return np.bincount(buckets, minlength=BUCKETS).tolist(), digests

    def _unlist(self, key: bytes, holder: int) -> None:
        if any(own.holder == holder and key in own.records for own in self.entries.values()):
            return
        self.listed[key].remove(holder)
        if not self.listed[key]:
            del self.listed[key]
