"""Shows what `make peers-faults` has recorded: the tables of docs/explanation/comparison.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers_report import ruled

FIGURES = Path(__file__).with_name("peers_faults.json")

Figures = dict[str, Any]

TITLES = {
    "ours": "PeerCache",
    "ours tcp": "PeerCache, reads over tcp",
    "mooncake": "Mooncake",
    "mooncake upsert": "Mooncake, `batch_upsert_from`",
    "peercache-0.8.4": "PyPI's `peercache`",
    "redis": "Redis",
}

CAPTIONS = {
    "killed": "The owner is killed three times, and started again after 4 s.",
    "paused": "The owner is paused for 2, 8 and 14 s.",
    "evicted": "Pages of four times the owner's memory are set while others are read.",
}

HEADS = (
    "", "calls", "faults in a read", "pages read", "misses", "calls that raised", "wrong pages",
    "torn pages", "found after removal", "longest call, s", "calls after their deadline",
    "new page found, s",
)  # fmt: skip


def measured() -> Figures:
    """Return the figures that the documentation shows."""
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def _seconds(values: list[float | None]) -> str:
    """Return the least and the greatest; None is a new page that was not found in a minute."""
    if None in values:
        return "not in 60"
    known = [value for value in values if value is not None]
    if not known:
        return ""
    least, greatest = min(known), max(known)
    return f"{greatest:.1f}" if len(known) == 1 else f"{least:.1f} to {greatest:.1f}"


def _row(title: str, run: Figures) -> list[str]:
    if "failed" in run:
        return [title, run["failed"], *[""] * (len(HEADS) - 2)]
    names = ("hits", "misses", "errors", "wrong", "torn", "found_removed")
    longest = f"{run['longest_s']:.1f} ({run['longest_kind']})"
    if run["unanswered"]:
        longest += f", {run['unanswered']} without an answer"
    found = _seconds(run["recoveries_s"])
    if run["starts_s"]:
        found += f" (start: {_seconds(run['starts_s'])})"
    struck = f"{run['mid_read']} of {run['faults']}" if run["faults"] else ""
    counts = [f"{run[name]:,}" for name in names]
    return [title, f"{run['calls']:,}", struck, *counts, longest, f"{run['late']:,}", found]


def setting(figures: Figures) -> str:
    """Return a sentence about what ran, and when."""
    versions = ", ".join(
        f"{TITLES[store].replace('`', '')} {version}"
        for store, version in figures["versions"].items()
        if version and store in {"mooncake", "peercache-0.8.4", "redis"}
    )
    before, after = figures["load_averages"]
    return (
        f"Seed {figures['seed']}, {figures['date']}; {figures['processors']} processors, load "
        f"average {before:.0f} before it began and {after:.0f} at its end; "
        f"{versions or 'no other store'}."
    )


def markdown(figures: Figures) -> str:
    """Return a table for each scenario."""
    parts = [setting(figures)]
    for scenario, caption in CAPTIONS.items():
        rows = [
            _row(title, figures["runs"][store][scenario])
            for store, title in TITLES.items()
            if scenario in figures["runs"].get(store, {})
        ]
        parts.append("\n".join([f"{caption}\n", *ruled([list(HEADS), *rows])]))
    remarks = [f"* {TITLES[store]}: {why}." for store, why in figures["missing"].items()]
    if remarks:
        parts.append("\n".join(remarks))
    return "\n\n".join(parts)
