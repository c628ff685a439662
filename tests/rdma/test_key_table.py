"""Ranges are cut where the keys change, and nothing is opened that no piece covers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peercache.rdma.key_table import Cut, MemoryKeys, Piece


def u64(*values: int) -> np.ndarray:
    """Return numbers as the table takes them."""
    return np.array(values, np.uint64)


def parts(cut: Cut) -> list[tuple[int, int, int, int]]:
    """Return (source, begin, length, key) of every part."""
    columns = (cut.sources, cut.begins, cut.lengths, cut.keys)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_range_is_cut_at_borders_only() -> None:
    """The usual page needs one key; one that straddles two chunks is read with two, in order."""
    table = MemoryKeys.of([(1000, 500, 7), (1500, 500, 8), (2000, 10, 9)])

    cut = table.cut(u64(1900, 1400), u64(50, 605))

    assert parts(cut) == [(0, 1900, 50, 8), (1, 1400, 100, 7), (1, 1500, 500, 8), (1, 2000, 5, 9)]


PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 9)), max_size=8)
RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), max_size=8)


@given(PIECES, RANGES)
def test_cut_agrees_with_a_walk_over_every_byte(
    pieces: list[Piece], ranges: list[tuple[int, int]]
) -> None:
    """A range is covered exactly if each byte lies in some piece, and each part in its key's."""
    open_to = {
        byte: {key for begin, length, key in pieces if begin <= byte < begin + length}
        for byte in range(120)
    }

    cut = MemoryKeys.of(pieces).cut(
        u64(*[begin for begin, _ in ranges]), u64(*[length for _, length in ranges])
    )

    for number, (begin, length) in enumerate(ranges):
        mine = [part for part in parts(cut) if part[0] == number]
        covered = all(open_to[byte] for byte in range(begin, begin + length))
        assert bool(cut.covered[number]) == covered
        bytes_of_parts = [(byte, key) for _, at, size, key in mine for byte in range(at, at + size)]
        expected = list(range(begin, begin + length)) if covered else []
        assert [byte for byte, _ in bytes_of_parts] == expected
        assert all(key in open_to[byte] for byte, key in bytes_of_parts)
    assert all(length > 0 for _, _, length, _ in parts(cut))
    assert [part[0] for part in parts(cut)] == sorted(part[0] for part in parts(cut))
