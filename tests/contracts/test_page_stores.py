"""The contract of the connector's page stores: every one of them keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.connector.folder import folder_store
from peercache.connector.metadata import OpenStore, PageStore, cluster_store
from peercache.model.keys import KEY, Namespace, PageKeys
from peercache.model.runs import PageRuns
from tests.pace import TIMEOUT_S

PAGE = 200_000
"""Bytes: more than one chunk of a folder's file in these tests, no multiple of anything."""

KINDS: dict[str, Callable[[Path], OpenStore]] = {
    "peercache": lambda path: cluster_store(
        embedded=True,
        pool_size="32MiB",
        listen="127.0.0.1:0",
        shm_dir=str(path),
        op_timeout_s=TIMEOUT_S,
    ),
    "folder": lambda path: folder_store(path / "pages", "32MiB"),
    "folder, zstd": lambda path: folder_store(path / "pages", "32MiB", zstd_level=1),
    "folder, direct, durable": lambda path: folder_store(
        path / "pages", "32MiB", is_direct=True, is_durable=True
    ),
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PageStore]:
    path = tmp_path_factory.mktemp("store")
    opened = KINDS[request.param](path)(Namespace("contract"))
    yield opened
    opened.close()
    opened.close()
    # A closed store answers with misses.
    memory = Memory(1)
    assert opened.get_into(keys_of("closed", 1), memory.runs()) == [False]
    assert opened.set_from(keys_of("closed", 1), memory.runs()) == [False]
    assert opened.exists(keys_of("closed", 1), PAGE) == 0


def keys_of(name: str, count: int) -> PageKeys:
    """Return keys that no other test has."""
    return np.array([f"{name[:12]:12}{i:04}".encode() for i in range(count)], "S16").view(KEY)


class Memory:
    """Pages of a caller, each in three runs that are apart, with a rim that must stay as it is."""

    def __init__(self, pages: int, page: int = PAGE, seed: int | None = None) -> None:
        self.sizes = [page // 2, 1, page - page // 2 - 1]
        self.parts = [np.full((pages, size + 64), 7, np.uint8) for size in self.sizes]
        if seed is not None:
            rng = np.random.default_rng(seed)
            for part, size in zip(self.parts, self.sizes, strict=True):
                part[:, :size] = rng.integers(0, 256, (pages, size), np.uint8)

    def runs(self) -> PageRuns:
        addresses = np.array(
            [[row.ctypes.data for row in part] for part in self.parts], np.uint64
        ).T
        sizes = np.broadcast_to(np.array(self.sizes, np.uint64), addresses.shape)
        return PageRuns.regular(addresses, sizes, len(addresses))

    def page(self, index: int) -> bytes:
        return b"".join(
            part[index, :size].tobytes() for part, size in zip(self.parts, self.sizes, strict=True)
        )

    def has_its_rim(self) -> bool:
        return all(
            bool((part[:, size:] == 7).all())
            for part, size in zip(self.parts, self.sizes, strict=True)
        )


def test_what_was_set_is_got(store: PageStore) -> None:
    """Bytes come back into runs of another place, and nothing next to them is touched."""
    keys, source, target = keys_of("got", 5), Memory(5, seed=1), Memory(5)

    assert store.exists(keys, PAGE) == 0
    assert store.set_from(keys, source.runs()) == [True] * 5
    assert store.exists(keys, PAGE) == 5
    assert store.get_into(keys, target.runs()) == [True] * 5
    assert [target.page(i) for i in range(5)] == [source.page(i) for i in range(5)]
    assert target.has_its_rim()


def test_each_page_is_answered_for_itself(store: PageStore) -> None:
    """Misses between hits, and the leading run of a question."""
    keys, source, target = keys_of("each", 4), Memory(4, seed=2), Memory(4)
    held = np.array([0, 1, 3])
    assert store.set_from(keys[held], source.runs().take(held)) == [True] * 3

    assert store.exists(keys, PAGE) == 2
    assert store.exists(keys[2:], PAGE) == 0
    assert store.get_into(keys, target.runs()) == [True, True, False, True]
    assert target.page(3) == source.page(3)


def test_a_page_of_another_length_is_a_miss(store: PageStore) -> None:
    """A caller with other geometry gets nothing, and its memory next to the runs stays."""
    keys, source = keys_of("length", 1), Memory(1, seed=3)
    assert store.set_from(keys, source.runs()) == [True]

    assert (store.exists(keys, 0), store.exists(keys, PAGE)) == (1, 1)
    for page in (PAGE - 1, PAGE + 1, 3):
        target = Memory(1, page)
        assert store.exists(keys, page) == 0
        assert store.get_into(keys, target.runs()) == [False]
        assert target.has_its_rim()


def test_a_page_is_set_once(store: PageStore) -> None:
    """A key names its content: a second set reports that the page is there, and changes nothing."""
    keys, first, target = keys_of("once", 2), Memory(2, seed=4), Memory(2)
    assert store.set_from(keys, first.runs()) == [True, True]
    assert store.set_from(keys, Memory(2, seed=5).runs()) == [True, True]

    assert store.get_into(keys, target.runs()) == [True, True]
    assert target.page(1) == first.page(1)


def test_nothing_asked_is_nothing_answered(store: PageStore) -> None:
    """Empty batches are answered without a thought."""
    keys, none = keys_of("none", 0), Memory(0).runs()

    assert (store.exists(keys, PAGE), store.get_into(keys, none), store.set_from(keys, none)) == (
        0,
        [],
        [],
    )


def test_threads_share_a_store(store: PageStore) -> None:
    """Gets and sets of the same pages from several threads give right pages or misses."""
    keys, source = keys_of("threads", 8), Memory(8, seed=6)
    wrong: list[str] = []
    hits: list[int] = []

    def write() -> None:
        kept = [
            store.set_from(keys[i : i + 1], source.runs().take(np.array([i]))) for i in range(8)
        ]
        if kept != [[True]] * 8:
            wrong.append(f"pages were not stored: {kept}")

    def read() -> None:
        for _ in range(10):
            target = Memory(8)
            found = store.get_into(keys, target.runs())
            hits.extend(found)
            wrong.extend(
                f"page {i} has wrong bytes"
                for i, is_hit in enumerate(found)
                if is_hit and target.page(i) != source.page(i)
            )

    threads = [threading.Thread(target=work, daemon=True) for work in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    read()

    assert wrong == []
    assert hits[-8:] == [True] * 8


def test_memory_is_registered_until_it_is_not(store: PageStore) -> None:
    """What registering returns ends it, and a get works before, between and after."""
    keys, source, target = keys_of("register", 1), Memory(1, seed=7), Memory(1)
    assert store.set_from(keys, source.runs()) == [True]

    end = store.register(target.parts[0].ctypes.data, target.parts[0].nbytes)
    assert store.get_into(keys, target.runs()) == [True]
    end()
    assert store.get_into(keys, target.runs()) == [True]
