"""A page store with a small pool of its own, driven by hand: write, load, look at the reports."""

from __future__ import annotations

import mmap
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np

from peercache.actors.disk.index import DiskIndex
from peercache.actors.ports import (
    DiskEffect,
    DiskEnded,
    DiskFact,
    DiskOpened,
    Forget,
    ForgetDone,
    Load,
    LoadDone,
    Write,
    WriteDone,
)
from peercache.model.keys import tags_of
from peercache.model.records import RECORD, RESIDENT
from peercache.storage.mover import PoolMemory
from peercache.storage.store import DiskStore
from tests.pace import TIMEOUT_S

GRANULE = 4096
MIB = 2**20


class Log:
    """Keeps what is logged, as (level, event, facts)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **facts: self.lines.append((level, event, facts))

    def events(self) -> list[str]:
        return [event for _, event, _ in self.lines]

    def errors(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [line for line in self.lines if line[0] == "error"]


class Pool:
    """Page memory and words, as a segment has them; slots are given out in order."""

    def __init__(self, size_bytes: int = 16 * MIB) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        self.words = np.ones(size_bytes // GRANULE, np.uint64)
        self.generation = 1000
        self.at = 0

    def seen(self) -> PoolMemory:
        return PoolMemory(self.memory, self.words, GRANULE)

    def slots(self, lengths: list[int]) -> list[int]:
        """Take slots one after the other, from the beginning again where they do not fit."""
        wanted = sum(-(-length // GRANULE) * GRANULE for length in lengths)
        if self.at + wanted > len(self.memory):
            self.at = 0
        offsets = []
        for length in lengths:
            offsets.append(self.at)
            self.words[self.at // GRANULE] |= np.uint64(1)
            self.at += -(-length // GRANULE) * GRANULE
        return offsets

    def commit(self, keys: list[bytes], lengths: list[int]) -> np.ndarray:
        """Write what `content` specifies for each key; return RESIDENT records."""
        records = np.zeros(len(keys), RECORD)
        offsets = self.slots(lengths)
        for index, (key, length, offset) in enumerate(zip(keys, lengths, offsets, strict=True)):
            self.memory[offset : offset + length] = content(key, length)
            self.generation += 2
            self.words[offset // GRANULE] = self.generation
            records[index] = (key, 7, offset, self.generation, length, RESIDENT, 0)
        return records

    def evict(self, record: np.void) -> None:
        self.words[int(record["offset"]) // GRANULE] |= np.uint64(1)


def content(key: bytes, length: int) -> np.ndarray:
    """Return the bytes of a page: another stream for each key."""
    seed = int.from_bytes(key[:8], "little")
    words = np.arange(seed % 2**40, seed % 2**40 + length // 8 + 1, dtype=np.uint64)
    return (words * np.uint64(0x9E37_79B9_7F4A_7C15)).view(np.uint8)[:length]


def key_of(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "little")


class Rig:
    """One store on a folder, its facts in a queue."""

    def __init__(
        self, path: Path, *, size_bytes: int = 32 * MIB, opened: bool = True, **more: Any
    ) -> None:
        self.pool = more.pop("pool", None) or Pool()
        self.log = Log()
        self.facts: queue.SimpleQueue[DiskFact] = queue.SimpleQueue()
        self.reported: list[DiskFact] = []
        self.jobs = 0
        self.store = DiskStore(
            str(path), size_bytes=size_bytes, pool=self.pool.seen(), notify=self.facts.put,
            log=self.log, **{"free_floor": 0.0, **more},
        )  # fmt: skip
        self.store.start()
        if opened:
            self.opened = self.await_fact(DiskOpened)
            self.index = DiskIndex(
                capacity_bytes=self.opened.usable_bytes, slab_bytes=self.opened.slab_bytes
            )
            self.index.load(self.opened.entries)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def await_fact(
        self, kind: type, job: int | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Return the next fact of a kind (and job); others are kept in `reported`."""
        until = time.monotonic() + timeout_s
        while True:
            for fact in self.reported:
                if isinstance(fact, kind) and job in (None, getattr(fact, "job", None)):
                    self.reported.remove(fact)
                    return fact
            try:
                self.reported.append(self.facts.get(timeout=until - time.monotonic()))
            except (queue.Empty, ValueError):
                raise AssertionError(f"no {kind.__name__}; reported {self.reported}") from None

    def write(self, numbers: list[int], length: int = 100_000, **more: Any) -> bytes:
        """Commit pages to the pool, write them and keep them in the index; return outcomes."""
        return self.await_fact(WriteDone, self.send_write(numbers, length, **more)).outcomes

    def send_write(
        self, numbers: list[int], length: int = 100_000, *, namespace: int = 5,
        until_s: float = TIMEOUT_S, finish: bool = True,
    ) -> int:  # fmt: skip
        keys = [key_of(number) for number in numbers]
        self.records = self.pool.commit(keys, [length] * len(keys))
        spaces = tags_of([namespace] * len(keys))
        self.jobs += 1
        sequences = np.full(len(keys), self.jobs, np.uint64)
        lengths = np.full(len(keys), length, np.uint64)
        self.begun = begun = self.index.begin(b"".join(keys), spaces, lengths, sequences, 0)
        assert (begun.entries >= 0).all(), "no room"
        if begun.gone.count:
            self.perform(Forget(begun.gone.places))
        if finish:
            self.index.finish(begun.entries)
        self.perform(
            Write(
                self.jobs, self.records, spaces, begun.places, sequences,
                time.monotonic() + until_s,
            )
        )  # fmt: skip
        return self.jobs

    def load(self, numbers: list[int], **more: Any) -> list[str]:
        """Load pages; return "right", or the outcome's number, for each. Wrong bytes fail."""
        job, offsets = self.send_load(numbers, **more)
        done = self.await_fact(LoadDone, job)
        found = []
        for number, offset, outcome in zip(numbers, offsets, done.outcomes, strict=True):
            if outcome == 0:
                length = int(self.lengths[len(found)])
                there = self.pool.memory[offset : offset + length]
                assert np.array_equal(there, content(key_of(number), length)), "wrong bytes"
            found.append("right" if outcome == 0 else str(outcome))
        return found

    def send_load(
        self, numbers: list[int], *, namespace: int = 5, until_s: float = TIMEOUT_S,
        known: np.ndarray | None = None,
    ) -> tuple[int, list[int]]:  # fmt: skip
        keys = b"".join(key_of(number) for number in numbers)
        entries = self.index.find(keys)
        assert (entries >= 0).all(), "not in the index"
        rows = self.index.entries(entries)
        self.lengths = rows["length"].astype(np.uint64)
        offsets = self.pool.slots(self.lengths.tolist())
        self.jobs += 1
        spaces = tags_of([namespace] * len(numbers))
        self.perform(
            Load(
                self.jobs, keys, spaces, self.lengths, rows["place"].copy(),
                np.array(offsets, np.uint64), time.monotonic() + until_s, known,
            )
        )  # fmt: skip
        return self.jobs, offsets

    def forget(self, numbers: list[int]) -> None:
        """Remove pages from the index and the store, and wait until that holds."""
        gone = self.index.remove(self.index.find(b"".join(key_of(n) for n in numbers)))
        self.jobs += 1
        self.perform(Forget(gone.places, job=self.jobs))
        self.await_fact(ForgetDone, self.jobs)

    @property
    def parts(self) -> Any:
        """Return what an open store is made of: its folder, files, index, mover and workers."""
        return self.store._opened

    def place_of(self, number: int) -> int:
        return int(self.index.entries(self.index.find(key_of(number)))["place"][0])

    def file_of(self, number: int) -> tuple[Path, int]:
        """Return the slab file of a page, and where its header is in it."""
        slab, offset = divmod(self.place_of(number), self.opened.slab_bytes)
        return self.parts.folder.path / f"slab-{slab:06d}.pcs", offset

    def perform(self, effect: DiskEffect) -> None:
        self.store.perform(effect)

    def ended(self) -> str:
        return self.await_fact(DiskEnded).reason
