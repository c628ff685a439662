"""PeerCacheLinker: pages between an engine's device pool and PeerCache, without a host tier.

Owns    a PeerCacheStore over the device pool itself, the loads that SGLang has queued, and a thread
        that stores pages.
Takes   the methods of UnifiedCacheLinker, all from the scheduler's thread.
Keeps   a load is queued only if every byte of it is verified in its place: no layer is used before.
        SGLang aborts the requests of a load that fails later, and recomputes one that is refused,
        so everything that can fail is done before a load is queued. All ranks of a model accept or
        refuse a load together. No method raises.
Limits  a lookup and a load take no longer than the deadlines of the client. Stores that wait hold
        pages of the device, so there are at most BACKLOG_PAGES of them.

SGLang calls `load` while it admits the request; layers are ready when `load` returns.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.srt.runtime_context import get_parallel, get_serving

from peercache.client.client import Client
from peercache.config.settings import Config
from peercache.engines.lanes import STORE_TIMEOUT_S, CallLane
from peercache.errors import ConfigError
from peercache.observability import log
from peercache.sglang.device import DevicePool
from peercache.sglang.pages import BATCH_PAGES
from peercache.sglang.store import PeerCacheStore

BACKLOG_PAGES = 8 * BATCH_PAGES
"""Pages whose store may wait. SGLang cannot evict them from the device meanwhile."""

LATE_FRACTION = 0.5
"""A load that takes more than this fraction of its deadline is as long as a load may be."""

SETTING = "unified_cache_external_linker"


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
        _require_plain(params, components)
        pool = DevicePool(params.token_to_kv_pool_allocator.get_kvcache(), params.page_size)
        config = _storage_config(params, pool, dict(extra_config or {}))
        self._deadline_s = Config.from_sglang(config.extra_config, os.environ).op_timeout_s
        self._log = log.get_logger(component="sglang")
        self._groups = _groups(params)
        self._is_writer = not pool.is_replicated or config.tp_rank == 0
        self._pages_max: int | None = None
        """The longest load that is offered, after a load that took too long."""
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(pool.layers))
        self._queued: set[str] = set()
        self._offloads: deque[Offload] = deque()
        self._store = PeerCacheStore(config, client_factory=client_factory)
        self._store.register_mem_pool_host(pool)
        self._lane = self._new_lane()

    # --- loads -------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the lengths, in pages, that can be loaded: all before the first missing page."""
        keys = list(transfers[0].keys or ())
        return list(range(1, self._store.batch_exists(keys[: self._pages_max]) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Read pages into the device; return whether every rank has every byte of them."""
        verdict = torch.tensor([int(self._read(transfers[0]))], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=group)
        if verdict.item():
            self._queued.add(rid)
        return bool(verdict.item())

    def _read(self, transfer: Any) -> bool:
        begun_s = time.monotonic()
        flags = self._store.batch_get_v1(list(transfer.keys), transfer.device_indices.cpu())
        hits = flags.count(True)
        if time.monotonic() - begun_s > self._deadline_s * LATE_FRACTION:
            self._pages_max = max(1, hits // 2)
        elif self._pages_max is not None and hits >= self._pages_max:
            self._pages_max *= 2
        return hits == len(flags)

    def start_layer_wise_loading(self) -> int:
        """Return the index of the queued loads, whose layers are all in place; -1 for none."""
        if not self._queued:
            return -1
        self._queued.clear()
        index: int = self.layer_done_counter.update_producer()
        for layer in range(self.layer_done_counter.num_layers):
            self.layer_done_counter.complete(index, layer)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return whether all layers of an index are in place, which they are."""
        is_complete: bool = self.layer_done_counter.finish(counter_index)
        return is_complete

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a queued load; return whether there was one."""
        was_queued = rid in self._queued
        self._queued.discard(rid)
        return was_queued

    # --- stores ------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages for the store; return whether SGLang shall wait for a result."""
        keys = list(transfers[0].keys or ())
        waiting = sum(each.pages for each in self._offloads if each.is_stored is None)
        # However long one prompt is, it is stored if nothing else waits.
        if not keys or (waiting and waiting + len(keys) > BACKLOG_PAGES):
            return False
        offload = Offload(len(keys), None if self._is_writer else True)
        self._offloads.append(offload)
        if self._is_writer:
            slots = transfers[0].device_indices.cpu().clone()

            def write() -> None:
                offload.is_stored = self._write(keys, slots)

            def refuse() -> None:
                offload.is_stored = False

            self._lane.submit(write, refuse)
        return True

    def _write(self, keys: list[str], slots: torch.Tensor) -> bool:
        """Store pages, in batches with a deadline each; return whether the cluster holds all."""
        page_tokens = len(slots) // len(keys)
        for begin in range(0, len(keys), BATCH_PAGES):
            some = slice(begin, begin + BATCH_PAGES)
            places = slots[some.start * page_tokens : some.stop * page_tokens]
            if not all(self._store.batch_set_v1(keys[some], places)):
                return False
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

    # --- the end -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Return when no thread reads or writes the device; forget all loads and offloads."""
        self._quiesce()
        # SGLang flushes its caches after new weights. A thread stores pages of one version only.
        self._lane = self._new_lane()

    def close(self) -> None:
        """Close the client, after what moves."""
        self._quiesce()
        self._store.close()

    def _quiesce(self) -> None:
        # Calls have deadlines. A page that is read while another request fills it would be wrong.
        self._lane.drain()
        self._lane.close(self._deadline_s)
        self._queued.clear()
        self._offloads.clear()
        self.layer_done_counter.reset()

    def _new_lane(self) -> CallLane:
        return CallLane("linker-store", self._log, timeout_s=STORE_TIMEOUT_S)


def _require_plain(params: Any, components: Any) -> None:
    """Refuse models with more state than the KV pages of one stage."""
    parallel = get_parallel()
    draft = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    problems = {
        "no sliding windows or recurrent states": set(components) != {ComponentType.FULL},
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
    """Return what HiCache would tell a storage backend about this rank and model."""
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
