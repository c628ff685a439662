"""Overlap: what the records of a batch say, beside a plain count of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.keys import PageKeys, from_bytes
from peercache.model.overlap import HOLDERS_MAX, Overlap, leading
from peercache.model.records import HAS_CHECKSUM, ON_DISK, RECORD, RESIDENT, Records


def keys_of(*numbers: int) -> PageKeys:
    return from_bytes(b"".join(number.to_bytes(16, "big") for number in numbers))


def records_of(*rows: tuple[int, int, int]) -> Records:
    """Return records of (key, holder, flags)."""
    records = np.zeros(len(rows), RECORD)
    for at, (key, holder, flags) in enumerate(rows):
        records[at] = (key.to_bytes(16, "big"), holder, 0, 0, 0, flags, 0)
    return records


@given(
    st.lists(st.integers(0, 12), max_size=20),
    st.dictionaries(
        st.tuples(st.integers(0, 14), st.integers(1, 5)), st.integers(0, 7), max_size=40
    ),
    st.booleans(),
)
def test_flags_are_those_of_the_records(
    numbers: list[int], held: dict[tuple[int, int], int], share: bool
) -> None:
    """Keys that come twice, keys with one half in common and strange records included."""
    # Equal first halves, or equal second ones: keys must be compared whole.
    shift = 0 if share else 64
    rows = [(key << shift, holder, flags) for (key, holder), flags in held.items()]

    told = Overlap.of(keys_of(*(n << shift for n in numbers)), records_of(*rows), whole=True)

    assert told.whole
    for row, holder in enumerate(told.holders):
        expected = [held.get((n, holder), 0) & (RESIDENT | ON_DISK) for n in numbers]
        assert told.flags[row].tolist() == expected
    assert {holder for (key, holder) in held if key in numbers} <= set(told.holders)


def test_runs_and_tiers() -> None:
    """A run ends at the first page that is missing on the tier; `stored` takes any holder's."""
    told = Overlap.of(
        keys_of(1, 2, 3, 4),
        records_of(
            (1, 7, RESIDENT), (2, 7, ON_DISK), (4, 7, RESIDENT | HAS_CHECKSUM), (2, 8, RESIDENT),
            (3, 8, RESIDENT | ON_DISK),
        ),
        whole=False,
    )  # fmt: skip

    assert told.holders == (7, 8)
    assert told.run().tolist() == [2, 0]
    assert told.run(RESIDENT).tolist() == [1, 0]
    assert told.pages(ON_DISK).tolist() == [1, 1]
    assert told.pages().tolist() == [3, 2]
    assert (told.stored(), told.stored(RESIDENT), told.stored(ON_DISK)) == (4, 4, 0)


def test_parts_are_joined_and_merged() -> None:
    """Joined: pages one after the other. Merged: what two nodes know of the same pages."""
    first = Overlap.of(keys_of(1, 2), records_of((1, 7, RESIDENT), (2, 8, ON_DISK)), whole=True)
    second = Overlap.of(keys_of(3), records_of((3, 8, RESIDENT)), whole=False)

    joined = Overlap.joined([first, second])
    assert joined.holders == (7, 8)
    assert joined.flags.tolist() == [[RESIDENT, 0, 0], [0, ON_DISK, RESIDENT]]
    assert not joined.whole

    merged = Overlap.merged(3, [(np.array([0, 2]), first), (np.array([2]), second)])
    assert merged.flags.tolist() == [[RESIDENT, 0, 0], [0, 0, ON_DISK | RESIDENT]]
    assert Overlap.merged(3, []).stored() == 0
    assert Overlap.joined([]).stored() == Overlap.unknown(5).stored() == 0


def test_the_longest_beginnings_are_kept() -> None:
    """More holders than an answer names: those of the longest runs, and it is not whole."""
    holders = HOLDERS_MAX + 9
    rows = [(key, holder, RESIDENT) for holder in range(1, holders + 1) for key in range(holder)]

    told = Overlap.of(keys_of(*range(holders)), records_of(*rows), whole=True)

    assert told.holders == tuple(range(10, holders + 1))
    assert not told.whole


def test_leading() -> None:
    assert leading(np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)).tolist() == [2, 4, 0]
    assert leading(np.zeros((2, 0), bool)).tolist() == [0, 0]
