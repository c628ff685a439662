"""The engine's side of `benchmarks.peers`: sets, gets and looks up pages in one store, timed.

It runs as a process in that store's own environment, so it imports numpy, the store and nothing
else. It reads one JSON command a line from its standard input and answers with one line; keys and
addresses are prepared, and bytes verified, outside the timed part.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

ASKED = 128
"""Keys of one exists, as SGLang calls it."""

POISON = 0xA5
START_S = 30.0

Bytes: TypeAlias = npt.NDArray[Any]
"""Memory that a store may register."""


class Ours:
    """Two clients of this checkout: one that maps its peers' memory, and one that reads by tcp."""

    def __init__(self, settings: dict[str, Any], memory: list[Bytes]) -> None:
        """Open them at their home node."""
        del memory
        client = importlib.import_module("peercache.client.client").Client
        home = importlib.import_module("peercache.client.home")
        self._runs = importlib.import_module("peercache.model.runs").PageRuns
        self._clients = {
            fabric: client.open(fabric=fabric, **settings) for fabric in ("shm", "tcp")
        }
        # Meanwhile the kernel makes the page tables of the home node's memory: a second, once.
        for thread in threading.enumerate():
            if thread.name == home.POPULATING:
                thread.join(START_S)

    def places(self, addresses: list[int], page_bytes: int) -> Any:
        """Return the places of a batch in the form that set and get take."""
        sizes = np.full(len(addresses), page_bytes, np.uint64)
        return self._runs.regular(np.array(addresses, np.uint64), sizes, len(addresses))

    def set(self, keys: list[str], places: Any) -> list[bool]:
        """Store pages; return which are stored."""
        stored: list[bool] = self._clients["shm"].batch_set_from(keys, places)
        return stored

    def get(self, keys: list[str], places: Any, fabric: str) -> list[bool]:
        """Fetch pages into their places; return which arrived."""
        hits: list[bool] = self._clients[fabric].batch_get_into(keys, places)
        return hits

    def exists(self, keys: list[str], fabric: str = "shm") -> int:
        """Return how many leading keys are known, as in SGLang."""
        return int(self._clients[fabric].batch_exists(keys))

    def contains(self, keys: list[str]) -> int:
        """Return how many keys are known, each of them looked up."""
        return sum(self._clients["shm"].contains(keys))

    def clear(self) -> None:
        """Forget all pages."""
        self._clients["shm"].clear()

    def close(self) -> None:
        """End."""
        for client in self._clients.values():
            client.close()


class Mooncake:
    """A client of Mooncake's store, which lends its master a segment of memory."""

    def __init__(self, settings: dict[str, Any], memory: list[Bytes]) -> None:
        """Join, and register the engine's memory."""
        store = importlib.import_module("mooncake.store")
        self.store = store.MooncakeDistributedStore()
        status = self.store.setup(
            settings["address"], "P2PHANDSHAKE", settings["pool_bytes"], 64 * 2**20, "tcp", "",
            settings["master"],
        )  # fmt: skip
        if status:
            raise OSError(f"setup answered {status}")
        for part in memory:
            status = self.store.register_buffer(int(part.ctypes.data), part.nbytes)
            if status:
                raise OSError(f"register_buffer answered {status}")

    def places(self, addresses: list[int], page_bytes: int) -> Any:
        """Return the places of a batch in the form that set and get take."""
        return addresses, [page_bytes] * len(addresses)

    def set(self, keys: list[str], places: Any) -> list[bool]:
        """Store pages; return which are stored."""
        return [status == 0 for status in self.store.batch_put_from(keys, *places)]

    def get(self, keys: list[str], places: Any, fabric: str) -> list[bool]:
        """Fetch pages into their places; return which arrived."""
        del fabric
        sizes = places[1]
        return [
            count == size
            for count, size in zip(self.store.batch_get_into(keys, *places), sizes, strict=True)
        ]

    def exists(self, keys: list[str], fabric: str = "") -> int:
        """Return how many keys are known."""
        del fabric
        return int(self.store.batch_is_exist(keys).count(1))

    contains = exists

    def clear(self) -> None:
        """Forget all pages."""
        self.store.remove_all(force=True)

    def close(self) -> None:
        """End."""
        self.store.close()


class _HostPool:
    """The part of SGLang's host pool that the public PeerCache uses: buffer and addresses."""

    def __init__(self, memory: Bytes) -> None:
        self.kv_buffer = self
        self._memory = memory

    def data_ptr(self) -> int:
        return int(self._memory.ctypes.data)

    def numel(self) -> int:
        return self._memory.nbytes

    def element_size(self) -> int:
        return 1

    def get_page_buffer_meta(self, places: Any) -> Any:
        return places


class PublicPeerCache:
    """A node of the package `peercache` of PyPI, embedded in this process, over tcp."""

    def __init__(self, settings: dict[str, Any], memory: list[Bytes]) -> None:
        """Join, and wait until the ring has all nodes."""
        kind = importlib.import_module("peercache.store").PeerCacheStore
        shape = type("Shape", (), {"tp_rank": 0, "tp_size": 1, "is_mla_model": True})()
        # One object per page, as in the other stores.
        shape.extra_config = {
            "discovery_addr": settings["discovery"], "protocol": "tcp",
            "local_hostname": "127.0.0.1", "rdma_bind_host": "127.0.0.1",
            "control_bind_host": "127.0.0.1", "meta_bind_host": "127.0.0.1",
            "global_segment_size": settings["pool_bytes"], "disk_enabled": False,
            "metrics_enabled": False,
        }  # fmt: skip
        self.store = kind(shape)
        self.store.register_mem_pool_host(_HostPool(memory[-1]))

    def await_nodes(self, count: int) -> None:
        """Wait until the ring has all nodes."""
        until = time.monotonic() + START_S
        while len(self.store.runtime.ring) < count:
            if time.monotonic() > until:
                raise OSError(f"the ring has {len(self.store.runtime.ring)} of {count} nodes")
            time.sleep(0.05)

    places = Mooncake.places

    def set(self, keys: list[str], places: Any) -> list[bool]:
        """Store pages; return which are stored."""
        stored: list[bool] = self.store.batch_set_v1(keys, places)
        return stored

    def get(self, keys: list[str], places: Any, fabric: str) -> list[bool]:
        """Fetch pages into their places; return which arrived."""
        del fabric
        hits: list[bool] = self.store.batch_get_v1(keys, places)
        return hits

    def exists(self, keys: list[str], fabric: str = "") -> int:
        """Return how many leading keys are known."""
        del fabric
        return int(self.store.batch_exists(keys))

    def clear(self) -> None:
        """Forget this node's pages."""
        self.store.clear()

    def close(self) -> None:
        """End."""
        self.store.close()


class Redis:
    """A client of several Redis servers that divides keys between them: a plain baseline."""

    def __init__(self, settings: dict[str, Any], memory: list[Bytes]) -> None:
        """Connect."""
        self._memory = {int(part.ctypes.data): part for part in memory}
        redis = importlib.import_module("redis")
        self._error = redis.RedisError
        self._servers = [
            redis.Redis(host="127.0.0.1", port=port, socket_timeout=1.0, retry=None)
            for port in settings["ports"]
        ]

    def places(self, addresses: list[int], page_bytes: int) -> Any:
        """Return the places of a batch in the form that set and get take."""
        places = []
        for address in addresses:
            start = max(begin for begin in self._memory if begin <= address)
            offset = address - start
            places.append(self._memory[start][offset : offset + page_bytes])
        return places

    def _shares(self, keys: list[str]) -> list[list[int]]:
        shares: list[list[int]] = [[] for _ in self._servers]
        for number, key in enumerate(keys):
            shares[int(key[:8], 16) % len(shares)].append(number)
        return shares

    def _each(self, keys: list[str], ask: Callable[[Any, list[int]], None]) -> None:
        """Ask each server for its share; a server that fails answers for none of it."""
        for server, share in zip(self._servers, self._shares(keys), strict=True):
            if share:
                try:
                    ask(server, share)
                except (self._error, OSError):
                    server.connection_pool.disconnect()

    def set(self, keys: list[str], places: Any) -> list[bool]:
        """Store pages; return which are stored."""
        stored = [False] * len(keys)

        def ask(server: Any, share: list[int]) -> None:
            server.mset({keys[number]: places[number].data for number in share})
            for number in share:
                stored[number] = True

        self._each(keys, ask)
        return stored

    def get(self, keys: list[str], places: Any, fabric: str) -> list[bool]:
        """Fetch pages into their places; return which arrived."""
        del fabric
        hits = [False] * len(keys)

        def ask(server: Any, share: list[int]) -> None:
            for number, page in zip(share, server.mget([keys[n] for n in share]), strict=True):
                if page is not None:
                    places[number][:] = np.frombuffer(page, np.uint8)
                    hits[number] = True

        self._each(keys, ask)
        return hits

    def exists(self, keys: list[str], fabric: str = "") -> int:
        """Return how many keys are known, each of them looked up."""
        del fabric
        counts: list[int] = []

        def ask(server: Any, share: list[int]) -> None:
            batch = server.pipeline(transaction=False)
            for number in share:
                batch.exists(keys[number])
            counts.append(sum(batch.execute()))

        self._each(keys, ask)
        return sum(counts)

    contains = exists

    def clear(self) -> None:
        """Forget all pages."""
        for server in self._servers:
            server.flushall()

    def close(self) -> None:
        """End."""
        for server in self._servers:
            server.close()


STORES: dict[str, type[Any]] = {
    "ours": Ours,
    "mooncake": Mooncake,
    "peercache-0.8.4": PublicPeerCache,
    "redis": Redis,
}


class Engine:
    """Memory with pages of known content, and an engine's calls of a store."""

    def __init__(self) -> None:
        """Start without a store."""
        self._store: Any = None
        self._source: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._target: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._page_bytes = 8
        self._batch = 1
        self._asked = 0

    def open(
        self, store: str, settings: dict[str, Any], page_bytes: int, batch: int, total_bytes: int
    ) -> None:
        """Make the working set, then open the store."""
        words: npt.NDArray[np.uint64] = np.arange(total_bytes // 8, dtype=np.uint64)
        self._source = words * np.uint64(0x9E3779B97F4A7C15)
        self._target = np.zeros_like(self._source)
        self._page_bytes, self._batch = page_bytes, batch
        memory = [self._source.view(np.uint8), self._target.view(np.uint8)]
        self._store = STORES[store](settings, memory)

    def await_nodes(self, count: int) -> None:
        """Wait until the store knows all its nodes, if it can report that."""
        if hasattr(self._store, "await_nodes"):
            self._store.await_nodes(count)

    def copy(self) -> float:
        """Return the GB/s of numpy's copy, page by page over the working set."""
        source, target = self._source.view(np.uint8), self._target.view(np.uint8)
        step = self._page_bytes
        started = time.perf_counter()
        for begin in range(0, source.nbytes, step):
            np.copyto(target[begin : begin + step], source[begin : begin + step])
        return source.nbytes / (time.perf_counter() - started) / 1e9

    def set(self, generation: int, first: int = 0, count: int | None = None) -> dict[str, Any]:
        """Set batches of a generation of pages; return the seconds of each, and pages stored."""
        self._mark(generation)
        times, stored, pages = [], 0, 0
        for numbers in self._batches(first, count):
            keys = self._keys(generation, numbers)
            places = self._store.places(self._addresses(self._source, numbers), self._page_bytes)
            started = time.perf_counter()
            answers = self._store.set(keys, places)
            times.append(time.perf_counter() - started)
            stored += sum(answers)
            pages += len(numbers)
        return {"seconds": times, "done": stored, "pages": pages}

    def get(
        self,
        generation: int,
        fabric: str = "",
        first: int = 0,
        count: int | None = None,
        *,
        ask: bool = True,
    ) -> dict[str, Any]:
        """Get batches, each after its exists, as SGLang does; only the get is timed."""
        self._mark(generation)
        self._target.view(np.uint8)[:] = POISON
        times, pages = [], 0
        hits: list[int] = []
        for numbers in self._batches(first, count):
            keys = self._keys(generation, numbers)
            places = self._store.places(self._addresses(self._target, numbers), self._page_bytes)
            if ask:
                self._store.exists(keys, fabric)
            started = time.perf_counter()
            answers = self._store.get(keys, places, fabric)
            times.append(time.perf_counter() - started)
            hits += [number for number, hit in zip(numbers, answers, strict=True) if hit]
            pages += len(numbers)
        wrong = self._wrong_pages(hits)
        return {"seconds": times, "done": len(hits), "pages": pages, "wrong": wrong}

    def get_for(self, generation: int, fabric: str, seconds: float) -> dict[str, Any]:
        """Get the working set again and again, without a pause; verify the last pass."""
        until = time.perf_counter() + seconds
        moved, took = 0, 0.0
        while True:
            answer = self.get(generation, fabric, ask=False)
            moved += answer["done"]
            took += sum(answer["seconds"])
            if time.perf_counter() > until:
                return {"gb_s": moved * self._page_bytes / took / 1e9, "wrong": answer["wrong"]}

    def exists_hot(self, generation: int, calls: int) -> dict[str, Any]:
        """Ask for the same stored keys again and again."""
        keys = self._keys(generation, range(ASKED))
        self._store.exists(keys)
        return self._asked_for("exists", [keys] * calls)

    def exists_known(self, generation: int, calls: int, how: str = "exists") -> dict[str, Any]:
        """Ask for stored keys, each key for the first time."""
        spans = [range(call * ASKED, (call + 1) * ASKED) for call in range(calls)]
        return self._asked_for(how, [self._keys(generation, span) for span in spans])

    def exists_unknown(self, calls: int, how: str = "exists", pause_s: float = 0.0) -> Any:
        """Ask for keys that were never set, each key once; `done` counts the right answers."""
        batches = []
        for _ in range(calls):
            self._asked += 1
            batches.append(self._keys(-self._asked, range(ASKED)))
        answer = self._asked_for(how, batches, pause_s)
        return answer | {"done": answer["pages"] - answer["done"]}

    def clear(self) -> None:
        """Forget all pages."""
        self._store.clear()

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _asked_for(
        self, how: str, batches: list[list[str]], pause_s: float = 0.0
    ) -> dict[str, Any]:
        ask = getattr(self._store, how, None)
        if ask is None:
            return {"seconds": [], "done": 0, "pages": 0}
        times, known = [], 0
        for keys in batches:
            started = time.perf_counter()
            known += ask(keys)
            times.append(time.perf_counter() - started)
            time.sleep(pause_s)
        return {"seconds": times, "done": known, "pages": sum(map(len, batches))}

    def _batches(self, first: int, count: int | None) -> list[range]:
        pages = self._source.nbytes // self._page_bytes
        begins = list(range(0, pages, self._batch))
        chosen = (
            begins
            if count is None
            else [begins[(first + number) % len(begins)] for number in range(count)]
        )
        return [range(begin, min(begin + self._batch, pages)) for begin in chosen]

    def _keys(self, generation: int, numbers: range) -> list[str]:
        """Return keys derived from their numbers, in the form of SGLang's: 64 hex digits."""
        text = f"{os.getppid()}/{os.getpid() if generation < 0 else 0}/{generation}/"
        return [hashlib.sha256(f"{text}{number}".encode()).hexdigest() for number in numbers]

    def _addresses(self, memory: Bytes, numbers: range) -> list[int]:
        start = int(memory.ctypes.data)
        return [start + number * self._page_bytes for number in numbers]

    def _mark(self, generation: int) -> None:
        """Let each page begin and end with its generation and number: no two pages are equal."""
        pages = self._source.reshape(-1, self._page_bytes // 8)
        marks = np.arange(len(pages), dtype=np.uint64) + np.uint64(generation << 32)
        pages[:, 0] = marks
        pages[:, -1] = marks

    def _wrong_pages(self, hits: list[int]) -> int:
        """Count the hits with bytes that differ from what was set."""
        shape = (-1, self._page_bytes // 8)
        source, target = self._source.reshape(shape), self._target.reshape(shape)
        return sum(not np.array_equal(source[page], target[page]) for page in hits)


def main() -> None:
    """Execute commands until the input ends. Only answers go to the standard output that the driver
    reads.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine()
    for line in sys.stdin:
        action, arguments = json.loads(line)
        try:
            answer = {"answer": getattr(engine, action)(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # Some stores have threads that do not end.


if __name__ == "__main__":
    # The modules of this folder do not belong to the store.
    sys.path.pop(0)
    main()
