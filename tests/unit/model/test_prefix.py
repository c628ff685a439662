"""How far a prefix reaches, and how much of a prompt is where."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peercache.model.prefix import (
    ALL_PAGES,
    BLOCK_GROUPS,
    HOLDERS_MAX,
    TRAILING_PAGES,
    Overlap,
    Prefix,
    SidePages,
    leading,
    leading_columns,
    prefix_of,
)
from peercache.model.records import ON_DISK, RESIDENT

PAGES = 7
MASKS = st.lists(st.booleans(), min_size=PAGES, max_size=PAGES).map(np.array)
SIDES = st.lists(
    st.builds(
        SidePages,
        st.sampled_from([ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS, "another"]),
        MASKS,
        st.integers(1, PAGES + 2),
        st.integers(-1, 3),
        st.integers(-1, 3),
    ),
    max_size=3,
)


def allows(side: SidePages, end: int) -> bool:
    """Say in words whether a prefix of `end` pages has what a pool must have of it."""
    if side.policy == ALL_PAGES:
        return all(side.present[:end])
    if side.policy == TRAILING_PAGES:
        return all(side.present[max(0, end - side.trailing) : end])
    return side.policy == BLOCK_GROUPS


@given(kv=MASKS, sides=SIDES)
def test_a_prefix_may_end_where_every_pool_allows_it(
    kv: np.ndarray, sides: list[SidePages]
) -> None:
    """No usable end is left out, and none is invented."""
    found = prefix_of(kv, PAGES, sides)

    ends = [
        end
        for end in range(1, PAGES + 1)
        if all(kv[:end]) and all(allows(side, end) for side in sides)
    ]
    assert found.ends == ends
    assert found.pages == max(ends, default=0)
    assert found.kv == leading(kv)


@given(kv=MASKS, sides=SIDES)
def test_each_pool_reports_what_it_has_alone(kv: np.ndarray, sides: list[SidePages]) -> None:
    """The longest prefix next to KV, whatever the other pools lack."""
    found = prefix_of(kv, PAGES, sides)

    for side, pages in zip(sides, found.sides, strict=True):
        if side.policy != BLOCK_GROUPS:
            ends = [end for end in range(1, found.kv + 1) if allows(side, end)]
            assert pages == max(ends, default=0)


def test_groups_cover_blocks_as_far_as_they_are_whole() -> None:
    """Five keys in groups of two: two whole groups, of three pages each."""
    keys = np.array([True] * 5 + [False])
    groups = SidePages(BLOCK_GROUPS, keys, block_pages=3, group_pages=2)
    kv = np.ones(PAGES, np.bool_)

    assert prefix_of(kv, PAGES, [groups]) == Prefix(PAGES, list(range(1, PAGES + 1)), PAGES, [6])
    assert groups.covered(4) == 4
    assert SidePages(BLOCK_GROUPS, keys, block_pages=3).covered(PAGES) == 0


def test_without_kv_bytes_a_pool_of_every_page_vouches() -> None:
    """A pool of which only the end must be there shows nothing about the pages before it."""
    present = np.array([True] * 5 + [False] * 2)
    every, last = SidePages(ALL_PAGES, present), SidePages(TRAILING_PAGES, present)

    assert prefix_of(None, PAGES, [every, last]).pages == 5
    assert prefix_of(None, PAGES, [last]) == Prefix(0, [], 0, [0])
    assert prefix_of(None, PAGES, []) == Prefix(0, [], 0, [])


def test_nothing_asked_is_nothing_found() -> None:
    """A prompt shorter than a page."""
    nothing = np.empty(0, np.bool_)

    assert prefix_of(nothing, 0, [SidePages(TRAILING_PAGES, nothing)]) == Prefix(0, [], 0, [0])


def test_a_whole_prefix_may_end_anywhere() -> None:
    """Whether a pool wants every page of it or the last ones."""
    whole = np.ones(3, np.bool_)
    sides = [SidePages(ALL_PAGES, whole), SidePages(TRAILING_PAGES, whole, trailing=2)]

    assert prefix_of(whole, 3, sides) == Prefix(3, [1, 2, 3], 3, [3, 3])


def reported_of(pages: int, *rows: tuple[int, int, int], whole: bool = True) -> Overlap:
    """Return an overlap of (page, holder, flags)."""
    holders = tuple(sorted({holder for _, holder, _ in rows}))
    flags = np.zeros((len(holders), pages), np.uint8)
    for page, holder, bits in rows:
        flags[holders.index(holder), page] = bits
    return Overlap(holders, flags, whole)


def test_runs_and_tiers() -> None:
    """A run ends at the first page that is missing on the tier; `stored` takes any holder's."""
    reported = reported_of(
        4, (0, 7, RESIDENT), (1, 7, ON_DISK), (3, 7, RESIDENT), (1, 8, RESIDENT),
        (2, 8, RESIDENT | ON_DISK),
    )  # fmt: skip

    assert reported.holders == (7, 8)
    assert reported.run().tolist() == [2, 0]
    assert reported.run(RESIDENT).tolist() == [1, 0]
    assert reported.pages(ON_DISK).tolist() == [1, 1]
    assert reported.pages().tolist() == [3, 2]
    assert (reported.stored(), reported.stored(RESIDENT), reported.stored(ON_DISK)) == (4, 4, 0)


def test_parts_are_joined_and_merged() -> None:
    """Joined: pages one after the other. Merged: what two nodes know of the same pages."""
    first = reported_of(2, (0, 7, RESIDENT), (1, 8, ON_DISK))
    second = reported_of(1, (0, 8, RESIDENT), whole=False)

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

    reported = Overlap.joined([reported_of(holders, *rows)])

    assert reported.holders == tuple(range(10, holders + 1))
    assert not reported.whole


def test_leading() -> None:
    assert leading_columns(np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)).tolist() == [
        2,
        4,
        0,
    ]
    assert leading_columns(np.zeros((2, 0), bool)).tolist() == [0, 0]
