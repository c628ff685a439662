"""Read pages while they are evicted and nodes are killed: exit status 1 for one wrong byte.

python -m tests.system.endurance.evictions --hits 1000000000

Two nodes with small pools, a writer at each that stores four times as much round and round, and
three readers, each a process, that compare every byte of every hit. One node is killed or paused
every few seconds. It tests what no simulation has: the caches and store buffers of real processors,
which read memory while its owner reuses it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import sys
import time
from collections import Counter
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from tests.pace import TIMEOUT_S
from tests.system.endurance.load import (
    FIGURES,
    OP_TIMEOUT_S,
    Corpus,
    EdgeReader,
    EdgeWriter,
    opened,
)
from tests.system.nodes import LocalCluster, free_port, keys_of

PAGE_BYTES = 4096
GRANULE = "4KiB"
POOL_PAGES = 4096
CORPUS_PAGES = 4 * POOL_PAGES
NODES = 2
"""The second one is killed and paused."""
LATE_S = 1.5
"""A call may be late by this: a process that gets no processor."""
BETWEEN_S = (4.0, 12.0)
PAUSE_S = (0.1, 3.0)
DOWN_S = (0.0, 2.0)
LOOK_S = 0.5


@attrs.frozen
class Role:
    """A client process. home: its node; fabric: only a reader has one."""

    name: str
    home: int
    fabric: str = ""


ROLES = (
    *(Role(f"writer {home}", home) for home in range(NODES)),
    Role("reader, shm", 0, "shm"),
    Role("reader, tcp", 0, "tcp"),
    Role("reader of the node that is killed", 1, "shm"),
)


def work(place: int, cluster: str, home: str, figures: Path, seed: int, stop: Event) -> None:
    """Be one client until the run is over, or its process has been killed."""
    parent = os.getppid()
    rows = np.memmap(figures, FIGURES, "r+", shape=(len(ROLES),))
    role, rng = ROLES[place], random.Random(seed)
    corpora = [Corpus(keys_of(f"edge-{home}", CORPUS_PAGES), PAGE_BYTES) for home in range(NODES)]
    with opened(cluster, home, role.fabric or "auto", granule=GRANULE) as client:
        if not role.fabric:
            writer = EdgeWriter(client, corpora[role.home], rows[place])
            while not stop.is_set() and os.getppid() == parent:
                writer.step()
            return
        reader = EdgeReader(client, corpora, rows[place], POOL_PAGES)
        while not stop.is_set() and os.getppid() == parent:
            chosen = rng.randrange(NODES)
            reader.step(chosen, int(rows["position"][chosen]), rng)
        reader.report()


class Evictions:
    """One run: its nodes, its clients, and what happens to them."""

    def __init__(self, cluster: LocalCluster, folder: Path, seed: int) -> None:
        """Start all processes; figures are in a file of the folder."""
        self.rng = random.Random(seed)
        self.did: Counter[str] = Counter()
        self._cluster = cluster
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in range(NODES)]
        for place in range(NODES):
            self._start(place)
        path = folder / "figures"
        self.figures = np.memmap(path, FIGURES, "w+", shape=(len(ROLES),))
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._processes: list[SpawnProcess] = []
        for place, role in enumerate(ROLES):
            home = cluster.nodes[role.home].ready["home"]
            arguments = (place, cluster.name, home, path, self.rng.getrandbits(32), self._stop)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def _start(self, place: int) -> None:
        nodes = self._cluster.nodes
        flags = ["--granule", GRANULE, "--listen", self._addresses[place]]
        if nodes:
            flags += ["--discovery-addr", nodes[0].ready["control"]]
        pool = f"{POOL_PAGES * PAGE_BYTES // 1024}KiB"
        node = self._cluster.start(f"n{place}", pool=pool, flags=flags)
        if place < len(nodes) - 1:
            nodes[place] = nodes.pop()
        assert nodes[place] is node

    @property
    def hits(self) -> int:
        """Pages that readers have compared."""
        return int(self.figures["done"][NODES:].sum())

    def run(self, hits: int, seconds: float) -> None:
        """Go on until so many hits are checked, or the time is up; raise what a client raised."""
        until = time.monotonic() + seconds
        try:
            while self.hits < hits and time.monotonic() < until:
                self.disturb()
                again_at = time.monotonic() + self.rng.uniform(*BETWEEN_S)
                while self.hits < hits and time.monotonic() < min(again_at, until):
                    self._check_processes()
                    time.sleep(LOOK_S)
        finally:
            self.end()
        self._check_processes()

    def disturb(self) -> None:
        """Kill the second node and start it again, or pause it."""
        node = self._cluster.nodes[-1]
        if self.rng.random() < 0.5:
            node.pause()
            time.sleep(self.rng.uniform(*PAUSE_S))
            node.resume()
            self.did["paused"] += 1
        else:
            node.kill()
            time.sleep(self.rng.uniform(*DOWN_S))
            node.end()
            self._start(NODES - 1)
            self.did["killed"] += 1

    def _check_processes(self) -> None:
        for node in self._cluster.nodes:
            node.assert_not_died()
        for role, process in zip(ROLES, self._processes, strict=True):
            assert not process.exitcode, f"{role.name} ended with {process.exitcode}: see above"

    def end(self) -> None:
        """End the clients."""
        self._stop.set()
        for process in self._processes:
            process.join(TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
                process.join()

    def summary(self) -> dict[str, Any]:
        """Return what all did."""
        longest_s = {
            role.name: round(int(row["longest_us"]) / 1e6, 3)
            for role, row in zip(ROLES, self.figures, strict=True)
        }
        readers = self.figures[NODES:]
        return {
            "hits": {
                role.name: int(row["done"])
                for role, row in zip(ROLES[NODES:], readers, strict=True)
            },
            "misses": int(readers["pages"].sum() - readers["done"].sum()),
            "evicted_while_read": int(readers["evicted"].sum()),
            "stored": int(self.figures["done"][:NODES].sum()),
            "killed": self.did["killed"],
            "paused": self.did["paused"],
            "longest_s": longest_s,
        }


def run(hits: int, minutes: float, seed: int) -> dict[str, Any]:
    """Make one run; return its summary."""
    began = time.monotonic()
    with LocalCluster() as cluster:
        evictions = Evictions(cluster, Path(cluster.folder.name), seed)
        evictions.run(hits, minutes * 60)
        return {**evictions.summary(), "seconds": round(time.monotonic() - began)}


def late_calls(summary: dict[str, Any]) -> dict[str, float]:
    """Return the longest call of each client that had one too long."""
    longest = summary["longest_s"].items()
    return {who: took_s for who, took_s in longest if took_s > OP_TIMEOUT_S + LATE_S}


def main() -> int:
    """Run as asked."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.endurance.evictions", description=__doc__
    )
    parser.add_argument("--hits", type=int, default=10**9, help="end after so many hits")
    parser.add_argument("--minutes", type=float, default=600.0, help="and after this time")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    summary = run(asked.hits, asked.minutes, asked.seed)
    print(json.dumps(summary, indent=1))
    late = late_calls(summary)
    if late:
        print(f"seconds of calls that had {OP_TIMEOUT_S:g}: {late}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
