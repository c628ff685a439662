"""The disk tier among nodes: what a promote takes a remote reader, and what `set` pays for it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from peercache.cli.bench.engine import POISON, Engine, WorkingSet
from peercache.cli.bench.limits import percentile
from peercache.cli.processes import NodeProcesses
from peercache.client.client import Client

POOL_PAGES: Final = 64
"""Pages in memory; twice as many are set, so that the first half lies on disk only."""

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
        nodes = processes.cluster(cluster, pools, {"disk": disk})
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
    """Return how long a remote client waits for single pages that are on disk only."""
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
    """Wait until a figure of the home node has come to a value."""
    until = time.monotonic() + TIMEOUT_S
    while not _has_come(client.stats().get(figure), figure, value):
        if time.monotonic() > until:
            raise TimeoutError(f"{figure} has not come to {value}")
        time.sleep(0.01)


def _has_come(told: Any, figure: str, value: float) -> bool:
    if told is None:
        return "bytes" in figure  # A node without a disk has none in flight.
    return bool(told >= value if value else told == 0)
