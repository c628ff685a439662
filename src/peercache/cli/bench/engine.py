"""The engine's side of the benchmarks: a working set of pages, and what an engine does to it.

The working set is larger than any cache of the processor. An engine verifies what it reads, outside
the timed part.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import attrs
import numpy as np

from peercache.cli.bench import limits
from peercache.client.client import Client
from peercache.errors import PeerUnreachable
from peercache.model.runs import PageRuns

EXISTS_KEYS = 128
"""Keys of one exists: what SGLang asks at once."""

EXISTS_CALLS = 300

FIND_S = 60.0
"""How long an engine waits until it sees the pages of another engine."""

POISON = 0xA5


@attrs.frozen
class WorkingSet:
    """The sizes of a working set."""

    page_bytes: int
    pages: int
    batch: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all pages."""
        return self.pages * self.page_bytes

    def batches(self) -> list[slice]:
        """Return the pages of each call."""
        return [
            slice(begin, min(begin + self.batch, self.pages))
            for begin in range(0, self.pages, self.batch)
        ]

    def keys(self, generation: int) -> list[str]:
        """Return keys that follow from the sizes and a number, so that two hosts compute them."""
        return [
            hashlib.sha256(f"{self.page_bytes}/{generation}/{page}".encode()).hexdigest()
            for page in range(self.pages)
        ]

    def content(self) -> limits.Memory:
        """Return the bytes of all pages, one after the other: no two words are equal."""
        words = np.arange(self.total_bytes // 8, dtype=np.uint64)
        content: limits.Memory = (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)
        return content

    def runs(self, memory: limits.Memory, some: slice) -> PageRuns:
        """Return where the pages of one call are in memory."""
        numbers = np.arange(some.start, some.stop, dtype=np.uint64)
        addresses = numbers * np.uint64(self.page_bytes) + np.uint64(memory.ctypes.data)
        sizes = np.full(len(numbers), self.page_bytes, np.uint64)
        return PageRuns.regular(addresses, sizes, len(numbers))


class Engine:
    """A working set, clients by name, and what can be measured with them."""

    def __init__(self, work: WorkingSet) -> None:
        """Make the working set."""
        self.work = work
        self.source = work.content()
        self.target = np.zeros_like(self.source)
        self.clients: dict[str, Client] = {}
        self.stored: list[str] = []
        self._generation = 0

    def open(self, name: str, settings: dict[str, Any]) -> None:
        """Open a client under a name."""
        self.clients[name] = Client.open(**settings)

    def close(self) -> None:
        """Close every client."""
        for client in self.clients.values():
            client.close()

    def new_keys(self) -> list[str]:
        """Return keys that were never set."""
        self._generation += 1
        return self.work.keys(self._generation)

    def store(self, client: str) -> int:
        """Set one working set that is read later, untimed; return how many pages are stored."""
        self.stored = self.new_keys()
        return sum(
            sum(
                self.clients[client].batch_set_from(
                    self.stored[some], self.work.runs(self.source, some)
                )
            )
            for some in self.work.batches()
        )

    def adopt(self, client: str, generation: int = 1) -> None:
        """Read from now on what another engine has stored; wait until its pages are seen."""
        self.stored = self.work.keys(generation)
        until = time.perf_counter() + FIND_S
        while self.clients[client].batch_exists(self.stored) < len(self.stored):
            if time.perf_counter() > until:
                raise PeerUnreachable("a node that serves these pages; is `bench serve` running")
            time.sleep(0.1)

    def get(self, client: str, *, seconds: float) -> dict[str, float]:
        """Get the stored pages again and again, each batch after its exists, as SGLang does."""
        cache = self.clients[client]
        times: list[float] = []
        missed = wrong_bytes = 0
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            self.target[:] = POISON
            hits: list[bool] = []
            for some in self.work.batches():
                cache.batch_exists(self.stored[some])
                runs = self.work.runs(self.target, some)
                started = time.perf_counter()
                hits += cache.batch_get_into(self.stored[some], runs)
                times.append(time.perf_counter() - started)
            missed += hits.count(False)
            wrong_bytes += self.wrong_bytes(hits)
        return {**self._rate(times), "missed": missed, "wrong_bytes": wrong_bytes}

    def exists(self, client: str) -> dict[str, float]:
        """Ask for the same stored keys again and again."""
        cache = self.clients[client]
        keys = (self.stored * (EXISTS_KEYS // len(self.stored) + 1))[:EXISTS_KEYS]
        times = []
        for _ in range(EXISTS_CALLS):
            started = time.perf_counter()
            cache.batch_exists(keys)
            times.append(time.perf_counter() - started)
        return {"us": limits.median_us(times), "p99_us": limits.percentile(times, 0.99) * 1e6}

    def wrong_bytes(self, hits: list[bool]) -> int:
        """Count the bytes of hits that are not what was set."""
        wrong = 0
        for page in np.flatnonzero(hits).tolist():
            span = slice(page * self.work.page_bytes, (page + 1) * self.work.page_bytes)
            if not np.array_equal(self.target[span], self.source[span]):
                wrong += int((self.target[span] != self.source[span]).sum())
        return wrong

    def _rate(self, times: list[float]) -> dict[str, float]:
        # The first batch opens connections and maps memory.
        counted = sorted(times[1:] or times)
        median_s = counted[len(counted) // 2]
        return {
            "gb_s": min(self.work.batch, self.work.pages) * self.work.page_bytes / median_s / 1e9,
            "p50_ms": median_s * 1e3,
            "p99_ms": limits.percentile(counted, 0.99) * 1e3,
            "batches": len(counted),
        }
