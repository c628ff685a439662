"""What the documentation shows of a soak: its figures, and small charts over its minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import attrs

from peercache.cli.bench.picture import COLOURS, tick_step
from tests.hostile.strangers import MIB
from tests.system.endurance.gates import (
    BUCKETS,
    DISK_BYTES,
    FIRST,
    LAST,
    Series,
    Summary,
    findings,
    middle,
    rows_of_page,
)

WIDTH, HEIGHT = 410, 190
"""Of one chart."""
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 26
COLUMNS = 2
LEGEND = 24

HOUR = Path(__file__).parent / "hour.json"
"""The summary of the run that the documentation shows: `--summary` writes it."""

EVENTS = {
    "kill_node": "a node killed",
    "pause_node": "a node paused",
    "stall_node": "a node that stalled",
    "kill_engine": "an engine killed",
    "pause_engine": "an engine paused",
    "die_writing": "an engine that died while it wrote",
}


@attrs.frozen
class Chart:
    """One chart: a figure of some processes, divided by `unit`."""

    title: str
    names: Sequence[str]
    figure: str
    unit: float = 1.0


def charts(summary: Summary) -> list[Chart]:
    """Return what the picture shows."""
    steady = sorted(summary["steady"])
    nodes = [name for name in steady if summary["steady"][name] == "node"]
    clients = [name for name in steady if name not in nodes]
    return [
        Chart("anonymous memory, MiB", steady, "anonymous_bytes", MIB),
        Chart("descriptors", steady, "descriptors"),
        Chart("threads", steady, "threads"),
        Chart("records in the directory", nodes, "rows"),
        Chart("files in /dev/shm", ["machine"], "shm_files"),
        Chart("disk folder, MiB", ["n0"], "disk_bytes", MIB),
        Chart("median get of 16 pages, ms", clients, "get_p50_ms"),
        Chart("the same work on this machine, ms", ["machine"], "loop_ms"),
    ]


def picture(summary: Summary) -> str:
    """Return an SVG: every chart, and a legend of all processes."""
    shown = charts(summary)
    colours = {
        name: COLOURS[at % len(COLOURS)] for at, name in enumerate(sorted(summary["steady"]))
    }
    parts = []
    for number, chart in enumerate(shown):
        x, y = WIDTH * (number % COLUMNS), LEGEND + HEIGHT * (number // COLUMNS)
        drawn = _drawn(chart, summary, lambda name: colours.get(name, "#374151"))
        parts.append(f'<g transform="translate({x} {y})">\n{drawn}\n</g>')
    for number, (name, colour) in enumerate(colours.items()):
        x = LEFT + 100 * number
        parts.append(f'<path d="M{x} 14h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(x + 26, 18, name))
    width, height = WIDTH * COLUMNS, LEGEND + HEIGHT * (len(shown) // COLUMNS)
    minutes = summary["seconds"] / 60
    title = f"What each process took in {minutes:g} minutes of kills and pauses"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{title}</title>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _drawn(chart: Chart, summary: Summary, colour_of: Callable[[str], str]) -> str:
    series: dict[str, Series] = {
        name: summary["series"][name][chart.figure] for name in chart.names
    }
    values = [value for each in series.values() for value in each if value is not None]
    top = max(values) / chart.unit * 1.05
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    minutes = summary["seconds"] / 60

    def x_of(bucket: float) -> float:
        return LEFT + width * bucket / BUCKETS

    def y_of(value: float) -> float:
        return TOP + height * (1 - value / top)

    parts = [_text(LEFT, TOP - 12, chart.title)]
    for window in (FIRST, LAST):
        left, right = x_of(window.start), x_of(window.stop)
        parts.append(f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
                     f'height="{height}" fill="#f3f4f6"/>')  # fmt: skip
    step = tick_step(top / 2)
    step *= -(-top // (4 * step))
    for number in range(int(top / step) + 1):
        y = y_of(number * step)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{width}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{number * step:g}", anchor="end"))
    for sixth in range(7):
        x = x_of(sixth * BUCKETS / 6)
        label = f"{sixth * minutes / 6:.3g}" + (" min" if sixth == 6 else "")
        parts.append(_text(x, HEIGHT - 10, label, anchor="end" if sixth == 6 else "middle"))
    for name, each in series.items():
        points = " ".join(
            f"{x_of(at + 0.5):.1f},{y_of(value / chart.unit):.1f}"
            for at, value in enumerate(each)
            if value is not None
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour_of(name)}" '
                     'stroke-width="1.5"/>')  # fmt: skip
    return "\n".join(parts)


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" fill="#374151" text-anchor="{anchor}">'
            f"{escape(words)}</text>")  # fmt: skip


def measured() -> Summary:
    """Return the run that the documentation shows."""
    found: Summary = json.loads(HOUR.read_text())
    return found


def shown(summary: Summary) -> str:
    """Return the figures of a run as Markdown: counts, and both windows of each process."""
    end, events, steady = summary["end"], summary["events"], summary["steady"]
    found = findings(summary)
    failed = [finding for finding in found if not finding.is_passed]
    counts = ", ".join(f"{count} × {EVENTS[name]}" for name, count in sorted(events.items()))
    lines = [
        (
            f"{end['calls']:,} calls, {end['hits']:,} hits of which every byte was checked, "
            f"{end['visits']:,} clients opened and closed, {end['babbled']:,} connections with "
            f"garbage; {counts}. {len(found)} gates, {len(failed)} failed."
        ),
        "",
        (
            "| process | anonymous memory, MiB | descriptors | threads | median get, ms | "
            "95th percentile, ms |"
        ),
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name in sorted(steady):
        cells = [
            _both(summary, name, figure, unit, places)
            for figure, unit, places in (
                ("anonymous_bytes", MIB, 1), ("descriptors", 1, 0), ("threads", 1, 0),
                ("get_p50_ms", 1, 1), ("get_p95_ms", 1, 0),
            )
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rows = [rows_of_page(summary, window) for window in (FIRST, LAST)]
    disk = _both(summary, "n0", "disk_bytes", MIB, 1)
    files = _both(summary, "machine", "shm_files", 1, 0)
    loop = _both(summary, "machine", "loop_ms", 1, 1)
    longest = ", ".join(f"{kind} {took_s:.2f} s" for kind, took_s in end["longest_s"].items())
    return "\n".join([
        *lines,
        "",
        (f"Records in the directories for each page: {rows[0]:.2f} → {rows[1]:.2f}. Files in "
        f"`/dev/shm`: {files}, two for each node. Disk folder of n0, with a limit of "
        f"{DISK_BYTES // MIB} MiB: {disk} MiB. A loop that does the same work each time, on this "
        f"machine: {loop} ms. Longest calls: {longest}."),
    ])  # fmt: skip


def _both(summary: Summary, name: str, figure: str, unit: float, places: int) -> str:
    """Return a figure in both windows."""
    series = summary["series"][name].get(figure)
    if series is None:
        return ""
    first, last = (f"{middle(series, window) / unit:.{places}f}" for window in (FIRST, LAST))
    return f"{first} → {last}"
