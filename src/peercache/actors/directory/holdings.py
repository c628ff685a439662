"""What one directory owner holds of one holder: the receiving end of a record stream.

Records are kept as the bytes they came in, in one dictionary a bucket (byte 0 of the key): a lookup
joins them as they are, a repair of a few buckets touches only those, and to let go of a holder is
to let go of one list.
"""

from __future__ import annotations

import math

import attrs

from peercache.model import records
from peercache.model.records import BUCKETS, DROP_BYTES, RECORD_BYTES, Content

Parts = list[dict[bytes, bytes]]
"""For each bucket, the packed record of each key."""


NAME_BYTES = 40
"""The first bytes of a record: key, holder, offset and generation. They name one commit."""


@attrs.define(eq=False)
class Holdings:
    """The records of one holder.

    number:  the number of the last message of the stream that was applied.
    late_since: since when all summaries have had lower numbers; inf if the last one had not.
    parts:   the records by bucket, by key.
    content: count and digests of them, for comparison with the holder's own.
    """

    number: int = 0
    late_since: float = math.inf
    parts: Parts = attrs.field(factory=lambda: [{} for _ in range(BUCKETS)])
    content: Content = attrs.field(factory=Content)

    def put(self, packed: bytes) -> list[bytes]:
        """Take the records that are newer than those held; return the keys that are new here."""
        fresh: list[bytes] = []
        flipped: list[bytes] = []
        parts = self.parts
        for at in range(0, len(packed), RECORD_BYTES):
            record = packed[at : at + RECORD_BYTES]
            key = record[:16]
            part = parts[key[0]]
            held = part.get(key)
            if held is None:
                fresh.append(key)
            elif _generation(held) >= _generation(record):
                continue
            else:
                flipped.append(held)
            part[key] = record
            flipped.append(record)
        self._flip(flipped, len(fresh))
        return fresh

    def drop(self, packed: bytes) -> list[bytes]:
        """Let go of each record that is not newer than its drop; return the keys that went."""
        gone: list[bytes] = []
        flipped: list[bytes] = []
        for at in range(0, len(packed), DROP_BYTES):
            key = packed[at : at + 16]
            part = self.parts[key[0]]
            held = part.get(key)
            if held is None:
                continue
            # A page may have been committed anew since: only its own record may go.
            if _generation(held) <= int.from_bytes(packed[at + 16 : at + 24], "little"):
                flipped.append(part.pop(key))
                gone.append(key)
        self._flip(flipped, -len(gone))
        return gone

    def has(self, record: bytes) -> bool:
        """Return whether this very record is in force: its key, place and generation."""
        key = record[:16]
        held = self.parts[key[0]].get(key)
        return held is not None and held[:NAME_BYTES] == record[:NAME_BYTES]

    def replace(self, buckets: bytes, packed: bytes) -> tuple[list[bytes], list[bytes]]:
        """Make these records the whole of these buckets; return the keys new here, and those gone.

        Records of other buckets are passed over.
        """
        before: dict[bytes, bytes] = {}
        for bucket in sorted(set(buckets)):
            before.update(self.parts[bucket])
            self.parts[bucket].clear()
        self._flip(list(before.values()), -len(before))
        named = frozenset(buckets)
        rows = [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]
        now_held = self.put(b"".join(row for row in rows if row[0] in named))
        fresh = [key for key in now_held if before.pop(key, None) is None]
        return fresh, list(before)

    def _flip(self, flipped: list[bytes], more: int) -> None:
        self.content.count += more
        if flipped:
            changed = records.from_bytes(b"".join(flipped))
            self.content.flip(records.buckets_of(changed), records.digest_of(changed))


def _generation(record: bytes) -> int:
    return int.from_bytes(record[32:40], "little")
