"""A client of a store of others, or of ours, as a process: calls at random, recorded.

    python -m tests.faults.peers_stores PROCESS HOST SEED FILE SETTINGS

It runs in the store's own environment, so it imports numpy, the store and nothing else. SETTINGS is
JSON: the store, its settings, and the plan of the worker; without a plan the process only holds
memory for others.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers_engine
from tests.faults.recorder import Recorder
from tests.faults.worker import BATCH, Page, Plan, Worker

ABSENT = "absent"
OBJECT_NOT_FOUND = -704
"""Of Mooncake's error codes, the one of a key that its master does not have."""


class Memory:
    """Memory of a batch to set from, and of one to read into, each in one piece to register."""

    def __init__(self, page_bytes: int) -> None:
        """Allocate it."""
        self.parts = [np.zeros(BATCH * page_bytes, np.uint8) for _ in range(2)]

    def pages(self, size: int) -> tuple[list[Page], list[Page]]:
        """Return the pages of both batches."""
        source, target = ([part[at * size :][:size] for at in range(BATCH)] for part in self.parts)
        return source, target


class _Theirs:
    """What the stores of others have in common here."""

    can_remove = True

    def __init__(self, memory: Memory) -> None:
        self.misses: Mapping[str, int] = {}
        self._memory = memory

    def buffers(self, size: int) -> tuple[list[Page], list[Page]]:
        """Return memory of a batch to set from, and of one to read into."""
        return self._memory.pages(size)

    def look(self) -> dict[str, Any]:
        """Return nothing: their clients have no view of members."""
        return {}

    def _answered(self, answers: Sequence[bool], reason: str = ABSENT) -> list[bool]:
        self.misses = {reason: answers.count(False)} if False in answers else {}
        return list(answers)


class Redis(_Theirs):
    """One Redis server, through redis-py: a set replaces the bytes of a key."""

    def __init__(self, settings: dict[str, Any], memory: Memory) -> None:
        """Connect at the first call. A call that fails raises; the next one connects again."""
        super().__init__(memory)
        redis = importlib.import_module("redis")
        self._redis = redis.Redis(
            host="127.0.0.1", port=settings["port"], socket_timeout=settings["timeout_s"],
            socket_connect_timeout=settings["timeout_s"], retry=None,
        )  # fmt: skip

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages; return which are stored."""
        self._redis.mset({key: page.data for key, page in zip(keys, pages, strict=True)})
        return [True] * len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Read pages into buffers; return which are hits."""
        found = self._redis.mget(keys)
        for page, buffer in zip(found, buffers, strict=True):
            if page is not None:
                buffer[:] = np.frombuffer(page, np.uint8)
        return self._answered([page is not None for page in found])

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are found."""
        batch = self._redis.pipeline(transaction=False)
        for key in keys:
            batch.exists(key)
        return self._answered([found == 1 for found in batch.execute()])

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove keys."""
        self._redis.delete(*keys)
        return [True] * len(keys)

    def clear(self) -> bool:
        """Remove everything."""
        return bool(self._redis.flushall())


class Mooncake(_Theirs):
    """A client of Mooncake's store, with registered memory: a set keeps the bytes of a key.

    With `upsert` a set replaces them. A removal respects the leases of readers, and is refused
    during one, as without `force`.
    """

    def __init__(self, settings: dict[str, Any], memory: Memory) -> None:
        """Join, and register the memory."""
        super().__init__(memory)
        self._store = peers_engine.Mooncake(settings, memory.parts).store
        self._is_upsert = settings.get("upsert", False)

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages; return which are stored."""
        put = self._store.batch_upsert_from if self._is_upsert else self._store.batch_put_from
        return self._coded(put(list(keys), *_places(pages)), lambda code: code == 0)

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Read pages into buffers; return which are hits."""
        size = buffers[0].nbytes
        codes = self._store.batch_get_into(list(keys), *_places(buffers))
        return self._coded(codes, lambda code: code == size)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are found."""
        codes = self._store.batch_is_exist(list(keys))
        return self._coded([code or OBJECT_NOT_FOUND for code in codes], lambda code: code == 1)

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove keys; a lease refuses it."""
        codes = self._store.batch_remove(list(keys))
        return self._coded(codes, lambda code: code in {0, OBJECT_NOT_FOUND})

    def clear(self) -> bool:
        """Remove what has no lease; so it is not certain that everything is gone."""
        self._store.remove_all()
        return False

    def _coded(self, codes: Sequence[int], is_good: Any) -> list[bool]:
        reasons = Counter(
            ABSENT if code == OBJECT_NOT_FOUND else f"error {code}"
            for code in codes
            if not is_good(code)
        )
        self.misses = dict(reasons)
        return [bool(is_good(code)) for code in codes]


class PublicPeerCache(_Theirs):
    """A node of the package `peercache` of PyPI in this process: a set keeps the bytes of a key.

    It has no removal of single keys.
    """

    can_remove = False

    def __init__(self, settings: dict[str, Any], memory: Memory) -> None:
        """Join."""
        super().__init__(memory)
        node = peers_engine.PublicPeerCache(settings, memory.parts)
        node.await_nodes(settings.get("members", 1))
        self._store = node.store

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages; return which are stored."""
        return list(self._store.batch_set_v1(list(keys), _places(pages)))

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Read pages into buffers; return which are hits."""
        hits = list(self._store.batch_get_v1(list(keys), _places(buffers)))
        return self._answered(hits, "missed")

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return the leading keys that are found: it answers with their number."""
        found = int(self._store.batch_exists(list(keys)))
        return self._answered([number < found for number in range(len(keys))], "not leading")

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Do nothing: it cannot."""
        return [False] * len(keys)

    def clear(self) -> bool:
        """Remove all pages of this node, which are all pages of a run."""
        self._store.clear()
        return True


def _places(pages: Sequence[Page]) -> tuple[list[int], list[int]]:
    """Return addresses and sizes."""
    return [int(page.ctypes.data) for page in pages], [page.nbytes for page in pages]


def _ours(settings: dict[str, Any], memory: Memory) -> Any:
    """Return a client of this checkout."""
    client = importlib.import_module("tests.faults.client")
    return client.Ours(client.opened(settings))


STORES: dict[str, Any] = {
    "ours": _ours,
    "mooncake": Mooncake,
    "peercache-0.8.4": PublicPeerCache,
    "redis": Redis,
}


def main() -> None:
    """Work until standard input ends. Stores print to standard output, which is the log here."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO)
    process, host, seed, path, text = sys.argv[1:]
    given = json.loads(text)
    store = STORES[given["store"]](given["settings"], Memory(given["page_bytes"]))
    if given["plan"] is None:
        answers.write("{}\n")
        answers.flush()
        sys.stdin.read()
    else:
        plan = Plan(**given["plan"], page_bytes=given["page_bytes"])
        with Path(path).open("a") as file:
            Worker(store, Recorder(file, int(process), host), plan, int(seed)).serve(answers)
    os._exit(0)  # Some stores have threads that do not end.


if __name__ == "__main__":
    main()
