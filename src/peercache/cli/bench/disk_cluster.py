"""The disk tier among nodes: what a promote takes a remote reader, and what `set` pays for it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from peercache.cli.bench.engine import Engine
from peercache.cli.bench.limits import percentile
from peercache.cli.demo.processes import NodeProcess, NodeProcesses
from peercache.client.client import Client

POOL_PAGES: Final = 64
"""Pages in memory; twice as many are set, so that the first half lies on disk only."""

ROUNDS: Final = 9
"""Sets of a batch with and without a disk, in turn; the first pair is not counted."""

PATIENCE_S: Final = 60.0


def measure_cluster(
    page_bytes: int, folder: Path, progress: Callable[[str], None]
) -> dict[str, float]:
    """Start three nodes, one with a disk in `folder`, and measure through real clients."""
    engine = Engine(page_bytes=page_bytes, pages=2 * POOL_PAGES, batch=16)
    with NodeProcesses(log_folder=None) as processes:
        nodes = _start(processes, page_bytes, folder)
        try:
            for name, node in nodes.items():
                engine.open(name, {"cluster": _cluster(), "home": node.home, "op_timeout_s": 30.0})
            _await(engine.clients["disk"], "home_disk_open", 1)
            _await(engine.clients["disk"], "home_members_alive", len(nodes))
            progress("set, with and without a disk")
            figures = _compare_sets(engine)
            progress("promote of single pages")
            return {**figures, **_promote(engine)}
        finally:
            engine.close()


def _start(processes: NodeProcesses, page_bytes: int, folder: Path) -> dict[str, NodeProcess]:
    disk = {
        "disk-enabled": "true",
        "disk-path": str(folder),
        "disk-size": str(max(2**30, 64 * POOL_PAGES * page_bytes)),
        "disk-free-floor": "0",
    }
    nodes: dict[str, NodeProcess] = {}
    for name in ("disk", "plain", "reader"):
        settings = {
            "cluster": _cluster(),
            "listen": "127.0.0.1:0",
            "pool-size": str(POOL_PAGES * page_bytes),
            "metrics-port": "0",
            "log-level": "warning",
            **(disk if name == "disk" else {}),
        }
        if nodes:
            settings["discovery-addr"] = nodes["disk"].ready["control"]
        nodes[name] = processes.launch(name, settings)
        processes.await_ready(nodes[name])
    return nodes


def _compare_sets(engine: Engine) -> dict[str, float]:
    """Return the rate of `set` with a disk that keeps up, and its ratio to the rate without."""
    samples: dict[str, list[float]] = {"disk": [], "plain": []}
    size = POOL_PAGES // 2
    keys: list[str] = []
    for _ in range(ROUNDS):
        for name, times in samples.items():
            keys = engine.new_keys()
            runs = engine.runs(engine.source, slice(0, size))
            started = time.perf_counter()
            engine.clients[name].batch_set_from(keys[:size], runs)
            times.append(time.perf_counter() - started)
            # The disk keeps up if it has written what there was before more is set.
            _await(engine.clients[name], "home_disk_bytes_waiting", 0)
            _await(engine.clients[name], "home_disk_bytes_in_flight", 0)
    rates = {
        name: size * engine.page_bytes / statistics.median(times[1:]) / 1e9
        for name, times in samples.items()
    }
    return {"set_disk_gb_s": rates["disk"], "set_disk_ratio": rates["disk"] / rates["plain"]}


def _promote(engine: Engine) -> dict[str, float]:
    """Return how long a remote client waits for single pages that are on disk only."""
    writer, reader = engine.clients["disk"], engine.clients["reader"]
    before = writer.stats().get("home_disk_pages", 0)
    keys = engine.new_keys()
    for begin in range(0, len(keys), engine.batch):
        some = slice(begin, begin + engine.batch)
        stored = writer.batch_set_from(keys[some], engine.runs(engine.source, some))
        assert all(stored), "a set into a pool that evicts was refused"
        _await(writer, "home_disk_pages", float(before) + begin + engine.batch)
    # An engine reads into memory that it has had for long; the first touch of a page of ours would
    # take longer than the page.
    engine.target[:] = 0xA5
    times = []
    missed = wrong_bytes = 0
    for page in range(POOL_PAGES):
        some = slice(page, page + 1)
        started = time.perf_counter()
        hits = reader.batch_get_into(keys[some], engine.runs(engine.target, some))
        times.append((time.perf_counter() - started) * 1e3)
        missed += hits.count(False)
        wrong_bytes += engine.wrong_bytes(
            [number == page and hits[0] for number in range(page + 1)]
        )
    return {
        "promote_ms": statistics.median(times),
        "promote_p99_ms": percentile(times, 0.99),
        "promote_misses": float(missed),
        "wrong_bytes": float(wrong_bytes),
    }


def _await(client: Client, figure: str, value: float) -> None:
    """Wait until a figure of the home node has come to a value; one that is not told is there."""
    until = time.monotonic() + PATIENCE_S
    while not _has_come(client.stats().get(figure), figure, value):
        if time.monotonic() > until:
            raise TimeoutError(f"{figure} has not come to {value}")
        time.sleep(0.01)


def _has_come(told: Any, figure: str, value: float) -> bool:
    if told is None:
        return "bytes" in figure  # a node without a disk
    return bool(told >= value if value else told == 0)


def _cluster() -> str:
    return f"bench-disk-{os.getpid()}"
