"""The engine's side of the benchmark: a process of its own that obeys lines of JSON.

It owns a working set of pages, larger than any cache of the processor, and does to it what an
inference engine does: set, exists, get. What it reads it verifies, outside the timed part.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peercache.cli.bench import limits
from peercache.client.client import Client
from peercache.model.runs import PageRuns

EXISTS_KEYS = 128
"""Keys of one exists: what SGLang asks at once."""

EXISTS_CALLS = 300

ADOPT_S = 60.0


class Engine:
    """The working set, the clients, and what can be measured with them."""

    def __init__(self, *, page_bytes: int, pages: int, batch: int) -> None:
        """Make the working set: every word of it is different."""
        self.page_bytes, self.pages, self.batch = page_bytes, pages, batch
        words = np.arange(pages * page_bytes // 8, dtype=np.uint64)
        self.source = (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)
        self.target = np.zeros_like(self.source)
        self.clients: dict[str, Client] = {}
        self.generation = 0
        self.stored: list[str] = []
        self._busy = threading.Event()

    # --- what the driver may ask ------------------------------------------------------------------

    def open(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Open a client under a name."""
        self.clients[name] = Client.open(**settings)
        return {}

    def copy(self) -> dict[str, Any]:
        """Measure the memory copy."""
        return {"gb_s": limits.copy_gb_s(self.source, self.target, self.page_bytes)}

    def send_stream(self, port: int) -> dict[str, Any]:
        """Feed a raw tcp stream."""
        limits.send_stream(port, self.source, self.page_bytes)
        return {}

    def stream(self, *, seconds: float, at_most_gb_s: float = math.inf) -> dict[str, Any]:
        """Load the machine with a raw tcp stream that is nobody's."""
        rate = limits.paced_stream(
            self.source,
            self.target,
            page_bytes=self.page_bytes,
            seconds=seconds,
            at_most_gb_s=at_most_gb_s,
        )
        return {"wall_gb_s": rate}

    def set(self, client: str, *, seconds: float, clear: bool) -> dict[str, Any]:
        """Set working sets of new keys; `clear` empties the pool between them, not timed."""
        cache = self.clients[client]
        times: list[float] = []
        refused = 0
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            keys = self.new_keys()
            for begin in range(0, self.pages, self.batch):
                some = slice(begin, min(begin + self.batch, self.pages))
                runs = self.runs(self.source, some)
                started = time.perf_counter()
                stored = cache.batch_set_from(keys[some], runs)
                times.append(time.perf_counter() - started)
                refused += stored.count(False)
                if self._busy.is_set() and time.perf_counter() > until:
                    break
            self.stored = keys
            if clear and time.perf_counter() < until:
                cache.clear()
        return {**self._rate(times), "refused": refused}

    def store(self, client: str) -> dict[str, Any]:
        """Set one working set that will be read, untimed."""
        self.stored = self.new_keys()
        stored = 0
        for begin in range(0, self.pages, self.batch):
            some = slice(begin, min(begin + self.batch, self.pages))
            stored += sum(
                self.clients[client].batch_set_from(self.stored[some], self.runs(self.source, some))
            )
        return {"stored": stored, "keys": self.stored}

    def adopt(self, client: str, *, keys: list[str]) -> dict[str, Any]:
        """Read what another engine has stored from now on; wait until it is to be seen."""
        self.stored = keys
        until = time.perf_counter() + ADOPT_S
        while self.clients[client].batch_exists(keys) < len(keys):
            if time.perf_counter() > until:
                raise TimeoutError("the other engine's pages cannot be seen")
            time.sleep(0.1)
        return {}

    def get(self, client: str, *, seconds: float, at_most_gb_s: float = math.inf) -> dict[str, Any]:
        """Get the stored pages again and again, each batch after its exists, as SGLang does."""
        began = time.perf_counter()
        cache = self.clients[client]
        times: list[float] = []
        missed = wrong_bytes = 0
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            self.target[:] = 0xA5
            hits: list[bool] = []
            for begin in range(0, self.pages, self.batch):
                some = slice(begin, min(begin + self.batch, self.pages))
                cache.batch_exists(self.stored[some])
                runs = self.runs(self.target, some)
                started = time.perf_counter()
                hits += cache.batch_get_into(self.stored[some], runs)
                times.append(time.perf_counter() - started)
                due_s = len(times) * self.batch * self.page_bytes / at_most_gb_s / 1e9
                time.sleep(max(0.0, began + due_s - time.perf_counter()))
                if time.perf_counter() > until and (self._busy.is_set() or at_most_gb_s < math.inf):
                    break
            missed += hits.count(False)
            wrong_bytes += self.wrong_bytes(hits)
        wall_gb_s = len(times) * self.batch * self.page_bytes / (time.perf_counter() - began) / 1e9
        return {
            **self._rate(times),
            "wall_gb_s": wall_gb_s,
            "missed": missed,
            "wrong_bytes": wrong_bytes,
        }

    def exists(self, client: str) -> dict[str, Any]:
        """Ask for the same stored keys again and again."""
        cache = self.clients[client]
        keys = (self.stored * (EXISTS_KEYS // len(self.stored) + 1))[:EXISTS_KEYS]
        times = []
        found = 0
        for _ in range(EXISTS_CALLS):
            started = time.perf_counter()
            found = cache.batch_exists(keys)
            times.append(time.perf_counter() - started)
        return {
            "us": limits.median_us(times),
            "p99_us": limits.percentile(times, 0.99) * 1e6,
            "found": found,
        }

    def busy(self, *, on: bool) -> dict[str, Any]:
        """Start or stop a thread that computes in Python, as an engine's scheduler does."""
        if on:
            self._busy.set()
            threading.Thread(target=self._spin, daemon=True).start()
        else:
            self._busy.clear()
        return {}

    def spin(self, *, seconds: float) -> dict[str, Any]:
        """Measure what a Python-bound thread gets done in this process meanwhile, a second.

        What strangers took of its processor is no second of it.
        """
        count = 0
        waited_s = _waited_s()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for _ in range(1000):
                count += 1
        return {"loops_a_second": count / (seconds - (_waited_s() - waited_s))}

    def close(self) -> dict[str, Any]:
        """Close every client."""
        for client in self.clients.values():
            client.close()
        return {}

    # --- helpers ----------------------------------------------------------------------------------

    def _spin(self) -> None:
        count = 0
        while self._busy.is_set():
            for _ in range(1000):
                count += 1

    def new_keys(self) -> list[str]:
        self.generation += 1
        return [
            hashlib.sha256(f"{self.generation}/{i}".encode()).hexdigest() for i in range(self.pages)
        ]

    def runs(self, memory: limits.Memory, some: slice) -> PageRuns:
        base = memory.ctypes.data
        count = some.stop - some.start
        addresses = np.arange(some.start, some.stop, dtype=np.uint64) * np.uint64(self.page_bytes)
        sizes = np.full(count, self.page_bytes, np.uint64)
        return PageRuns.regular(addresses + np.uint64(base), sizes, count)

    def _rate(self, times: list[float]) -> dict[str, Any]:
        # The first batch opens connections and maps memory.
        counted = times[1:] or times
        batch_bytes = min(self.batch, self.pages) * self.page_bytes
        ordered = sorted(counted)
        median_s = ordered[len(ordered) // 2]
        return {
            "gb_s": batch_bytes / median_s / 1e9,
            "mean_gb_s": batch_bytes * len(counted) / sum(counted) / 1e9,
            "p50_ms": median_s * 1e3,
            "p99_ms": limits.percentile(counted, 0.99) * 1e3,
            "batches": len(counted),
        }

    def wrong_bytes(self, hits: list[bool]) -> int:
        """Count the bytes of hits that are not what was set."""
        wrong = 0
        for page in np.flatnonzero(hits).tolist():
            span = slice(page * self.page_bytes, (page + 1) * self.page_bytes)
            if not np.array_equal(self.target[span], self.source[span]):
                wrong += int((self.target[span] != self.source[span]).sum())
        return wrong


def _waited_s() -> float:
    """Return how long this thread has waited for a processor, 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def main() -> int:
    """Obey one JSON object a line until stdin ends; answer each with one."""
    settings = json.loads(sys.stdin.readline())
    engine = Engine(**settings)
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        name: getattr(engine, name)
        for name in (
            "open", "copy", "send_stream", "stream", "set", "store", "adopt", "get", "exists",
            "busy", "spin", "close",
        )
    }  # fmt: skip
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        answer = actions[order.pop("do")](**order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
