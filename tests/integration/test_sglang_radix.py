"""SGLang's radix cache of hybrid models restores the prompts of another engine, bit for bit.

Two engines have pools and a tree of their own; only PeerCache is between them: the fake cluster, or
in the slow tests two nodes, each the home of one of them. Host bytes are
compared where SGLang gives pages to its storage and where it loads them to the device, device bytes
after the load.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.utils import get_storage_hash_str

from peercache.config.settings import Config
from peercache.observability.metrics import Metrics, totals_of
from peercache.sglang import PeerCacheStore
from tests.integration.processes import StandaloneNode
from tests.integration.sglang_cache import SIDE, WINDOW_TOKENS, Cache, Restored
from tests.integration.sglang_fakes import FakeBackedStore, FakeCluster
from tests.integration.sglang_pools import page_hash, shared_pools
from tests.integration.sglang_rig import PAGE_TOKENS, prompt
from tests.pace import TIMEOUT_S, no_peer_is_taken_for_hung, paced

PAGES = 9
WINDOW_PAGES = WINDOW_TOKENS // PAGE_TOKENS

SHAPES = [
    ("window", "layer_first"),
    ("window", "page_first"),
    ("window", "page_first_direct"),
    ("states", "page_first"),
    ("states", "page_first_direct"),
]

POOL, POOL_PAGES = "16MiB", (16 << 20) // Config().granule
"""Small pages take a granule each."""

OpenCache = Callable[..., Cache]
OpenPair = Callable[..., tuple[Cache, Cache]]
Nodes = tuple[StandaloneNode, StandaloneNode]


@pytest.fixture
def open_cache(cluster: FakeCluster) -> Iterator[OpenCache]:
    """Return a function that builds an engine's caches over the fake cluster."""
    caches: list[Cache] = []

    def build(
        kind: str, layout: str = "page_first", backend: type = FakeBackedStore, **extra: Any
    ) -> Cache:
        caches.append(Cache(kind, layout, backend, extra))
        return caches[-1]

    yield build
    # SGLang's arguments are those of the process: the last ones end first.
    for cache in reversed(caches):
        cache.close()


def asking(tokens: list[int]) -> list[int]:
    """Return a request that begins with these tokens and has something left to compute."""
    return [*tokens, 1]


def hashes_of(tokens: list[int]) -> list[str]:
    """Return SGLang's page hashes."""
    return list(get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS))


Part = tuple[int, int, int]
"""Pages from one number to another that were computed from a seed, in a prompt that ended there."""


def assert_restored(got: Restored, cache: Cache, parts: list[Part]) -> None:
    """Assert that the device has the bytes that these parts of a prompt were computed with."""
    kv: list[list[torch.Tensor]] = []
    side: list[list[torch.Tensor]] = []
    for begin, end, seed in parts:
        tokens = end * PAGE_TOKENS
        content = cache.content(tokens, 1 if cache.kind == "states" else tokens, seed)
        first = begin * PAGE_TOKENS
        kv.append([each[first:] for each in content["kv"]])
        side.append(
            [each[0 if cache.kind == "states" else first :] for each in content[cache.kind]]
        )
    kept = 1 if cache.kind == "states" else WINDOW_TOKENS
    wanted = {
        "kv": [torch.cat(buffer) for buffer in zip(*kv, strict=True)],
        cache.kind: [torch.cat(buffer)[-kept:] for buffer in zip(*side, strict=True)],
    }
    assert got.tokens == parts[-1][1] * PAGE_TOKENS
    for pool, buffers in wanted.items():
        assert len(buffers) == len(got.pages[pool]) > 0
        for data, buffer in zip(buffers, got.pages[pool], strict=True):
            assert torch.equal(data, buffer), pool


def assert_loaded(reader: Cache, writer: Cache, hashes: list[str], kv_pages: int) -> None:
    """Assert that the host pages that went to the device are those that the writer stored."""
    assert set(reader.loaded) == {"kv", SIDE[reader.kind]}
    assert len(reader.loaded["kv"]) == kv_pages
    for pool, pages in reader.loaded.items():
        assert pages == [writer.given[pool, each] for each in hashes[-len(pages) :]]


def free_slots(cache: Cache) -> list[int]:
    """Return the free slots of each host pool."""
    return [cache.host_pool(name).available_size() for name in ("kv", SIDE[cache.kind])]


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_all_pools_of_an_engine_may_be_in_shared_memory(
    open_cache: OpenCache, kind: str, layout: str
) -> None:
    """SGLang itself reads `allocator`, and allocates the host pool and the side pool so."""
    writer, reader = (open_cache(kind, layout, allocator="shm") for _ in "wr")
    tokens = prompt(PAGES, seed=60)

    writer.compute(tokens, seed=61)
    got = reader.restore(asking(tokens))

    for name in ("kv", SIDE[kind]):
        assert shared_pools(reader.host_pool(name)), name
    assert got.from_storage == len(tokens)
    assert_restored(got, reader, [(0, PAGES, 61)])
    assert_loaded(reader, writer, hashes_of(tokens), PAGES)


@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_a_prompt_of_one_engine_is_restored_by_another(
    open_cache: OpenCache, kind: str, layout: str
) -> None:
    """Insert, back up, prefetch, load back: every byte of the prefix, on host and device."""
    writer, reader = open_cache(kind, layout), open_cache(kind, layout)
    tokens = prompt(PAGES, seed=1)

    writer.compute(tokens, seed=2)
    got = reader.restore(asking(tokens))

    assert got.from_storage == len(tokens)
    assert_restored(got, reader, [(0, PAGES, 2)])
    assert_loaded(reader, writer, hashes_of(tokens), PAGES)
    assert reader.store.stats()["refused"] == writer.store.stats()["refused"] == {}


@pytest.mark.parametrize("kind", SIDE)
def test_storage_continues_a_prefix_that_the_engine_has_itself(
    open_cache: OpenCache, kind: str
) -> None:
    """Only the pages behind it are fetched, into the same branch of the tree."""
    writer, reader = open_cache(kind), open_cache(kind)
    tokens = prompt(PAGES, seed=3)
    writer.compute(tokens, seed=4)
    reader.compute(tokens[: 4 * PAGE_TOKENS], seed=5)

    got = reader.restore(asking(tokens))

    assert got.from_storage == 5 * PAGE_TOKENS
    assert_restored(got, reader, [(0, 4, 5), (4, PAGES, 4)])
    assert_loaded(reader, writer, hashes_of(tokens), 5)


def test_a_window_with_a_page_missing_ends_the_prefix_before_it(open_cache: OpenCache) -> None:
    """The prefix is shorter, and its own last pages are its window."""
    writer, reader = open_cache("window"), open_cache("window")
    tokens = prompt(PAGES, seed=6)
    hashes = hashes_of(tokens)
    writer.compute(tokens, seed=7)

    assert writer.remove("swa", [hashes[7]]) == 1
    got = reader.restore(asking(tokens))

    assert WINDOW_PAGES == 2
    assert got.from_storage == 7 * PAGE_TOKENS
    shorter = writer.content(len(tokens), len(tokens), 7)
    kept = [each[: 7 * PAGE_TOKENS] for each in shorter["kv"]]
    window = [each[5 * PAGE_TOKENS : 7 * PAGE_TOKENS] for each in shorter["window"]]
    assert all(map(torch.equal, got.pages["kv"], kept))
    assert all(map(torch.equal, got.pages["window"], window))
    assert_loaded(reader, writer, hashes[:7], 7)


def test_a_prefix_ends_where_the_last_state_is(open_cache: OpenCache) -> None:
    """KV pages behind it do not count: their state is not there to go on from."""
    writer, reader = open_cache("states"), open_cache("states")
    tokens = prompt(PAGES, seed=8)
    hashes = hashes_of(tokens)
    writer.compute(tokens[: 4 * PAGE_TOKENS], seed=9)
    writer.compute(tokens, seed=10)

    assert writer.remove("mamba", [hashes[-1]]) == 1
    got = reader.restore(asking(tokens))

    assert got.from_storage == 4 * PAGE_TOKENS
    assert_restored(got, reader, [(0, 4, 9)])
    assert_loaded(reader, writer, hashes[:4], 4)


@pytest.mark.parametrize(
    ("kind", "pool", "page", "left"),
    [
        ("window", "kv", 4, 4),
        ("window", "swa", 8, 8),
        ("states", "kv", 4, 0),
        ("states", "mamba", 8, 0),
    ],
)
def test_a_page_evicted_after_exists_costs_the_prefetch_and_nothing_else(
    open_cache: OpenCache,
    monkeypatch: pytest.MonkeyPatch,
    cluster: FakeCluster,
    kind: str,
    pool: str,
    page: int,
    left: int,
) -> None:
    """SGLang throws it away whole; no host slot is lost, and the next request gets what is left."""
    writer, reader = open_cache(kind), open_cache(kind)
    tokens = prompt(PAGES, seed=11)
    hashes = hashes_of(tokens)
    writer.compute(tokens, seed=12)
    metrics = cluster.opened[1].metrics = Metrics()
    ask, free = reader.store.batch_exists_v2, free_slots(reader)

    def evicting(*arguments: Any) -> Any:
        answer = ask(*arguments)
        assert answer.kv_hit_pages == PAGES
        assert writer.remove(pool, [hashes[page]]) == 1
        monkeypatch.setattr(reader.store, "batch_exists_v2", ask)
        return answer

    monkeypatch.setattr(reader.store, "batch_exists_v2", evicting)
    thrown = reader.restore(asking(tokens))
    reader.settle()
    free_after = free_slots(reader)
    again = reader.restore(asking(tokens))

    assert (thrown.tokens, thrown.from_storage, thrown.pages["kv"][0].numel()) == (0, 0, 0)
    assert free_after == free
    assert sum(totals_of(metrics.pages_short).values()) >= 1
    assert again.tokens == again.from_storage == left * PAGE_TOKENS
    wanted = writer.content(len(tokens), len(tokens) if kind == "window" else 1, 12)
    for buffer, data in zip(again.pages["kv"], wanted["kv"], strict=True):
        assert torch.equal(buffer, data[: again.tokens])
    if left:
        assert_loaded(reader, writer, hashes[:left], left)


# --- over nodes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Return two nodes of one cluster, with small pools."""
    folders = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    with (
        StandaloneNode(folders[0], pool_size=POOL) as first,
        StandaloneNode(folders[1], discovery=first.control, pool_size=POOL) as second,
    ):
        yield first, second


@pytest.fixture
def open_pair(
    open_cache: OpenCache, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Cache, Cache]]:
    """Return a function that builds the caches of two engines, each at home with its node."""
    no_peer_is_taken_for_hung(monkeypatch)
    patient = {"exists_timeout_s": TIMEOUT_S, "op_timeout_s": TIMEOUT_S}

    def build(kind: str, layout: str = "page_first", fabric: str = "tcp") -> tuple[Cache, Cache]:
        writer = open_cache(kind, layout, PeerCacheStore, home=nodes[0].home, **patient)
        reader = open_cache(
            kind, layout, PeerCacheStore, home=nodes[1].home, fabric=fabric, **patient
        )
        return writer, reader

    return build


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["shm", "tcp"])
@pytest.mark.parametrize(("kind", "layout"), SHAPES)
def test_a_prompt_is_restored_from_the_node_of_another_engine(
    open_pair: OpenPair, kind: str, layout: str, fabric: str
) -> None:
    """The same over each fabric: what is stored is found at once."""
    writer, reader = open_pair(kind, layout, fabric)
    tokens = prompt(PAGES, seed=20 + SHAPES.index((kind, layout)) + 10 * (fabric == "tcp"))

    writer.compute(tokens, seed=21)
    got = reader.restore(asking(tokens))

    assert got.from_storage == len(tokens)
    assert_restored(got, reader, [(0, PAGES, 21)])
    assert_loaded(reader, writer, hashes_of(tokens), PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIDE)
def test_what_exists_reports_outlives_pages_that_are_younger(
    open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The prompt's pages are the oldest of a full pool when they are asked for.

    More pages come before they are fetched. They stay, because they have been reported; when more
    come than the pool holds, they are gone, and the engine gets nothing instead of a part.
    """
    writer, reader = open_pair(kind)
    ask, numbers = reader.store.batch_exists_v2, itertools.count()
    seeds = itertools.count(100 * list(SIDE).index(kind) + 50)

    def store_more(share: float) -> None:
        """Store pages that fill this share of the pool."""
        slots = torch.arange(64 * PAGE_TOKENS)
        for _ in range(int(share * POOL_PAGES) // 64):
            keys = [page_hash(next(numbers)) for _ in range(64)]
            assert all(writer.store.batch_set_v1(keys, slots))

    def restore_while(share: float, tokens: list[int]) -> Restored:
        def evicting(*arguments: Any) -> Any:
            answer = ask(*arguments)
            asked.append(answer.kv_hit_pages)
            store_more(share)
            return answer

        asked: list[int] = []
        reader.tree.reset()
        monkeypatch.setattr(reader.store, "batch_exists_v2", evicting)
        got = reader.restore(asking(tokens))
        assert asked == [PAGES]
        return got

    def story(_: float) -> tuple[list[int], Restored]:
        tokens = prompt(PAGES, seed=next(seeds))
        writer.compute(tokens, seed=51)
        store_more(0.6)
        return tokens, restore_while(0.6, tokens)

    # What was reported is said in one message, which comes late where the machine is paused.
    tokens, kept = paced(story, lambda reported: reported[1].from_storage == len(reported[0]))
    assert kept.from_storage == len(tokens)
    assert_restored(kept, reader, [(0, PAGES, 51)])
    gone = restore_while(1.5, tokens)

    assert (gone.tokens, gone.from_storage) == (0, 0)
