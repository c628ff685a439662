"""SGLang's own controllers back up and prefetch through PeerCacheStore, over the fake cluster.

The same travels between two processes over real nodes in test_sglang_processes.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.integration import older_sglang
from tests.integration.sglang_fakes import FakeCluster
from tests.integration.sglang_pools import (
    EVERY_POOL,
    HAS_SHARED_POOLS,
    PAGE_TOKENS,
    filled,
    flat_page,
    host_pool,
    page_hash,
    shared_pools,
)
from tests.integration.sglang_rig import Rig, prompt

PAGES = 9

INJECTOR = getattr(hicache_storage, "HiCacheStorageFailureInjector", None)
"""SGLang's own fault injector: since 0.5.23."""

OpenRig = Callable[..., Rig]


@pytest.mark.parametrize("interface", ["v0", "v1"])
@pytest.mark.parametrize("controller", ["plain", "hybrid"])
@pytest.mark.parametrize(("kind", "layout"), EVERY_POOL)
def test_pages_travel_from_engine_to_engine_bit_for_bit(
    open_rig: OpenRig, kind: str, layout: str, controller: str, interface: str
) -> None:
    """What one engine backs up is what another prefetches, in every layout and interface."""
    shape = {"kind": kind, "layout": layout, "controller": controller, "interface": interface}
    writer, reader = open_rig(**shape), open_rig(**shape)
    tokens = prompt(PAGES, seed=1)

    stored = writer.back_up(tokens, seed=2)
    loaded = reader.prefetch(tokens, seed=2)

    assert (stored, loaded) == (PAGES, (PAGES, True))


@pytest.mark.skipif(not HAS_SHARED_POOLS, reason="this SGLang has no such allocator")
@pytest.mark.parametrize("interface", ["v0", "v1"])
@pytest.mark.parametrize(("kind", "layout"), EVERY_POOL)
def test_a_host_pool_in_shared_memory_shares_pages_with_one_that_is_not(
    open_rig: OpenRig, kind: str, layout: str, interface: str
) -> None:
    """With `"allocator": "shm"` the pool is in a memory file, and nothing else differs."""
    shape = {"kind": kind, "layout": layout, "interface": interface}
    usual, shared = open_rig(**shape), open_rig(**shape, allocator="shm")
    first, second = prompt(PAGES, seed=30), prompt(PAGES, seed=31)

    stored = shared.back_up(first, seed=32), usual.back_up(second, seed=33)
    loaded = usual.prefetch(first, seed=32), shared.prefetch(second, seed=33)

    assert [len(shared_pools(rig.host)) > 0 for rig in (usual, shared)] == [False, True]
    assert stored == (PAGES, PAGES)
    assert loaded == ((PAGES, True), (PAGES, True))


@pytest.mark.parametrize(("written", "read"), [("v0", "v1"), ("v1", "v0")])
@pytest.mark.parametrize(("kind", "layout"), EVERY_POOL)
def test_each_interface_reads_the_pages_of_the_other(
    open_rig: OpenRig, kind: str, layout: str, written: str, read: str
) -> None:
    """v0 and v1 keep one object a page with the same bytes, in every layout."""
    writer = open_rig(kind=kind, layout=layout, interface=written)
    reader = open_rig(kind=kind, layout=layout, interface=read)
    tokens = prompt(PAGES, seed=3)

    stored = writer.back_up(tokens, seed=4)
    loaded = reader.prefetch(tokens, seed=4)

    assert (stored, loaded) == (PAGES, (PAGES, True))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_heads_of_two_widths_travel_bit_for_bit(open_rig: OpenRig, layout: str) -> None:
    """K and V of different width are in two buffers, whose addresses order nothing."""
    writer = open_rig(kind="asymmetric", layout=layout)
    reader = open_rig(kind="asymmetric", layout=layout)
    tokens = prompt(PAGES, seed=5)

    stored = writer.back_up(tokens, seed=6)
    loaded = reader.prefetch(tokens, seed=6)

    assert (stored, loaded) == (PAGES, (PAGES, True))


@pytest.mark.parametrize("interface", ["v0", "v1"])
def test_rank_one_never_reads_the_heads_of_rank_zero(open_rig: OpenRig, interface: str) -> None:
    """Tensor-parallel ranks of MHA hold different heads under the same page hashes."""
    rigs = [open_rig(interface=interface, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    tokens = prompt(PAGES, seed=7)

    rigs[0].back_up(tokens, seed=100)
    before = rigs[1].prefetch(tokens, seed=101)
    rigs[1].back_up(tokens, seed=101)
    after = [rig.prefetch(tokens, seed=100 + rank) for rank, rig in enumerate(rigs)]

    assert before == (0, True)
    assert after == [(PAGES, True), (PAGES, True)]


@pytest.mark.parametrize("interface", ["v0", "v1"])
def test_ranks_of_mla_share_what_one_of_them_writes(open_rig: OpenRig, interface: str) -> None:
    """MLA pages are the same on every rank, and SGLang lets only rank 0 write them."""
    rigs = [open_rig(kind="mla", interface=interface, tp_rank=r, tp_size=2) for r in (0, 1)]
    tokens = prompt(PAGES, seed=8)

    skipped = rigs[1].back_up(tokens, seed=9)
    before = rigs[1].prefetch(tokens, seed=9)
    rigs[0].back_up(tokens, seed=9)
    after = [rig.prefetch(tokens, seed=9) for rig in rigs]

    assert (skipped, before) == (0, (0, True))
    assert after == [(PAGES, True), (PAGES, True)]


def test_prefetch_stops_at_a_page_that_is_missing(open_rig: OpenRig, cluster: FakeCluster) -> None:
    """Pages behind a gap are of no use, and exists counts the leading run only."""
    rig = open_rig()
    tokens = prompt(PAGES, seed=10)
    rig.back_up(tokens, seed=11)

    del cluster.pages[sorted(cluster.pages, key=list(cluster.pages).index)[4]]

    assert rig.prefetch(tokens, seed=11) == (4, True)


def test_a_chain_of_three_hundred_pages_is_asked_for_in_one_call(open_rig: OpenRig) -> None:
    """HybridCacheController hands the whole chain to exists: no cap, no portion."""
    store = open_rig().store
    indices = torch.arange(2 * PAGE_TOKENS)
    keys = [page_hash(number) for number in range(300)]
    for begin in range(0, 300, 2):
        assert store.batch_set_v1(keys[begin : begin + 2], indices) == [True, True]

    found = store.batch_exists([*keys, "f" * 64])

    assert found == 300


@pytest.mark.skipif(INJECTOR is None, reason="this SGLang has no fault injector")
def test_injected_failures_shorten_hits_and_never_corrupt_them(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under SGLang's own fault injector every prefetch is a right prefix, often a short one."""
    monkeypatch.setenv(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.name, "0.3")
    monkeypatch.setenv(envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.name, "0.002")
    writer, reader = open_rig(interface="v1"), open_rig(interface="v0")
    rounds = 40

    seen = []
    for seed in range(rounds):
        tokens = prompt(PAGES, seed=1000 + seed)
        stored = writer.back_up(tokens, seed)
        loaded, right = reader.prefetch(tokens, seed)
        seen.append((stored, loaded, right))

    assert isinstance(writer.store, INJECTOR)
    assert all(right for _, _, right in seen)
    assert {stored for stored, _, _ in seen} == {0, PAGES}
    assert {loaded for _, loaded, _ in seen} == {0, PAGES}


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_a_hybrid_model_hits_where_its_window_is(open_rig: OpenRig, layout: str) -> None:
    """SGLang's controller stores KV with a window of its last two pages, and finds both."""
    rig = open_rig(layout=layout)
    side = filled(host_pool("mha", layout))
    rig.store.register_mem_host_pool_v2(side, PoolName.SWA)
    tokens, longer = prompt(PAGES, seed=12), prompt(PAGES + 3, seed=12)
    keys = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    assert longer[: len(tokens)] == tokens

    def window(keys: list[str]) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.SWA,
            keys=keys[-2:],
            host_indices=torch.arange(2 * PAGE_TOKENS),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    before = [flat_page(side, page) for page in (0, 1)]
    stored = rig.back_up(tokens, seed=13, extra_pools=[window(keys)])
    filled(side, seed=1)
    rig.controller.prefetch(CacheRequestHandle("rid", 0), longer, extra_pools=[window(keys)])
    operation = rig.controller.prefetch_hit_queue.get(timeout=120)
    operation.host_indices = rig.pools.alloc(operation.storage_hit_count)
    rig.controller.prefetch_buffer.put(operation)
    loaded: dict[str, int] = {}
    while not (ack := rig.controller.ack_prefetch_queue.get(timeout=120)).completed_req:
        loaded |= ack.pool_hits or {}

    assert stored == PAGES
    assert operation.storage_hit_count == PAGES * PAGE_TOKENS
    # 0.5.20 asks the store for them, and its controller does not keep them.
    ends = operation.pool_storage_result.restorable_prefix_pages
    assert ends == (None if older_sglang.WANTED else [PAGES])
    assert {name: pages for name, pages in loaded.items() if pages} == {PoolName.SWA: 2}
    assert [flat_page(side, page) for page in (0, 1)] == before
    assert rig.store.stats()["refused"] == {}
