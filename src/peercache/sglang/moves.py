"""How a linker moves pages: in place, or through pinned memory next to an accelerator.

Owns    the pages of loads from their read until their last layer is on the device.
Takes   reads, stores and the start of a batch, from the linker.
Keeps   a layer is reported complete after its copy has ended, and not before; nothing is copied
        that was not read and verified as a whole.
Limits  the deadlines of the client. Copies to and from the device end by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Queue
from typing import Any

import attrs
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from peercache.sglang.device import StagedPool
from peercache.sglang.pages import BATCH_PAGES

STORE_DIVISOR = 4
"""Of the staging memory, one part of so many is for stores, at most BATCH_PAGES pages."""

Events = Callable[[], list[Any]]
"""Records what pages of the device wait for, on the thread of the scheduler."""


@attrs.frozen(eq=False)
class PoolPages:
    """Pages of one pool, as SGLang's storage interface has them. host_indices: of all slots."""

    name: Any
    keys: list[str]
    host_indices: torch.Tensor

    @classmethod
    def of(cls, transfers: Iterable[Any]) -> list[PoolPages]:
        """Read the transfers of a linker's call."""
        return [cls(e.name, list(e.keys), e.device_indices.cpu()) for e in transfers if e.keys]

    def firsts(self) -> list[int]:
        """Return the first slot of each page."""
        listed: list[int] = self.host_indices[:: len(self.host_indices) // len(self.keys)].tolist()
        return listed

    def batches(self, pages_max: int) -> list[PoolPages]:
        """Cut them into batches, each with a deadline of its own."""
        tokens = len(self.host_indices) // len(self.keys)
        return [
            PoolPages(
                self.name,
                self.keys[at : at + pages_max],
                self.host_indices[at * tokens : (at + pages_max) * tokens],
            )
            for at in range(0, len(self.keys), pages_max)
        ]


def read(store: Any, pages: list[PoolPages]) -> list[list[bool]]:
    """Read pages of several pools in one batch; return one bool a page."""
    if len(pages) == 1:
        return [store.batch_get_v1(pages[0].keys, pages[0].host_indices)]
    answer = store.batch_get_v2(pages)
    return [answer[each.name] for each in pages]


def write(store: Any, pages: PoolPages) -> bool:
    """Store pages of one pool; return whether the cluster holds all."""
    if pages.name == PoolName.KV:
        return all(store.batch_set_v1(pages.keys, pages.host_indices))
    return all(store.batch_set_v2([pages])[pages.name])


class InPlace:
    """Moves pages between the device pool and the cluster directly."""

    loads_max: int | None = None
    """Pages that there is room for in one load; None for no limit."""

    def __init__(self, store: Any, layers: int) -> None:
        """Move pages of pools whose memory the processor can read. layers: of the model."""
        self._store, self._layers = store, layers

    def read(self, rid: str, pages: list[PoolPages]) -> list[list[bool]]:
        """Read pages for a request; return one bool a page."""
        return read(self._store, pages)

    def forget(self, rid: str) -> None:
        """Give up what was read for a request."""

    def start(self, counter: Any, rids: list[str], events: Events) -> int:
        """Start to load what was read; return the index of the counter."""
        index: int = counter.update_producer()
        for layer in range(self._layers):
            counter.complete(index, layer)
        return index

    def storing(self, pages: list[PoolPages], events: Events) -> Callable[[], bool]:
        """Return a function that stores pages, and returns whether the cluster holds all."""

        def store() -> bool:
            return all(
                write(self._store, some) for each in pages for some in each.batches(BATCH_PAGES)
            )

        return store

    def quiesce(self) -> None:
        """Return when nothing writes to the device."""

    def close(self) -> None:
        """End."""


@attrs.frozen(eq=False)
class StagedLoad:
    """Pages of one pool that were read. slots: the first of each page on the device."""

    pool: StagedPool
    pages: list[int]
    slots: list[int]


class Staged:
    """Moves pages through pinned memory, and a thread that copies layers to the device."""

    def __init__(self, store: Any, pools: dict[Any, StagedPool], layers: int, log: Any) -> None:
        """Start the thread. layers: of the model."""
        self._store, self._pools, self._layers, self._log = store, pools, layers, log
        # Loads find room even while pages are stored.
        self._store_room = {
            name: pool.take(min(BATCH_PAGES, max(1, pool.pages // STORE_DIVISOR))) or []
            for name, pool in pools.items()
        }
        kv = pools[PoolName.KV]
        self.loads_max: int | None = kv.pages - len(self._store_room[PoolName.KV])
        self._loads: dict[str, list[StagedLoad]] = {}
        self._device = kv.device_module
        self._stream, self._store_stream = (self._device.Stream() for _ in range(2))
        self._batches: Queue[Callable[[], None] | None] = Queue()
        self._thread = threading.Thread(target=self._main, name="peercache-layers", daemon=True)
        self._thread.start()

    def read(self, rid: str, pages: list[PoolPages]) -> list[list[bool]]:
        """Read pages for a request; return one bool a page, none set without room for all."""
        loads: list[StagedLoad] = []
        for each in pages:
            pool = self._pools[each.name]
            taken = pool.take(len(each.keys))
            if taken is None:
                self._give_back(loads)
                return [[False] * len(each.keys) for each in pages]
            loads.append(StagedLoad(pool, taken, each.firsts()))
        rooms = [
            PoolPages(each.name, each.keys, load.pool.slots(load.pages))
            for each, load in zip(pages, loads, strict=True)
        ]
        flags = read(self._store, rooms)
        if all(map(all, flags)):
            self._loads[rid] = loads
        else:
            self._give_back(loads)
        return flags

    @staticmethod
    def _give_back(loads: list[StagedLoad]) -> None:
        for load in loads:
            load.pool.give_back(load.pages)

    def forget(self, rid: str) -> None:
        """Give up what was read for a request."""
        self._give_back(self._loads.pop(rid, []))

    def start(self, counter: Any, rids: list[str], events: Events) -> int:
        """Have the thread copy what was read, layer by layer; return the index of the counter."""
        index: int = counter.update_producer()
        loads = [load for rid in rids for load in self._loads.pop(rid)]
        before = events()
        self._batches.put(lambda: self._copy(counter, index, loads, before))
        return index

    def _copy(self, counter: Any, index: int, loads: list[StagedLoad], before: list[Any]) -> None:
        try:
            with self._device.stream(self._stream):
                for event in before:
                    event.synchronize()
                for layer in range(self._layers):
                    for load in loads:
                        load.pool.to_device(layer, load.pages, load.slots)
                    self._end(self._stream)
                    counter.complete(index, layer)
        except Exception as error:  # an error of the device: SGLang aborts these requests
            counter.fail(index, error)
            self._log.exception("sglang.call_failed", operation="copy", pages=0)
        finally:
            self._give_back(loads)

    def _end(self, stream: Any) -> None:
        """Wait for all copies of a stream."""
        done = self._device.Event()
        done.record(stream)
        done.synchronize()

    def _main(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch()
            self._batches.task_done()
        self._batches.task_done()

    def storing(self, pages: list[PoolPages], events: Events) -> Callable[[], bool]:
        """Return a function that stores pages, and returns whether the cluster holds all."""
        before = events()

        def store() -> bool:
            for event in before:
                event.synchronize()
            return all(
                self._store_staged(some)
                for each in pages
                for some in each.batches(len(self._store_room[each.name]))
            )

        return store

    def _store_staged(self, pages: PoolPages) -> bool:
        pool = self._pools[pages.name]
        room = self._store_room[pages.name][: len(pages.keys)]
        with self._device.stream(self._store_stream):
            pool.from_device(room, pages.firsts())
            self._end(self._store_stream)
        return write(self._store, PoolPages(pages.name, pages.keys, pool.slots(room)))

    def quiesce(self) -> None:
        """Return when nothing writes to the device; forget all loads that have not started."""
        for rid in list(self._loads):
            self.forget(rid)
        self._batches.join()

    def close(self) -> None:
        """End the thread; may be repeated."""
        if self._thread.is_alive():
            self._batches.put(None)
            self._thread.join()
