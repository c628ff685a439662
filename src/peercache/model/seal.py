"""Seals: 64 bytes of metadata about the page in a slot, in published memory.

The word is the generation under which the page was committed, odd while the slot may be written to,
and zero if the slot never held a page. Key, space and length identify the page; the node stores
them before it stores the even word, and no even word is ever reused. So key, space and length that
are read between two equal even words are those of the page that was committed under it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peercache.model.runs import U64

SEAL = np.dtype(
    {
        "names": ["word", "key", "space", "length"],
        "formats": ["<u8", "V16", "<u8", "<u8"],
        "itemsize": 64,
    }
)
"""The space is that of the page's namespace: `Namespace.space_tag`. The fields are 40 bytes, but a
seal takes a whole cache line, because an RDMA adapter reads a line atomically."""

SEAL_BYTES = SEAL.itemsize

Seals: TypeAlias = npt.NDArray[np.void]

NEVER_COMMITTED = np.uint64(0)
"""The word of a slot that never held a page; no record has it."""

ODD = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""The word of a seal that was not read: odd, so never equal to a generation."""

assert SEAL_BYTES == 64, SEAL_BYTES


def still_committed(words: U64, generations: U64) -> npt.NDArray[np.bool_]:
    """Return which slots may be read, (n,) bool: the check before the first byte.

    It is not enough for a hit. A record may name a future commit, and would then validate bytes
    that were read before it.
    """
    # A slot without a page may be memory that its owner has not populated: reading it would
    # allocate it, and charge it to this process.
    same: npt.NDArray[np.bool_] = (words == generations) & (words != NEVER_COMMITTED)
    return same


def unread_seals(count: int) -> Seals:
    """Return the seals of pages that did not arrive, (count,) SEAL: every word is ODD."""
    seals: Seals = np.zeros(count, SEAL)
    seals["word"] = ODD
    return seals
