"""`python -m benchmarks.disk`: the disk tier among nodes, and its index at a million pages.

It measures how long a reader at another node waits for a page that is only on disk, what a disk
costs a `set`, and how long an index takes to load. `peercache bench disk` measures the page store.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from benchmarks.engine import start_cluster
from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES, SLAB_BYTES_MAX, slot_blocks, slots_in
from peercache.actors.ports import DISK_ENTRY
from peercache.cli.bench.engine import POISON, Engine, WorkingSet
from peercache.cli.bench.limits import percentile
from peercache.cli.main import run
from peercache.cli.options import SizeType, json_option
from peercache.cli.processes import NodeProcesses
from peercache.cli.terminal import print_json, show_progress
from peercache.client.client import Client
from peercache.errors import ConfigError
from peercache.storage.folder import open_folder
from peercache.storage.index_file import load_entries, open_index
from peercache.storage.slab_files import SlabFiles, consistent

POOL_PAGES: Final = 64
"""Pages in memory; twice as many are set, so that the first half is only on disk."""

ROUNDS: Final = 9
"""Sets of a batch with and without a disk, in turn; the first pair is not counted."""

TIMEOUT_S: Final = 60.0


def measure_cluster(
    page_bytes: int, folder: Path, progress: Callable[[str], None]
) -> dict[str, float]:
    """Start three nodes, one with a disk in `folder`, and measure through real clients."""
    engine = Engine(WorkingSet(page_bytes, pages=2 * POOL_PAGES, batch=16))
    cluster = f"bench-disk-{os.getpid()}"
    pools = dict.fromkeys(("disk", "plain", "reader"), POOL_PAGES * page_bytes)
    disk = {
        "disk-enabled": "true",
        "disk-path": str(folder),
        "disk-size": str(max(2**30, 64 * POOL_PAGES * page_bytes)),
        "disk-free-floor": "0",
    }
    with NodeProcesses() as processes:
        nodes = start_cluster(processes, cluster, pools, {"disk": disk})
        try:
            for name, node in nodes.items():
                engine.open(name, {"cluster": cluster, "home": node.home, "op_timeout_s": 30.0})
            _await(engine.clients["disk"], "home_disk_open", 1)
            _await(engine.clients["disk"], "home_members_alive", len(nodes))
            progress("set, with and without a disk")
            figures = _compare_sets(engine)
            progress("promote of single pages")
            return {**figures, **_promote(engine)}
        finally:
            engine.close()


def _compare_sets(engine: Engine) -> dict[str, float]:
    """Return the rate of `set` with a disk that keeps up, and its ratio to the rate without."""
    samples: dict[str, list[float]] = {"disk": [], "plain": []}
    some = slice(0, POOL_PAGES // 2)
    for _ in range(ROUNDS):
        for name, times in samples.items():
            keys = engine.new_keys()
            runs = engine.work.runs(engine.source, some)
            started = time.perf_counter()
            engine.clients[name].batch_set_from(keys[some], runs)
            times.append(time.perf_counter() - started)
            # A disk keeps up if it has written everything before more is set.
            _await(engine.clients[name], "home_disk_bytes_waiting", 0)
            _await(engine.clients[name], "home_disk_bytes_in_flight", 0)
    rates = {
        name: some.stop * engine.work.page_bytes / statistics.median(times[1:]) / 1e9
        for name, times in samples.items()
    }
    return {"set_disk_gb_s": rates["disk"], "set_disk_ratio": rates["disk"] / rates["plain"]}


def _promote(engine: Engine) -> dict[str, float]:
    """Return how long a remote client waits for single pages that are only on disk."""
    writer, reader, work = engine.clients["disk"], engine.clients["reader"], engine.work
    before = writer.stats().get("home_disk_pages", 0)
    keys = engine.new_keys()
    for some in work.batches():
        stored = writer.batch_set_from(keys[some], work.runs(engine.source, some))
        assert all(stored), "a set into a pool that evicts was refused"
        _await(writer, "home_disk_pages", float(before) + some.stop)
    # An engine's memory is populated; the first touch of a fresh page takes longer than a read.
    engine.target[:] = POISON
    times = []
    missed = wrong_bytes = 0
    for page in range(POOL_PAGES):
        some = slice(page, page + 1)
        started = time.perf_counter()
        hits = reader.batch_get_into(keys[some], work.runs(engine.target, some))
        times.append((time.perf_counter() - started) * 1e3)
        missed += hits.count(False)
        wrong_bytes += engine.wrong_bytes([False] * page + hits)
    return {
        "promote_ms": statistics.median(times),
        "promote_p99_ms": percentile(times, 0.99),
        "promote_misses": float(missed),
        "wrong_bytes": float(wrong_bytes),
    }


def _await(client: Client, figure: str, value: float) -> None:
    """Wait until a figure of the home node has reached a value."""
    until = time.monotonic() + TIMEOUT_S
    while not _has_come(client.stats().get(figure), figure, value):
        if time.monotonic() > until:
            raise TimeoutError(f"{figure} has not come to {value}")
        time.sleep(0.01)


def _has_come(found: Any, figure: str, value: float) -> bool:
    if found is None:
        return "bytes" in figure  # A node without a disk has none in flight.
    return bool(found >= value if value else found == 0)


def measure_index(entries: int, folder: Path) -> dict[str, float]:
    """Return how long an index of this many pages takes to load, and its memory."""
    folder.mkdir()
    slab_bytes, length = SLAB_BYTES_MAX, 2**20
    blocks = int(slot_blocks(np.array([length]))[0])
    a_slab = slots_in(slab_bytes, blocks)
    slab_count = entries // a_slab + 1
    rows = np.zeros(entries, DISK_ENTRY)
    number = np.arange(entries)
    rows["key"] = np.frombuffer(np.random.default_rng(3).bytes(16 * entries), "V16")
    rows["place"] = number // a_slab * slab_bytes + (number % a_slab * blocks + 1) * BLOCK_BYTES
    rows["length"], rows["sequence"] = length, number
    # Without an effective cap: the index of a real store has a share of the tier's cap.
    open_index(folder, bytes_max=2**40, entries=rows).close()
    opened = open_folder(folder, None)
    try:
        files = SlabFiles(opened, free_floor=0.0, log=_Silent(), read_only=True)
        files.blocks_of = dict.fromkeys(range(slab_count), blocks)
        opened.slab_bytes = slab_bytes
        index = DiskIndex(capacity_bytes=slab_count * slab_bytes, slab_bytes=slab_bytes)
        started = time.perf_counter()
        connection = open_index(folder, bytes_max=2**40)
        found = consistent(load_entries(connection), files, slab_count)
        index.load(found)
        load_s = time.perf_counter() - started
        connection.close()
    finally:
        opened.close()
    if len(index) != entries:
        raise ConfigError("entries", f"{len(index)} of {entries} came back")
    return {
        "index_entries": float(entries),
        "index_load_s": load_s,
        "index_bytes_a_page": _bytes_a_page(found, slab_count, slab_bytes),
    }


def _bytes_a_page(entries: Any, slab_count: int, slab_bytes: int) -> float:
    tracemalloc.start()
    try:
        index = DiskIndex(capacity_bytes=slab_count * slab_bytes, slab_bytes=slab_bytes)
        index.load(entries)
        return tracemalloc.get_traced_memory()[0] / len(index)
    finally:
        tracemalloc.stop()


class _Silent:
    """A log that drops the warnings about slab files: the index has rows for missing files."""

    def warning(self, event: str, **facts: object) -> None:
        """Do nothing."""


@click.command
@click.option("--folder", type=click.Path(exists=True, file_okay=False), default=".")
@click.option("--page-bytes", type=SizeType(multiple_of=8), default="1MiB", show_default=True)
@click.option("--entries", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@json_option
def disk(folder: str, page_bytes: int, entries: int, *, as_json: bool) -> int:
    """Measure promotes, sets with a disk, and the load of an index, below a folder."""
    with tempfile.TemporaryDirectory(prefix="peercache-bench-", dir=folder) as name:
        figures = measure_cluster(page_bytes, Path(name) / "nodes", show_progress)
        show_progress(f"an index of {entries} pages")
        figures |= measure_index(entries, Path(name) / "index")
    if as_json:
        print_json(figures)
    else:
        print(
            f"  promote of one page, remote reader {figures['promote_ms']:.2f} ms\n"
            f"  set, the disk keeping up {figures['set_disk_gb_s']:.2f} GB/s,"
            f" {figures['set_disk_ratio']:.2f} of its rate without a disk\n"
            f"  index: load {figures['index_load_s']:.2f} s,"
            f" {figures['index_bytes_a_page']:.0f} bytes a page"
        )
    return int(bool(figures["wrong_bytes"]))


if __name__ == "__main__":
    sys.exit(run(disk, "benchmarks.disk", sys.argv[1:]))
