"""What a process takes of the machine, from /proc, and the file that the soak writes it to."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

Row = Mapping[str, Any]
"""One line of the file: `at` in seconds since the start, `kind`, `name`, and figures."""

NODE, CLIENT, MACHINE, EVENT, END = "node", "client", "machine", "event", "end"
SAMPLES = "samples.jsonl"
SCRAPE_S = 1.0
METRICS = {
    "rows": ("peercache_directory_records",),
    "pool_pages": ("peercache_pool_pages",),
    "disk_pages": ("peercache_disk_pages",),
    "reserved_bytes": ('peercache_pool_bytes{state="reserved"}',),
}
"""Figures of a node, by names of its metrics that are added."""
LOOP_STEPS = 200_000
WAKES, WAKE_S = 50, 0.002


def vitals(pid: int) -> dict[str, int]:
    """Return what a process takes: anonymous memory in bytes, descriptors, threads."""
    process = Path(f"/proc/{pid}")
    lines = (process / "smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return {
        "anonymous_bytes": kib["Anonymous"] * 1024,
        "descriptors": sum(1 for _ in (process / "fd").iterdir()),
        "threads": sum(1 for _ in (process / "task").iterdir()),
    }


def scraped(http: str) -> dict[str, float]:
    """Return METRICS of a node, {} if it does not answer now."""
    try:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=SCRAPE_S) as got:
            page = got.read().decode()
    except OSError:
        return {}
    values = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            values[name] = float(value)
    return {
        figure: sum(values.get(name, 0.0) for name in names) for figure, names in METRICS.items()
    }


def folder_of(path: Path) -> dict[str, int]:
    """Return the allocated bytes and the number of files in a folder and those below it."""
    allocated = files = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                allocated += 512 * (Path(folder) / name).lstat().st_blocks
                files += 1
    return {"bytes": allocated, "files": files}


def loop_ms() -> float:
    """Return how long a fixed amount of work takes: what of a latency is the machine's."""
    began = time.perf_counter()
    for _ in range(LOOP_STEPS):
        pass
    return round(1e3 * (time.perf_counter() - began), 2)


def wake_ms() -> float:
    """Return how much later than asked this thread wakes up, on average: processors are taken."""
    began = time.perf_counter()
    for _ in range(WAKES):
        time.sleep(WAKE_S)
    return round(1e3 * ((time.perf_counter() - began) / WAKES - WAKE_S), 2)


@attrs.define
class Journal:
    """The file of samples, one JSON object a line. began: from when their times count."""

    path: Path
    began: float = attrs.field(factory=time.monotonic)

    def write(self, kind: str, name: str, **figures: Any) -> None:
        """Add a line."""
        row = {"at": round(time.monotonic() - self.began, 2), "kind": kind, "name": name, **figures}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the lines of a file of samples."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)
