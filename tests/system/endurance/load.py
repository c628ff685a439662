"""Processes that store and read pages without a pause, and compare every byte of every hit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from peercache import Client
from peercache.errors import PeerCacheError
from peercache.model.runs import PageRuns
from tests.system.nodes import Page, page_of

OP_TIMEOUT_S, EXISTS_TIMEOUT_S = 2.0, 0.5
READ_PAGES, SET_PAGES = 512, 32
"""Pages of one get, and of one set."""
SET_EVERY_S = 0.005
"""Writers leave most of the processors to readers."""
NO_HOME_S = 0.05
REPORT_CALLS = 1000
FIGURES = np.dtype(
    [
        ("position", "<i8"), ("calls", "<i8"), ("pages", "<i8"), ("done", "<i8"),
        ("evicted", "<i8"), ("longest_us", "<i8"),
    ]
)  # fmt: skip
"""What one process has done.

position: how many pages a writer has tried to store, one after the other
calls:    of `batch_get_into` or `batch_set_from`, with as many pages
done:     pages that were stored, or hits with the right bytes
evicted:  pages that were evicted between their lookup and their read
longest_us: the longest call in microseconds"""


class Corpus:
    """Keys and the only right bytes of each, made once: making them costs more than reading."""

    def __init__(self, keys: Sequence[str], page_bytes: int) -> None:
        """Make the pages of these keys, one row each."""
        self.keys = list(keys)
        self.page_bytes = page_bytes
        self.pages: npt.NDArray[np.uint8] = np.stack([page_of(key, page_bytes) for key in keys])

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)


def opened(cluster: str, home: str, fabric: str, **settings: Any) -> Client:
    """Attach to a home node, which may be dead for now."""
    while True:
        try:
            return Client.open(
                cluster=cluster,
                home=home,
                fabric=fabric,
                op_timeout_s=OP_TIMEOUT_S,
                exists_timeout_s=EXISTS_TIMEOUT_S,
                **settings,
            )
        except PeerCacheError:  # noqa: PERF203 - each turn waits
            time.sleep(0.2)


def runs_of(pages: Page) -> PageRuns:
    """Return the rows of a matrix as runs."""
    count, size = pages.shape
    addresses = pages.ctypes.data + size * np.arange(count, dtype=np.uint64)
    return PageRuns.regular(addresses, np.full(count, size, np.uint64), count)


class Caller:
    """Calls of one client, and what came of them: a row of FIGURES that other processes see."""

    def __init__(self, client: Client, corpus: Corpus, row: Any) -> None:
        """Begin with no call; row: an item of FIGURES."""
        self.client, self.corpus, self.row = client, corpus, row

    def timed(self, call: Callable[[], list[bool]]) -> npt.NDArray[np.bool_]:
        """Call, count it, and return for each page whether it was served."""
        began = time.monotonic()
        served = np.array(call(), np.bool_)
        took_us = int((time.monotonic() - began) * 1e6)
        self.row["longest_us"] = max(took_us, int(self.row["longest_us"]))
        self.row["calls"] += 1
        self.row["pages"] += len(served)
        return served


class EdgeWriter(Caller):
    """Stores a corpus round and round, so that a smaller pool evicts all the time."""

    def step(self) -> None:
        """Store the next pages; wait where there is no home node."""
        begin = int(self.row["position"]) % len(self.corpus)
        rows = slice(begin, begin + SET_PAGES)
        runs = runs_of(self.corpus.pages[rows])
        stored = self.timed(lambda: self.client.batch_set_from(self.corpus.keys[rows], runs))
        self.row["done"] += stored.sum()
        if stored.any():
            self.row["position"] += len(stored)
        time.sleep(SET_EVERY_S if stored.any() else NO_HOME_S)


class EdgeReader(Caller):
    """Reads between what is certainly there and what has just been evicted."""

    def __init__(self, client: Client, corpora: Sequence[Corpus], row: Any, room: int) -> None:
        """Read the corpora of writers; room: pages of each that nodes have memory for."""
        super().__init__(client, corpora[0], row)
        self._corpora, self._room = corpora, room
        self._destination = np.empty((READ_PAGES, corpora[0].page_bytes), np.uint8)
        self._runs = runs_of(self._destination)

    def step(self, writer: int, position: int, rng: random.Random) -> None:
        """Read a batch of this writer, which is at this position of its corpus."""
        corpus = self._corpora[writer]
        back = rng.randrange(READ_PAGES, self._room // 2)
        begin = min((position - back) % len(corpus), len(corpus) - READ_PAGES)
        rows = slice(begin, begin + READ_PAGES)
        self._destination[:, :8] = self._destination[:, -8:] = 0xA5  # A hit must write.
        hits = self.timed(lambda: self.client.batch_get_into(corpus.keys[rows], self._runs))
        right = (self._destination.view("<u8") == corpus.pages[rows].view("<u8")).all(axis=1)
        wrong = np.flatnonzero(hits & ~right)
        assert not len(wrong), f"wrong bytes under {corpus.keys[begin + wrong[0]]}"
        self.row["done"] += hits.sum()
        if self.row["calls"] % REPORT_CALLS == 0:
            self.report()

    def report(self) -> None:
        """Count what only the client knows."""
        self.row["evicted"] = self.client.stats().get("pages_missed_evicted", 0)
