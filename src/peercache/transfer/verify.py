"""The one verification: whether bytes that were read are the page that was asked for.

A record names a slot and the generation under which its bytes were committed. The holder makes the
slot's generation word odd before it changes any of those bytes, and never uses an even value twice.
So bytes read *before* a word that still equals the record's generation are the committed bytes.
Every fabric reads the word after the bytes; nobody else compares generations, and only `reading`
calls this.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peercache.keys import PageKeys
from peercache.records import HAS_CHECKSUM, Records
from peercache.runs import U64

SAMPLE_ONE_IN = 64
"""With `verify = sampled`: keys whose checksum is made and checked. Writer and reader must choose
the same ones, so the choice is by key."""


def verified(records: Records, words: U64) -> npt.NDArray[np.bool_]:
    """Return which pages are hits, (n,) bool.

    records: (n,) RECORD, what was believed; words: (n,) uint64, read after all of a page's bytes.
    """
    generations = records["generation"]
    committed = (generations & np.uint64(1) == 0) & (generations != 0)
    same: npt.NDArray[np.bool_] = committed & (generations == words)
    return same


def wants_checksum(keys: PageKeys, mode: str) -> npt.NDArray[np.intp]:
    """Return the positions of the keys whose checksum is made or checked under `mode`."""
    if mode == "full":
        return np.arange(len(keys))
    if mode == "generation":
        return np.empty(0, np.intp)
    last_bytes = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 16)[:, 15]
    return np.flatnonzero(last_bytes % SAMPLE_ONE_IN == 0)


def checksums_agree(records: Records, digests: U64) -> npt.NDArray[np.bool_]:
    """Return which pages have the checksum of their record, or a record without one, (n,) bool."""
    without = (records["flags"] & HAS_CHECKSUM) == 0
    agree: npt.NDArray[np.bool_] = without | (records["checksum"] == digests)
    return agree
