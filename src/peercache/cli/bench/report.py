"""Shows the figures of a benchmark in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peercache.cli.terminal import console, table

Figures = Mapping[str, float]

_DRIVE_ROWS = (
    ("get", "get_gb_s", "GB/s", ""),
    ("exists of 128, hot", "exists_hot_us", "µs", ""),
)

_DISK_ROWS = (
    ("write-through", "spill_gb_s", "GB/s", "spill_ratio"),
    ("load", "load_gb_s", "GB/s", "load_ratio"),
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
