"""`peercache bench disk`: the page store compared with the raw device.

Pages are written and read in the order of their places, and then read in a random order by stores
that have fewer or more reads in flight.

The raw rate is measured in the same folder, in turn with the store, by as many threads, with calls
of the same size past the page cache: the difference is what the store costs.
"""

from __future__ import annotations

import mmap
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES, SLAB_BYTES_MAX
from peercache.actors.ports import (
    DiskEnded,
    DiskFact,
    DiskOpened,
    Load,
    LoadDone,
    Write,
    WriteDone,
)
from peercache.cli.bench.engine import WorkingSet
from peercache.cli.bench.limits import percentile
from peercache.errors import ConfigError
from peercache.model.keys import Namespace, tags_of
from peercache.model.records import RECORD, RESIDENT
from peercache.storage.mover import UNIT_BYTES, PoolMemory
from peercache.storage.ring import READS_AT_ONCE
from peercache.storage.store import DiskStore

ROUNDS: Final = 3
"""After one that is not counted: a disk is slower where it was never written."""

JOBS_AT_ONCE: Final = 8
"""Two for each thread by default, so that one that ends a job finds the next."""

SINGLE_LOADS: Final = 200

IN_FLIGHT: Final = (1, 8, 64)
"""Reads at random places that are in flight at once, while a batch is loaded."""

GRANULE: Final = 16 * 2**10

TIMEOUT_S: Final = 120.0


Pages = npt.NDArray[np.intp]


@attrs.frozen
class DiskPlan:
    """What is measured: each round writes and reads `work`."""

    folder: Path
    work: WorkingSet
    threads: int


class Bench:
    """A store with a pool of its own, and a plain file of the same size next to it."""

    def __init__(self, plan: DiskPlan, folder: Path) -> None:
        """Open both and fill the pool."""
        self.plan, self.work = plan, plan.work
        page_bytes, page_count = plan.work.page_bytes, plan.work.pages
        slot = -(-page_bytes // GRANULE) * GRANULE
        self.pages = np.frombuffer(mmap.mmap(-1, page_count * slot), np.uint8)
        self.pages[:] = self._content()
        words = np.full(page_count * slot // GRANULE, 2, np.uint64)
        self.offsets = np.arange(page_count, dtype=np.uint64) * np.uint64(slot)
        self.facts: queue.SimpleQueue[DiskFact] = queue.SimpleQueue()
        self.jobs = 0
        self._new_store = partial(
            DiskStore,
            str(folder / "store"),
            size_bytes=2 * page_count * (page_bytes + 2 * BLOCK_BYTES) + 4 * SLAB_BYTES_MAX,
            pool=PoolMemory(self.pages, words, GRANULE),
            notify=self.facts.put,
            free_floor=0.0,
        )
        opened = self._open(plan.threads, READS_AT_ONCE)
        self.index = DiskIndex(capacity_bytes=opened.usable_bytes, slab_bytes=opened.slab_bytes)
        if page_bytes > self.index.page_bytes_max:
            raise ConfigError("page-bytes", f"{self.index.page_bytes_max} at most here")
        self.keys = [os.urandom(16) for _ in range(page_count)]
        self.records = np.zeros(page_count, RECORD)
        self.records["key"] = np.frombuffer(b"".join(self.keys), "V16")
        self.records["offset"], self.records["length"] = self.offsets, page_bytes
        self.records["generation"], self.records["flags"] = 2, RESIDENT
        ones = np.ones(page_count, np.uint64)
        self.lengths = ones * np.uint64(page_bytes)
        self.ones = ones
        self.namespaces = np.full(page_count, tags_of([Namespace().tag()]))
        begun = self.index.begin(b"".join(self.keys), self.namespaces, self.lengths, ones, 0)
        self.places = begun.places
        self.known = np.zeros(page_count, np.uint64)
        """The checksums of pages that were written: a node loads those without their headers."""
        self._written: dict[int, Pages] = {}
        self.calls = self._raw_calls(folder / "raw")

    def store_gb_s(self, *, write: bool) -> float:
        """Return the rate of the whole working set through the store, in the order of places."""
        return self._gb_s(np.arange(self.work.pages), self._write if write else self._load)

    def scattered_gb_s(self, in_flight: int) -> float:
        """Return the rate of loads in a random order, by a store with so many reads in flight."""
        threads = min(in_flight, self.plan.threads)
        self.store.close()
        self._open(threads, in_flight // threads)
        gb_s = self._gb_s(np.random.default_rng(3).permutation(self.work.pages), self._load)
        self.store.close()
        self._open(self.plan.threads, READS_AT_ONCE)
        return gb_s

    def raw_scattered_gb_s(self, in_flight: int) -> float:
        """Return the device's own rate of such reads, each by a thread."""
        page_bytes = -(-self.work.page_bytes // BLOCK_BYTES) * BLOCK_BYTES
        memory = self.pages.data
        count = len(self.pages) // page_bytes
        order = np.random.default_rng(3).permutation(count).tolist()
        places = [(at * page_bytes, memory[at * page_bytes :][:page_bytes]) for at in order]
        return self._move_raw(places, in_flight, os.preadv)

    def one_page_ms(self) -> list[float]:
        """Return how long loads of single pages take, one after the other."""
        chosen = np.random.default_rng(2).integers(0, self.work.pages, SINGLE_LOADS).tolist()
        times = []
        for page in chosen:
            started = time.perf_counter()
            self._load(np.array([page]))
            self._await_done()
            times.append((time.perf_counter() - started) * 1e3)
        return times

    def raw_gb_s(self, *, write: bool) -> float:
        """Return the device's own rate, with as many threads and calls of the same size."""
        move = os.pwritev if write else os.preadv
        return self._move_raw(self.calls, self.plan.threads, move)

    def wrong_bytes(self) -> int:
        """Load every page into cleared memory; return how many bytes are not what was written."""
        self.pages[:] = 0
        self.store_gb_s(write=False)
        shape = (self.work.pages, -1)
        wrong = self.pages.reshape(shape) != self._content().reshape(shape)
        return int(np.count_nonzero(wrong[:, : self.work.page_bytes]))

    def close(self) -> None:
        """Close both."""
        self.store.close()
        os.close(self._raw)

    def _move_raw(
        self,
        calls: list[tuple[int, memoryview]],
        threads: int,
        move: Callable[[int, list[memoryview], int], int],
    ) -> float:
        """Return the rate of plain calls of so many threads, in GB/s."""
        pending = queue.SimpleQueue[tuple[int, memoryview]]()
        for call in calls:
            pending.put(call)

        def work() -> None:
            while True:
                try:
                    offset, memory = pending.get_nowait()
                except queue.Empty:
                    return
                move(self._raw, [memory], offset)

        running = [threading.Thread(target=work) for _ in range(threads)]
        started = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sum(len(memory) for _, memory in calls) / (time.perf_counter() - started) / 1e9

    def _content(self) -> npt.NDArray[np.uint8]:
        return np.random.default_rng(1).integers(0, 256, len(self.pages), np.uint8)

    def _raw_calls(self, path: Path) -> list[tuple[int, memoryview]]:
        direct = os.O_DIRECT if self.is_direct else 0
        self._raw = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | direct, 0o600)
        total = len(self.pages)
        os.posix_fallocate(self._raw, 0, total)
        pages = max(1, UNIT_BYTES // self.work.page_bytes)
        size = min(total, pages * self.work.page_bytes // BLOCK_BYTES * BLOCK_BYTES or BLOCK_BYTES)
        memory = self.pages.data
        return [(at, memory[at : at + size]) for at in range(0, total - size + 1, size)]

    @property
    def is_direct(self) -> bool:
        """Return whether the store goes past the page cache."""
        return self.store.is_direct

    def _open(self, threads: int, reads_at_once: int) -> DiskOpened:
        self.store = self._new_store(threads=threads, reads_at_once=reads_at_once)
        self.store.start()
        opened = self._take()
        if not isinstance(opened, DiskOpened):
            raise ConfigError("folder", f"{self.plan.folder} cannot be used: {opened}")
        return opened

    def _gb_s(self, pages: Pages, move: Callable[[Pages], None]) -> float:
        """Return the rate of the working set in this order."""
        wrong = 0
        started = time.perf_counter()
        in_flight = 0
        for some in self.work.batches():
            move(pages[some])
            in_flight += 1
            if in_flight == JOBS_AT_ONCE:
                wrong += self._await_done()
                in_flight -= 1
        for _ in range(in_flight):
            wrong += self._await_done()
        if wrong:
            raise ConfigError("folder", f"{wrong} pages were not written or read as they should")
        return self.work.total_bytes / (time.perf_counter() - started) / 1e9

    def _write(self, pages: Pages) -> None:
        self.jobs += 1
        self._written[self.jobs] = pages
        self.store.perform(
            Write(
                self.jobs, self.records[pages], self.namespaces[pages], self.places[pages],
                self.ones[pages], time.monotonic() + TIMEOUT_S,
            )
        )  # fmt: skip

    def _load(self, pages: Pages) -> None:
        self.jobs += 1
        keys = b"".join(self.keys[page] for page in pages.tolist())
        self.store.perform(
            Load(
                self.jobs, keys, self.namespaces[pages], self.lengths[pages],
                self.places[pages], self.offsets[pages], time.monotonic() + TIMEOUT_S,
                self.known[pages],
            )
        )  # fmt: skip

    def _await_done(self) -> int:
        fact = self._take()
        if not isinstance(fact, (WriteDone, LoadDone)):
            raise ConfigError("folder", f"the store ended: {fact}")
        if isinstance(fact, WriteDone) and fact.checksums is not None:
            self.known[self._written.pop(fact.job)] = fact.checksums
        return sum(outcome != 0 for outcome in fact.outcomes)

    def _take(self) -> DiskFact:
        try:
            return self.facts.get(timeout=TIMEOUT_S)
        except queue.Empty:
            return DiskEnded(f"no answer within {TIMEOUT_S:.0f} s")


def run_disk(plan: DiskPlan, progress: Callable[[str], None]) -> dict[str, float]:
    """Measure in a folder of our own below `plan.folder`; return figures by name."""
    with tempfile.TemporaryDirectory(prefix="peercache-bench-", dir=plan.folder) as name:
        bench = Bench(plan, Path(name))
        try:
            return _measured(bench, progress)
        finally:
            bench.close()


def _measured(bench: Bench, progress: Callable[[str], None]) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for number in range(ROUNDS + 1):
        progress(f"round {number} of {ROUNDS}")
        measured = {
            "raw_write_gb_s": bench.raw_gb_s(write=True),
            "write_gb_s": bench.store_gb_s(write=True),
            "raw_read_gb_s": bench.raw_gb_s(write=False),
            "load_gb_s": bench.store_gb_s(write=False),
        }
        for count in IN_FLIGHT:
            measured[f"raw_scattered_{count}_gb_s"] = bench.raw_scattered_gb_s(count)
            measured[f"scattered_{count}_gb_s"] = bench.scattered_gb_s(count)
        for name, figure in measured.items() if number else ():
            samples.setdefault(name, []).append(figure)
    times = bench.one_page_ms()
    figures = {name: statistics.median(values) for name, values in samples.items()}
    scattered = [f"scattered_{count}" for count in IN_FLIGHT]
    for ratio, ours, raw in (
        ("write_ratio", "write_gb_s", "raw_write_gb_s"),
        ("load_ratio", "load_gb_s", "raw_read_gb_s"),
        *((f"{name}_ratio", f"{name}_gb_s", f"raw_{name}_gb_s") for name in scattered),
    ):
        # Ratios are of one round each: the rate of a shared disk changes between rounds.
        rounds = zip(samples[ours], samples[raw], strict=True)
        figures[ratio] = statistics.median(a / b for a, b in rounds)
    figures["load_one_ms"] = statistics.median(times)
    figures["load_one_p99_ms"] = percentile(times, 0.99)
    figures["direct"] = float(bench.is_direct)
    figures["wrong_bytes"] = bench.wrong_bytes()
    return figures
