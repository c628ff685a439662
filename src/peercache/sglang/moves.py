"""How a linker moves pages: in place, or through pinned memory next to an accelerator.

Owns    the pages of loads from their read until their last layer is on the device.
Takes   reads, stores and the start of a batch, from the linker.
Keeps   a layer is reported complete after its copy has ended, and not before; nothing is copied
        that was not read and verified as a whole.
Limits  the deadlines of the client. Copies to and from the device end by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

import attrs
import torch

from peercache.sglang.device import DevicePool, StagedPool
from peercache.sglang.pages import BATCH_PAGES

STORE_DIVISOR = 4
"""Of the staging memory, one part of so many is for stores, at most BATCH_PAGES pages."""

Events = Callable[[], list[Any]]
"""Records what pages of the device wait for, on the thread of the scheduler."""


class InPlace:
    """Moves pages between the device pool and the cluster directly."""

    loads_max: int | None = None
    """Pages that there is room for in one load; None for no limit."""

    def __init__(self, store: Any, pool: DevicePool) -> None:
        """Move pages of a pool whose memory the processor can read."""
        self._store = store
        self._layers = len(pool.layers)

    def read(self, rid: str, keys: list[str], slots: torch.Tensor) -> int:
        """Read pages for a request; return how many were read."""
        return int(self._store.batch_get_v1(keys, slots).count(True))

    def forget(self, rid: str) -> None:
        """Give up what was read for a request."""

    def start(self, counter: Any, rids: list[str], events: Events) -> int:
        """Start to load what was read; return the index of the counter."""
        index: int = counter.update_producer()
        for layer in range(self._layers):
            counter.complete(index, layer)
        return index

    def storing(self, keys: list[str], slots: torch.Tensor, events: Events) -> Callable[[], bool]:
        """Return a function that stores pages, and returns whether the cluster holds all."""

        def store() -> bool:
            return all(
                all(self._store.batch_set_v1(some, places))
                for some, places in batches(keys, slots, BATCH_PAGES)
            )

        return store

    def quiesce(self) -> None:
        """Return when nothing writes to the device."""

    def close(self) -> None:
        """End."""


@attrs.frozen(eq=False)
class StagedLoad:
    """Pages of a request that were read. slots: the first of each page on the device."""

    pages: list[int]
    slots: list[int]


class Staged:
    """Moves pages through pinned memory, and a thread that copies layers to the device."""

    def __init__(self, store: Any, pool: StagedPool, log: Any) -> None:
        """Start the thread."""
        self._store, self._pool, self._log = store, pool, log
        # Loads find room even while pages are stored.
        self._store_pages = min(BATCH_PAGES, max(1, pool.pages // STORE_DIVISOR))
        self._store_room = pool.take(self._store_pages) or []
        self.loads_max: int | None = pool.pages - self._store_pages
        self._loads: dict[str, StagedLoad] = {}
        self._stream, self._store_stream = (pool.device_module.Stream() for _ in range(2))
        self._batches: Queue[Callable[[], None] | None] = Queue()
        self._thread = threading.Thread(target=self._main, name="peercache-layers", daemon=True)
        self._thread.start()

    def read(self, rid: str, keys: list[str], slots: torch.Tensor) -> int:
        """Read pages for a request; return how many were read, none without room for all."""
        pages = self._pool.take(len(keys))
        if pages is None:
            return 0
        flags = self._store.batch_get_v1(keys, self._pool.slots(pages))
        if all(flags):
            self._loads[rid] = StagedLoad(pages, slots[:: self._pool.page_size].tolist())
        else:
            self._pool.give_back(pages)
        return int(flags.count(True))

    def forget(self, rid: str) -> None:
        """Give up what was read for a request."""
        load = self._loads.pop(rid, None)
        if load is not None:
            self._pool.give_back(load.pages)

    def start(self, counter: Any, rids: list[str], events: Events) -> int:
        """Have the thread copy what was read, layer by layer; return the index of the counter."""
        index: int = counter.update_producer()
        loads = [self._loads.pop(rid) for rid in rids]
        before = events()
        self._batches.put(lambda: self._copy(counter, index, loads, before))
        return index

    def _copy(self, counter: Any, index: int, loads: list[StagedLoad], before: list[Any]) -> None:
        try:
            with self._pool.device_module.stream(self._stream):
                for event in before:
                    event.synchronize()
                for layer in range(len(self._pool.layers)):
                    for load in loads:
                        self._pool.to_device(layer, load.pages, load.slots)
                    self._end(self._stream)
                    counter.complete(index, layer)
        except Exception as error:  # an error of the device: SGLang aborts these requests
            counter.fail(index, error)
            self._log.exception("sglang.call_failed", operation="copy", pages=0)
        finally:
            for load in loads:
                self._pool.give_back(load.pages)

    def _end(self, stream: Any) -> None:
        """Wait for all copies of a stream."""
        done = self._pool.device_module.Event()
        done.record(stream)
        done.synchronize()

    def _main(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch()
            self._batches.task_done()
        self._batches.task_done()

    def storing(self, keys: list[str], slots: torch.Tensor, events: Events) -> Callable[[], bool]:
        """Return a function that stores pages, and returns whether the cluster holds all."""
        before = events()

        def store() -> bool:
            for event in before:
                event.synchronize()
            for some, places in batches(keys, slots, self._store_pages):
                room = self._store_room[: len(some)]
                with self._pool.device_module.stream(self._store_stream):
                    self._pool.from_device(room, places[:: self._pool.page_size].tolist())
                    self._end(self._store_stream)
                if not all(self._store.batch_set_v1(some, self._pool.slots(room))):
                    return False
            return True

        return store

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


def batches(
    keys: list[str], slots: torch.Tensor, pages_max: int
) -> list[tuple[list[str], torch.Tensor]]:
    """Cut pages into batches, each with a deadline of its own. slots: those of all tokens."""
    tokens = len(slots) // len(keys)
    return [
        (keys[at : at + pages_max], slots[at * tokens : (at + pages_max) * tokens])
        for at in range(0, len(keys), pages_max)
    ]
