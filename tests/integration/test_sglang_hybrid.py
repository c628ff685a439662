"""SGLang's interface for hybrid models (v2), over SGLang's own host pools and the fake cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from peercache.observability.metrics import Metrics, totals_of
from peercache.sglang import PeerCacheStore
from peercache.sglang.pages import BATCH_PAGES, FlatPages, side_pages_of
from tests.integration.sglang_fakes import BrokenClient, FakeCluster
from tests.integration.sglang_pools import (
    PAGE_TOKENS,
    bytes_of,
    filled,
    flat_page,
    host_pool,
    page_hash,
    storage_config,
    tensors_of,
)
from tests.integration.sglang_side_pools import (
    dsa,
    mamba,
    moved_to,
    nvfp4,
    qsa,
    v4_anchor,
    v4_rows,
    v4_states,
    window,
)

KEYS = [page_hash(number) for number in range(6)]
TRAILING = PoolHitPolicy.TRAILING_PAGES

SIDE_POOLS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "swa-page_first": (PoolName.SWA, window),
    "swa-page_first_direct": (PoolName.SWA, lambda: window("page_first_direct")),
    "swa-layer_first": (PoolName.SWA, lambda: window("layer_first")),
    "mamba-page_first": (PoolName.MAMBA, mamba),
    "mamba-page_first_direct": (PoolName.MAMBA, lambda: mamba("page_first_direct")),
    "mamba-side-states": (PoolName.MAMBA, lambda: mamba(extra=True)),
    "indexer-page_first": (PoolName.INDEXER, lambda: dsa()[1]),
    "indexer-layer_first": (PoolName.INDEXER, lambda: dsa("layer_first")[1]),
    "draft-mha": (PoolName.DRAFT, lambda: host_pool("mha", "page_first")),
    "draft-mla": (PoolName.DRAFT, lambda: host_pool("mla", "layer_first")),
    "v4-page_first": (PoolName.DEEPSEEK_V4_C4, v4_rows),
    "v4-layer_first": (PoolName.DEEPSEEK_V4_C128, lambda: v4_rows("layer_first")),
    "v4-states-page_first": (PoolName.DEEPSEEK_V4_C4_STATE, v4_states),
    "v4-states-layer_first": (
        PoolName.DEEPSEEK_V4_C4_INDEXER_STATE,
        lambda: v4_states("layer_first"),
    ),
    "nvfp4-indexer-page_first": (PoolName.INDEXER, lambda: nvfp4()[1]),
    "nvfp4-indexer-layer_first": (PoolName.INDEXER, lambda: nvfp4("layer_first")[1]),
    "qsa-page_first": (PoolName.INDEXER, qsa),
    "qsa-page_first_direct": (PoolName.INDEXER, lambda: qsa("page_first_direct")),
    "qsa-layer_first": (PoolName.INDEXER, lambda: qsa("layer_first")),
    "not-yet-known": ("a_pool_of_next_year", window),
}


def store_of(
    cluster: FakeCluster, *sides: tuple[Any, Any], anchor: Any = None, **changes: Any
) -> PeerCacheStore:
    """Return a store to which SGLang has named its pools."""
    store = PeerCacheStore(storage_config(**changes), {}, client_factory=cluster.open)
    kv = anchor or filled(host_pool("mha", "page_first"))
    store.register_mem_pool_host(kv)
    store.register_mem_host_pool_v2(kv, PoolName.KV)
    for name, pool in sides:
        store.register_mem_host_pool_v2(pool, name)
    store.on_host_pools_registered()
    return store


def transfer(name: Any, pool: Any, keys: list[str], first: int = 0, **more: Any) -> PoolTransfer:
    """Return a transfer of these keys to or from the pages from `first` on."""
    pages = list(range(first, first + len(keys)))
    return PoolTransfer(name=name, keys=keys, host_indices=moved_to(pool, pages), **more)


def wanted(name: Any, keys: list[str] | None = None, **more: Any) -> PoolTransfer:
    """Return what an exists asks of a pool."""
    return PoolTransfer(name=name, keys=keys, **more)


def put_kv(store: PeerCacheStore, keys: list[str]) -> None:
    """Store KV pages as SGLang's v1 does."""
    slots = moved_to(store.mem_pool_host, list(range(len(keys))))
    assert all(store.batch_set_v1(keys, slots))


# --- pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIDE_POOLS)
def test_pages_of_a_side_pool_come_back_bit_for_bit(cluster: FakeCluster, kind: str) -> None:
    """Every kind of pool, into other pages than they came from, and nothing next to them."""
    name, build = SIDE_POOLS[kind]
    source, target = filled(build(), 1), filled(build(), 2)
    writer, reader = store_of(cluster, (name, source)), store_of(cluster, (name, target))
    before = bytes_of(target)

    stored = writer.batch_set_v2([transfer(name, source, KEYS[:3])])
    read = reader.batch_get_v2([transfer(name, target, [KEYS[2], KEYS[4], KEYS[0]], first=5)])

    assert stored == {name: [True] * 3}
    assert read == {name: [True, False, True]}
    assert [flat_page(target, page) for page in (5, 7)] == [flat_page(source, p) for p in (2, 0)]
    for page in (5, 7):
        # Put the old bytes back: then nothing else may differ.
        old = filled(build(), 2)
        flat = old.get_data_page(page * old.page_size, flat=True)
        target.set_from_flat_data_page(page * target.page_size, flat)
    assert bytes_of(target) == before


@pytest.mark.parametrize("kind", SIDE_POOLS)
def test_an_object_is_the_flat_page_of_its_pool(cluster: FakeCluster, kind: str) -> None:
    """Whether it is read in place or through copies, in every layout."""
    name, build = SIDE_POOLS[kind]
    pool = filled(build())
    store = store_of(cluster, (name, pool))

    store.batch_set_v2([transfer(name, pool, KEYS[:2])])

    assert list(cluster.pages.values()) == [flat_page(pool, page) for page in (0, 1)]


def test_kv_pages_of_v2_are_those_of_v1(cluster: FakeCluster) -> None:
    """The same keys in the same namespace."""
    store = store_of(cluster)
    kv = store.mem_pool_host
    put_kv(store, KEYS)
    before = flat_page(kv, 0)

    read = store.batch_get_v2([transfer(PoolName.KV, kv, [KEYS[0]], first=9)])
    again = store.batch_set_v2([transfer(PoolName.KV, kv, KEYS)])

    assert read == {"kv": [True]}
    assert again == {"kv": [True] * 6}
    assert flat_page(kv, 9) == before
    assert len(cluster.pages) == 6


def test_all_pools_of_a_call_are_one_batch(cluster: FakeCluster) -> None:
    """Pools of several page sizes are set and read together, each into its own memory."""
    pools = {PoolName.SWA: window(), PoolName.MAMBA: mamba(), PoolName.INDEXER: dsa()[1]}
    for seed, pool in enumerate(pools.values()):
        filled(pool, seed)
    store = store_of(cluster, *pools.items())
    pages = {name: flat_page(pool, 1) for name, pool in pools.items()}
    client = cluster.opened[0]

    stored = store.batch_set_v2([transfer(name, pool, KEYS[:2]) for name, pool in pools.items()])
    for pool in pools.values():
        filled(pool, 99)
    read = store.batch_get_v2([transfer(name, pool, KEYS[:2]) for name, pool in pools.items()])

    assert stored == read == {name: [True, True] for name in pools}
    assert client.moved == [6, 6]
    assert {name: flat_page(pool, 1) for name, pool in pools.items()} == pages


def test_copied_pages_are_moved_in_portions(cluster: FakeCluster) -> None:
    """The copies of a long prefix are made a batch at a time."""
    pool = filled(mamba(extra=True))
    store = store_of(cluster, (PoolName.MAMBA, pool))
    keys = [page_hash(number) for number in range(BATCH_PAGES + 3)]
    pages = [number % 20 for number in range(len(keys))]
    move = PoolTransfer(name=PoolName.MAMBA, keys=keys, host_indices=moved_to(pool, pages))

    stored, read = store.batch_set_v2([move]), store.batch_get_v2([move])

    assert isinstance(side_pages_of(pool), FlatPages)
    assert stored == read == {PoolName.MAMBA: [True] * len(keys)}
    assert cluster.opened[0].moved == [BATCH_PAGES, 3] * 2


def test_a_slow_batch_leaves_no_time_for_the_next_one(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a long prefix would take the deadline of a call once for each of its batches."""
    pool = filled(mamba(extra=True))
    store = store_of(cluster, (PoolName.MAMBA, pool), extra_config={"op_timeout_s": "10"})
    keys = [page_hash(number) for number in range(BATCH_PAGES + 3)]
    pages = [number % 20 for number in range(len(keys))]
    move = PoolTransfer(name=PoolName.MAMBA, keys=keys, host_indices=moved_to(pool, pages))
    hours = itertools.count(0.0, 6.0)
    monkeypatch.setattr("peercache.sglang.hybrid.monotonic", lambda: next(hours))

    assert store.batch_set_v2([move]) == {PoolName.MAMBA: [True] * BATCH_PAGES + [False] * 3}
    assert cluster.opened[0].moved == [BATCH_PAGES]


# --- what cannot be served is a miss -----------------------------------------------------------


def test_what_does_not_fit_is_a_miss_a_key_and_the_rest_is_served(cluster: FakeCluster) -> None:
    """Wrong numbers of indices, no indices, half pages, unknown pools: with a pool that is."""
    swa, state = filled(window()), filled(mamba())
    store = store_of(cluster, (PoolName.SWA, swa), (PoolName.MAMBA, state))
    short, none, half, unknown = (
        transfer(PoolName.SWA, swa, KEYS[:2]) for _ in range(4)
    )  # fmt: skip
    short.host_indices = short.host_indices[:-1]
    none.host_indices = None
    half.host_indices = half.host_indices + 1
    unknown.name = PoolName.AUXILIARY_SWA

    for wrong in (short, none, half, unknown):
        moves = [wrong, transfer(PoolName.MAMBA, state, KEYS[:2])]
        expected = {wrong.name: [False, False], PoolName.MAMBA: [True, True]}
        assert store.batch_set_v2(moves) == expected
        assert store.batch_get_v2(moves) == expected

    refused = store.stats()["refused"]
    assert refused["set_v2"] == refused["get_v2"]
    assert refused["get_v2"] == {"wrong_size": 4, "refused": 2, "unsupported": 2}


class UnderAnyName(dict[bytes, bytes]):
    """Has its one page under every name."""

    def get(self, name: bytes, default: Any = None) -> Any:
        """Return the page."""
        return next(iter(self.values()))


def test_a_page_of_another_size_is_a_miss_that_writes_nothing(cluster: FakeCluster) -> None:
    """Another geometry has other keys; and were they equal, sizes would be compared."""
    small, large = filled(v4_rows()), filled(window())
    writer, reader = (store_of(cluster, ("p", pool)) for pool in (small, large))
    writer.batch_set_v2([transfer("p", small, KEYS[:1])])
    before = bytes_of(large)

    apart = reader.batch_get_v2([transfer("p", large, KEYS[:1])])
    cluster.pages = UnderAnyName(cluster.pages)
    same_key = reader.batch_get_v2([transfer("p", large, KEYS[:1])])

    assert apart == same_key == {"p": [False]}
    assert bytes_of(large) == before


@pytest.mark.parametrize(
    "answer", [RuntimeError("broken"), None, [], [True], [True] * 40, "yes"], ids=repr
)
def test_a_client_that_breaks_its_contract_is_a_miss(answer: Any) -> None:
    """Whatever the client answers or raises, SGLang sees misses of the right form."""
    pool = filled(window())
    store = PeerCacheStore(
        storage_config(), {}, client_factory=lambda *_, **__: BrokenClient(answer)
    )
    store.register_mem_pool_host(filled(host_pool("mha", "page_first")))
    store.register_mem_host_pool_v2(pool, PoolName.SWA)
    move = transfer(PoolName.SWA, pool, KEYS)

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.SWA)])

    assert store.batch_get_v2([move]) == store.batch_set_v2([move]) == {"swa": [False] * 6}
    assert found == PoolTransferResult(0, {}, [])


def test_calls_before_any_pool_and_after_the_end_are_misses(cluster: FakeCluster) -> None:
    """Nothing is registered, or everything closed: a miss a key, and never an exception."""
    pool = window()
    move = transfer(PoolName.SWA, pool, KEYS)
    store = PeerCacheStore(storage_config(), {}, client_factory=cluster.open)
    closed = store_of(cluster, (PoolName.SWA, pool))
    closed.close()

    for each in (store, closed):
        assert each.batch_get_v2([move]) == each.batch_set_v2([move]) == {"swa": [False] * 6}
        assert each.batch_exists_v2(KEYS, [wanted(PoolName.SWA)]).kv_hit_pages == 0
        assert each.batch_get_v2([]) == each.batch_set_v2(None) == {}


@pytest.mark.parametrize("attribute", ["shared_allocation_domain", "logical_size"])
def test_a_side_pool_that_cannot_be_served_ends_every_prefix(
    cluster: FakeCluster, attribute: str
) -> None:
    """Its pages move, or are spread over ranks: the model recomputes, reported once."""
    pool = filled(window())
    changed = type("C", (), {attribute: 10**9, "__getattr__": lambda _, n: getattr(pool, n)})()
    store = store_of(cluster, (PoolName.SWA, changed))
    put_kv(store, KEYS)

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.SWA)])

    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert store.stats()["refused"]["exists_v2"] == {"unsupported": 6}


# --- how far a prefix reaches ------------------------------------------------------------------


def test_a_prefix_reaches_as_far_as_every_pool_has_it(cluster: FakeCluster) -> None:
    """An indexer wants every page; a missing one in the middle ends the prefix before it."""
    anchor, indexer = map(filled, dsa())
    store = store_of(cluster, (PoolName.INDEXER, indexer), anchor=anchor, is_mla_model=True)
    put_kv(store, KEYS)
    present = [KEYS[page] for page in (0, 1, 2, 4, 5)]
    store.batch_set_v2([transfer(PoolName.INDEXER, indexer, present)])

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.INDEXER, KEYS)])

    assert found == PoolTransferResult(3, {PoolName.KV: 6, PoolName.INDEXER: 3}, [1, 2, 3])


@pytest.mark.parametrize(("page_ms", "reach"), [(250, 4), (100, 6), (5000, 0)])
def test_a_prefix_ends_where_its_pages_are_not_worth_reading(
    cluster: FakeCluster, page_ms: int, reach: int
) -> None:
    """The objects of a page share the time to compute it; the client decides what that is worth."""
    anchor, indexer = map(filled, dsa())
    costs = {"decline": "cost", "page_compute_ms": page_ms}
    store = store_of(
        cluster,
        (PoolName.INDEXER, indexer),
        anchor=anchor,
        is_mla_model=True,
        extra_config=costs,
    )
    put_kv(store, KEYS)
    store.batch_set_v2([transfer(PoolName.INDEXER, indexer, KEYS)])

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.INDEXER, KEYS)])

    assert found.kv_hit_pages == reach
    assert store.batch_exists(KEYS) == reach


def test_a_window_must_be_whole_before_the_end_of_a_prefix(cluster: FakeCluster) -> None:
    """Every end with a whole window is named: ranks may have to agree on a shorter one."""
    pool = filled(window())
    store = store_of(cluster, (PoolName.SWA, pool))
    put_kv(store, KEYS)
    store.batch_set_v2([transfer(PoolName.SWA, pool, [KEYS[page] for page in (0, 1, 3, 4)])])

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.SWA, KEYS[4:], hit_policy=TRAILING)])

    assert found == PoolTransferResult(5, {PoolName.KV: 6, PoolName.SWA: 5}, [1, 2, 5])


def test_a_state_is_where_a_node_ended(cluster: FakeCluster) -> None:
    """Mamba has one state a node of the tree; KV pages after the last one do not count."""
    state = filled(mamba())
    store = store_of(cluster, (PoolName.MAMBA, state))
    put_kv(store, KEYS)
    store.batch_set_v2([transfer(PoolName.MAMBA, state, [KEYS[1], KEYS[3]])])

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.MAMBA, KEYS[5:], hit_policy=TRAILING)])

    assert found == PoolTransferResult(4, {PoolName.KV: 6, PoolName.MAMBA: 4}, [2, 4])


def test_block_groups_have_a_verdict_of_their_own(cluster: FakeCluster) -> None:
    """Whole leading groups of keys cover blocks of pages, and never shorten the prefix."""
    pool = filled(v4_rows())
    store = store_of(cluster, ("blocks", pool))
    put_kv(store, KEYS)
    keys = [f"{key}.block" for key in KEYS[:6]]
    store.batch_set_v2([transfer("blocks", pool, [*keys[:3], *keys[4:]])])
    ask = wanted("blocks", keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    ask.block_pages, ask.group_pages = 3, 2

    found = store.batch_exists_v2(KEYS, [ask])
    ask.group_pages = 0
    unsaid = store.batch_exists_v2(KEYS, [ask])

    assert found == PoolTransferResult(6, {PoolName.KV: 6, "blocks": 3}, [1, 2, 3, 4, 5, 6])
    assert unsaid == PoolTransferResult(6, {PoolName.KV: 6}, [1, 2, 3, 4, 5, 6])


def test_a_policy_not_yet_known_reaches_nowhere(cluster: FakeCluster) -> None:
    """What it wants cannot be expressed, so nothing is promised."""
    pool = filled(window())
    store = store_of(cluster, (PoolName.SWA, pool))
    put_kv(store, KEYS)
    store.batch_set_v2([transfer(PoolName.SWA, pool, KEYS)])

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.SWA, KEYS, hit_policy="every_third")])

    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])


def test_an_anchor_without_bytes_is_as_long_as_its_side_pools(cluster: FakeCluster) -> None:
    """DeepSeek V4: KV has nothing to move, and the compressed rows decide."""
    rows = {name: filled(v4_rows(name=name)) for name in ("deepseek_v4_c4", "deepseek_v4_c128")}
    store = store_of(cluster, *rows.items(), anchor=v4_anchor(), is_mla_model=True)
    slots = moved_to(store.mem_pool_host, list(range(6)))
    store.batch_set_v2([transfer("deepseek_v4_c4", rows["deepseek_v4_c4"], KEYS)])
    store.batch_set_v2([transfer("deepseek_v4_c128", rows["deepseek_v4_c128"], KEYS[:4])])

    found = store.batch_exists_v2(KEYS, [wanted(name, KEYS) for name in rows])
    of_state = store.batch_exists_v2(KEYS, [wanted("deepseek_v4_c4", KEYS, hit_policy=TRAILING)])

    assert found.kv_hit_pages == 4
    assert store.batch_set_v1(KEYS, slots) == store.batch_get_v1(KEYS, slots) == [True] * 6
    # Without a pool of which every page must be there, nothing vouches for the prefix.
    assert of_state.kv_hit_pages == store.batch_exists(KEYS) == 0


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_of_four_bit_floats_and_their_indexer_make_one_prefix(
    cluster: FakeCluster, layout: str
) -> None:
    """MiniMax: payload and scales of a page are one object, as long as its indexer has the page."""
    anchor, indexer = map(filled, nvfp4(layout))
    store = store_of(cluster, (PoolName.INDEXER, indexer), anchor=anchor)
    put_kv(store, KEYS)
    store.batch_set_v2([transfer(PoolName.INDEXER, indexer, KEYS[:4])])
    before = [flat_page(anchor, page) for page in range(4)]
    slots = moved_to(anchor, [12, 13, 14, 15])

    found = store.batch_exists_v2(KEYS, [wanted(PoolName.INDEXER, KEYS)])
    read = store.batch_get_v1(KEYS[:4], slots)

    assert found.kv_hit_pages == 4
    assert read == [True] * 4
    assert [flat_page(anchor, page) for page in range(12, 16)] == before


def test_four_bit_pages_whose_buffers_have_no_names_are_misses(cluster: FakeCluster) -> None:
    """SGLang names none in layer_first: nothing is stored, and no prefix is promised."""
    anchor, indexer = map(filled, nvfp4("layer_first"))
    store = store_of(cluster, (PoolName.INDEXER, indexer), anchor=anchor)

    stored = store.batch_set_v1(KEYS, moved_to(anchor, list(range(6))))

    assert stored == [False] * 6
    assert store.batch_exists_v2(KEYS, [wanted(PoolName.INDEXER, KEYS)]).kv_hit_pages == 0
    assert cluster.pages == {}


def test_exists_of_all_pools_is_one_question_that_touches(cluster: FakeCluster) -> None:
    """KV and side pools are asked for in one batch, and their holders are notified."""
    pools = {PoolName.SWA: filled(window()), PoolName.INDEXER: filled(dsa()[1])}
    store = store_of(cluster, *pools.items())
    put_kv(store, KEYS)

    store.batch_exists_v2(KEYS, [wanted(name, KEYS) for name in pools])
    store.batch_exists(KEYS)

    assert cluster.opened[0].touched == [18, 6]


# --- whose pages they are ----------------------------------------------------------------------


def shared(cluster: FakeCluster, name: Any, pool: Any, **changes: Any) -> bool:
    """Return whether rank 1 of 2 reads what rank 0 has stored."""
    anchor = filled(host_pool("mla", "page_first"))
    ranks = [
        store_of(cluster, (name, pool), anchor=anchor, tp_rank=rank, tp_size=2, **changes)
        for rank in (0, 1)
    ]
    assert ranks[0].batch_set_v2([transfer(name, pool, KEYS)]) == {name: [True] * 6}
    read = ranks[1].batch_get_v2([transfer(name, pool, KEYS)])[name]
    assert read in ([True] * 6, [False] * 6)
    return all(read)


def test_ranks_share_what_follows_replicated_kv_and_nothing_else(cluster: FakeCluster) -> None:
    """Mamba states and the heads of a draft are a rank's own, even under MLA."""
    assert shared(cluster, PoolName.INDEXER, filled(dsa()[1]), is_mla_model=True)
    assert shared(
        cluster, PoolName.DRAFT, filled(host_pool("mla", "page_first")), is_mla_model=True
    )
    assert shared(cluster, PoolName.DEEPSEEK_V4_C4, filled(v4_rows()), is_mla_model=True)
    assert not shared(cluster, PoolName.MAMBA, filled(mamba()), is_mla_model=True)
    assert not shared(cluster, PoolName.DRAFT, filled(window()), is_mla_model=True)
    assert not shared(cluster, PoolName.INDEXER, filled(dsa()[1]))


@pytest.mark.parametrize(
    "other",
    [{"pp_rank": 1, "pp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2}, {"model_name": "x"}],
)
def test_side_pools_of_other_stages_slices_and_models_are_apart(
    cluster: FakeCluster, other: dict[str, Any]
) -> None:
    """As KV pages are."""
    pool = filled(window())
    writer, reader = (store_of(cluster, (PoolName.SWA, pool), **x) for x in ({}, other))

    writer.batch_set_v2([transfer(PoolName.SWA, pool, KEYS)])

    assert reader.batch_get_v2([transfer(PoolName.SWA, pool, KEYS)]) == {"swa": [False] * 6}


def test_pools_of_one_model_never_share_a_page(cluster: FakeCluster) -> None:
    """Equal hashes, equal geometry, another pool: another page."""
    pool = filled(window())
    store = store_of(cluster, (PoolName.SWA, pool), (PoolName.DRAFT_SWA, pool))

    store.batch_set_v2([transfer(PoolName.SWA, pool, KEYS)])

    assert store.batch_get_v2([transfer(PoolName.DRAFT_SWA, pool, KEYS)]) == {
        "draft_swa": [False] * 6
    }


@pytest.mark.parametrize("is_resolved", [False, True], ids=["given", "resolved"])
def test_a_draft_of_other_weights_has_pages_of_its_own(
    cluster: FakeCluster, is_resolved: bool
) -> None:
    """The target's weights say nothing of the model that filled the draft pool.

    A path that SGLang itself finds is in its resolved configuration only.
    """
    pool = filled(window())
    moves = [transfer(name, pool, KEYS) for name in (PoolName.SWA, PoolName.DRAFT)]
    found = []
    for draft in ("a/draft", "b/draft"):
        resolved = {"speculative_draft_model_path": draft} if is_resolved else {}
        with get_context().override_server_args(**resolved):
            if not is_resolved:
                given = ServerArgs(model_path="dummy", speculative_draft_model_path=draft)
                get_context().set_server_args(given)
            store = store_of(cluster, (PoolName.SWA, pool), (PoolName.DRAFT, pool))
            found.append(store.batch_get_v2(moves))
            store.batch_set_v2(moves)

    assert found[0] == {"swa": [False] * 6, "draft": [False] * 6}
    assert found[1] == {"swa": [True] * 6, "draft": [False] * 6}


def test_clear_removes_the_pages_of_all_pools(cluster: FakeCluster) -> None:
    """They are one model's; another rank's stay."""
    pool = filled(window())
    stores = [store_of(cluster, (PoolName.SWA, pool), tp_rank=r, tp_size=2) for r in (0, 1)]
    for store in stores:
        put_kv(store, KEYS)
        store.batch_set_v2([transfer(PoolName.SWA, pool, KEYS)])

    stores[0].clear()

    found = [store.batch_exists_v2(KEYS, [wanted(PoolName.SWA)]).kv_hit_pages for store in stores]
    assert found == [0, 6]
    assert len(cluster.pages) == 12


# --- registration and figures ------------------------------------------------------------------


def test_memory_of_side_pools_is_registered_until_named_again(
    cluster: FakeCluster,
) -> None:
    """Adapters read into it; a pool that is named again takes the place of the first."""
    first, second = mamba(), mamba()
    store = store_of(cluster, (PoolName.MAMBA, first))
    registered = cluster.opened[0].registered
    before = set(registered)

    store.register_mem_host_pool_v2(second, PoolName.MAMBA)

    memory = [{(t.data_ptr(), t.nbytes) for t in tensors_of(pool)} for pool in (first, second)]
    assert memory[0] <= before
    assert memory[1] <= set(registered)
    assert not memory[0] & set(registered)


def test_side_pools_named_before_a_new_anchor_are_served_by_its_client(
    cluster: FakeCluster,
) -> None:
    """A re-registration with another geometry opens a client, and keeps the side pools."""
    pool = filled(window())
    store = store_of(cluster, (PoolName.SWA, pool))

    store.register_mem_pool_host(filled(host_pool("mha", "page_head")))

    assert len(cluster.opened) == 2
    assert store.batch_set_v2([transfer(PoolName.SWA, pool, KEYS)]) == {"swa": [True] * 6}
    assert cluster.opened[1].moved == [6]


def test_a_shortfall_is_counted_by_pool(cluster: FakeCluster) -> None:
    """What exists reported and a get lacks throws a prefetch away: operators see where."""
    pool = filled(window())
    store = store_of(cluster, (PoolName.SWA, pool))
    metrics = Metrics()
    cluster.opened[0].metrics = metrics
    put_kv(store, KEYS)
    store.batch_set_v2([transfer(PoolName.SWA, pool, KEYS)])
    assert store.batch_exists_v2(KEYS, [wanted(PoolName.SWA)]).kv_hit_pages == 6
    for name in list(cluster.pages)[-2:]:
        del cluster.pages[name]

    slots = moved_to(store.mem_pool_host, list(range(6)))
    store.batch_get_v1(KEYS, slots)
    store.batch_get_v2([transfer(PoolName.SWA, pool, KEYS)])

    assert totals_of(metrics.pages_short) == {"swa": 2.0}


def test_a_page_costs_what_it_moves_in_the_figures(cluster: FakeCluster) -> None:
    """Bandwidths count the bytes of each pool, not those of a KV page."""
    pools = {PoolName.SWA: filled(window()), PoolName.MAMBA: filled(mamba())}
    store = store_of(cluster, *pools.items(), enable_storage_metrics=True)
    moves = [transfer(name, pool, KEYS) for name, pool in pools.items()]

    store.batch_set_v2(moves)
    stats = store.get_stats()

    assert stats.backup_pgs == [12]
    assert 0 < stats.backup_bandwidth[0] < 6 * (4096 + 328) / 1e9 / 1e-6
    assert PAGE_TOKENS == 16
