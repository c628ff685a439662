"""What must hold in the memory of a directory table whenever no call of its owner is under way."""

from __future__ import annotations

import ctypes

import numpy as np

from peercache.actors.directory.table import DirectoryTable
from peercache.model.records import BUCKETS
from sims.tables import header_of

ROW = np.dtype(
    [("word", "<u8"), ("key", "V16"), ("offset", "<u8"), ("generation", "<u8"), ("length", "<u4"),
     ("flags", "<u4"), ("checksum", "<u8"), ("next", "<u4"), ("previous", "<u4")]
)  # fmt: skip
HOLDER = np.dtype(
    [("identity", "<u8"), ("state", "<u4"), ("next_free", "<u4"), ("count", "<u8"),
     ("digests", "<u8", BUCKETS), ("counts", "<u4", BUCKETS), ("first", "<u4", BUCKETS)]
)  # fmt: skip
EMPTY, TOMBSTONE = 0, 1 << 32
WHOLE, STATES, UNUSED = 1 << 16, 3 << 16, 0


def check_table(table: DirectoryTable) -> None:
    """Fail unless slots, rows, lists and sums of a table agree, and its searches end."""
    header = header_of(table)
    # Row 0 is never used, and has no memory before the first batch.
    rows = _array(table, header.rows_at, header.rows_used if header.rows_ready else 0, ROW)
    holders = _array(table, header.holders_at, header.holders_used, HOLDER)
    assert max(header.rows_used, 2) <= (header.rows_ready or 2) <= header.rows_max + 1
    assert header.holders_used == header.holders_ready
    live = 1 + np.flatnonzero(rows["word"][1:] & STATES)
    assert (rows["word"][live] & STATES == WHOLE).all(), "a row is still being written"
    assert header.rows_live == len(live) == holders["count"].sum()
    assert len(live) <= header.rows_max
    _check_indices(table, live)
    listed: list[int] = []
    for number, holder in enumerate(holders):
        if holder["state"] == UNUSED:
            left = holder["count"] or holder["digests"].any() or holder["counts"].any()
            assert not left, "an entry is free and not empty"
        listed += _listed(rows, number, holder)
    assert sorted(listed) == live.tolist(), "a row is in no list, or in two"


def _check_indices(table: DirectoryTable, live: np.ndarray) -> None:
    """Check that every row is named once, and that each search meets an empty slot."""
    header = header_of(table)
    names, full = [], 0
    for which in (0, 1):
        at, capacity, used, named = header.index[4 * which : 4 * which + 4]
        if not capacity:
            continue
        slots = _array(table, at, capacity, np.dtype("<u8"))
        numbers = slots & np.uint64(0xFFFFFFFF)
        names.append(numbers[numbers != 0])
        assert len(names[-1]) == named, "the named slots were counted wrongly"
        full += named
        if which != header.current:
            continue
        assert np.count_nonzero(slots) == used, "the slots in use were counted wrongly"
        is_idle = (slots == TOMBSTONE) & (np.roll(slots, -1) == EMPTY)
        assert not is_idle.any(), "a tombstone from which no search leads on"
        full += used - named
    capacity = header.index[4 * header.current + 1]
    assert header.slots_min <= capacity <= header.slots_max
    assert full * 5 <= capacity * 4, "an index is too full"
    assert sorted(np.concatenate(names).tolist()) == live.tolist(), "a row is named wrongly"


def _listed(rows: np.ndarray, number: int, holder: np.void) -> list[int]:
    """Return the rows in a holder's lists, which are linked both ways."""
    found = []
    for bucket in np.flatnonzero(holder["first"]).tolist():
        before, row, count = 0, int(holder["first"][bucket]), 0
        while row:
            assert rows["previous"][row] == before, "a link back is another one, or marked"
            assert rows["word"][row] & 0xFFFF == number
            assert bytes(rows["key"][row])[0] == bucket
            found.append(row)
            count += 1
            before, row = row, int(rows["next"][row])
        assert count == holder["counts"][bucket]
    assert holder["counts"].sum() == holder["count"] == len(found)
    return found


def _array(table: DirectoryTable, at: int, count: int, dtype: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(table.place[0] + at)
    return np.frombuffer(bytes(memory), dtype)
