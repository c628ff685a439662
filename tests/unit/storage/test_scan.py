"""Entries that can be true together: a damaged index costs its wrong rows, and not the disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.actors.storage_port import DISK_ENTRY
from peercache.storage.scan import consistent

SLAB = 64 * BLOCK_BYTES
LENGTH = 9 * BLOCK_BYTES
SLOT = 10 * BLOCK_BYTES
"""Six of them fit into a slab, and three blocks are left over."""

FILES: Any = SimpleNamespace(
    folder=SimpleNamespace(slab_bytes=SLAB), blocks_of={0: 10, 1: 10, 5: 10}
)


def place(slot: int, slab: int = 0) -> int:
    return slab * SLAB + BLOCK_BYTES + slot * SLOT


def row(key: int, at: int, *, sequence: int = 1, length: int = LENGTH, used: int = 0) -> np.ndarray:
    entry = np.zeros(1, DISK_ENTRY)
    entry["key"] = np.void(key.to_bytes(16, "big"))
    entry["place"], entry["sequence"], entry["length"], entry["used"] = at, sequence, length, used
    return entry


def kept(*rows: np.ndarray) -> list[int]:
    """Return the keys that stay, after an index has taken them."""
    entries = consistent(np.concatenate(rows), FILES, slab_count=4)
    DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB).load(entries)
    return [int.from_bytes(key.tobytes(), "big") for key in entries["key"]]


@pytest.mark.parametrize(
    "wrong",
    [
        row(2, place(6)),
        row(2, place(1) + BLOCK_BYTES),
        row(2, 0),
        row(2, place(0, slab=2)),
        row(2, place(0, slab=5)),
        row(2, 2**63),
        row(2, place(1), length=0),
        row(2, place(1), length=LENGTH + 1),
    ],
    ids=[
        "behind the last slot", "between two slots", "in the slab's own block",
        "in a slab without a size", "beyond the last slab", "beyond all numbers",
        "without a length", "of another size",
    ],
)  # fmt: skip
def test_a_row_that_names_no_slot_is_dropped_and_the_others_stay(wrong: np.ndarray) -> None:
    assert kept(row(1, place(0)), wrong, row(3, place(5, slab=1))) == [1, 3]


def test_of_two_rows_of_one_place_or_one_key_the_newest_stays() -> None:
    rows = [
        row(1, place(0), sequence=5),
        row(2, place(0), sequence=9),
        row(3, place(1), sequence=7),
        row(3, place(2), sequence=6),
    ]

    assert sorted(kept(*rows)) == [2, 3]
    assert sorted(kept(*reversed(rows))) == [2, 3]


def test_rows_are_told_coldest_first() -> None:
    """Of equal age the one that was written first."""
    rows = [
        row(1, place(0), used=9),
        row(2, place(1), used=3, sequence=8),
        row(3, place(2), used=3, sequence=7),
    ]

    assert kept(*rows) == [3, 2, 1]
