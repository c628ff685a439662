"""The sum of sweeps: rows of one day and code are added up, and none is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from sims.__main__ import main
from sims.swept import GOAL, Row, add, ranges, rows_of, shown, total

ROW = Row("2026-11-26", "abc", "1234567", "small", 10, 8000, 2000, 90000, 300, 100, 0, "5-14")


def test_a_sweep_adds_a_row_with_its_seeds_and_counts(tmp_path: Path) -> None:
    """The second sweep of the same day, code and size is added to the first one's row."""
    path = tmp_path / "swept.tsv"
    for first, flags in ((100, []), (101, []), (700, ["--large-batches"])):
        argv = ["sweep", "--first", str(first), "--seeds", "1", "--jobs", "1", "--sum", str(path)]
        assert main([*argv, *flags]) == 0

    small, large = rows_of(path)
    assert (small.runs, small.failures, small.seeds) == (2, 0, "100-100,101-101")
    assert (large.batches, large.runs, large.seeds) == ("large", 1, "700-700")
    assert min(small.hits, small.misses, large.hits) > 0


def test_other_code_and_another_day_are_other_rows(tmp_path: Path) -> None:
    """The total is of all of them."""
    path = tmp_path / "swept.tsv"
    rows = [ROW, attrs.evolve(ROW, sources="def"), attrs.evolve(ROW, day="2026-11-27")]
    for row in rows:
        add(row, path)

    assert rows_of(path) == rows
    assert total(rows).hits == 3 * ROW.hits
    assert [each.name for each in tmp_path.iterdir()] == ["swept.tsv"]


def test_sweeps_that_end_at_the_same_time_are_all_counted(tmp_path: Path) -> None:
    """Each of them reads the file and replaces it."""
    path = tmp_path / "swept.tsv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: add(ROW, path), range(40)))

    (row,) = rows_of(path)
    assert row.runs == 40 * ROW.runs


@pytest.mark.parametrize(
    ("seeds", "text"),
    [([], ""), ([7], "7-7"), ([3, 1, 2], "1-3"), ([9, 1, 2, 10], "1-2,9-10")],
)
def test_seeds_are_named_as_ranges(seeds: list[int], text: str) -> None:
    """Runs end in any order."""
    assert ranges(seeds) == text


def test_what_remains_follows_from_the_fastest_kind_of_sweep() -> None:
    """80 hits a second: the rest of the aim takes about 3,472 hours; at 800, 347."""
    large = attrs.evolve(ROW, batches="large", hits=80_000)
    text, both = shown([ROW]), shown([ROW, large])

    assert f"{GOAL:,}" in text
    assert "0.0008 %" in text
    assert "80 hits a second of the sweeps with small batches" in text
    assert "3,472 hours" in text
    assert "0.0088 %" in both
    assert "800 hits a second of the sweeps with large batches" in both
    assert "347 hours" in both
