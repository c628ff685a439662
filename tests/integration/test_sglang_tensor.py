"""Servers of several tensor-parallel sizes share pages, cut into groups of heads (`tp_lcm_size`).

A model of eight heads, in SGLang's own host pools: a rank of TP n holds its part of them. Whole
engines do the same in test_sglang_tensor_engine.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from peercache.client.report import add_moved
from peercache.sglang import PeerCacheStore
from peercache.sglang.namespace import HeadGroups, UncutPool
from peercache.sglang.pages import HostPages, object_keys
from tests.integration.sglang_fakes import FakeCluster
from tests.integration.sglang_pools import (
    PAGE_TOKENS,
    bytes_of,
    device_pool,
    filled,
    host_pool,
    page_hash,
    storage_config,
)
from tests.integration.sglang_rig import Rig, prompt
from tests.integration.sglang_side_pools import moved_to, window

HEADS, LCM = 8, 4
SIZES = (1, 2, 4)
KEYS = [page_hash(number) for number in range(3)]

OpenRig = Callable[..., Rig]


@cache
def device(heads: int) -> Any:
    """Return a device pool, which only gives host pools their shape here."""
    return device_pool("mha", heads)


@cache
def model_content(seed: int, layout: str) -> torch.Tensor:
    """Return random content of all heads in a layout."""
    whole: torch.Tensor = filled(host_pool("mha", layout, device(HEADS)), seed).kv_buffer
    return whole


def rank_pool(tp_rank: int, tp_size: int, seed: int, layout: str = "page_head") -> Any:
    """Return one rank's host pool with its part of the model's random content."""
    pool = host_pool("mha", layout, device(HEADS // tp_size))
    heads = 2 if layout == "page_head" else -2
    pool.kv_buffer.copy_(model_content(seed, layout).chunk(tp_size, dim=heads)[tp_rank])
    return pool


def config_of(tp_rank: int, tp_size: int, layout: str, **changes: Any) -> HiCacheStorageConfig:
    """Return what SGLang's controller makes of a server with `tp_lcm_size`, by its own rule."""
    facts = {"tp_lcm_size": LCM, "is_mla_model": False, "enable_storage_metrics": True, **changes}
    lcm = facts["tp_lcm_size"]
    facts["should_split_heads"] = bool(
        lcm and lcm > tp_size and layout == "page_head" and not facts["is_mla_model"]
    )
    is_page_first = layout == "page_first"
    return storage_config(
        tp_rank=tp_rank, tp_size=tp_size, is_page_first_layout=is_page_first, **facts
    )


def open_rank(
    cluster: FakeCluster, pool: Any, tp_rank: int, tp_size: int, **changes: Any
) -> PeerCacheStore:
    """Return the store of one rank."""
    config = config_of(tp_rank, tp_size, pool.layout, **changes)
    store = PeerCacheStore(config, {}, client_factory=cluster.open)
    store.register_mem_pool_host(pool)
    return store


def open_server(
    cluster: FakeCluster, tp_size: int, seed: int, layout: str = "page_head", **changes: Any
) -> list[PeerCacheStore]:
    """Return the stores of all ranks of one server."""
    return [
        open_rank(cluster, rank_pool(rank, tp_size, seed, layout), rank, tp_size, **changes)
        for rank in range(tp_size)
    ]


def slots(pages: list[int]) -> torch.Tensor:
    """Return the host indices of pages."""
    at = np.array(pages)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
    return torch.from_numpy(at.reshape(-1))


def put(server: list[PeerCacheStore], pages: list[int], interface: str = "v1") -> None:
    """Store pages of all ranks under the first keys."""
    keys = KEYS[: len(pages)]
    for store in server:
        if interface == "v1":
            assert store.batch_set_v1(keys, slots(pages)) == [True] * len(pages)
        else:
            pool = store.mem_pool_host
            flat = [pool.get_data_page(page * PAGE_TOKENS) for page in pages]
            assert store.batch_set(keys, flat)


def get(store: PeerCacheStore, pages: list[int], interface: str = "v1") -> list[bool]:
    """Read the first keys into pages of one rank."""
    keys = KEYS[: len(pages)]
    if interface == "v1":
        return store.batch_get_v1(keys, slots(pages))
    pool = store.mem_pool_host
    targets = [pool.get_dummy_flat_data_page() for _ in pages]
    read = store.batch_get(keys, targets)
    for page, flat in zip(pages, read, strict=True):
        if flat is not None:
            pool.set_from_flat_data_page(page * PAGE_TOKENS, flat)
    return [flat is not None for flat in read]


def object_names(store: PeerCacheStore, key: str, pool: str = "") -> list[bytes]:
    """Return the names of a page's objects on one rank: of its KV pool, or of a side pool."""
    at = store._registration.attached
    spaces = at.sides[pool].spaces if pool else at.spaces
    return [name.tobytes() for name in object_keys([key], spaces.digests)]


# --- where the heads of a group lie -------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "groups"), [(8, 8), (8, 4), (8, 2), (4, 2), (4, 4), (2, 2), (6, 3)]
)
def test_groups_are_where_sglang_expects_them(heads: int, groups: int) -> None:
    """Arithmetic gives what get_split_heads_page_buffer_meta does, for pages in any order."""
    pool = host_pool("mha", "page_head", device(heads))
    pages = np.random.default_rng(heads * groups).permutation(pool.page_num)[:40].tolist()

    served = HostPages.of(pool, objects=groups)
    runs = served.runs(slots(pages), len(pages))

    addresses, sizes = pool.get_split_heads_page_buffer_meta(slots(pages), groups)
    assert served.affine
    assert runs.addresses.tolist() == addresses
    assert runs.sizes.tolist() == sizes
    assert len(runs) == len(pages) * groups
    assert set(runs.lengths.tolist()) == {served.page_bytes // groups}


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_groups_are_the_whole_page_and_no_byte_twice(groups: int) -> None:
    """The runs of all groups, by address, are the runs of the uncut page."""
    pool = host_pool("mha", "page_head", device(HEADS))
    cut, uncut = HostPages.of(pool, objects=groups), HostPages.of(pool)

    runs = cut.runs(slots([5]), 1)
    whole = uncut.runs(slots([5]), 1)

    covered = sorted(zip(runs.addresses.tolist(), runs.sizes.tolist(), strict=True))
    for begin, size in zip(whole.addresses.tolist(), whole.sizes.tolist(), strict=True):
        inside = [piece for piece in covered if begin <= piece[0] < begin + size]
        assert [at for at, _ in inside] == list(range(begin, begin + size, size // groups))
        assert sum(length for _, length in inside) == size
    assert sum(size for _, size in covered) == uncut.page_bytes == cut.page_bytes


def test_an_object_is_the_heads_of_one_group(cluster: FakeCluster) -> None:
    """K of its heads, then V; what all ranks of TP 4 store is what one rank of TP 1 does."""
    whole = rank_pool(0, 1, seed=1).kv_buffer
    put(open_server(cluster, 1, seed=1), [7])
    by_one = dict(cluster.pages)
    cluster.pages.clear()
    put(open_server(cluster, 4, seed=1), [7])

    groups = [
        bytes(whole[:, 7, group * 2 : group * 2 + 2].contiguous().view(torch.uint8).numpy())
        for group in range(LCM)
    ]
    assert list(by_one.values()) == groups
    assert cluster.pages == by_one


# --- every size reads what every size writes ----------------------------------------------------


@pytest.mark.parametrize(
    ("writers", "readers", "written", "read"),
    [
        *((*sizes, "v1", "v1") for sizes in itertools.product(SIZES, SIZES)),
        (2, 1, "v0", "v1"),
        (1, 4, "v0", "v0"),
        (4, 2, "v1", "v0"),
    ],
)
def test_pages_of_one_size_are_read_by_another(
    cluster: FakeCluster, writers: int, readers: int, written: str, read: str
) -> None:
    """Bit for bit, into other pages, and nothing next to them."""
    put(open_server(cluster, writers, seed=1), [4, 0, 9], written)

    for rank, store in enumerate(open_server(cluster, readers, seed=2)):
        assert store.batch_exists(KEYS) == 3
        assert get(store, [11, 3, 20], read) == [True] * 3

        expected, source = rank_pool(rank, readers, seed=2), rank_pool(rank, readers, seed=1)
        expected.kv_buffer[:, [11, 3, 20]] = source.kv_buffer[:, [4, 0, 9]]
        assert bytes_of(store.mem_pool_host) == bytes_of(expected)


@pytest.mark.parametrize(
    ("writers", "readers", "interface"), [(2, 1, "v1"), (1, 2, "v1"), (2, 1, "v0")]
)
def test_pages_travel_between_sizes_through_sglangs_controllers(
    open_rig: OpenRig, writers: int, readers: int, interface: str
) -> None:
    """The controller itself makes the configuration of `tp_lcm_size`, and moves device rows."""
    shape = {"layout": "page_head", "interface": interface, "heads": HEADS}
    tokens = prompt(pages=9, seed=1)
    for rank in range(writers):
        writer = open_rig({"tp_lcm_size": LCM}, tp_rank=rank, tp_size=writers, **shape)
        assert writer.back_up(tokens, seed=2) == 9

    for rank in range(readers):
        reader = open_rig({"tp_lcm_size": LCM}, tp_rank=rank, tp_size=readers, **shape)
        assert reader.prefetch(tokens, seed=2) == (9, True)


# --- a page is whole or a miss ------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(2))
def test_a_page_without_one_of_its_groups_is_a_miss(cluster: FakeCluster, rank: int) -> None:
    """One rank of two has stored its part, or a group was evicted: TP 1 lacks heads."""
    servers = {size: open_server(cluster, size, seed=size) for size in SIZES}
    put(servers[2], [0, 1, 2])
    [whole] = servers[1]
    # Of the second page, the second group of this rank.
    del cluster.pages[object_names(servers[2][rank], KEYS[1])[1]]

    assert whole.batch_exists(KEYS) == 1
    assert get(whole, [0, 1, 2]) == [True, False, True]
    assert get(whole, [0, 1, 2], "v0") == [True, False, True]
    assert servers[2][rank].batch_exists(KEYS) == 1
    assert servers[2][1 - rank].batch_exists(KEYS) == 3
    # At TP 4 each rank has one of the groups.
    lacking = 2 * rank + 1
    assert [store.batch_exists(KEYS) for store in servers[4]] == [
        1 if group == lacking else 3 for group in range(LCM)
    ]


def test_a_set_that_loses_a_group_is_no_stored_page(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gets True for a page only if every group of it is held."""
    [store] = open_server(cluster, 1, seed=1)
    client = cluster.opened[0]

    def lossy(self: Any, keys: Any, runs: Any) -> list[bool]:
        add_moved(len(keys) - 1, 1)
        return [i != 5 for i in range(len(keys))]

    monkeypatch.setattr(type(client), "batch_set_from", lossy)

    assert store.batch_set_v1(KEYS, slots([0, 1, 2])) == [True, False, True]
    assert store.get_stats().backup_pgs == [2]


def test_groups_of_a_call_are_one_exchange_and_count_as_pages(cluster: FakeCluster) -> None:
    """One exists, one set, one get; SGLang's metrics count pages and their bytes."""
    [store] = open_server(cluster, 1, seed=1)
    client = cluster.opened[0]

    put([store], [0, 1, 2])
    assert store.batch_exists(KEYS) == 3
    assert get(store, [3, 4, 5]) == [True] * 3

    stats = store.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert client.touched == [3 * LCM]
    assert client.moved == [3 * LCM, 3 * LCM]


# --- who shares with whom -----------------------------------------------------------------------


def test_servers_of_all_sizes_are_one_geometry_of_one_name(cluster: FakeCluster) -> None:
    """A node admits them side by side, with and without `tp_lcm_size`; `clear` is for all sizes."""
    cut = {size: open_server(cluster, size, seed=1) for size in SIZES}
    shared = {client.namespace for client in cluster.opened}
    for size in SIZES:
        open_server(cluster, size, seed=1, tp_lcm_size=None)

    assert len(shared) == 1
    assert len({(each.namespace.name, each.namespace.geometry) for each in cluster.opened}) == 1
    put(cut[1], [0, 1, 2])
    cut[4][3].clear()
    assert not cluster.pages


@pytest.mark.parametrize("size", SIZES)
def test_pages_that_are_cut_never_meet_pages_that_are_not(cluster: FakeCluster, size: int) -> None:
    """Nor those of another `tp_lcm_size`: a clean miss, whatever the size is."""
    servers = {
        (tp_size, lcm): open_server(cluster, tp_size, seed=1, tp_lcm_size=lcm)
        for tp_size in SIZES
        for lcm in (None, 4, 8)
    }
    put(servers[size, LCM], [0, 1, 2])

    found = {key: [store.batch_exists(KEYS) for store in server] for key, server in servers.items()}
    read = {key: [get(store, [5, 6, 7]) for store in server] for key, server in servers.items()}

    for (tp_size, lcm), counts in found.items():
        hit = lcm == LCM
        assert counts == [3 if hit else 0] * tp_size, (tp_size, lcm)
        assert read[tp_size, lcm] == [[hit] * 3] * tp_size, (tp_size, lcm)


@pytest.mark.parametrize(
    "other",
    [
        {"pp_rank": 1, "pp_size": 2},
        {"pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"model_name": "org/another"},
    ],
)
def test_groups_of_another_stage_slice_or_model_are_others(
    cluster: FakeCluster, other: dict[str, Any]
) -> None:
    """What separates whole pages separates groups of heads."""
    put(open_server(cluster, 2, seed=1), [0, 1, 2])
    pool = rank_pool(0, 1, seed=2)

    same, apart = open_rank(cluster, pool, 0, 1), open_rank(cluster, pool, 0, 1, **other)

    assert [same.batch_exists(KEYS), apart.batch_exists(KEYS)] == [3, 0]


def test_replicas_of_data_parallel_attention_share_groups(cluster: FakeCluster) -> None:
    """Their TP rank and size are those within the attention group."""
    put(open_server(cluster, 2, seed=1, dp_rank=0), [0, 1, 2])

    replicas = open_server(cluster, 4, seed=2, dp_rank=3)

    assert [store.batch_exists(KEYS) for store in replicas] == [3] * 4


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_other_layouts_are_shared_by_ranks_of_one_size_only(
    cluster: FakeCluster, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang cuts page_head alone. Elsewhere TP 2 finds what TP 2 wrote; TP 1 and TP 4 miss."""
    put(open_server(cluster, 2, seed=1, layout=layout), [0, 1, 2])

    found = {
        size: [store.batch_exists(KEYS) for store in open_server(cluster, size, 2, layout)]
        for size in SIZES
    }

    assert found == {1: [0], 2: [3, 3], 4: [0] * 4}
    assert any("sglang.heads_not_split" in line and layout in line for line in caplog.messages)


def test_heads_that_make_no_equal_groups_stay_whole(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Sixteen groups of eight heads: servers of one size share, and a warning explains why."""
    put(open_server(cluster, 2, seed=1, tp_lcm_size=16), [0, 1, 2])

    same, other = (open_server(cluster, size, seed=2, tp_lcm_size=16) for size in (2, 1))

    assert [get(store, [3, 4, 5]) for store in same] == [[True] * 3] * 2
    assert [store.batch_exists(KEYS) for store in other] == [0]
    assert any("4 heads of a rank are not 8 equal groups" in line for line in caplog.messages)


def test_ranks_that_hold_the_same_head_share_with_their_size_only(cluster: FakeCluster) -> None:
    """At TP 16 SGLang gives each of eight heads to two ranks; nothing smaller can be cut so.

    Rank 3 has head 1 then, and at TP 8 head 3, in pages of the same size.
    """
    pool = host_pool("mha", "page_head", device(1))
    ranks = [open_rank(cluster, filled(pool), rank, 16, tp_lcm_size=16) for rank in (2, 3)]
    put(ranks[1:], [0])

    smaller = [open_rank(cluster, pool, 3, 8, tp_lcm_size=lcm) for lcm in (8, 16)]

    assert [store.batch_exists(KEYS[:1]) for store in (*ranks, *smaller)] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("config", "pool", "groups"),
    [
        ({"tp_size": 2, "tp_rank": 1}, {}, HeadGroups(4, 2, 2)),
        ({"tp_size": 4, "tp_rank": 3, "should_split_heads": False}, {}, HeadGroups(4, 3, 1)),
        ({"tp_lcm_size": None}, {}, None),
        ({"is_mla_model": True}, {}, None),
        ({}, {"layout": "page_first"}, "its layout is page_first"),
        ({}, {"head_num": None}, "no attention heads"),
        ({}, {"head_num": 6}, "6 heads of a rank are not 4 equal groups"),
        ({"tp_size": 3}, {}, "no multiple of the TP size 3"),
        ({"should_split_heads": False}, {}, "SGLang does not split"),
        ({}, {"get_split_heads_page_buffer_meta": None}, "where its heads are"),
    ],
)
def test_which_groups_a_rank_holds(
    config: dict[str, Any], pool: dict[str, Any], groups: HeadGroups | str | None
) -> None:
    """All reasons why pages are not cut, which need no SGLang to be true."""
    said = {
        "tp_size": 1, "tp_rank": 0, "tp_lcm_size": 4, "should_split_heads": True,
        "is_mla_model": False, **config,
    }  # fmt: skip
    has = {"layout": "page_head", "head_num": 4, "get_split_heads_page_buffer_meta": len, **pool}
    asked = [SimpleNamespace(**facts) for facts in (said, {k: v for k, v in has.items() if v})]

    if isinstance(groups, str):
        with pytest.raises(UncutPool, match=groups):
            HeadGroups.of(*asked)
    else:
        assert HeadGroups.of(*asked) == groups


def test_a_shard_of_decode_context_parallelism_has_pages_of_its_own(cluster: FakeCluster) -> None:
    """SGLang gives this configuration to no dynamic backend yet: its ranks hold other tokens."""
    pool = filled(host_pool("mla", "page_first"))
    shards = [
        open_rank(
            cluster, pool, rank, 2, is_mla_model=True, tp_lcm_size=None,
            dcp_rank=rank, dcp_size=2, logical_page_size=2 * PAGE_TOKENS,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    put(shards[:1], [0, 1, 2])

    assert [store.batch_exists(KEYS) for store in shards] == [3, 0]


# --- side pools ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 4), (4, 2)])
def test_a_drafts_heads_are_cut_as_those_of_the_model(
    cluster: FakeCluster, writers: int, readers: int
) -> None:
    """A pool with heads in page_head is cut too, so the whole prefix is found in one exchange."""

    def ask(store: PeerCacheStore) -> Any:
        wanted = PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES)
        return store.batch_exists_v2(KEYS, [wanted])

    for rank, store in enumerate(open_server(cluster, writers, seed=1)):
        draft = rank_pool(rank, writers, seed=3)
        store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        sent = PoolTransfer(name=PoolName.DRAFT, keys=KEYS, host_indices=slots([0, 1, 2]))
        assert store.batch_set_v2([sent]) == {PoolName.DRAFT: [True] * 3}
        assert ask(store).kv_hit_pages == 0
        put([store], [0, 1, 2])

    for rank in range(readers):
        store = open_rank(cluster, rank_pool(rank, readers, seed=2), rank, readers)
        draft = rank_pool(rank, readers, seed=4)
        store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        answer = ask(store)
        assert (answer.kv_hit_pages, answer.restorable_prefix_pages) == (3, [1, 2, 3])
        to = PoolTransfer(name=PoolName.DRAFT, keys=KEYS, host_indices=slots([4, 5, 6]))
        assert store.batch_get_v2([to]) == {PoolName.DRAFT: [True] * 3}
        source = rank_pool(rank, readers, seed=3)
        assert torch.equal(
            draft.kv_buffer[:, 4:7].view(torch.uint8), source.kv_buffer[:, :3].view(torch.uint8)
        )
        assert cluster.opened[-1].touched == [3 * 2 * LCM // readers]
        del cluster.pages[object_names(store, KEYS[0], "draft")[-1]]
        assert ask(store).kv_hit_pages == 0


def test_a_window_in_another_layout_is_shared_by_one_size_only(cluster: FakeCluster) -> None:
    """Its pages are a rank's own: the KV pages are there at TP 1, and the prefix is a miss."""
    wanted = PoolTransfer(name=PoolName.SWA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    for store in open_server(cluster, 2, seed=1):
        pool = filled(window())
        store.register_mem_host_pool_v2(pool, PoolName.SWA)
        sent = PoolTransfer(name=PoolName.SWA, keys=KEYS, host_indices=moved_to(pool, [0, 1, 2]))
        assert store.batch_set_v2([sent]) == {PoolName.SWA: [True] * 3}
        put([store], [0, 1, 2])
        assert store.batch_exists_v2(KEYS, [wanted]).kv_hit_pages == 3

    [other] = open_server(cluster, 1, seed=2)
    other.register_mem_host_pool_v2(filled(window()), PoolName.SWA)

    assert other.batch_exists(KEYS) == 3
    assert other.batch_exists_v2(KEYS, [wanted]).kv_hit_pages == 0
