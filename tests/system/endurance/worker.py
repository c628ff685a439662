"""An engine's cache in the soak, as a process: it sets, reads, and checks every byte of every hit.

    python -m tests.system.endurance.worker ROLE CLUSTER FABRIC SEED FIGURES HOME...

ROLE is `engine`, which stays at the first home, or `visitor`, which opens a client at any of the
homes for a few calls and closes it again. What it did is in the file FIGURES at any moment, also
after a `kill -9`. It ends by itself only where a promise is broken, and prints which one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peercache import Client
from tests.faults.worker import Pauses
from tests.system.endurance.load import EXISTS_TIMEOUT_S, Corpus, opened
from tests.system.nodes import keys_of

ENGINE, VISITOR = "engine", "visitor"
CORPUS = "chaos"
KEYS, PAGE_BYTES, BATCH = 1024, 32 * 1024, 16
KINDS, WEIGHTS = ("get", "set", "exists", "remove"), (60, 25, 13, 2)
FIGURES_S = 0.5
LATENCIES_S = 60.0
"""How long a latency counts in the quantiles."""
BETWEEN_S = (0.05, 0.25)
"""Between two calls: the soak is long, and others share the machine."""
CALLS_OF_VISITOR = 8
QUANTILES = (0.5, 0.95, 0.99)


class Latencies:
    """How long the calls of the last minute took, without pauses of this process."""

    def __init__(self) -> None:
        """Begin with no call."""
        self.longest: dict[str, float] = {}
        self._pauses = Pauses()
        self._took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}

    def timed(self, kind: str, call: Callable[[], Any]) -> Any:
        """Call, and return the answer."""
        began, paused_s = time.monotonic(), self._pauses.total_s
        answer = call()
        now = time.monotonic()
        took_s = now - began
        if took_s > EXISTS_TIMEOUT_S:
            # A pause that ends with the call is counted a moment later.
            time.sleep(3 * Pauses.TICK_S)
            took_s -= self._pauses.total_s - paused_s
        self.longest[kind] = max(took_s, self.longest.get(kind, 0.0))
        self._took[kind].append((now, took_s))
        return answer

    def quantiles(self) -> dict[str, list[float]]:
        """Return QUANTILES of each kind in milliseconds, and forget what is older."""
        found = {}
        oldest = time.monotonic() - LATENCIES_S
        for kind, took in self._took.items():
            took[:] = [(at, took_s) for at, took_s in took if at >= oldest]
            if took:
                quantiles = np.quantile([took_s for _, took_s in took], QUANTILES)
                found[kind] = [round(1e3 * float(each), 3) for each in quantiles]
        return found


class Worker:
    """Calls of one client after the other, and what came of them."""

    def __init__(self, seed: int, figures: Path) -> None:
        """Make the pages: making them costs more than reading."""
        self._rng = random.Random(seed)
        self._corpus = Corpus(keys_of(CORPUS, KEYS), PAGE_BYTES)
        self._buffers = [np.empty(PAGE_BYTES, np.uint8) for _ in range(BATCH)]
        self._latencies = Latencies()
        self._counts: Counter[str] = Counter()
        self._figures, self._written_at = figures, 0.0

    def stay(self, client: Client) -> None:
        """Call until killed."""
        while True:
            self.call(client)

    def visit(self, cluster: str, fabric: str, homes: list[str]) -> None:
        """Come and go until killed."""
        while True:
            with opened(cluster, self._rng.choice(homes), fabric) as client:
                for _ in range(CALLS_OF_VISITOR):
                    self.call(client)
            self._counts["visits"] += 1

    def call(self, client: Client) -> None:
        """Make one call, check it, and write down what came of it."""
        chosen = self._rng.sample(range(KEYS), BATCH)
        keys = [self._corpus.keys[index] for index in chosen]
        kind = self._rng.choices(KINDS, WEIGHTS)[0]
        timed = self._latencies.timed
        if kind == "get":
            self._get(client, chosen, keys)
        elif kind == "set":
            pages = [self._corpus.pages[index] for index in chosen]
            self._counts["stored"] += sum(timed(kind, lambda: client.batch_set(keys, pages)))
        elif kind == "exists":
            timed(kind, lambda: client.batch_exists(keys))
        else:
            timed(kind, lambda: client.remove(keys[:2]))
        self._counts["calls"] += 1
        if time.monotonic() - self._written_at > FIGURES_S:
            self._write()
        time.sleep(self._rng.uniform(*BETWEEN_S))

    def _get(self, client: Client, chosen: list[int], keys: list[str]) -> None:
        for buffer in self._buffers:
            buffer[:8] = buffer[-8:] = 0xA5  # A hit that wrote nothing is noticed.
        hits = self._latencies.timed("get", lambda: client.batch_get(keys, self._buffers))
        for index, buffer, hit in zip(chosen, self._buffers, hits, strict=True):
            right = np.array_equal(buffer, self._corpus.pages[index])
            assert not hit or right, f"wrong bytes under {self._corpus.keys[index]}"
        self._counts["hits"] += sum(hits)
        self._counts["misses"] += BATCH - sum(hits)

    def _write(self) -> None:
        self._written_at = time.monotonic()
        written = {
            **self._counts,
            "latency_ms": self._latencies.quantiles(),
            "longest_s": self._latencies.longest,
        }
        part = self._figures.with_suffix(".part")
        part.write_text(json.dumps(written))
        os.replace(part, self._figures)  # noqa: PTH105 - the same


def main() -> None:
    """Work until killed."""
    role, cluster, fabric, seed, path, *homes = sys.argv[1:]
    worker = Worker(int(seed), Path(path))
    if role == VISITOR:
        worker.visit(cluster, fabric, homes)
    else:
        worker.stay(opened(cluster, homes[0], fabric))


if __name__ == "__main__":
    main()
