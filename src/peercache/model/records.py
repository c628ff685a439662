"""Location records: where a page is, in 56 bytes.

A record says which incarnation holds a page, where in its published memory, and under which
generation. Records are hints: only the generation word beside the bytes decides. Order exists only
within one holder, by `generation`: every change of a page's record (commit, demote, promote) takes
a new number, twice a per-node sequence, so it is always even.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

RECORD = np.dtype(
    [
        ("key", "V16"),
        ("holder", "<u8"),
        ("offset", "<u8"),
        ("generation", "<u8"),
        ("length", "<u4"),  # a page is smaller than 4 GiB
        ("flags", "<u4"),
        ("checksum", "<u8"),
    ]
)
RECORD_BYTES = RECORD.itemsize
ROW = np.dtype((np.void, RECORD_BYTES))
"""A record as plain bytes: numpy moves one with fields ten times as slowly, field by field."""

PAGE_BYTES_MAX = 2**32 - 1

DROP = np.dtype([("key", "V16"), ("generation", "<u8")])
"""A delete: removes the record of `key` if its generation is not newer than this one."""
DROP_BYTES = DROP.itemsize

RESIDENT = 1
"""Flag: the bytes are in the holder's published memory."""
ON_DISK = 2
"""Flag: the bytes are on the holder's disk."""
HAS_CHECKSUM = 4
"""Flag: `checksum` is the xxh3_64 of the page."""

Records: TypeAlias = npt.NDArray[np.void]

assert RECORD_BYTES == 56, RECORD_BYTES
assert DROP_BYTES == 24, DROP_BYTES


def from_bytes(blob: bytes) -> Records:
    """Return the records that came as one byte string."""
    return np.frombuffer(blob, RECORD)


BUCKETS = 256
"""Buckets of a stream's digest: the bucket of a record is byte 0 of its key."""

RECORDS_A_MESSAGE_MAX = 4096
"""Most records or drops a sender puts into one message: 224 KiB of the 256 that are accepted."""

DOUBTED_NUMBERS = 2**24
"""How far an owner that stood still puts the number of the next summary ahead: a holder never sends
so many messages while one does."""

NUMBERS_AHEAD_MAX = 2**40
"""How far ahead of its own number a holder lets an owner put it: 65,536 unanswered stalls."""


def digest_of(records: Records) -> npt.NDArray[np.uint64]:
    """Return one 64-bit digest a record, (n,): what a stream summary XORs together.

    A multiply-xor-shift mix of key, generation and flags; equal sets have equal XORs, and an
    accidental equality of unequal sets has a chance of 2**-64 (no defence against an adversary,
    who could lie outright).
    """
    halves = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 2)
    mixed = halves[:, 0] ^ _mix(halves[:, 1] ^ _mix(records["generation"]))
    return _mix(mixed ^ records["flags"].astype(np.uint64))


def buckets_of(records: Records) -> npt.NDArray[np.intp]:
    """Return the bucket of each record or drop, (n,): byte 0 of its key."""
    keys = np.ascontiguousarray(records["key"]).view(np.uint8)
    return keys.reshape(-1, 16)[:, 0].astype(np.intp)


def keys_of(records: Records) -> list[bytes]:
    """Return the keys of records or drops, as dictionaries want them."""
    packed = records["key"].tobytes()
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


@attrs.define(eq=False)
class Content:
    """The size of a set of records, and a digest for each bucket.

    Holder and owner each keep one for the records that the owner should hold of the holder.
    """

    count: int = 0
    buckets: npt.NDArray[np.uint64] = attrs.field(factory=lambda: np.zeros(BUCKETS, np.uint64))

    def flip(self, buckets: npt.NDArray[np.intp], digests: npt.NDArray[np.uint64]) -> None:
        """Add or remove records: XOR does both."""
        np.bitwise_xor.at(self.buckets, buckets, digests)

    def digest(self) -> int:
        """Return the digest of the whole set."""
        return int(np.bitwise_xor.reduce(self.buckets))


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # The finaliser of splitmix64 (Steele, Lea, Flood 2014), wrapping on purpose.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
