"""`peercache bench serve` and `bench drive`: the same figures over two hosts.

One host serves a working set from its memory; the other reads it, and verifies every page against
what it must be, which both compute from the page's number.
"""

from __future__ import annotations

import hashlib
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from peercache.cli.bench.limits import Memory, percentile
from peercache.client.client import Client
from peercache.errors import PeerUnreachable
from peercache.model.runs import PageRuns

FIND_S = 60.0
"""How long `drive` waits until it sees the pages that `serve` holds."""

EXISTS_CALLS = 200
CLUSTER = "peercache-bench"


@attrs.frozen
class WorkingSet:
    """Pages that both hosts can compute."""

    page_bytes: int
    pages: int
    batch: int

    def keys(self) -> list[str]:
        """Return the keys: of these sizes, so that two settings do not mix."""
        return [
            hashlib.sha256(f"{self.page_bytes}/{i}".encode()).hexdigest() for i in range(self.pages)
        ]

    def content(self) -> Memory:
        """Return all pages, one after the other."""
        words = np.arange(self.pages * self.page_bytes // 8, dtype=np.uint64)
        content: Memory = (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)
        return content

    def batches(self) -> list[slice]:
        """Return the pages of each call."""
        return [
            slice(begin, min(begin + self.batch, self.pages))
            for begin in range(0, self.pages, self.batch)
        ]

    def runs(self, memory: Memory, some: slice) -> PageRuns:
        """Return where the pages of one call lie."""
        numbers = np.arange(some.start, some.stop, dtype=np.uint64)
        addresses = numbers * np.uint64(self.page_bytes) + np.uint64(memory.ctypes.data)
        sizes = np.full(len(numbers), self.page_bytes, np.uint64)
        return PageRuns.regular(addresses, sizes, len(numbers))


def serve(work: WorkingSet, settings: dict[str, Any], announce: Callable[[str], None]) -> None:
    """Hold the working set in this host's memory until interrupted, or told to end (SIGTERM)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell that has started us in the background has had SIGINT ignored.
        signal.signal(number, signal.default_int_handler)
    pool = 2 * work.pages * work.page_bytes
    with Client.open(
        **{"cluster": CLUSTER, "pool_size": pool, "op_timeout_s": 30.0, **settings}
    ) as cache:
        content, keys = work.content(), work.keys()
        stored = sum(
            sum(cache.batch_set_from(keys[some], work.runs(content, some)))
            for some in work.batches()
        )
        announce(f"{stored} of {work.pages} pages are served; now `bench drive` on the other host")
        while True:
            time.sleep(1)


def drive(work: WorkingSet, settings: dict[str, Any], seconds: float) -> dict[str, float]:
    """Read the working set that the other host serves; return the figures."""
    defaults = {"cluster": CLUSTER, "pool_size": 64 * 2**20, "listen": "0.0.0.0:0"}
    defaults |= {"op_timeout_s": 30.0, "exists_timeout_s": 2.0}
    with Client.open(**{**defaults, **settings}) as cache:
        keys = work.keys()
        until = time.monotonic() + FIND_S
        while cache.batch_exists(keys) < len(keys):
            if time.monotonic() > until:
                raise PeerUnreachable("a node that serves these pages; is `bench serve` running")
            time.sleep(0.2)
        figures = _read(cache, work, keys, seconds)
        figures["exists_hot_us"] = _exists_us(cache, keys)
        return figures


def _read(cache: Client, work: WorkingSet, keys: list[str], seconds: float) -> dict[str, float]:
    content = work.content()
    target = np.zeros_like(content)
    cache.register_memory(int(target.ctypes.data), target.nbytes, target)
    times: list[float] = []
    missed = wrong_bytes = 0
    until = time.monotonic() + seconds
    while not times or time.monotonic() < until:
        target[:] = 0xA5
        for some in work.batches():
            runs = work.runs(target, some)
            started = time.perf_counter()
            hits = cache.batch_get_into(keys[some], runs)
            times.append(time.perf_counter() - started)
            missed += hits.count(False)
            span = slice(some.start * work.page_bytes, some.stop * work.page_bytes)
            if all(hits) and not np.array_equal(target[span], content[span]):
                wrong_bytes += int((target[span] != content[span]).sum())
    counted = times[1:] or times
    batch_bytes = min(work.batch, work.pages) * work.page_bytes
    return {
        "get_gb_s": batch_bytes / statistics.median(counted) / 1e9,
        "get_p50_ms": statistics.median(counted) * 1e3,
        "get_p99_ms": percentile(counted, 0.99) * 1e3,
        "batches": len(counted),
        "misses": missed,
        "wrong_bytes": wrong_bytes,
        **_pages_by_fabric(cache),
    }


def _pages_by_fabric(cache: Client) -> dict[str, float]:
    """Return how many pages came which way: a fallback must not pass for what was asked for."""
    found = cache.stats()
    return {name: float(value) for name, value in found.items() if name.startswith("pages_hit_")}


def _exists_us(cache: Client, keys: list[str]) -> float:
    some = keys[:128]
    times = []
    for _ in range(EXISTS_CALLS):
        started = time.perf_counter()
        cache.batch_exists(some)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6
