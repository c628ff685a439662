"""An in-memory stand-in for `peercache.Client`, with the same contract.

Pages live in one dict that every client of a `FakeCluster` shares, under the same page keys as in
the real thing, so that namespaces separate here what they separate there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from peercache.client.report import add_missed, add_moved
from peercache.model.keys import Namespace, page_keys
from peercache.model.runs import PageRuns
from peercache.observability.reasons import ABSENT
from peercache.sglang import PeerCacheStore


@attrs.define(eq=False)
class FakeCluster:
    """What all fake clients of one test share, and a switch that makes them fail."""

    pages: dict[bytes, bytes] = attrs.field(factory=dict)
    tags: dict[bytes, int] = attrs.field(factory=dict)
    opened: list[FakeClient] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    refuse_to_open: Exception | None = None
    hints: list[tuple[str, float, list[bytes]]] = attrs.field(factory=list)
    """Hints: which, for how long, and which of their pages are held."""

    def open(self, config: Any = None, *, namespace: Namespace, **settings: Any) -> FakeClient:
        """Stand in for `Client.open`."""
        if self.refuse_to_open is not None:
            raise self.refuse_to_open
        client = FakeClient(self, namespace)
        self.opened.append(client)
        return client


@attrs.define(eq=False)
class FakeClient:
    """One client of a FakeCluster."""

    cluster: FakeCluster
    namespace: Namespace
    closed: bool = False
    registered: list[tuple[int, int]] = attrs.field(factory=list)
    touched: list[int] = attrs.field(factory=list)
    """Keys of each exists."""
    moved: list[int] = attrs.field(factory=list)
    """Pages of each get and set: how many batches there were."""
    metrics: Any = None

    def register_memory(self, address: int, length: int, owner: Any = None) -> Callable[[], None]:
        """Take note of memory that reads will fill."""
        self.registered.append((address, length))
        return lambda: self.registered.remove((address, length))

    def batch_set_from(self, keys: Sequence[str], segments: Any) -> list[bool]:
        """Keep a copy of each page; the first size under a key stays."""
        runs = segments if isinstance(segments, PageRuns) else PageRuns.of(segments)
        self.moved.append(len(keys))
        held = set(self.cluster.pages)
        names = self._names(keys)
        flags = [self._set(name, self._gather(runs, i)) for i, name in enumerate(names)]
        new = [name not in held for name in names]
        return self._reported(flags, runs, [a and b for a, b in zip(flags, new, strict=True)])

    def batch_get_into(self, keys: Sequence[str], segments: Any) -> list[bool]:
        """Scatter each page that is there and has the destination's size."""
        runs = segments if isinstance(segments, PageRuns) else PageRuns.of(segments)
        self.moved.append(len(keys))
        flags = [self._get(name, runs, index) for index, name in enumerate(self._names(keys))]
        return self._reported(flags, runs, flags)

    def retain(self, keys: Any, seconds: float) -> int:
        """Note a hint."""
        return self._hinted("retain", keys, seconds)

    def demote(self, keys: Any) -> int:
        """Note a hint."""
        return self._hinted("demote", keys)

    def prefetch(self, keys: Any) -> int:
        """Note a hint."""
        return self._hinted("prefetch", keys)

    def _hinted(self, hint: str, keys: Any, seconds: float = 0.0) -> int:
        held = [name for name in self._names(keys) if name in self.cluster.pages]
        self.cluster.hints.append((hint, seconds, held))
        return len(held)

    def touch(self, keys: Any) -> list[bool]:
        """Return one bool a key."""
        self.touched.append(len(keys))
        with self.cluster.lock:
            found = [name in self.cluster.pages for name in self._names(keys)]
        add_missed({ABSENT: found.count(False)})
        return found

    def batch_touch(self, keys: Any, *, compute_s: float | None = None) -> int:
        """Return the length of the leading run, at most what is worth reading."""
        found = self.touch(keys)
        run = found.index(False) if False in found else len(found)
        return run if compute_s is None else self.worth_reading(keys[:run], compute_s=compute_s)

    def worth_reading(self, keys: Any, *, compute_s: float) -> int:
        """Return how many keys take a second to compute, together."""
        return min(len(keys), round(1 / compute_s))

    def remove(self, keys: Sequence[str]) -> int:
        """Remove pages; return how many there were."""
        with self.cluster.lock:
            return sum(self.cluster.pages.pop(n, None) is not None for n in self._names(keys))

    def clear(self) -> int:
        """Remove the pages of this namespace and no others."""
        tag = self.namespace.tag()
        with self.cluster.lock:
            names = [name for name, of in self.cluster.tags.items() if of == tag]
            return sum(self.cluster.pages.pop(name, None) is not None for name in names)

    def stats(self) -> dict[str, Any]:
        """Return something to look at."""
        return {"pages": len(self.cluster.pages)}

    def close(self) -> None:
        """Close; closing twice is fine."""
        self.closed = True

    @staticmethod
    def _reported(flags: list[bool], runs: PageRuns, moved: list[bool]) -> list[bool]:
        """Add what was moved to an open report; return the flags."""
        add_moved(sum(moved), int(runs.lengths[np.array(moved, np.bool_)].sum()))
        add_missed({ABSENT: flags.count(False)})
        return flags

    def _names(self, keys: Any) -> list[bytes]:
        is_named = isinstance(keys, np.ndarray)
        names = keys if is_named else page_keys(keys, self.namespace.digest())
        return [name.tobytes() for name in names]

    def _set(self, name: bytes, page: bytes) -> bool:
        with self.cluster.lock:
            held = self.cluster.pages.setdefault(name, page)
            self.cluster.tags[name] = self.namespace.tag()
            return not self.closed and len(held) == len(page)

    def _get(self, name: bytes, runs: PageRuns, index: int) -> bool:
        with self.cluster.lock:
            page = self.cluster.pages.get(name)
        if self.closed or page is None or len(page) != int(runs.lengths[index]):
            return False
        offset = 0
        for run in range(runs.starts[index], runs.starts[index + 1]):
            size = int(runs.sizes[run])
            ctypes.memmove(int(runs.addresses[run]), page[offset : offset + size], size)
            offset += size
        return True

    @staticmethod
    def _gather(runs: PageRuns, index: int) -> bytes:
        return b"".join(
            ctypes.string_at(int(runs.addresses[run]), int(runs.sizes[run]))
            for run in range(runs.starts[index], runs.starts[index + 1])
        )


class FakeBackedStore(PeerCacheStore):
    """PeerCacheStore over the fake cluster of the test that runs, built by SGLang's factory."""

    cluster: ClassVar[FakeCluster]

    def __init__(self, storage_config: Any, *rest: Any) -> None:
        super().__init__(storage_config, *rest, client_factory=self.cluster.open)


class BrokenClient:
    """A client whose every method answers what its contract forbids."""

    def __init__(self, answer: Any) -> None:
        """Answer this, or raise it if it is an exception."""
        self._answer = answer

    def register_memory(self, address: int, length: int, owner: Any = None) -> Callable[[], None]:
        """Take no note: construction may raise, and so is not what is tested with this."""
        return lambda: None

    def __getattr__(self, name: str) -> Any:
        def method(*arguments: Any, **options: Any) -> Any:
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

        return method
