"""Location records: where a page is, in 56 bytes.

A record says which incarnation holds a page, where in its published memory, and under which
generation. Records are hints: only the generation word in the seal decides. Records are ordered
only within one holder, by `generation`: every change of a page's record (commit, demote, promote)
takes a new number, twice a per-node sequence, so it is always even.

Followers of a node are sent *changes* of what it holds, in 24 bytes each.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.installation.library import function

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
"""A record as plain bytes: numpy copies records with fields ten times as slowly, field by field."""

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
    """Return the records in one byte string."""
    return np.frombuffer(blob, RECORD)


BUCKETS = 256
"""Buckets of a stream's digest: the bucket of a record is byte 0 of its key."""

RECORDS_A_MESSAGE_MAX = 4096
"""Most records or drops a sender puts into one message: 224 of the 256 KiB that are accepted."""

DOUBTED_NUMBERS = 2**24
"""How far an owner that was paused advances the number of the next summary: in that time a holder
never sends as many messages."""

NUMBERS_AHEAD_MAX = 2**40
"""How far a holder lets an owner advance its number: 65,536 unanswered stalls."""


def keys_of(records: Records) -> list[bytes]:
    """Return the keys of records or drops, for use in dictionaries."""
    # In both, the key is the first field: numpy would copy the fields one by one.
    packed, step = records.tobytes(), records.dtype.itemsize
    return [packed[at : at + 16] for at in range(0, len(packed), step)]


def are_of(packed: bytes, holder: int) -> bool:
    """Return whether all of these packed records name this holder."""
    return bool(_compiled_are_of()(packed, len(packed) // RECORD_BYTES, holder))


@functools.cache
def _compiled_are_of() -> Callable[[bytes, int, int], int]:
    """Return the compiled function, which only nodes need."""
    compiled: Callable[[bytes, int, int], int] = function(
        "peercache_records_are_of", ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64,
        keeps_gil=True,
    )  # fmt: skip
    return compiled


@attrs.define(eq=False)
class Content:
    """The size of a set of records, and for each bucket the XOR of the records' digests.

    A record's digest is a multiply-xor-shift mix (splitmix64) of key, generation and flags; it is
    compiled, in `memory/_table_layout.h`, for holder and owner. Equal sets have equal XORs, and the
    chance of an accidental equality of different sets is 2**-64. It does not protect against an
    adversary, but that could forge digests anyway.

    Holder and owner each have one for the records that the owner should hold of the holder.
    """

    count: int = 0
    buckets: npt.NDArray[np.uint64] = attrs.field(factory=lambda: np.zeros(BUCKETS, np.uint64))

    def digest(self) -> int:
        """Return the digest of the whole set."""
        return int(np.bitwise_xor.reduce(self.buckets))


CHANGE = np.dtype(
    [
        ("key", "V16"),
        ("length", "<u4"),
        ("tier", "<u4"),
    ]
)
"""A page, its length in bytes, and its tier from now on: IN_MEMORY, IN_FILES or GONE."""
CHANGE_BYTES = CHANGE.itemsize

GONE = 0
"""Tier: the node no longer holds the page, for any reason; its length is 0."""
IN_MEMORY = RESIDENT
"""Tier: the page is in the node's published memory, whether or not it is also on disk."""
IN_FILES = ON_DISK
"""Tier: the page is only on the node's disk."""

Changes: TypeAlias = npt.NDArray[np.void]

assert CHANGE_BYTES == 24, CHANGE_BYTES


def changes_from_bytes(blob: bytes) -> Changes:
    """Return the changes in one byte string."""
    return np.frombuffer(blob, CHANGE)
