"""PeerCacheLinker under SGLang's radix cache: pages between device pools, without a host tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

from peercache.errors import ConfigError
from peercache.sglang import PeerCacheLinker, linker
from peercache.sglang.device import DevicePool, StagedPool, pools_of
from tests.integration.sglang_cache import SIDE, Cache, hybrid_params
from tests.integration.sglang_fakes import (
    BrokenClient,
    FakeBackedStore,
    FakeClient,
    FakeCluster,
)
from tests.integration.sglang_linked import Linked, plain_params
from tests.integration.sglang_pools import PAGE_TOKENS, device_pool, host_pool, page_hash
from tests.integration.sglang_rig import Rig, Shape, prompt, ranks
from tests.integration.sglang_side_pools import DSA_PAGE_TOKENS
from tests.pace import TIMEOUT_S, wait_until

PAGES = 7
KINDS = ("mha", "mla", *SIDE)
"""Plain models, and hybrid ones by what they have next to full attention."""

OpenLinked = Callable[..., Linked]


def hashes_of(tokens: list[int]) -> list[str]:
    """Return SGLang's page hashes."""
    return list(get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS))


@pytest.fixture
def open_linked(cluster: FakeCluster) -> Iterator[OpenLinked]:
    """Return a function that builds an engine's cache over the fake cluster."""
    opened: list[Linked] = []

    def build(*arguments: Any, factory: Callable[..., Any] | None = None, **more: Any) -> Linked:
        opened.append(Linked(factory or cluster.open, *arguments, **more))
        return opened[-1]

    yield build
    # SGLang's arguments are those of the process: the last ones end first.
    for each in reversed(opened):
        each.close()


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_engine_is_restored_by_another(
    open_linked: OpenLinked, kind: str, is_staged: bool
) -> None:
    """Each layer is right when it is ready; what is on the device is not read again."""
    writer, reader = open_linked(kind, is_staged=is_staged), open_linked(kind, is_staged=is_staged)
    tokens = prompt(PAGES, 1)
    writer.compute(tokens, 1)

    assert reader.restore(tokens, 1) == (PAGES, True)
    assert reader.restore(prompt(PAGES, 2), 2) == (0, True)
    assert writer.restore(tokens, 1) == (PAGES, True)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_engines_with_and_without_a_host_tier_share_pages(
    open_linked: OpenLinked, open_rig: Callable[..., Rig], kind: str
) -> None:
    """In HiCache's layout `layer_first`; in the others pages have another order of bytes."""
    tokens, others = prompt(PAGES, 1), prompt(PAGES, 2)
    linked, tiered = open_linked(kind), open_rig(kind=kind, layout="layer_first")
    linked.compute(tokens, 1)
    assert tiered.back_up(others, 2) == PAGES

    assert tiered.prefetch(tokens, 1) == (PAGES, True)
    assert linked.restore(others, 2) == (PAGES, True)
    assert open_rig(kind=kind, layout="page_first").prefetch(tokens, 1) == (0, True)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_place_and_through_pinned_memory_are_the_same(
    open_linked: OpenLinked, kind: str
) -> None:
    """An accelerator's engine reads what another engine stored, and the other way around."""
    staged, direct = open_linked(kind, is_staged=True), open_linked(kind)
    staged.compute(prompt(PAGES, 1), 1)
    direct.compute(prompt(PAGES, 2), 2)

    assert direct.restore(prompt(PAGES, 1), 1) == (PAGES, True)
    assert staged.restore(prompt(PAGES, 2), 2) == (PAGES, True)


def test_pinned_memory_bounds_loads_and_is_free_after_each(
    open_linked: OpenLinked, cluster: FakeCluster
) -> None:
    """More pages than it holds are stored in parts; a load is as long as there is room for."""
    writer = open_linked()
    room = 8 * writer.linker.pools["kv"].size_per_token * PAGE_TOKENS
    reader = open_linked(settings={"staging_size": room}, is_staged=True)
    tokens, others = prompt(20, 1), prompt(20, 2)
    writer.compute(tokens, 1)
    reader.compute(others, 2)
    assert len(cluster.pages) == 40
    assert writer.restore(others, 2) == (20, True)

    # A quarter of the room is for stores.
    assert [reader.restore(tokens, 1) for _ in range(3)] == [(6, True)] * 3
    slots = reader.allocator.alloc(6 * PAGE_TOKENS)
    keys = hashes_of(tokens)[:6]
    transfer = PoolTransfer(PoolName.KV, keys=keys, device_indices=slots)
    assert reader.linker.load("first", [transfer])
    assert not reader.linker.load("second", [transfer])
    assert reader.linker.cancel_queued_load("first")
    assert not reader.linker.cancel_queued_load("first")
    assert reader.linker.load("second", [transfer])
    reader.linker.reset()
    assert reader.linker.load("third", [transfer])


@pytest.mark.parametrize("size", ["much", -1, None])
def test_a_wrong_staging_size_is_refused(open_linked: OpenLinked, size: Any) -> None:
    """By its name."""
    with pytest.raises(ConfigError, match="staging_size"):
        open_linked(settings={"staging_size": size})


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(
    ("kind", "pool", "left"),
    [("mha", "kv", 6), ("window", "kv", 6), ("window", "swa", 6), ("states", "kv", 0),
     ("states", "mamba", 0)],
)  # fmt: skip
def test_a_page_that_is_gone_before_the_load_makes_the_engine_compute(
    open_linked: OpenLinked, kind: str, pool: str, left: int, is_staged: bool
) -> None:
    """The load is refused, SGLang has its slots back, and the next request hits what is left.

    Of a window all pages of a node are stored, of the recurrent states that at its end.
    """
    writer, reader = open_linked(kind), open_linked(kind, is_staged=is_staged)
    tokens = prompt(PAGES, 1)
    writer.compute(tokens, 1)
    free = reader.free_slots()
    request = reader.matched([*tokens, 1])
    assert reader.remove(pool, hashes_of(tokens)[-1:]) == 1

    assert reader.loaded(request, 1) == (0, True)
    assert reader.free_slots() == free
    assert reader.restore(tokens, 1) == (left, True)
    assert reader.restore(tokens, 1) == (left, True)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(("kind", "pool"), SIDE.items())
def test_a_prefix_ends_where_every_pool_has_what_the_model_needs(
    open_linked: OpenLinked, kind: str, pool: str, is_staged: bool
) -> None:
    """The pages of full attention alone are of no use."""
    writer, reader = open_linked(kind), open_linked(kind, is_staged=is_staged)
    tokens, begin = prompt(PAGES, 1), 4
    writer.compute(tokens[: begin * PAGE_TOKENS], 1)
    writer.compute(tokens, 2)
    assert reader.remove(pool, hashes_of(tokens)[begin:]) > 0

    assert reader.restore(tokens, 1, computed=begin) == (begin, True)
    assert reader.remove(pool, hashes_of(tokens)) > 0
    reader.tree.reset()
    assert reader.restore(tokens, 1) == (0, True)


@pytest.mark.parametrize("is_staged", [False, True])
def test_keys_of_an_indexer_are_in_the_pages_of_kv(
    open_linked: OpenLinked, is_staged: bool
) -> None:
    """SGLang passes only the KV pages. A missing key of the indexer ends the prefix before it."""
    writer, reader = open_linked("indexer"), open_linked("indexer", is_staged=is_staged)
    tokens = prompt(PAGES * DSA_PAGE_TOKENS // PAGE_TOKENS, 1)
    hashes = list(get_storage_hash_str(tokens, None, page_size=DSA_PAGE_TOKENS))
    writer.compute(tokens, 1)
    free = reader.free_slots()
    assert open_linked("indexer", is_staged=is_staged).restore(tokens, 1) == (PAGES, True)

    request = reader.matched([*tokens, 1])
    assert reader.remove("indexer", hashes[-1:]) == 1
    assert reader.loaded(request, 1) == (0, True)
    assert reader.free_slots() == free
    assert reader.restore(tokens, 1) == (PAGES - 1, True)


def test_layers_with_a_recurrent_state_wait_for_it(open_linked: OpenLinked) -> None:
    """SGLang has KV layers wait for the counter of a linker; states have a pool of their own."""
    linked = open_linked("states")

    assert linked.requests.layer_transfer_counter is linked.linker.layer_done_counter


def test_windows_are_shared_with_an_engine_that_has_a_host_tier(
    open_linked: OpenLinked, cluster: FakeCluster
) -> None:
    """In the layout `layer_first`, as other pages."""
    tokens, others = prompt(PAGES, 1), prompt(PAGES, 2)
    linked, tiered = open_linked("window"), Cache("window", "layer_first", FakeBackedStore)
    try:
        linked.compute(tokens, 1)
        tiered.compute(others, 2)

        assert tiered.restore([*tokens, 1]).from_storage == len(tokens)
    finally:
        tiered.close()
    assert linked.restore(others, 2) == (PAGES, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_fails_in_mid_layer_is_reported_before_the_answer_is_used(
    open_linked: OpenLinked, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers before it are right. SGLang gives the request up; the next one is right.

    The pinned memory of the load is free.
    """
    writer, tokens = open_linked(kind), prompt(PAGES, 1)
    writer.compute(tokens, 1)
    # For one load, not for two.
    room = 16 * sum(pool.page_bytes for pool in writer.linker.pools.values())
    reader = open_linked(kind, is_staged=True, settings={"staging_size": room})
    copied: list[int] = []

    def to_device(pool: Any, layer: int, *arguments: Any) -> None:
        copied.append(layer)
        if layer == 2:
            raise RuntimeError("the device has failed")
        copy(pool, layer, *arguments)

    copy = StagedPool.to_device
    request = reader.matched([*tokens, 1])
    with monkeypatch.context() as patch:
        patch.setattr(StagedPool, "to_device", to_device)
        index = reader.load_back(request)
        assert index >= 0
        rows = reader.rows_of(request)
        assert reader.tree.finish_external_linker_loads([request]) == [request]

    assert max(copied) == 2
    wanted = reader.content(len(tokens), 1)
    assert reader.is_right(0, rows, wanted)
    assert reader.is_right(1, rows, wanted)
    wait_until(lambda: reader.restore(tokens, 1) == (PAGES, True), "the memory is free")


def test_one_rank_without_a_page_makes_all_ranks_compute(
    open_linked: OpenLinked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that compute different tokens would wait for each other for all time."""
    verdicts: list[int] = []

    def all_reduce(verdict: torch.Tensor, operation: Any, group: Any) -> None:
        verdicts.append(int(verdict))
        verdict.fill_(0)

    writer, reader = open_linked(), open_linked()
    tokens = prompt(PAGES, 1)
    writer.compute(tokens, 1)
    request = reader.matched([*tokens, 1])
    monkeypatch.setattr(reader.linker, "_groups", ["ranks"])
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    assert reader.loaded(request, 1) == (0, True)
    assert verdicts == [1]


@pytest.mark.parametrize("answer", [RuntimeError("boom"), None, "nonsense", [True], []])
def test_a_client_that_breaks_its_contract_costs_hits_and_no_request(
    open_linked: OpenLinked, answer: Any
) -> None:
    """Lookups find nothing, stores fail, and SGLang gets its pages back to evict."""

    class Client(BrokenClient):
        def close(self) -> None:
            """End with the test."""

    broken = open_linked(factory=lambda config, *, namespace: Client(answer))
    tokens = prompt(PAGES, 1)

    broken.compute(tokens, 1)
    assert broken.restore(prompt(PAGES, 2), 2) == (0, True)
    broken.tree.reset()
    assert broken.restore(tokens, 1) == (0, True)


class SlowClient(FakeClient):
    """A client whose gets are complete up to a page, and take as long as they may."""

    pages_max = 10**6
    get_s = 0.0
    may_store: threading.Event | None = None
    is_asked: threading.Event

    def batch_get_into(self, keys: Any, segments: Any) -> list[bool]:
        """Return hits up to `pages_max`."""
        time.sleep(self.get_s)
        flags = super().batch_get_into(keys, segments)
        return [flag and at < self.pages_max for at, flag in enumerate(flags)]

    def batch_set_from(self, keys: Any, segments: Any) -> list[bool]:
        """Wait until it may."""
        if self.may_store is not None:
            self.is_asked.set()
            assert self.may_store.wait(TIMEOUT_S)
        return super().batch_set_from(keys, segments)


@pytest.fixture
def slow(open_linked: OpenLinked, cluster: FakeCluster) -> tuple[Linked, SlowClient]:
    """Return an engine's cache and its client."""
    clients: list[SlowClient] = []

    def factory(config: Any, *, namespace: Any) -> SlowClient:
        clients.append(SlowClient(cluster, namespace))
        clients[-1].is_asked = threading.Event()
        return clients[-1]

    return open_linked(factory=factory, settings={"op_timeout_s": 0.4}), clients[0]


def test_a_load_that_takes_too_long_makes_later_loads_shorter(
    open_linked: OpenLinked, slow: tuple[Linked, SlowClient]
) -> None:
    """All pages of a load or none: a prompt that no deadline is enough for would never hit."""
    reader, client = slow
    tokens = prompt(8, 1)
    open_linked().compute(tokens, 1)
    client.pages_max, client.get_s = 4, 0.3

    assert reader.restore(tokens, 1) == (0, True)
    client.get_s = 0.0
    assert [reader.restore(tokens, 1)[0] for _ in range(3)] == [2, 4, 0]
    client.pages_max = 8
    assert reader.restore(tokens, 1) == (8, True)


def test_results_of_stores_come_in_the_order_of_the_stores(
    slow: tuple[Linked, SlowClient],
) -> None:
    """SGLang takes the oldest result for the oldest pages. A full queue refuses at once."""
    linked, client = slow
    client.may_store = threading.Event()
    slots = torch.arange(PAGE_TOKENS, 2 * PAGE_TOKENS)

    def offload(number: int, pages: int = 1) -> bool:
        keys = [page_hash(100 * number + page) for page in range(pages)]
        indices = torch.cat([slots + page * PAGE_TOKENS for page in range(pages)])
        transfer = PoolTransfer(PoolName.KV, keys=keys, device_indices=indices)
        return linked.linker.offload([transfer])

    try:
        assert offload(1)
        assert offload(2, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linker, "BACKLOG_PAGES", 4)
            assert not offload(3, 2)
        assert linked.linker.num_completed_offloads() == 0
    finally:
        client.may_store.set()
    wait_until(lambda: linked.linker.num_completed_offloads() == 2, "both have ended")
    assert [linked.linker.pop_completed_offload() for _ in range(2)] == [True, True]
    assert len(client.cluster.pages) == 3


def test_a_reset_returns_when_the_device_is_no_longer_read(slow: tuple[Linked, SlowClient]) -> None:
    """A page that another request fills while it is stored would be wrong for all engines."""
    linked, client = slow
    client.may_store = threading.Event()
    keys, slots = [page_hash(1)], torch.arange(PAGE_TOKENS, 2 * PAGE_TOKENS)
    transfer = PoolTransfer(PoolName.KV, keys=keys, device_indices=slots)
    linked.linker.offload([transfer])
    wait_until(client.is_asked.is_set, "the store is under way")
    resetting = threading.Thread(target=linked.linker.reset)
    resetting.start()
    resetting.join(0.2)
    was_waiting = resetting.is_alive()
    client.may_store.set()
    resetting.join()

    assert was_waiting
    assert client.moved == [1]
    assert linked.linker.num_completed_offloads() == 0
    # It serves on, with a new thread.
    linked.compute(prompt(PAGES, 1), 1)
    assert len(client.cluster.pages) == 1 + PAGES


def test_one_rank_of_a_replicated_model_writes(
    open_linked: OpenLinked, cluster: FakeCluster
) -> None:
    """All ranks have the same pages, and all count them as stored."""
    second = open_linked("mla", tp_rank=1, tp_size=2)
    tokens = prompt(PAGES, 1)
    second.compute(tokens, 1)
    assert not cluster.pages
    first = open_linked("mla", tp_rank=0, tp_size=2)
    first.compute(tokens, 1)
    second.tree.reset()

    assert second.restore(tokens, 1) == (PAGES, True)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_the_device_pool_looks_like_the_host_pool_of_the_same_model(kind: str) -> None:
    """In all that names a page: else engines would share no pages."""
    device = device_pool(kind)
    linked, host = DevicePool(device, PAGE_TOKENS), host_pool(kind, "layer_first", device)

    for name in ("dtype", "layout", "page_size", "layer_num", "target_layer_num", "size_per_token"):
        assert getattr(linked, name) == getattr(host, name), name


@pytest.mark.parametrize(
    ("change", "components", "why"),
    [
        ({"is_eagle": True}, {ComponentType.FULL}, "no draft models"),
        ({"pp_size": 2}, {ComponentType.FULL}, "no pipeline parallelism"),
        ({}, {ComponentType.FULL, ComponentType.SWA}, "only full attention, alone or with"),
        ({}, set(ComponentType), "only full attention, alone or with"),
    ],
)
def test_models_that_are_not_served_are_refused_in_a_sentence(
    change: dict[str, Any], components: set[Any], why: str
) -> None:
    """The engine does not start, and reports what to use instead."""
    params = plain_params("mha")
    for name, value in change.items():
        setattr(params, name, value)
    refusal = pytest.raises(ConfigError, match=f"{why}.*--enable-hierarchical-cache")
    with ranks(Shape()), refusal:
        PeerCacheLinker(None, params, components=components)


def test_pools_that_are_not_served_are_refused_in_a_sentence() -> None:
    """Layouts of one vendor, and states that have further states next to them."""
    asymmetric = device_pool("mha")
    asymmetric.kv_cache_layout = "hnd"
    with pytest.raises(ConfigError, match="MHATokenToKVPool in the layout hnd"):
        DevicePool(asymmetric, PAGE_TOKENS)
    params = hybrid_params("states")
    params.req_to_token_pool.mamba_pool.register_slot_state(object())
    with pytest.raises(ConfigError, match="further states"):
        pools_of(params)
    params = hybrid_params("states")
    state = params.req_to_token_pool.mamba_pool.mamba_cache
    state.conv[0] = state.conv[0].transpose(-1, -2)
    with pytest.raises(ConfigError, match="not one run of memory"):
        pools_of(params)
    params = hybrid_params("states")
    params.req_to_token_pool.mamba_ckpt_pool = object()
    with pytest.raises(ConfigError, match="further states"):
        pools_of(params)
    with ranks(Shape()):
        params = plain_params("indexer")
    params.token_to_kv_pool_allocator.get_kvcache().kpool_use_compress = True
    with pytest.raises(ConfigError, match="compresses its keys"):
        pools_of(params)
