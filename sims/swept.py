"""The sum of all sweeps: a file of the repository with a row for each day and state of the code.

    python -m sims sweep --minutes 60 --sum sims/swept.tsv

A row names the seeds, so each of its runs can be repeated at its commit. Sweeps of one day, one
code and one size of batches are added up in one row.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from sims.sweep import Tally, commit, digest_of_sources

SWEPT = Path(__file__).parent / "swept.tsv"
GOAL = 10**9
"""Checked reads that the sum is to come to."""
SMALL, LARGE = BATCHES = ("small", "large")


@attrs.frozen
class Row:
    """Sweeps of one day, one code and one size of batches.

    sources: digest of the code. batches: "small", or "large" for `--large-batches`.
    seeds: as `first-last,first-last`.
    hits: pages read, every byte checked. misses: pages that a get did not return.
    """

    day: str
    sources: str
    commit: str
    batches: str
    runs: int
    hits: int
    misses: int
    messages: int
    virtual_s: int
    wall_s: int
    failures: int
    seeds: str

    def plus(self, other: Row) -> Row:
        """Return both together."""
        summed = ("runs", "hits", "misses", "messages", "virtual_s", "wall_s", "failures")
        return attrs.evolve(
            self,
            seeds=f"{self.seeds},{other.seeds}",
            **{name: getattr(self, name) + getattr(other, name) for name in summed},
        )


NAMES = tuple(field.name for field in attrs.fields(Row))
TEXTS = ("day", "sources", "commit", "batches", "seeds")


def row_of(tally: Tally, day: str) -> Row:
    """Return the row of one sweep."""
    return Row(
        day=day,
        sources=digest_of_sources().hex()[:12],
        commit=commit(),
        batches=LARGE if tally.has_large_batches else SMALL,
        runs=tally.runs,
        hits=tally.hits,
        misses=tally.misses,
        messages=tally.messages,
        virtual_s=round(tally.virtual_s),
        wall_s=round(tally.wall_s),
        failures=len(tally.failures),
        seeds=ranges(tally.seeds),
    )


def ranges(seeds: Sequence[int]) -> str:
    """Return seeds as ranges, in their order."""
    found: list[list[int]] = []
    for seed in sorted(seeds):
        if found and seed == found[-1][1] + 1:
            found[-1][1] = seed
        else:
            found.append([seed, seed])
    return ",".join(f"{first}-{last}" for first, last in found)


def rows_of(path: Path = SWEPT) -> list[Row]:
    """Return the rows of a file, none if it does not exist."""
    if not path.exists():
        return []
    head, *lines = path.read_text().splitlines()
    assert head.split("\t") == list(NAMES), head
    rows = []
    for line in lines:
        words = dict(zip(NAMES, line.split("\t"), strict=True))
        rows.append(Row(**{n: w if n in TEXTS else int(w) for n, w in words.items()}))  # type: ignore[arg-type]
    return rows


def add(row: Row, path: Path = SWEPT) -> None:
    """Add a row to a file, or to its row of the same kind; all of it or nothing."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # Sweeps that end at the same time wait for each other.
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = {_kind(each): each for each in rows_of(path)}
        same = rows.get(_kind(row))
        rows[_kind(row)] = row if same is None else same.plus(row)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write("".join(line + "\n" for line in _lines(list(rows.values()))))
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    finally:
        os.close(folder)


def _kind(row: Row) -> tuple[str, str, str]:
    return row.day, row.sources, row.batches


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "\t".join(NAMES)
    for row in rows:
        yield "\t".join(str(value) for value in attrs.astuple(row))


def total(rows: Sequence[Row]) -> Row:
    """Return the sum of rows, of which there is at least one."""
    first, *others = rows
    for other in others:
        first = first.plus(other)
    return first


def shown(rows: Sequence[Row] | None = None) -> str:
    """Return what the documentation shows of the sum, as Markdown."""
    rows = rows if rows is not None else rows_of()
    sums = [
        total(of_kind)
        for batches in BATCHES
        if (of_kind := [row for row in rows if row.batches == batches])
    ]
    hits = sum(each.hits for each in sums)
    fastest = max(sums, key=lambda each: each.hits / each.wall_s)
    rate = fastest.hits / fastest.wall_s
    remains = (
        f"The aim is {GOAL:,} checked hits. That is {100 * hits / GOAL:.3g} % of it, and at the "
        f"{rate:,.0f} hits a second of the sweeps with {fastest.batches} batches another "
        f"{(GOAL - hits) / rate / 3600:,.0f} hours remain."
    )
    lines = [
        "| batches | seeds | failed | hits checked | misses | messages | virtual hours | hours |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
        *map(_shown, sums),
        "",
        remains,
    ]
    return "\n".join(lines)


def _shown(row: Row) -> str:
    return (
        f"| {row.batches} | {row.runs:,} | {row.failures} | {row.hits:,} | {row.misses:,} "
        f"| {row.messages:,} | {row.virtual_s / 3600:.1f} | {row.wall_s / 3600:.1f} |"
    )
