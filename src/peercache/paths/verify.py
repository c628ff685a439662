"""The only verification: whether bytes that were read are the requested page.

A record names a slot and the generation under which its bytes were committed. The holder makes the
slot's generation word odd before it changes any of those bytes, and never uses an even value twice.
So bytes read *before* a word that still equals the record's generation are the committed bytes.
Every fabric reads the word after the bytes. No other module compares generations. `paths.read`
calls this module, and `paths.takeover`, for pages that a node takes over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peercache.model.keys import KEY_BYTES, PageKeys
from peercache.model.records import HAS_CHECKSUM, Records
from peercache.model.runs import U64
from peercache.model.seal import Seals

CHECKSUM_PORTION_BYTES = 64 * 2**20
"""Bytes that are checksummed between two checks of the clock: 3 ms."""

SAMPLE_ONE_IN = 64
"""With `verify = sampled`: one in this many keys has a checksum. Writer and reader must choose the
same keys, so the choice depends on the key."""


def verified(records: Records, space: int, seals: Seals) -> npt.NDArray[np.bool_]:
    """Return which pages are hits, (n,) bool.

    records: (n,) RECORD, with which the pages were read, each for the requested key.
    space:   that of the reader's namespace.
    seals:   (n,) SEAL, each read after all of its page's bytes, the word last; before the first
             byte the word was the record's generation.
    """
    generations = records["generation"]
    # A single seal would be broadcast to every record.
    assert seals.shape == generations.shape, f"{seals.shape} seals, {generations.shape} records"
    same: npt.NDArray[np.bool_] = (generations & np.uint64(1) == 0) & (generations != 0)
    same &= generations == seals["word"]
    same &= records["key"] == seals["key"]
    same &= records["length"] == seals["length"]
    same &= seals["space"] == np.uint64(space)
    return same


def names_another(records: Records, seals: Seals) -> npt.NDArray[np.bool_]:
    """Return which misses have a forged record, (n,) bool: its word fits another page."""
    fits: npt.NDArray[np.bool_] = records["generation"] == seals["word"]
    return fits


def wants_checksum(keys: PageKeys, mode: str) -> npt.NDArray[np.intp]:
    """Return the positions of keys with a checksum under `mode`."""
    if mode == "full":
        return np.arange(len(keys))
    if mode == "generation":
        return np.empty(0, np.intp)
    last_bytes = np.frombuffer(keys.tobytes()[KEY_BYTES - 1 :: KEY_BYTES], np.uint8)
    sampled: npt.NDArray[np.intp] = (last_bytes % SAMPLE_ONE_IN == 0).nonzero()[0]
    return sampled


def checksum_portions(places: npt.NDArray[np.intp], lengths: U64) -> list[npt.NDArray[np.intp]]:
    """Cut the indices, in order, into parts with at most a portion of bytes.

    lengths: bytes of each page of the batch. A single page may be larger than that.
    """
    if not len(places):
        return []
    sizes = lengths[places]
    if sizes.sum() <= CHECKSUM_PORTION_BYTES:
        return [places]
    begins = np.cumsum(sizes, dtype=np.uint64) - sizes
    portion = begins // np.uint64(CHECKSUM_PORTION_BYTES)
    return np.split(places, np.flatnonzero(np.diff(portion)) + 1)


def refuses_without_checksum(mode: str) -> bool:
    """Return whether a reader under `mode` refuses pages without a checksum in the record."""
    return mode == "full"


def owed_checksums(
    keys: PageKeys, records: Records, hits: npt.NDArray[np.bool_], mode: str
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return what `mode` requires of these hits, as positions: two lists without common pages.

    First those that it refuses, because their records have no checksum; then those whose bytes are
    to be compared with the checksum.
    """
    wanted = wants_checksum(keys, mode)
    owed = wanted[hits[wanted]]
    if not refuses_without_checksum(mode):
        return owed[:0], owed
    is_there = (records["flags"][owed] & HAS_CHECKSUM) != 0
    return owed[~is_there], owed[is_there]


def checksums_agree(records: Records, digests: U64) -> npt.NDArray[np.bool_]:
    """Return which pages have the checksum of their record, or a record without one, (n,) bool."""
    without = (records["flags"] & HAS_CHECKSUM) == 0
    agree: npt.NDArray[np.bool_] = without | (records["checksum"] == digests)
    return agree
