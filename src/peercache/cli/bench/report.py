"""Shows the figures of a benchmark in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peercache.cli.terminal import console, table
from peercache.config.quantities import written_size

if TYPE_CHECKING:
    from peercache.cli.bench.replay import Outcome, Plan

Figures = Mapping[str, float]

_DRIVE_ROWS = (
    ("get", "get_gb_s", "GB/s", ""),
    ("exists of 128, hot", "exists_hot_us", "µs", ""),
)

_DISK_ROWS = (
    ("write-through", "write_gb_s", "GB/s", "write_ratio"),
    ("load", "load_gb_s", "GB/s", "load_ratio"),
    ("load in random order, 1 in flight", "scattered_1_gb_s", "GB/s", "scattered_1_ratio"),
    ("load in random order, 8 in flight", "scattered_8_gb_s", "GB/s", "scattered_8_ratio"),
    ("load in random order, 64 in flight", "scattered_64_gb_s", "GB/s", "scattered_64_ratio"),
    ("load of one page", "load_one_ms", "ms", ""),
    ("load of one page, p99", "load_one_p99_ms", "ms", ""),
    ("device: write", "raw_write_gb_s", "GB/s", ""),
    ("device: read", "raw_read_gb_s", "GB/s", ""),
)


def print_drive(title: str, figures: Figures) -> None:
    """Print what `bench drive` measured."""
    print_table(title, "", _DRIVE_ROWS, figures)
    print(f"  {figures['wrong_bytes']:.0f} wrong bytes, {figures['misses']:.0f} misses")


def print_disk(title: str, figures: Figures) -> None:
    """Print what the page store does, and what the device does."""
    print_table(title, "of the device", _DISK_ROWS, figures)
    if not figures["direct"]:
        print("  through the page cache: this file system refuses direct I/O")
    print(f"  {figures['wrong_bytes']:.0f} wrong bytes")


def print_table(
    title: str, of: str, rows: Sequence[tuple[str, str, str, str]], figures: Figures
) -> None:
    """Print a row for each figure that was measured; the ratio is to a limit of the same run."""
    shown = table("what", "median", "", of, title=title)
    for name, key, unit, ratio in rows:
        if key in figures:
            share = f"{figures[ratio]:.2f}" if ratio in figures else ""
            share += " trips" if share and ratio.endswith("_trips") else ""
            shown.add_row(name, f"{figures[key]:.2f}", unit, share)
    console().print(shown)


_REPLAY_ROWS = (
    ("blocks hit", "hit_rate", ".3f"),
    ("one idealised LRU over all nodes", "lru_hit_rate", ".3f"),
    ("compared with it", "of_lru", ".2f"),
    ("an idealised LRU for each node", "node_lru_hit_rate", ".3f"),
    ("a request waits, median", "wait_p50_ms", ".1f"),
    ("a request waits, p99", "wait_p99_ms", ".1f"),
    ("the latest request began late by", "late_max_s", ".1f"),
)
_REPLAY_UNITS = {"_ms": " ms", "_s": " s"}


def print_replays(trace: str, plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Print a column for each number of blocks."""
    print(
        f"{trace}: {len(plan.requests):,} requests for {plan.asked:,} blocks of "
        f"{written_size(plan.block_bytes)}, {plan.speed:,g} times as fast\n"
        f"{plan.nodes} nodes, {plan.prefill} of them get requests, routing {plan.routing}, "
        f"seed {plan.seed}"
    )
    shown = table("what", *(f"{outcome.blocks:,} blocks" for outcome in outcomes))
    columns = [replay_column(outcome.figures()) for outcome in outcomes]
    for name in dict.fromkeys(name for column in columns for name in column):
        shown.add_row(name, *(column.get(name, "-") for column in columns))
    console().print(shown)


def replay_column(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of one replay, by the name of their row."""
    cells = {
        name: f"{figures[key]:{form}}" + _REPLAY_UNITS.get(key[key.rfind("_") :], "")
        for name, key, form in _REPLAY_ROWS
        if figures[key] is not None
    }
    cells |= {f"read over {way}": written_size(n) for way, n in figures["bytes_read"].items()}
    cells["written"] = written_size(figures["bytes_written"])
    cells |= {f"not hit: {why}": f"{blocks:,}" for why, blocks in figures["misses"].items()}
    return cells | {
        f"not stored: {why}": f"{blocks:,}" for why, blocks in figures["sets_refused"].items()
    }
