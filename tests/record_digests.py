"""The digests of records in plain numpy: what the compiled ones are compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peercache.model.records import Content, Records


def digest_of(records: Records) -> npt.NDArray[np.uint64]:
    """Return one 64-bit digest a record, (n,): what a stream summary XORs together."""
    halves = np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 2)
    mixed = halves[:, 0] ^ _mix(halves[:, 1] ^ _mix(records["generation"]))
    return _mix(mixed ^ records["flags"].astype(np.uint64))


def buckets_of(records: Records) -> npt.NDArray[np.intp]:
    """Return the bucket of each record or drop, (n,): byte 0 of its key."""
    keys = np.ascontiguousarray(records["key"]).view(np.uint8)
    return keys.reshape(-1, 16)[:, 0].astype(np.intp)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # The finaliser of splitmix64 (Steele, Lea, Flood 2014), wrapping on purpose.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def flip(content: Content, records: Records) -> None:
    """Add records to a content, or remove them: XOR does both. The count stays."""
    np.bitwise_xor.at(content.buckets, buckets_of(records), digest_of(records))
