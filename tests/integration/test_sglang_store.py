"""PeerCacheStore on its own: configuration, namespaces, and answers that are always well-formed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetrics

from peercache.errors import ConfigError, Rejected
from peercache.sglang import PeerCacheStore
from peercache.sglang.pages import HostPages
from peercache.sglang.store import PENDING_MAX, BatchTally
from tests.integration.sglang_fakes import BrokenClient, FakeBackedStore, FakeCluster
from tests.integration.sglang_pools import (
    EVERY_POOL,
    HAS_TWO_BUFFERS,
    PAGE_TOKENS,
    flat_page,
    host_pool,
    page_hash,
    storage_config,
)
from tests.integration.sglang_pools import filled as fill

KEYS = [page_hash(number) for number in range(3)]
SLOTS = torch.arange(3 * PAGE_TOKENS)


HAS_ENDS = hasattr(PoolTransferResult, "restorable_prefix_pages")
"""Whether SGLang asks at which lengths a prefix may end: since 0.5.19."""


def open_store(cluster: FakeCluster, pool: Any = None, **changes: Any) -> PeerCacheStore:
    """Return a store with a host pool registered."""
    store = PeerCacheStore(storage_config(**changes), {}, client_factory=cluster.open)
    store.register_mem_pool_host(pool or filled("mha", "page_first"))
    return store


def filled(kind: str, layout: str) -> Any:
    """Return a host pool full of random bytes."""
    return fill(host_pool(kind, layout))


# --- what a page is -----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "layout"), EVERY_POOL)
def test_an_object_is_the_flat_page(cluster: FakeCluster, kind: str, layout: str) -> None:
    """The bytes that are stored are those of SGLang's flat page, for every page of the pool."""
    pool = filled(kind, layout)
    store = open_store(cluster, pool, is_mla_model=kind == "mla")
    count = pool.size // PAGE_TOKENS
    keys = [page_hash(number) for number in range(count)]

    assert all(store.batch_set_v1(keys, torch.arange(pool.size)))

    flat = [pool.get_data_page(page * PAGE_TOKENS).view(torch.uint8) for page in range(count)]
    assert list(cluster.pages.values()) == [bytes(page.numpy()) for page in flat]


@pytest.mark.parametrize(("kind", "layout"), [*EVERY_POOL, ("asymmetric", "page_first")])
def test_addresses_by_arithmetic_are_those_sglang_names(kind: str, layout: str) -> None:
    """The arithmetic gives what get_page_buffer_meta returns, sorted, for pages in any order."""
    pool = host_pool(kind, layout)
    pages = np.random.default_rng(0).permutation(pool.size // PAGE_TOKENS)[:40]
    slots = torch.from_numpy((pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1))

    served = HostPages.of(pool)
    runs = served.runs(slots, len(pages))

    addresses, sizes = pool.get_page_buffer_meta(slots)
    named = np.array(addresses, np.uint64).reshape(len(pages), -1)[:, served.order]
    assert served.affine
    assert np.array_equal(runs.addresses.reshape(len(pages), -1), named)
    assert runs.sizes.tolist() == sizes
    assert set(runs.lengths.tolist()) == {served.page_bytes}


@pytest.mark.skipif(not HAS_TWO_BUFFERS, reason="this SGLang has no pool of two buffers")
def test_k_comes_before_v_wherever_they_were_allocated(cluster: FakeCluster) -> None:
    """Two buffers are at addresses of chance: the order of a page must not follow them."""
    pool = filled("asymmetric", "page_first")
    k_shape, v_shape = (part.shape for part in pool.kv_buffer)
    flat = torch.cat([part.flatten() for part in reversed(pool.kv_buffer)])
    v_part, k_part = flat.split([v_shape.numel(), k_shape.numel()])
    pool.kv_buffer = (k_part.view(k_shape), v_part.view(v_shape))
    store = open_store(cluster, pool)

    assert store.batch_set_v1(KEYS, SLOTS) == [True] * 3

    pages = [part[:PAGE_TOKENS].contiguous().view(torch.uint8) for part in pool.kv_buffer]
    stored = next(iter(cluster.pages.values()))
    assert k_part.data_ptr() > v_part.data_ptr()
    assert stored == b"".join(bytes(page.flatten().numpy()) for page in pages)


def test_a_pool_that_is_not_regular_is_asked_for_each_batch(cluster: FakeCluster) -> None:
    """Where the arithmetic does not hold on a sample, get_page_buffer_meta is believed."""
    pool = filled("mha", "page_first")
    plain = pool.get_page_buffer_meta
    count = pool.size // PAGE_TOKENS

    def mirrored(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = indices[::PAGE_TOKENS] // PAGE_TOKENS
        odd = torch.where(pages > 1, count + 1 - pages, pages) * PAGE_TOKENS
        return plain((odd[:, None] + torch.arange(PAGE_TOKENS)).reshape(-1))

    pool.get_page_buffer_meta = mirrored
    store = open_store(cluster, pool)

    stored = store.batch_set_v1(KEYS, SLOTS)

    first, last = (pool.get_data_page(page * PAGE_TOKENS) for page in (0, count - 1))
    kept = list(cluster.pages.values())
    assert stored == [True, True, True]
    assert kept[0] == bytes(first.view(torch.uint8).numpy())
    assert kept[2] == bytes(last.view(torch.uint8).numpy())


def test_a_pool_of_kilobytes_is_built_where_ten_gigabytes_are_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang wants them for its own; with other tests a machine may not have them."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))

    assert host_pool("mha", "page_first").size > 0


# --- what separates pages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 4},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"model_name": "org/another"},
        {"is_mla_model": True},
    ],
)
def test_another_shard_or_model_has_pages_of_its_own(
    cluster: FakeCluster, other: dict[str, Any]
) -> None:
    """Equal page hashes are different pages where rank, stage, slice or model differ."""
    first = open_store(cluster, tp_size=2)
    second = open_store(cluster, **{"tp_size": 2, **other})

    first.batch_set_v1(KEYS, SLOTS)

    assert first.batch_exists(KEYS) == 3
    assert second.batch_exists(KEYS) == 0


def test_ranks_of_a_replicated_model_and_data_parallel_replicas_share(cluster: FakeCluster) -> None:
    """MLA has no tensor-parallel coordinate, and no model has a data-parallel one."""
    pool = filled("mla", "page_first")
    first = open_store(cluster, pool, is_mla_model=True, tp_size=8)
    second = open_store(cluster, pool, is_mla_model=True, tp_rank=5, tp_size=8, dp_rank=3)

    first.batch_set_v1(KEYS, SLOTS)

    assert second.batch_exists(KEYS) == 3


def test_layouts_and_types_are_different_geometries_of_one_name(cluster: FakeCluster) -> None:
    """What bytes mean is part of the geometry, and so of every key."""
    pools = [filled("mha", layout) for layout in ("page_first", "page_head")]
    for pool in pools:
        open_store(cluster, pool)

    first, second = (client.namespace for client in cluster.opened)
    assert first.name == second.name == "org/model"
    assert first.geometry != second.geometry
    assert first.coordinates == second.coordinates
    assert "dtype=torch.bfloat16" in first.geometry


def test_pipeline_stages_are_one_geometry_of_one_name(cluster: FakeCluster) -> None:
    """Stages hold other layers of the same model: a coordinate, or one would be refused."""
    stages = [filled("mha", "page_first") for _ in range(2)]
    stages[1].start_layer, stages[1].end_layer = 3, 6
    for rank, pool in enumerate(stages):
        open_store(cluster, pool, pp_rank=rank, pp_size=2)

    first, second = (client.namespace for client in cluster.opened)
    assert first.geometry == second.geometry
    assert first.coordinates != second.coordinates


def test_a_stage_is_distinguished_by_its_rank_alone(cluster: FakeCluster) -> None:
    """A pool that does not say which layers it holds is still that of its stage."""
    for rank in (0, 1):
        open_store(cluster, pp_rank=rank, pp_size=2)

    first, second = (client.namespace for client in cluster.opened)
    assert first != second


def test_clear_removes_the_pages_of_this_namespace_only(cluster: FakeCluster) -> None:
    """Another rank's pages stay."""
    stores = [open_store(cluster, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for store in stores:
        store.batch_set_v1(KEYS, SLOTS)

    stores[0].clear()

    assert [store.batch_exists(KEYS) for store in stores] == [0, 3]


def test_a_configuration_of_an_older_sglang_is_enough(cluster: FakeCluster) -> None:
    """Fields that 0.5.12 does not have take their defaults, and the second argument may lack."""
    old = SimpleNamespace(
        tp_rank=0, tp_size=1, is_mla_model=False, is_page_first_layout=True, model_name=None,
        extra_config={"pool_size": "1GiB"},
    )  # fmt: skip
    store = PeerCacheStore(old, client_factory=cluster.open)

    store.register_mem_pool_host(filled("mha", "page_first"))

    assert store.batch_set_v1(KEYS, SLOTS) == [True] * 3
    assert cluster.opened[0].namespace.name.startswith("unnamed-")
    assert store.get_stats() is None


# --- configuration ------------------------------------------------------------------------------


def test_an_unknown_key_is_one_clear_error() -> None:
    """The error names the key, before anything starts."""
    extra = {"backend_name": "peercache", "interface_v1": "0", "pool_sise": "4GiB"}

    with pytest.raises(ConfigError, match="pool_sise"):
        PeerCacheStore(storage_config(extra_config=extra), {})


def test_sglangs_factory_shows_the_error_of_the_configuration() -> None:
    """What a person reads in the server's log is our sentence."""
    extra = {
        "backend_name": "peercache",
        "module_path": "peercache.sglang",
        "class_name": "PeerCacheStore",
        "op_timeout_s": "soon",
    }

    with pytest.raises(ConfigError, match="op_timeout_s"):
        StorageBackendFactory.create_backend("dynamic", storage_config(extra_config=extra), None)


def test_a_refused_client_fails_the_registration_loudly(cluster: FakeCluster) -> None:
    """Registration may raise; afterwards every call is a miss."""
    cluster.refuse_to_open = Rejected("granule", "the granule differs")
    store = PeerCacheStore(storage_config(), {}, client_factory=cluster.open)

    with pytest.raises(Rejected, match="the granule differs"):
        store.register_mem_pool_host(filled("mha", "page_first"))

    assert store.batch_get_v1(KEYS, SLOTS) == [False] * 3


def test_registering_again_keeps_the_client_unless_the_namespace_differs(
    cluster: FakeCluster,
) -> None:
    """The same geometry only swaps addresses; another one closes and opens again."""
    store = open_store(cluster)

    store.register_mem_pool_host(filled("mha", "page_first"))
    same = len(cluster.opened)
    store.register_mem_pool_host(filled("mha", "page_head"))

    assert same == 1
    assert [client.closed for client in cluster.opened] == [True, False]


@pytest.mark.parametrize("kind", ["mha", "asymmetric", "mla"])
def test_memory_that_reads_will_fill_is_registered_and_no_other(
    cluster: FakeCluster, kind: str
) -> None:
    """Every run of every page is in registered memory; the later pool takes the place."""
    first, second = filled(kind, "page_first"), filled(kind, "page_first")
    store = open_store(cluster, first)
    registered = cluster.opened[0].registered
    before = list(registered)

    store.register_mem_pool_host(second)

    for pool, memory in ((first, before), (second, registered)):
        runs = HostPages.of(pool).runs(SLOTS, len(KEYS))
        for address, size in zip(runs.addresses.tolist(), runs.sizes.tolist(), strict=True):
            assert any(begin <= address and address + size <= begin + n for begin, n in memory)
    assert not set(before) & set(registered)


# --- answers are well-formed --------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [RuntimeError("broken"), None, [], [True], [True] * 4, -1, 4, "yes"],
    ids=repr,
)
def test_a_client_that_breaks_its_contract_is_a_miss(cluster: FakeCluster, answer: Any) -> None:
    """Whatever the client answers or raises, the engine sees a miss of the right form."""
    pool = filled("mha", "page_first")
    store = PeerCacheStore(
        storage_config(), {}, client_factory=lambda *_, **__: BrokenClient(answer)
    )
    store.register_mem_pool_host(pool)
    flat = [pool.get_dummy_flat_data_page() for _ in KEYS]

    assert store.batch_get_v1(KEYS, SLOTS) == [False] * 3
    assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    assert store.batch_get(KEYS, flat) == [None] * 3
    assert store.batch_set(KEYS, flat) is False
    assert store.batch_exists(KEYS) == 0
    assert store.clear() is None
    assert store.stats()["refused"]["get"] == {"internal": 6}


@pytest.mark.parametrize("state", ["before registration", "after close", "unserved pool"])
def test_without_a_client_everything_is_a_miss(cluster: FakeCluster, state: str) -> None:
    """No call before registration, after close or for a pool that we cannot serve raises."""
    store = PeerCacheStore(storage_config(), {}, client_factory=cluster.open)
    if state == "after close":
        store.register_mem_pool_host(filled("mha", "page_first"))
        store.close()
    if state == "unserved pool":
        store.register_mem_pool_host(SimpleNamespace(kv_buffer=None))

    assert store.batch_get_v1(KEYS, SLOTS) == [False] * 3
    assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    assert store.batch_get(KEYS, [torch.zeros(1)] * 3) == [None] * 3
    assert store.batch_set(KEYS, [torch.zeros(1)] * 3) is False
    assert (store.get(KEYS[0]), store.set(KEYS[0], torch.zeros(1))) == (None, False)
    assert (store.exists(KEYS[0]), store.batch_exists(KEYS)) == (False, 0)
    assert (store.clear(), store.get_stats()) == (None, None)
    store.close()
    store.close()
    assert all(client.closed for client in cluster.opened)


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        (SLOTS[:-1], "wrong_size"),
        (SLOTS + 1, "refused"),
        (SLOTS - PAGE_TOKENS, "refused"),
        (SLOTS + 10**6 * PAGE_TOKENS, "refused"),
        (SLOTS.flip(0), "refused"),
        (SLOTS + (SLOTS == PAGE_TOKENS - 1) * PAGE_TOKENS, "refused"),
        (SLOTS.reshape(3, -1), "wrong_size"),
    ],
    ids=[
        "short",
        "unaligned",
        "negative",
        "beyond the pool",
        "backwards",
        "torn",
        "two dimensions",
    ],
)
def test_indices_that_are_not_whole_pages_are_refused(
    cluster: FakeCluster, slots: torch.Tensor, reason: str
) -> None:
    """An address outside the pool is never computed, let alone read."""
    store = open_store(cluster)

    assert store.batch_set_v1(KEYS, slots) == [False] * 3
    assert store.batch_get_v1(KEYS, slots) == [False] * 3

    assert not cluster.pages
    assert store.stats()["refused"] == {"get": {reason: 3}, "set": {reason: 3}}


@pytest.mark.parametrize("fault", ["strided", "other size", "too few", "no tensor"])
def test_flat_pages_that_cannot_be_used_in_place_are_refused(
    cluster: FakeCluster, fault: str
) -> None:
    """A copy, or an object of another size under the key, would outlive the mistake."""
    store = open_store(cluster)
    page_bytes = host_pool("mha", "page_first").get_data_page(0).nbytes
    page = {
        "strided": torch.zeros(2 * page_bytes, dtype=torch.uint8)[::2],
        "other size": torch.zeros(page_bytes + 2, dtype=torch.uint8),
        "too few": torch.zeros(page_bytes, dtype=torch.uint8),
        "no tensor": None,
    }[fault]
    pages = [page] * (2 if fault == "too few" else 3)

    assert store.batch_set(KEYS, pages) is False
    assert store.batch_get(KEYS, pages) == [None] * 3
    assert not cluster.pages


def test_v0_fills_the_targets_that_it_was_given(cluster: FakeCluster) -> None:
    """A hit is the target tensor itself, a miss is None in its place."""
    pool = filled("mha", "page_first")
    store = open_store(cluster, pool)
    pages = [pool.get_data_page(page * PAGE_TOKENS) for page in range(3)]
    assert store.batch_set(KEYS[:2], pages[:2]) is True
    targets = [pool.get_dummy_flat_data_page() for _ in KEYS]

    got = store.batch_get(KEYS, targets)

    assert [a is b for a, b in zip(got, targets, strict=True)] == [True, True, False]
    assert got[2] is None
    assert all(
        torch.equal(target.view(torch.uint8), page.view(torch.uint8))
        for target, page in zip(targets[:2], pages, strict=False)
    )
    assert torch.equal(store.get(KEYS[0]).view(torch.uint8), pages[0].view(torch.uint8))


def test_an_empty_batch_is_an_empty_answer(cluster: FakeCluster) -> None:
    """No keys, no pages, no trouble."""
    store = open_store(cluster)
    none = torch.empty(0, dtype=torch.int64)

    answers = [store.batch_get_v1([], none), store.batch_set_v1([], none), store.batch_get([], [])]

    assert answers == [[], [], []]
    assert store.batch_exists([]) == 0


def test_pools_that_were_never_named_are_misses_and_store_nothing(cluster: FakeCluster) -> None:
    """One False a key of each pool, a hit of zero pages, and each page counted."""
    store = open_store(cluster)
    transfers = [
        PoolTransfer(name=PoolName.SWA, keys=KEYS[:2], host_indices=SLOTS[: 2 * PAGE_TOKENS]),
        PoolTransfer(name=PoolName.MAMBA),
    ]

    found = store.batch_exists_v2(KEYS, transfers)
    read = store.batch_get_v2(transfers)
    written = store.batch_set_v2(transfers)

    ends = {"restorable_prefix_pages": []} if HAS_ENDS else {}
    assert found == PoolTransferResult(0, {}, **ends)
    assert read == written == {PoolName.SWA: [False, False], PoolName.MAMBA: []}
    assert not cluster.pages
    assert store.stats()["refused"] == {
        "exists_v2": {"unsupported": 6},
        "get_v2": {"unsupported": 2},
        "set_v2": {"unsupported": 2},
    }


def test_a_side_pool_is_stored_and_read_back(cluster: FakeCluster) -> None:
    """A window's pages travel through v2, and a prefix ends where the window is."""
    store, side = open_store(cluster), filled("mha", "page_first")
    store.register_mem_host_pool_v2(side, PoolName.SWA)
    before = [flat_page(side, page) for page in (0, 1)]
    window = PoolTransfer(
        name=PoolName.SWA,
        keys=KEYS[1:],
        host_indices=SLOTS[: 2 * PAGE_TOKENS],
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )

    written = store.batch_set_v2([window])
    alone = store.batch_exists_v2(KEYS, [window])
    store.batch_set_v1(KEYS, SLOTS)
    found = store.batch_exists_v2(KEYS, [window])
    fill(side, seed=1)
    read = store.batch_get_v2([window])

    assert written == read == {PoolName.SWA: [True, True]}
    assert (alone.kv_hit_pages, found.kv_hit_pages) == (0, 3)
    assert getattr(found, "restorable_prefix_pages", [3]) == [3]
    assert [flat_page(side, page) for page in (0, 1)] == before


def test_stats_are_what_sglang_asserts_and_drain_on_read(cluster: FakeCluster) -> None:
    """get_stats is a StorageMetrics when metrics are on: SGLang sets attributes on it."""
    pool = filled("mha", "page_first")
    store = open_store(cluster, pool, enable_storage_metrics=True)
    store.batch_set_v1(KEYS, SLOTS)
    store.batch_get_v1([*KEYS[:2], "f" * 64], SLOTS)

    first, second = store.get_stats(), store.get_stats()

    assert isinstance(first, StorageMetrics)
    assert (first.backup_pgs, first.prefetch_pgs) == ([3], [2])
    assert len(first.backup_bandwidth) == len(first.prefetch_bandwidth) == 1
    assert all(figure > 0 for figure in first.backup_bandwidth + first.prefetch_bandwidth)
    assert second == StorageMetrics()


def test_stats_that_are_never_drained_do_not_grow(cluster: FakeCluster) -> None:
    """An engine that has stopped stepping must not fill its memory with our figures."""
    tally = BatchTally(StorageMetrics)

    for _ in range(PENDING_MAX + 5):
        tally.moved("backup", 1, 4096, 0.001)

    drained = tally.drain()
    assert len(drained.backup_pgs) == len(drained.backup_bandwidth) == PENDING_MAX


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": "page_unified"}, "layout"),
        ({"logical_size": 10**6}, "ranks"),
        ({"shared_allocation_domain": object()}, "move"),
        ({"size_per_token": 1}, "bytes"),
    ],
    ids=["layout", "sharded", "moving", "incomplete"],
)
def test_a_pool_whose_pages_are_not_whole_is_not_served(
    cluster: FakeCluster, change: dict[str, Any], why: str
) -> None:
    """Pages in other places, or with parts that the buffers do not name, are recomputed."""
    pool = filled("mha", "page_first")
    changed = type("Changed", (), {**change, "__getattr__": lambda _, name: getattr(pool, name)})()

    store = open_store(cluster, changed)

    assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    assert store.stats()["refused"] == {"set": {"unsupported": 3}}
    assert not cluster.opened


@pytest.mark.parametrize("fault", ["the same bytes twice", "bytes of something else"])
def test_a_pool_that_names_wrong_buffers_is_not_served(cluster: FakeCluster, fault: str) -> None:
    """A page of K and K again, or with a part outside the pool, has the right size only."""
    pool = filled("mha", "page_first")
    plain = pool.get_page_buffer_meta
    elsewhere = torch.zeros(pool.size * pool.size_per_token, dtype=torch.uint8)

    def wrong(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = plain(indices)
        for index in range(1, len(addresses), 2):
            addresses[index] = addresses[index - 1]
            if fault == "bytes of something else":
                addresses[index] += elsewhere.data_ptr() - pool.kv_buffer.data_ptr()
        return addresses, sizes

    pool.get_page_buffer_meta = wrong

    store = open_store(cluster, pool)

    assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    assert not cluster.opened


def test_the_fake_backed_store_is_loaded_by_name(cluster: FakeCluster) -> None:
    """The other tests' stores come out of SGLang's own factory."""
    extra = {
        "backend_name": "peercache",
        "module_path": FakeBackedStore.__module__,
        "class_name": "FakeBackedStore",
    }

    store = StorageBackendFactory.create_backend(
        "dynamic", storage_config(extra_config=extra), None
    )

    assert isinstance(store, PeerCacheStore)
