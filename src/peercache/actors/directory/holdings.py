"""What one directory owner holds of one holder: the receiving end of a record stream."""

from __future__ import annotations

import math

import attrs

from peercache.actors.directory.table import Change, DirectoryTable
from peercache.model.records import Content

NAME_BYTES = 40
"""The first bytes of a record: key, holder, offset and generation. They name one commit."""


@attrs.define(eq=False)
class Holdings:
    """The records of one holder, which lie in the shard's table.

    number:  the number of the last message of the stream that was applied.
    late_since: since when all summaries have had lower numbers; inf if the last one had not.
    is_whole:  the holder has handed over, and each message since then has followed the one before.
    complete:  the version of the ring on which the holder has told all that this node owns of it.
    heard_at:  when a summary matched last.
    """

    table: DirectoryTable
    entry: int
    number: int = 0
    late_since: float = math.inf
    is_whole: bool = False
    complete: bytes = b""
    heard_at: float = -math.inf

    def put(self, packed: bytes) -> Change:
        """Take the records that are newer than those held."""
        return self.table.put(self.entry, packed)

    def drop(self, packed: bytes) -> Change:
        """Let go of each record that is not newer than its drop."""
        return self.table.drop(self.entry, packed)

    def replace(self, buckets: bytes, packed: bytes) -> Change:
        """Make these records the whole of these buckets; pass over records of other buckets."""
        return self.table.replace(self.entry, buckets, packed)

    def has(self, packed: bytes) -> list[bool]:
        """Return of each record whether this very one is in force: its key, place, generation."""
        return self.table.has(self.entry, packed)

    def records(self, bucket: int | None = None) -> bytes:
        """Return the records of one bucket, or all of them."""
        return self.table.read(self.entry, bucket)

    def count_in(self, buckets: bytes) -> int:
        """Return how many records these buckets have."""
        counts, _ = self.table.content(self.entry)
        return sum(int(counts[bucket]) for bucket in set(buckets))

    @property
    def count(self) -> int:
        """How many records there are."""
        return self.table.count(self.entry)

    @property
    def content(self) -> Content:
        """Count and digests of the records, for comparison with the holder's own."""
        counts, digests = self.table.content(self.entry)
        return Content(int(counts.sum()), digests)
