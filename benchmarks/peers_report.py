"""Shows the figures of `benchmarks.peers`: a text, and the tables and pictures of the docs.

`make peers` measures and writes FIGURES; `make docs` makes tables and pictures of them.
"""

from __future__ import annotations

import json
from html import escape
from math import log
from pathlib import Path
from typing import Any

import attrs

FIGURES = Path(__file__).with_name("peers.json")

Figures = dict[str, Any]

TITLES = {
    "mooncake": "Mooncake",
    "peercache-0.8.4": "PyPI's `peercache`",
    "redis": "Redis",
}
"""The other stores, in the order of the columns."""

SHARE_MIN = 0.99
"""A store that answered for fewer pages than this is shown, and is not the best other one."""


@attrs.frozen
class Row:
    """A line of a table. name: of the figures; ours: our column; less: whether less is better."""

    label: str
    name: str
    ours: str = "ours"
    less: bool = False


def moving_rows(figures: Figures) -> list[Row]:
    """Return the rows of sets and gets, in GB/s."""
    rows = []
    for size in figures["sizes"]:
        name = size["name"]
        rows += [
            Row(f"get {name}, same host", f"get {name}", "ours shm"),
            Row(f"get {name}, over tcp", f"get {name}", "ours tcp"),
            Row(f"set {name}", f"set {name}"),
            Row(f"set {name}, full pool", f"set full {name}"),
        ]
    return rows


ASKING_ROWS = [
    Row("128 unknown keys", "exists unknown", less=True),
    Row("128 unknown keys, p99", "exists unknown p99", less=True),
    Row("128 unknown keys, each looked up", "contains unknown", less=True),
    Row("128 stored keys, asked for the first time", "exists known", less=True),
    Row("128 stored keys, asked again", "exists hot", less=True),
    Row("128 unknown keys, a node serving at full rate", "exists busy", less=True),
    Row("128 unknown keys, a node serving at full rate, p99", "exists busy p99", less=True),
]

FAULT_RATES = [
    Row(f"{call}, a node {fault}", f"{fault} {call}")
    for fault in ("stopped", "killed")
    for call in ("set", "get")
]

FAULT_TIMES = [
    Row(f"longest {call}, a node {fault}", f"{fault} {call} longest", less=True)
    for fault in ("stopped", "killed")
    for call in ("set", "get", "exists")
]

RUNNING_TIMES = [
    Row(f"longest {call}, all nodes running", f"running {call} longest", less=True)
    for call in ("set", "get", "exists")
]


def measured() -> Figures:
    """Return the figures that the documentation shows."""
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def others(figures: Figures) -> list[str]:
    """Return the other stores that were measured."""
    return [store for store in TITLES if store in figures["versions"]]


def best_other(row: Row, figures: Figures) -> float | None:
    """Return the best median of the other stores that answered for enough pages."""
    cells = figures["rows"].get(row.name, {})
    medians: list[float] = [
        cells[store]["median"]
        for store in others(figures)
        if store in cells and cells[store].get("share", 1.0) >= SHARE_MIN
    ]
    if not medians:
        return None
    return min(medians) if row.less else max(medians)


def ratio(row: Row, figures: Figures) -> float | None:
    """Return ours / best other."""
    ours = figures["rows"].get(row.name, {}).get(row.ours)
    best = best_other(row, figures)
    return float(ours["median"]) / best if ours and best else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cell(figures: Figures, row: Row, name: str) -> str:
    """Return a median with its spread over the rounds, and the share of pages if not all."""
    cell = figures["rows"].get(row.name, {}).get(name)
    if cell is None:
        return ""
    if row.name.endswith("longest") and cell["greatest"] >= figures["hung_ms"]:
        return f"over {_number(figures['hung_ms'])}"
    text = _number(cell["median"])
    if cell["greatest"] > cell["least"]:
        text += f" ({_number(cell['least'])} to {_number(cell['greatest'])})"
    share = cell.get("share", 1.0)
    return text if share >= SHARE_MIN else f"{text}, {share:.0%} of the pages"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def table(figures: Figures, rows: list[Row], head: str, *, copy: bool = False) -> list[list[str]]:
    """Return the lines of a table, the head first. copy: with the machine's memory copy."""
    stores = [TITLES[store] for store in others(figures)]
    compared = f"ours / {stores[0]}" if len(stores) == 1 else "ours / best other"
    heads = [head, "PeerCache", *stores, compared]
    if copy:
        heads += ["memory copy", "ours / copy"]
    lines = [heads]
    for row in rows:
        if row.ours not in figures["rows"].get(row.name, {}):
            continue
        line = [row.label, _cell(figures, row, row.ours)]
        line += [_cell(figures, row, store) for store in others(figures)]
        line.append(_shown(ratio(row, figures)))
        if copy:
            name = next(
                f"copy {size['name']}"
                for size in figures["sizes"]
                if row.name.endswith(f" {size['name']}")
            )
            copied = figures["rows"][name]["machine"]["median"]
            line += [
                _number(copied),
                _shown(figures["rows"][row.name][row.ours]["median"] / copied),
            ]
        lines.append(line)
    return lines


def tables(figures: Figures) -> list[tuple[str, list[list[str]]]]:
    """Return every table with the sentence above it."""
    return [
        (
            "Rates; more is better.",
            table(figures, moving_rows(figures), "GB/s", copy=True),
        ),
        (
            "Time of an `exists` of 128 keys; less is better.",
            table(figures, ASKING_ROWS, "µs"),
        ),
        (
            "Rates while one of three nodes is paused or has just been killed; more is better.",
            table(figures, FAULT_RATES, f"GB/s, {figures['sizes'][0]['name']}"),
        ),
        (
            "The longest call of the seconds after that; less is better.",
            table(figures, FAULT_TIMES + RUNNING_TIMES, "ms"),
        ),
    ]


def setting(figures: Figures) -> str:
    """Return a sentence about what was measured, and where."""
    versions = ", ".join(
        f"{TITLES[store].replace('`', '')} {figures['versions'][store]}"
        for store in others(figures)
    )
    return (
        f"{figures['processors']} processors ({figures['machine']}), load average "
        f"{figures['load_average']:.1f} before it began; medians of {figures['rounds']} rounds "
        f"(with a failed node: {figures['fault_rounds']}) and in brackets the least and the "
        f"greatest; compared with {versions or 'no other store'}; {figures['minutes']:.0f} minutes."
    )


def _ratios(figures: Figures, rows: list[Row]) -> list[tuple[str, float]]:
    """Return ours / best other of the rows that have it."""
    found = [(row.label, ratio(row, figures)) for row in rows]
    return [(label, value) for label, value in found if value is not None]


def _listed(found: list[tuple[str, float]]) -> str:
    return "; ".join(f"{label}: {value:.2g}" for label, value in found)


def _unless_none(what: str, found: list[tuple[str, float]]) -> str:
    """Return a sentence that lists rows, with a space before it; "" for no rows."""
    return f" {what}: {_listed(found)}." if found else ""


def summary(figures: Figures) -> str:
    """Return five sentences: on what, where PeerCache wins, and where it loses."""
    rates, asked = _ratios(figures, moving_rows(figures)), _ratios(figures, ASKING_ROWS)
    failed, longest = _ratios(figures, FAULT_RATES), _ratios(figures, FAULT_TIMES)
    label, most = max(rates, key=lambda each: each[1])
    slower = [each for each in rates if each[1] < 1]
    longer = [each for each in asked if each[1] > 1]
    least, greatest = min(value for _, value in failed), max(value for _, value in failed)
    ordered = sorted(longest, key=lambda each: -each[1])
    return (
        f"* **On what**: three nodes of each store on one machine with {figures['processors']} "
        "processors, over loopback, without GPUs and RDMA adapters.\n"
        f"* **Pages**: PeerCache is faster than the best other store in "
        f"{len(rates) - len(slower)} of {len(rates)} rows of sets and gets, up to {most:.1f} "
        f"times ({label})."
        f"{_unless_none('It is slower in, as parts of the best rate of another store', slower)}\n"
        f"* **Lookups**: an `exists` takes less time than the best other's in "
        f"{len(asked) - len(longer)} of {len(asked)} rows."
        f"{_unless_none('It takes more in, as multiples of the best time', longer)}\n"
        f"* **Rates with a failed node**: from {least:.2f} to {greatest:.2f} times the best "
        "other's.\n"
        f"* **Longest calls with a failed node**, as multiples of the best other's: "
        f"{_listed(ordered)}."
    )


def remarks(figures: Figures) -> list[str]:
    """Return what was not measured, and the problems, one sentence each."""
    lines = [f"{name}: not measured; {why}." for name, why in figures["missing"].items()]
    lines += [f"{problem.splitlines()[0]}." for problem in figures["problems"]]
    wrong = {name: count for name, count in figures["wrong_pages"].items() if count}
    if wrong:
        lines += [f"{name}: {count} pages with wrong bytes." for name, count in wrong.items()]
    else:
        lines.append("No page that was read had other bytes than were set, in any store.")
    served = figures["rows"].get("served busy", {})
    if served:
        rates = ", ".join(f"{name} {cell['median']:.1f}" for name, cell in served.items())
        lines.append(f"Served meanwhile where a node serves at full rate, GB/s: {rates}.")
    return lines


def text(figures: Figures) -> str:
    """Return the text for a terminal."""
    parts = [setting(figures)]
    for caption, lines in tables(figures):
        if len(lines) == 1:
            continue
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        parts.append("\n".join([caption, *shown]))
    parts.append("\n".join(remarks(figures)))
    return "\n\n".join(parts)


def ruled(lines: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return ["| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:])]


def markdown(figures: Figures) -> str:
    """Return the part of docs/explanation/performance.md."""
    parts = [setting(figures)]
    for caption, lines in tables(figures):
        parts.append("\n".join([f"{caption}\n", *ruled(lines)]))
    parts.append("\n".join(f"* {line}" for line in remarks(figures)))
    return "\n\n".join(parts)


def with_mooncake(figures: Figures) -> str:
    """Return the tables of docs/explanation/comparison.md: Mooncake's figures next to ours."""
    only = {**figures, "versions": {"mooncake": figures["versions"]["mooncake"]}}
    longest = [row for row in FAULT_TIMES if row.name in figures["rows"]]
    asked = [row for row in ASKING_ROWS if not row.name.endswith("p99")]
    parts = [setting(only)]
    for head, rows in (("GB/s", moving_rows(only)), ("`exists`, µs", asked), ("ms", longest)):
        lines = table(only, rows, head)
        parts.append("\n".join(ruled(lines)))
    return "\n\n".join(parts)


WIDTH, LEFT, BAR, GAP = 860, 330, 16, 22
COLOURS = {
    "ours": "#d9480f", "mooncake": "#4c6ef5", "peercache-0.8.4": "#868e96", "redis": "#ced4da",
}  # fmt: skip


LEAST_SHOWN = 0.1
"""Where a logarithmic scale begins."""


def _bars(figures: Figures, row: Row) -> list[tuple[str, dict[str, float]]]:
    """Return the stores and cells of one group of bars."""
    cells = figures["rows"].get(row.name, {})
    names = {"ours": row.ours} | {store: store for store in others(figures)}
    return [(store, cells[name]) for store, name in names.items() if name in cells]


def _label(figures: Figures, row: Row, cell: dict[str, float], unit: str) -> str:
    if row.name.endswith("longest") and cell["greatest"] >= figures["hung_ms"]:
        return f"over {_number(figures['hung_ms'])} {unit}"
    share = cell.get("share", 1.0)
    part = "" if share >= SHARE_MIN else f", {share:.0%} of the pages"
    return f"{_number(cell['median'])} {unit}{part}"


def _picture(
    figures: Figures, rows: list[Row], title: str, unit: str, *, is_logarithmic: bool = False
) -> str:
    """Return an SVG with a group of bars per row, each with its range; all have one scale."""
    groups = [(row, _bars(figures, row)) for row in rows]
    greatest = max((cell["greatest"] for _, bars in groups for _, cell in bars), default=1.0)
    room = WIDTH - LEFT - 190

    def length(value: float) -> float:
        if not is_logarithmic:
            return room * value / greatest
        return max(0.0, room * log(value / LEAST_SHOWN) / log(greatest / LEAST_SHOWN))

    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    y = 36
    for row, bars in groups:
        if not bars:
            continue
        middle = y + len(bars) * BAR / 2 + 5
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(row.label)}</text>'
        )
        for store, cell in bars:
            least, end = LEFT + length(cell["least"]), LEFT + length(cell["greatest"])
            middle, width = y + BAR / 2 - 1, max(1.0, length(cell["median"]))
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[store]}"/>'
            )
            parts.append(
                f'<path d="M{least:.1f} {middle}H{end:.1f}M{least:.1f} {y + 3}v8'
                f'M{end:.1f} {y + 3}v8" stroke="#212529"/>'
            )
            parts.append(
                f'<text x="{end + 6:.1f}" y="{y + BAR - 4}" font-size="12">'
                f"{escape(_label(figures, row, cell, unit))}</text>"
            )
            y += BAR
        y += GAP
    x = 20
    for store in ("ours", *others(figures)):
        label = "PeerCache" if store == "ours" else TITLES[store].replace("`", "")
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[store]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{escape(label)}</text>')
        x += 190
    height = y + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="14" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def rates_picture(figures: Figures) -> str:
    """Return an SVG of the rates of set and get."""
    rows = moving_rows(figures)
    return _picture(figures, rows, "Pages set and read, GB/s: more is better", "GB/s")


def asking_picture(figures: Figures) -> str:
    """Return an SVG of the time that `exists` takes."""
    rows = [row for row in ASKING_ROWS if not row.name.endswith("p99")]
    return _picture(figures, rows, "exists of 128 keys, microseconds: less is better", "µs")


def failures_picture(figures: Figures) -> str:
    """Return an SVG of the longest calls while a node is paused, and after one was killed."""
    title = "Longest calls with a failed node, milliseconds, logarithmic: less is better"
    return _picture(figures, FAULT_TIMES, title, "ms", is_logarithmic=True)
