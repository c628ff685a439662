"""Changes of what a node holds, in 24 bytes: what followers of a node are told."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from peercache.model.records import ON_DISK, RESIDENT

CHANGE = np.dtype(
    [
        ("key", "V16"),
        ("length", "<u4"),
        ("tier", "<u4"),
    ]
)
"""A page, its length in bytes, and where it lies from now on: IN_MEMORY, IN_FILES or GONE."""
CHANGE_BYTES = CHANGE.itemsize

GONE = 0
"""Tier: the node holds the page no longer, for whatever reason; its length is 0."""
IN_MEMORY = RESIDENT
"""Tier: the page is in the node's published memory, whether it is on its disk too or not."""
IN_FILES = ON_DISK
"""Tier: the page is on the node's disk only."""

Changes: TypeAlias = npt.NDArray[np.void]

assert CHANGE_BYTES == 24, CHANGE_BYTES


def from_bytes(blob: bytes) -> Changes:
    """Return the changes that came as one byte string."""
    return np.frombuffer(blob, CHANGE)
