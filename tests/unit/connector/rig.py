"""An engine's buffers, and a page store in a dictionary that can hang, lose pages and fail."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from peercache.connector import ConnectorMetadata, RemoteKVConnector
from peercache.connector.metadata import PageStore
from peercache.model.keys import PageKeys
from peercache.model.runs import PageRuns
from tests.pace import TIMEOUT_S

PAGE_TOKENS = 4
LAYERS = 3
ITEM_BYTES = (32, 48)


class MemoryPages:
    """A page store in a dictionary, which several connectors may share."""

    def __init__(self, pages: dict[bytes, bytes] | None = None) -> None:
        self.pages: dict[bytes, bytes] = {} if pages is None else pages
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Semaphore(0)
        self.fails = False
        self.registered: list[tuple[int, int]] = []
        self.calls: list[int] = []
        self.closed = 0

    def _enter(self, keys: PageKeys) -> None:
        self.calls.append(len(keys))
        self.entered.release()
        assert self.go.wait(TIMEOUT_S)
        if self.fails:
            raise RuntimeError("the store has a bug")

    def exists(self, keys: PageKeys, page_bytes: int) -> int:
        self._enter(keys)
        sizes = [len(self.pages.get(key, b"")) for key in keys.tolist()]
        found = [bool(size) and page_bytes in {0, size} for size in sizes]
        return found.index(False) if False in found else len(found)

    def get_into(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        self._enter(keys)
        return [self._get(key, runs, i) for i, key in enumerate(keys.tolist())]

    def set_from(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        self._enter(keys)
        for i, key in enumerate(keys.tolist()):
            self.pages[key] = b"".join(ctypes.string_at(*run) for run in runs_of(runs, i))
        return [True] * len(keys)

    def _get(self, key: bytes, runs: PageRuns, i: int) -> bool:
        page = self.pages.get(key, b"")
        if len(page) != int(runs.lengths[i]):
            return False
        for address, size in runs_of(runs, i):
            ctypes.memmove(address, page[:size], size)
            page = page[size:]
        return True

    def register(self, address: int, length: int) -> Callable[[], None]:
        self.registered.append((address, length))
        return lambda: self.registered.remove((address, length))

    def close(self) -> None:
        self.closed += 1


def runs_of(runs: PageRuns, page: int) -> list[tuple[int, int]]:
    """Return the (address, size) of a page's runs."""
    part = slice(int(runs.starts[page]), int(runs.starts[page + 1]))
    return list(zip(runs.addresses[part].tolist(), runs.sizes[part].tolist(), strict=True))


class Engine:
    """Buffers of K and V for a few layers, and a connector over them."""

    def __init__(self, store: PageStore, pages: int = 64, seed: int = 0, **metadata: Any) -> None:
        rng = np.random.default_rng(seed)
        self.buffers = [
            rng.integers(0, 256, (pages, size), np.uint8)
            for _ in range(LAYERS)
            for size in ITEM_BYTES
        ]
        facts = {"model": "m", "dtype": "bfloat16", "page_tokens": PAGE_TOKENS, "timeout_s": 30.0}
        self.connector = RemoteKVConnector(
            ConnectorMetadata(**{**facts, **metadata}, store=lambda _: store)
        )
        self.connector.register_kv_buffers(self.kv_args())

    def kv_args(self) -> SimpleNamespace:
        return SimpleNamespace(
            kv_data_ptrs=[buffer.ctypes.data for buffer in self.buffers],
            kv_data_lens=[buffer.nbytes for buffer in self.buffers],
            kv_item_lens=[buffer.shape[1] for buffer in self.buffers],
        )

    def page(self, index: int) -> bytes:
        return b"".join(buffer[index].tobytes() for buffer in self.buffers)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()


def mapping_of(pages: Sequence[int], first: int = 0) -> list[tuple[int, slice]]:
    """Return a mapping of page indices, from the prompt's page `first` on."""
    return [
        (page, slice((first + i) * PAGE_TOKENS, (first + i + 1) * PAGE_TOKENS))
        for i, page in enumerate(pages)
    ]
