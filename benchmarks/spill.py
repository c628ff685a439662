"""`python -m benchmarks.spill`: what moving pages costs those who set and read meanwhile.

Two clusters of three nodes on this machine, without spill and with it, in turns. In each turn node
`full` is filled; `large` has room for all that it evicts. Rows, each with and without spill:

    set     128 x 1 MiB into the full pool, at `placement_rate`, so that pages move all the time
    get     1 MiB that `large` holds, read by a client of `small`, while another process stores
            pages at `full` at `placement_rate`

Columns: samples; median and 99th percentile in ms; MiB that moved meanwhile, a second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from benchmarks.copies import figure
from benchmarks.engine import start_cluster
from peercache import Client
from peercache.cli.bench import limits
from peercache.cli.processes import NodeProcess, NodeProcesses

MIB: Final = 2**20
BATCH: Final = 128
FULL_BYTES: Final = 9 * BATCH * MIB
POOLS: Final = {"full": FULL_BYTES, "large": 3 * FULL_BYTES, "small": 16 * MIB}
RATE: Final = 512 * MIB
SETS: Final = 12
READ_S: Final = 2.0
READ_PAGES: Final = 32
CALL_S: Final = 3.0
SETTLED_S: Final = 4.0
"""Longer than a node accepts no offers: after its start, or while a clear has not reached its
deadline."""


@attrs.define(eq=False)
class Row:
    """The samples of one row, in seconds, and what moved while they were taken."""

    took: list[float] = attrs.field(factory=list)
    moved: int = 0
    watched_s: float = 0.0

    def line(self, name: str) -> str:
        """Return the row as text."""
        median, p99 = (limits.percentile(self.took, share) * 1e3 for share in (0.5, 0.99))
        rate = self.moved / MIB / self.watched_s
        return f"{name:<16}{len(self.took):>8}{median:>10.2f}{p99:>10.2f}{rate:>10.0f}"


class Cluster:
    """Three nodes, and a client of each."""

    def __init__(self, processes: NodeProcesses, spill: str, fabric: str) -> None:
        """Start them."""
        self.name = f"spill-{spill}"
        settings = {
            "spill": spill,
            "placement-rate": str(RATE),
            "fabric": fabric,
            "metrics-port": "-1",
        }
        self.nodes = start_cluster(processes, self.name, POOLS, dict.fromkeys(POOLS, settings))
        self.fabric, self.number = fabric, 0
        self.source: npt.NDArray[np.uint8] = np.random.default_rng(1).integers(
            0, 256, (BATCH, MIB), dtype=np.uint8
        )
        self.stores = open_client(self.nodes["full"], self.name, fabric)
        self.reads = open_client(self.nodes["small"], self.name, fabric)
        self.kept = [f"kept-{number}" for number in range(READ_PAGES)]
        self.keeps = open_client(self.nodes["large"], self.name, fabric)
        self.target = np.zeros(MIB, np.uint8)

    def set(self) -> float:
        """Store a batch of new pages; return the seconds."""
        self.number += 1
        keys = [f"{self.number}-{number}" for number in range(BATCH)]
        began = time.perf_counter()
        stored = self.stores.batch_set(keys, list(self.source))
        took = time.perf_counter() - began
        assert all(stored), f"{stored.count(False)} pages were not stored"
        return took

    def fill(self) -> None:
        """Empty all pools, and fill the one that is full once."""
        self.stores.clear()
        time.sleep(SETTLED_S)
        assert all(self.keeps.batch_set(self.kept, list(self.source[:READ_PAGES])))
        for _ in range(FULL_BYTES // BATCH // MIB):
            self.set()

    def moved(self) -> int:
        """Return how many bytes have moved."""
        return figure(self.nodes["full"], "placement_bytes")

    def timed_sets(self, row: Row) -> None:
        """Add the samples of one turn."""
        self.fill()
        before, began = self.moved(), time.perf_counter()
        for number in range(1, SETS + 1):
            row.took.append(self.set())
            due = began + number * self.source.nbytes / RATE
            time.sleep(max(0.0, due - time.perf_counter()))
        row.watched_s += time.perf_counter() - began
        row.moved += self.moved() - before

    def timed_gets(self, row: Row) -> None:
        """Add the samples of one turn, while another process stores."""
        self.fill()
        process = multiprocessing.get_context("spawn").Process(
            target=store, args=(self.nodes["full"].home, self.name, self.fabric, self.number)
        )
        process.start()
        self.number += 1_000
        try:
            stored = self.moved() if self.name.endswith("on") else 0
            while process.is_alive() and self.name.endswith("on") and self.moved() == stored:
                time.sleep(0.01)
            before, began = self.moved(), time.perf_counter()
            row.took += list(self.gets(began + READ_S))
            row.watched_s += time.perf_counter() - began
            row.moved += self.moved() - before
            assert process.is_alive(), "the process that stores has ended"
        finally:
            process.terminate()
            process.join()

    def gets(self, until: float) -> Iterator[float]:
        """Yield how long each read takes, for a while."""
        while (began := time.perf_counter()) < until:
            for key in self.kept:
                began = time.perf_counter()
                (hit,) = self.reads.batch_get([key], [self.target])
                yield time.perf_counter() - began
                assert hit, f"{key} is lost"


def open_client(node: NodeProcess, cluster: str, fabric: str) -> Client:
    """Return a client of a node."""
    return Client.open(home=node.home, cluster=cluster, fabric=fabric, op_timeout_s=CALL_S)


def store(home: str, cluster: str, fabric: str, number: int) -> None:
    """Store new pages at `placement_rate`, until this process is stopped."""
    source = np.random.default_rng(2).integers(0, 256, (8, MIB), dtype=np.uint8)
    with Client.open(home=home, cluster=cluster, fabric=fabric, op_timeout_s=CALL_S) as client:
        due = time.perf_counter()
        while True:
            number += 1
            client.batch_set([f"{number}-{page}" for page in range(8)], list(source))
            due = max(due + source.nbytes / RATE, time.perf_counter() - 0.1)
            time.sleep(max(0.0, due - time.perf_counter()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--fabric", default="auto")
    options = parser.parse_args()
    rows = {(what, spill): Row() for what in ("set", "get") for spill in ("off", "on")}
    with NodeProcesses() as without, NodeProcesses() as with_spill:
        clusters = [
            ("off", Cluster(without, "off", options.fabric)),
            ("on", Cluster(with_spill, "on", options.fabric)),
        ]
        for _ in range(options.turns):
            for spill, cluster in clusters:
                cluster.timed_sets(rows["set", spill])
                cluster.timed_gets(rows["get", spill])
        for _, cluster in clusters:
            for client in (cluster.stores, cluster.keeps, cluster.reads):
                client.close()
    print(f"{'':<16}{'samples':>8}{'median':>10}{'p99':>10}{'MiB/s':>10}")
    for (what, spill), row in rows.items():
        print(row.line(f"{what}, spill {spill}"))


if __name__ == "__main__":
    main()
