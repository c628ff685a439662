"""Load that goes on by itself: threads that write and read, and check every byte they get."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from peercache import Client
from tests.system.nodes import Page, page_of


@attrs.define
class Counts:
    """What one thread has done."""

    batches: int = 0
    pages: int = 0
    hits: int = 0
    longest_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Return hits over pages."""
        return self.hits / self.pages if self.pages else 0.0


class Load:
    """Threads of one test. The first wrong byte, or any exception, ends it and fails the test."""

    def __init__(self) -> None:
        """Begin with no thread."""
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.error: BaseException | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Repeat a step in a thread of its own until the block ends."""

        def repeat() -> None:
            try:
                while not self._stop.is_set():
                    step()
            except BaseException as error:
                self.error = self.error or error
                self._stop.set()

        self._threads.append(threading.Thread(target=repeat))

    def last(self, seconds: float) -> None:
        """Let it go on for so long, or until something failed."""
        self._stop.wait(seconds)

    def __enter__(self) -> Load:
        """Start every thread."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Stop every thread, and raise what one of them met."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None and self.error is not None:
            raise self.error


class Corpus:
    """Keys and the only right bytes of each, made once: making them costs more than reading."""

    def __init__(self, keys: Sequence[str], page_bytes: int) -> None:
        """Make the pages of these keys."""
        self.keys = list(keys)
        self.page_bytes = page_bytes
        self.pages: list[Page] = [page_of(key, page_bytes) for key in keys]

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)


class Reader:
    """Reads batches with one client, and compares every byte of every hit."""

    def __init__(self, client: Client, corpus: Corpus, batch: int) -> None:
        """Read up to `batch` pages at once."""
        self.client = client
        self.counts = Counts()
        self.corpus = corpus
        self.buffers = [np.empty(corpus.page_bytes, np.uint8) for _ in range(batch)]

    def read(self, indices: Sequence[int]) -> list[bool]:
        """Read these pages of the corpus; return which were hits, all of them verified."""
        buffers = self.buffers[: len(indices)]
        for buffer in buffers:
            buffer[:8] = buffer[-8:] = 0xA5  # A hit that wrote nothing is noticed.
        keys = [self.corpus.keys[index] for index in indices]
        started = time.monotonic()
        hits = self.client.batch_get(keys, buffers)
        self.counts.longest_s = max(self.counts.longest_s, time.monotonic() - started)
        assert len(hits) == len(indices)
        for index, buffer, hit in zip(indices, buffers, hits, strict=True):
            assert not hit or np.array_equal(buffer, self.corpus.pages[index]), (
                f"wrong bytes under {self.corpus.keys[index]}"
            )
        self.counts.batches += 1
        self.counts.pages += len(hits)
        self.counts.hits += sum(hits)
        return hits


class EdgeWriter:
    """Writes a corpus round and round, so that a smaller pool evicts all the time."""

    def __init__(self, client: Client, corpus: Corpus, batch: int) -> None:
        """Write `batch` pages at once."""
        self.client = client
        self.position = 0
        self.counts = Counts()
        self.corpus = corpus
        self._batch = batch

    def step(self) -> None:
        """Write the next batch."""
        begin = self.position % len(self.corpus)
        end = begin + self._batch
        stored = self.client.batch_set(self.corpus.keys[begin:end], self.corpus.pages[begin:end])
        self.counts.batches += 1
        self.counts.pages += len(stored)
        self.counts.hits += sum(stored)
        self.position += self._batch


def follow(reader: Reader, writer: EdgeWriter, pool_pages: int, rng: random.Random) -> None:
    """Read a batch somewhere between what is certainly there and what has just been evicted."""
    count = len(reader.buffers)
    back = rng.randrange(count, pool_pages + pool_pages // 2)
    size = len(reader.corpus)
    reader.read([(writer.position - back + i) % size for i in range(count)])
