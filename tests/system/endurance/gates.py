"""What the samples of a soak must show: nothing grows, and the end is as fast as the beginning.

The run is cut into BUCKETS of equal length; of each the summary keeps the median of every figure.
Two windows are compared: FIRST, when caches and allocators have found their size, and LAST. Of an
hour these are the minutes 10 to 20 and the last ten.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.hostile.strangers import MIB
from tests.system.endurance.load import EXISTS_TIMEOUT_S, OP_TIMEOUT_S
from tests.system.endurance.samples import CLIENT, END, EVENT, MACHINE, NODE, Row

BUCKETS = 60
FIRST, LAST = slice(10, 20), slice(50, 60)

MEMORY_MAX = {NODE: 8 * MIB, CLIENT: 24 * MIB}
"""Growth of anonymous memory. A client's allocator takes 20 MB once, in whichever minute it first
replaces its location cache."""
DESCRIPTORS_MAX = 16
"""While a holder stalls, its readers open further channels, and keep them for a minute."""
THREADS_MAX = {NODE: 4, CLIENT: 4}
"""A client starts a thread for each further holder when it first reads from several over tcp, and
keeps it; a node does the same when it first takes copies from several nodes. There are four."""
FILES_OF_NODE = 2
"""In shared memory: its pool and its directory table."""
ROWS_OF_PAGE = 3
"""In directories: at two owners, and at its holder."""
ROWS_FACTOR = 1.15
DISK_BYTES = 16 * MIB
DISK_FACTOR = 1.1
"""The folder of a disk: pages within its limit, and the index."""
DISK_FILES_MAX = DISK_BYTES // MIB + 8
"""A slab has a mebibyte; the others are the index and its log."""
SHM_FACTOR = 1.05
LATENCY_FACTORS = (2.0, 3.0)
"""Of the median and of the 95th percentile, after the machine's own slowness."""
LATENCY_SPARE_MS = 2.0
LATENCIES_FROM_S = 600.0
"""A shorter run has about ten calls of a kind in a window: their latencies are not judged."""
HITS_PER_MINUTE_MIN = 1200
LATE_S = 1.5
"""What a scheduler may add to a deadline, in addition to pauses that the process noticed."""

FIGURES = {
    NODE: ("anonymous_bytes", "descriptors", "threads", "rows", "pool_pages", "disk_pages",
           "disk_bytes", "disk_files"),
    CLIENT: ("anonymous_bytes", "descriptors", "threads"),
    MACHINE: ("loop_ms", "wake_ms", "shm_bytes", "shm_files"),
}  # fmt: skip
KINDS = ("get", "set", "exists")

Series = Sequence["float | None"]
Summary = dict[str, Any]


@attrs.frozen
class Finding:
    """What one gate reports.

    first, last: the figure in both windows. bound: the most that `last` may be, or the least.
    """

    gate: str
    who: str
    first: float
    last: float
    bound: float
    is_least: bool = False

    @property
    def is_passed(self) -> bool:
        """Whether nothing leaks here."""
        return self.last >= self.bound if self.is_least else self.last <= self.bound

    def __str__(self) -> str:
        """Return a line for the reader."""
        verdict = "ok" if self.is_passed else "FAILED"
        return (f"{verdict:8}{self.gate:26}{self.who:10}{self.first:16,.1f}{self.last:16,.1f}"
                f"{self.bound:16,.1f}")  # fmt: skip


# --- the summary ----------------------------------------------------------------------------------


def summary_of(rows: Iterable[Row], seconds: float) -> Summary:
    """Return the medians of every figure in each bucket, and what happened."""
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(
        lambda: [[] for _ in range(BUCKETS)]
    )
    events: Counter[str] = Counter()
    lives: dict[str, set[int]] = defaultdict(set)
    steady: dict[str, str] = {}
    end: Row = {}
    for row in rows:
        kind, name = row["kind"], row["name"]
        if kind == EVENT:
            events[name] += 1
        if kind == END and name == "all":
            end = row
        at = int(row["at"] / seconds * BUCKETS)
        if kind not in FIGURES or at >= BUCKETS:
            continue
        lives[name].add(row.get("pid", 0))
        if row.get("is_steady"):
            steady[name] = kind
        for figure, value in _figures_of(row):
            found[name, figure][at].append(value)
    series: dict[str, dict[str, list[float | None]]] = defaultdict(dict)
    for (name, figure), buckets in found.items():
        series[name][figure] = [
            round(statistics.median(values), 2) if values else None for values in buckets
        ]
    return {
        "seconds": seconds,
        "steady": steady,
        "lives": {name: len(pids) for name, pids in lives.items()},
        "events": dict(events),
        "series": {name: dict(figures) for name, figures in series.items()},
        "end": {key: value for key, value in end.items() if key not in ("at", "kind", "name")},
    }


def _figures_of(row: Row) -> Iterator[tuple[str, float]]:
    for figure in FIGURES[row["kind"]]:
        if figure in row:
            yield figure, row[figure]
    for kind, quantiles in row.get("latency_ms", {}).items():
        if kind in KINDS:
            yield f"{kind}_p50_ms", quantiles[0]
            yield f"{kind}_p95_ms", quantiles[1]


def middle(series: Series, window: slice) -> float:
    """Return the median of a window; where nothing was measured, nan, which passes no gate."""
    values = [value for value in series[window] if value is not None]
    return statistics.median(values) if values else math.nan


def least(series: Series, window: slice) -> float:
    """Return the least of a window, nan where nothing was measured."""
    return min((value for value in series[window] if value is not None), default=math.nan)


# --- the gates ------------------------------------------------------------------------------------


def findings(summary: Summary) -> list[Finding]:
    """Return what every gate reports of a run."""
    return [
        *_of_processes(summary),
        *_of_directories(summary),
        *_of_shared_memory(summary),
        *_of_disks(summary),
        *_of_latencies(summary),
        *_of_promises(summary),
    ]


def _of_processes(summary: Summary) -> Iterator[Finding]:
    for name, kind in sorted(summary["steady"].items()):
        figures = summary["series"][name]
        yield Finding("one life", name, 1, summary["lives"][name], 1)
        # A client that is opened and closed all the time has few descriptors in between: what is
        # left open for good raises the least number, too.
        for figure, of, growth in (
            ("anonymous_bytes", middle, MEMORY_MAX[kind]),
            ("descriptors", least, DESCRIPTORS_MAX),
            ("threads", least, THREADS_MAX[kind]),
        ):
            first, last = (of(figures[figure], window) for window in (FIRST, LAST))
            yield Finding(figure, name, first, last, first + growth)


def _nodes(summary: Summary) -> Mapping[str, Mapping[str, Series]]:
    return {name: each for name, each in summary["series"].items() if "rows" in each}


def _of_directories(summary: Summary) -> Iterator[Finding]:
    """Records against pages: those of dead nodes and of evicted pages must go."""
    first, last = (rows_of_page(summary, window) for window in (FIRST, LAST))
    yield Finding("rows of a page", "all", first, last, min(ROWS_OF_PAGE, ROWS_FACTOR * first))


def rows_of_page(summary: Summary, window: slice) -> float:
    """Return how many records the directories have together for each page of the nodes."""
    rows = pages = 0.0
    for figures in _nodes(summary).values():
        rows += middle(figures["rows"], window)
        pages += sum(middle(figures[name], window) for name in ("pool_pages", "disk_pages"))
    return rows / max(pages, 1.0)


def _of_shared_memory(summary: Summary) -> Iterator[Finding]:
    machine = summary["series"]["machine"]
    files = FILES_OF_NODE * len(_nodes(summary))
    first, last = (middle(machine["shm_files"], window) for window in (FIRST, LAST))
    yield Finding("/dev/shm files", "all", first, last, files)
    yield Finding("/dev/shm files at the end", "all", first, summary["end"]["shm_files"], files)
    first, last = (middle(machine["shm_bytes"], window) for window in (FIRST, LAST))
    yield Finding("/dev/shm bytes", "all", first, last, SHM_FACTOR * first)


def _of_disks(summary: Summary) -> Iterator[Finding]:
    for name, figures in _nodes(summary).items():
        if "disk_bytes" not in figures:
            continue
        first = middle(figures["disk_bytes"], FIRST)
        most = max(value for value in figures["disk_bytes"] if value is not None)
        yield Finding("disk bytes", name, first, most, DISK_FACTOR * DISK_BYTES)
        first, last = (middle(figures["disk_files"], window) for window in (FIRST, LAST))
        yield Finding("disk files", name, first, last, DISK_FILES_MAX)


def _of_latencies(summary: Summary) -> Iterator[Finding]:
    if summary["seconds"] < LATENCIES_FROM_S:
        return
    slower = slowness(summary)
    for name, kind in sorted(summary["steady"].items()):
        if kind != CLIENT:
            continue
        for call in KINDS:
            for quantile, factor in zip(("p50", "p95"), LATENCY_FACTORS, strict=True):
                series = summary["series"][name][f"{call}_{quantile}_ms"]
                first, last = (middle(series, window) for window in (FIRST, LAST))
                bound = factor * slower * first + LATENCY_SPARE_MS
                yield Finding(f"{call} {quantile} ms", name, first, last, bound)


def slowness(summary: Summary) -> float:
    """Return how many times longer the same work, or to wake up, took at the end; at least 1.

    That is the load of others, which no gate of this project is about.
    """
    machine = summary["series"]["machine"]
    both = [machine[name] for name in ("loop_ms", "wake_ms") if name in machine]
    return max(1.0, *(middle(each, LAST) / max(middle(each, FIRST), 0.1) for each in both))


def _of_promises(summary: Summary) -> Iterator[Finding]:
    """Enough was checked, and no call took longer than it may."""
    end = summary["end"]
    enough = HITS_PER_MINUTE_MIN * summary["seconds"] / 60
    yield Finding("hits checked", "all", 0.0, end["hits"], enough, is_least=True)
    for kind, took_s in end["longest_s"].items():
        timeout_s = EXISTS_TIMEOUT_S if kind == "exists" else OP_TIMEOUT_S
        yield Finding(f"longest {kind} s", "all", 0.0, took_s, timeout_s + LATE_S)
