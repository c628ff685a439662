"""Overlap: runs, tiers, and what several nodes and batches say together."""

from __future__ import annotations

import numpy as np

from peercache.model.overlap import HOLDERS_MAX, Overlap, leading
from peercache.model.records import ON_DISK, RESIDENT


def told_of(pages: int, *rows: tuple[int, int, int], whole: bool = True) -> Overlap:
    """Return an overlap of (page, holder, flags)."""
    holders = tuple(sorted({holder for _, holder, _ in rows}))
    flags = np.zeros((len(holders), pages), np.uint8)
    for page, holder, bits in rows:
        flags[holders.index(holder), page] = bits
    return Overlap(holders, flags, whole)


def test_runs_and_tiers() -> None:
    """A run ends at the first page that is missing on the tier; `stored` takes any holder's."""
    told = told_of(
        4, (0, 7, RESIDENT), (1, 7, ON_DISK), (3, 7, RESIDENT), (1, 8, RESIDENT),
        (2, 8, RESIDENT | ON_DISK),
    )  # fmt: skip

    assert told.holders == (7, 8)
    assert told.run().tolist() == [2, 0]
    assert told.run(RESIDENT).tolist() == [1, 0]
    assert told.pages(ON_DISK).tolist() == [1, 1]
    assert told.pages().tolist() == [3, 2]
    assert (told.stored(), told.stored(RESIDENT), told.stored(ON_DISK)) == (4, 4, 0)


def test_parts_are_joined_and_merged() -> None:
    """Joined: pages one after the other. Merged: what two nodes know of the same pages."""
    first = told_of(2, (0, 7, RESIDENT), (1, 8, ON_DISK))
    second = told_of(1, (0, 8, RESIDENT), whole=False)

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

    told = Overlap.joined([told_of(holders, *rows)])

    assert told.holders == tuple(range(10, holders + 1))
    assert not told.whole


def test_leading() -> None:
    assert leading(np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)).tolist() == [2, 4, 0]
    assert leading(np.zeros((2, 0), bool)).tolist() == [0, 0]
