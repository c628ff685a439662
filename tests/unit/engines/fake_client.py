"""A client with pages in a dictionary, and faults on demand."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from peercache.client.home import HomeState
from peercache.client.report import add_missed, add_moved
from peercache.config.settings import Config
from peercache.model.keys import Namespace, PageKeys
from peercache.model.prefix import Overlap
from peercache.model.records import RESIDENT
from peercache.model.runs import PageRuns


class FakeClient:
    """What an adapter calls of a `Client`, with its promises."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.pages: dict[bytes, bytes] = {}
        self.namespace: Namespace | None = None
        self.config: Config | None = None
        self.registered: list[tuple[int, int]] = []
        self.touched: list[int] = []
        self.retained: dict[bytes, float] = {}
        self.hints: list[tuple[str, float, list[bytes]]] = []
        """The hints that it was given: which, for how long, and which of their pages it holds."""
        self.is_closed = False
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.entered = threading.Event()
        """A call has come."""
        self.problem: Exception | None = None
        self.home_address = "ipc:///home"
        self.home_state = HomeState(is_lost=False, answered_s=time.monotonic())

    def open(self, config: Config, *, namespace: Namespace) -> FakeClient:
        """Stand for `Client.open`; raise the problem if there is one."""
        if self.problem is not None:
            raise self.problem
        self.config, self.namespace = config, namespace
        return self

    def register_memory(self, address: int, length: int, owner: Any = None) -> Callable[[], None]:
        """Note the memory."""
        self.registered.append((address, length))
        return lambda: None

    def touch(self, keys: PageKeys) -> list[bool]:
        """Return which pages are held."""
        self._come_in()
        self.touched.append(len(keys))
        return [key.tobytes() in self.pages for key in keys]

    def batch_set_from(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Store pages of one run each; a page that is held stays as it is."""
        self._come_in()
        new = 0
        for key, address, size in zip(keys, runs.addresses, runs.sizes, strict=True):
            if key.tobytes() not in self.pages:
                self.pages[key.tobytes()] = ctypes.string_at(int(address), int(size))
                new += 1
                add_moved(1, int(size))
        return [
            len(self.pages[key.tobytes()]) == size
            for key, size in zip(keys, runs.sizes, strict=True)
        ]

    def batch_get_into(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Read pages of one run each; another size is a miss that leaves the memory alone."""
        self._come_in()
        hits = []
        for key, address, size in zip(keys, runs.addresses, runs.sizes, strict=True):
            page = self.pages.get(key.tobytes(), b"")
            if is_hit := bool(page) and len(page) == int(size):
                ctypes.memmove(int(address), page, len(page))
                add_moved(1, len(page))
            hits.append(is_hit)
        add_missed({"absent": hits.count(False)})
        return hits

    def remove(self, keys: PageKeys) -> int:
        """Drop pages; return how many there were."""
        return sum(self.pages.pop(key.tobytes(), None) is not None for key in keys)

    def overlap(self, keys: PageKeys) -> Overlap:
        """Return that one member holds the pages; of lost pages nothing is known."""
        self._come_in()
        if self.home_state.is_lost:
            return Overlap.unknown(len(keys))
        flags = [RESIDENT if key.tobytes() in self.pages else 0 for key in keys]
        return Overlap((1,), np.array([flags], np.uint8), whole=True)

    def retain(self, keys: PageKeys, seconds: float) -> int:
        """Note for how long pages are retained; return how many of them are held."""
        held = [key.tobytes() for key in keys if key.tobytes() in self.pages]
        self.retained.update(dict.fromkeys(held, seconds))
        return self._hinted("retain", keys, seconds)

    def demote(self, keys: PageKeys) -> int:
        """Note a hint."""
        return self._hinted("demote", keys)

    def prefetch(self, keys: PageKeys) -> int:
        """Note a hint."""
        return self._hinted("prefetch", keys)

    def share(self, keys: PageKeys) -> int:
        """Note a hint."""
        return self._hinted("share", keys)

    def _hinted(self, hint: str, keys: PageKeys, seconds: float = 0.0) -> int:
        self._come_in()
        held = [key.tobytes() for key in keys if key.tobytes() in self.pages]
        self.hints.append((hint, seconds, held))
        return len(held)

    def stats(self) -> dict[str, int]:
        """Return the figure that adapters read."""
        return {"home_pool_bytes_used": sum(map(len, self.pages.values()))}

    def close(self) -> None:
        """Note that it is closed."""
        self.is_closed = True

    def _come_in(self) -> None:
        self.entered.set()
        assert self.may_answer.wait(30)
        if self.problem is not None:
            raise self.problem
