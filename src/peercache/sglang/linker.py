"""PeerCacheLinker: pages between an engine's device pool and PeerCache, without a host tier.

Owns    a PeerCacheStore over the device pools themselves, the loads that SGLang has queued, and a
        thread that stores pages.
Takes   the methods of UnifiedCacheLinker, all from the scheduler's thread.
Keeps   a load is queued only if every byte of it is verified in its place: no layer is used before.
        SGLang aborts the requests of a load that fails later, and recomputes one that is refused,
        so everything that can fail is done before a load is queued. All ranks of a model accept or
        refuse a load together. No method raises.
Limits  a lookup and a load take no longer than the deadlines of the client. Stores that wait hold
        pages of the device, so there are at most BACKLOG_PAGES of them.

SGLang calls `load` while it admits a request. When it returns, the pages are on a device that the
processor can address; for others they are in pinned memory, from which layers are copied while the
engine computes those before them.

A hybrid model has a pool of windows, of recurrent states or of an indexer's keys in addition to its
KV pages. A lookup returns only the lengths at which all pools have what the model needs, and a load
reads all of them in one batch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.srt.runtime_context import get_parallel, get_serving

from peercache.client.client import Client
from peercache.config.quantities import parse_size
from peercache.config.settings import Config
from peercache.engines.lanes import STORE_TIMEOUT_S, CallLane
from peercache.errors import ConfigError
from peercache.observability import log
from peercache.sglang.device import DevicePool, StagedPool, pools_of
from peercache.sglang.moves import InPlace, PoolPages, Staged
from peercache.sglang.pages import BATCH_PAGES
from peercache.sglang.store import PeerCacheStore

BACKLOG_PAGES = 8 * BATCH_PAGES
"""Pages whose store may wait. SGLang cannot evict them from the device meanwhile."""

LATE_FRACTION = 0.5
"""A load that takes more than this fraction of its deadline is as long as a load may be."""

SETTING = "unified_cache_external_linker"

STAGING_SIZE = "staging_size"
STAGING_DEFAULT = "1GiB"
"""Pinned memory of a linker next to an accelerator: the longest load that it accepts."""

STATES_DIVISOR = 4
"""Of the pinned memory, one part of so many is for recurrent states, if the model has them."""

SIDES = {SWAKVPool: {ComponentType.SWA}, HybridLinearKVPool: {ComponentType.MAMBA}}
"""What SGLang caches of a hybrid model in addition to the pages of full attention."""


@attrs.define(eq=False)
class Offload:
    """Pages that are to be stored. is_stored: None until the store has answered."""

    pages: int
    is_stored: bool | None = None


class PeerCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang ships no type information
    """Moves pages between the device pool of an engine and the cluster."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
        client_factory: Callable[..., Any] = Client.open,
    ) -> None:
        """Open the client; raise a PeerCacheError that says what is wrong.

        params: SGLang's CacheInitParams. extra_config: settings of PeerCache; they override the
                environment. client_factory: what opens the client; tests pass a fake.
        """
        self.forward_stream = forward_stream
        _require_served(params, components)
        settings = dict(extra_config or {})
        room = _staging_size(settings.pop(STAGING_SIZE, STAGING_DEFAULT))
        pools = pools_of(params)
        kv = pools[PoolName.KV]
        staged = None if is_addressable(kv.kv_buffer[0].device) else staged_pools(pools, room)
        config = _storage_config(params, kv, settings)
        self._deadline_s = Config.from_sglang(config.extra_config, os.environ).op_timeout_s
        self._log = log.get_logger(component="sglang")
        self._groups = _groups(params)
        self._written = {
            name for name, pool in pools.items() if not pool.is_replicated or config.tp_rank == 0
        }
        """Pools that this rank stores."""
        self._pages_max: int | None = None
        """The longest load that is offered, after a load that took too long."""
        self.pools = staged or pools
        layers = 1 + max(layer for pool in pools.values() for layer in pool.of_model)
        self.layer_done_counter = LayerWiseLoadCounter(layers)
        if PoolName.MAMBA in pools:
            # SGLang registers the counter with the pool of KV pages only.
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: list[str] = []
        self._offloads: deque[Offload] = deque()
        self._store = PeerCacheStore(config, client_factory=client_factory)
        self._store.register_mem_pool_host(self.pools[PoolName.KV])
        for name in pools.keys() - {PoolName.KV}:
            self._store.register_mem_host_pool_v2(self.pools[name], name)
        self._moves: InPlace | Staged = (
            InPlace(self._store, layers)
            if staged is None
            else Staged(self._store, staged, layers, self._log)
        )
        self._lane = self._new_lane()

    # --- loads -------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the lengths, in pages, that can be loaded.

        Those are all before the first missing page; with further pools those at whose end all of
        them have what the model needs.
        """
        limits = [most for most in (self._pages_max, self._moves.loads_max) if most is not None]
        keys = list(transfers[0].keys or ())[: min(limits, default=None)]
        if len(self.pools) > 1:
            sides = self._with_indexer(transfers)[1:]
            ends = self._store.batch_exists_v2(keys, sides).restorable_prefix_pages
            return list(ends or ())
        return list(range(1, self._store.batch_exists(keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Read pages for a request; return whether every rank has every byte of them."""
        pages = PoolPages.of(self._with_indexer(transfers))
        verdict = torch.tensor([int(self._read(rid, pages))], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=group)
        if verdict.item():
            self._queued.append(rid)
        else:
            self._moves.forget(rid)
        return bool(verdict.item())

    def _read(self, rid: str, pages: list[PoolPages]) -> bool:
        begun_s = time.monotonic()
        flags = self._moves.read(rid, pages)
        hits = flags[0].count(True)
        if time.monotonic() - begun_s > self._deadline_s * LATE_FRACTION:
            self._pages_max = max(1, hits // 2)
        elif self._pages_max is not None and hits >= self._pages_max:
            self._pages_max *= 2
        return all(map(all, flags))

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads; return their index, -1 for none."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, []
        return self._moves.start(self.layer_done_counter, queued, self.record_offload_ready)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return when all layers of an index are in place, and whether they are."""
        is_complete: bool = self.layer_done_counter.finish(counter_index)
        return is_complete

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a queued load; return whether there was one."""
        if rid not in self._queued:
            return False
        self._queued.remove(rid)
        self._moves.forget(rid)
        return True

    # --- stores ------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages for the store; return whether SGLang shall wait for a result."""
        count = len(transfers[0].keys or ())
        waiting = sum(each.pages for each in self._offloads if each.is_stored is None)
        # However long one prompt is, it is stored if nothing else waits.
        if not count or (waiting and waiting + count > BACKLOG_PAGES):
            return False
        pages = PoolPages.of(
            each for each in self._with_indexer(transfers) if each.name in self._written
        )
        offload = Offload(count, None if pages else True)
        self._offloads.append(offload)
        if pages:
            store = self._moves.storing(pages, self.record_offload_ready)

            def write() -> None:
                offload.is_stored = store()

            def refuse() -> None:
                offload.is_stored = False

            self._lane.submit(write, refuse)
        return True

    def num_completed_offloads(self) -> int:
        """Return how many of the oldest offloads have ended."""
        return next(
            (at for at, each in enumerate(self._offloads) if each.is_stored is None),
            len(self._offloads),
        )

    def pop_completed_offload(self) -> bool:
        """Forget the oldest offload, which has ended; return whether its pages are stored."""
        return bool(self._offloads.popleft().is_stored)

    def _with_indexer(self, transfers: list[Any]) -> list[Any]:
        """Return the transfers of all pools: those of an indexer are in the pages of KV."""
        if PoolName.INDEXER not in self.pools:
            return transfers
        return [*transfers, dataclasses.replace(transfers[0], name=PoolName.INDEXER)]

    # --- the end -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Return when no thread reads or writes the device; forget all loads and offloads."""
        self._quiesce()
        # SGLang flushes its caches after new weights. A thread stores pages of one version only.
        self._lane = self._new_lane()

    def close(self) -> None:
        """Close the client, after what moves."""
        self._quiesce()
        self._moves.close()
        self._store.close()

    def _quiesce(self) -> None:
        # Calls have deadlines. A page that is read while another request fills it would be wrong.
        self._lane.drain()
        self._lane.close(self._deadline_s)
        self._moves.quiesce()
        self._queued.clear()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def _new_lane(self) -> CallLane:
        return CallLane("linker-store", self._log, timeout_s=STORE_TIMEOUT_S)


def is_addressable(device: torch.device) -> bool:
    """Return whether the processor can read and write this device's memory."""
    is_processor: bool = device.type == "cpu"
    return is_processor


def _staging_size(value: Any) -> int:
    try:
        size = parse_size(value)
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(STAGING_SIZE, f"wants a size, such as 1GiB, not {value!r}")
    return size


def staged_pools(pools: dict[Any, DevicePool], size: int) -> dict[Any, StagedPool]:
    """Return pinned memory of `size` bytes for all pools of a model.

    Pages of windows have room for as many as there are of full attention: a load has no more. All
    recurrent states have a fraction.
    """
    states = size // STATES_DIVISOR if PoolName.MAMBA in pools else 0
    page_bytes = sum(pool.page_bytes for name, pool in pools.items() if name != PoolName.MAMBA)
    pages = (size - states) // page_bytes
    return {
        name: StagedPool(pool, states if name == PoolName.MAMBA else pages * pool.page_bytes)
        for name, pool in pools.items()
    }


def _require_served(params: Any, components: Any) -> None:
    """Refuse models with more state than the pages and states of one stage."""
    parallel = get_parallel()
    draft = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    served = {ComponentType.FULL} | SIDES.get(type(pool), set())
    problems = {
        "only full attention, alone or with either sliding windows or recurrent states": (
            set(components) != served
        ),
        "no draft models": bool(draft) or params.is_eagle,
        "no pipeline parallelism": params.pp_size > 1,
        "no decode context parallelism": parallel.attn_dcp_size > 1,
    }
    for limit, is_met in problems.items():
        if is_met:
            raise ConfigError(
                SETTING,
                f"PeerCacheLinker serves {limit}: use the storage backend, with "
                "--enable-hierarchical-cache --hicache-storage-backend peercache",
            )


def _groups(params: Any) -> list[Any]:
    """Return the groups of ranks that hold parts of the same pages, as SGLang's cache has them."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return []

    def several(*groups: Any) -> list[Any]:
        return [
            each for each in groups if each is not None and distributed.get_world_size(each) > 1
        ]

    attention = several(params.attn_cp_cache_group, params.attn_tp_cache_group)
    return attention or several(params.tp_cache_group)


def _storage_config(params: Any, pool: DevicePool, extra_config: dict[str, Any]) -> Any:
    """Return what HiCache passes to a storage backend about this rank and model."""
    parallel = get_parallel()
    has_own = is_dp_attention_enabled()
    return HiCacheStorageConfig(
        tp_rank=parallel.attn_tp_rank if has_own else parallel.tp_rank,
        tp_size=parallel.attn_tp_size if has_own else parallel.tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=pool.is_replicated,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=get_serving().served_model_name,
        extra_config=extra_config,
    )
