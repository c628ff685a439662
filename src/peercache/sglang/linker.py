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

SGLang calls `load` while it admits a request. When it returns, the pages are on a device that the
processor can address; for others they are in pinned memory, from which layers are copied while the
engine computes those before them.
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
from peercache.config.quantities import parse_size
from peercache.config.settings import Config
from peercache.engines.lanes import STORE_TIMEOUT_S, CallLane
from peercache.errors import ConfigError
from peercache.observability import log
from peercache.sglang.device import DevicePool, StagedPool
from peercache.sglang.moves import InPlace, Staged
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
        settings = dict(extra_config or {})
        room = _staging_size(settings.pop(STAGING_SIZE, STAGING_DEFAULT))
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pool = DevicePool(kvcache, params.page_size)
        if not is_addressable(pool.kv_buffer[0].device):
            pool = StagedPool(kvcache, params.page_size, room)
        config = _storage_config(params, pool, settings)
        self._deadline_s = Config.from_sglang(config.extra_config, os.environ).op_timeout_s
        self._log = log.get_logger(component="sglang")
        self._groups = _groups(params)
        self._is_writer = not pool.is_replicated or config.tp_rank == 0
        self._pages_max: int | None = None
        """The longest load that is offered, after a load that took too long."""
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(pool.layers))
        self._queued: list[str] = []
        self._offloads: deque[Offload] = deque()
        self._store = PeerCacheStore(config, client_factory=client_factory)
        self._store.register_mem_pool_host(pool)
        self._moves: InPlace | Staged = (
            Staged(self._store, pool, self._log)
            if isinstance(pool, StagedPool)
            else InPlace(self._store, pool)
        )
        self._lane = self._new_lane()

    # --- loads -------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the lengths, in pages, that can be loaded: all before the first missing page."""
        limits = [most for most in (self._pages_max, self._moves.loads_max) if most is not None]
        keys = list(transfers[0].keys or ())[: min(limits, default=None)]
        return list(range(1, self._store.batch_exists(keys) + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Read pages for a request; return whether every rank has every byte of them."""
        verdict = torch.tensor([int(self._read(rid, transfers[0]))], dtype=torch.int)
        for group in self._groups:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=group)
        if verdict.item():
            self._queued.append(rid)
        else:
            self._moves.forget(rid)
        return bool(verdict.item())

    def _read(self, rid: str, transfer: Any) -> bool:
        keys = list(transfer.keys)
        begun_s = time.monotonic()
        hits = self._moves.read(rid, keys, transfer.device_indices.cpu())
        if time.monotonic() - begun_s > self._deadline_s * LATE_FRACTION:
            self._pages_max = max(1, hits // 2)
        elif self._pages_max is not None and hits >= self._pages_max:
            self._pages_max *= 2
        return hits == len(keys)

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
        keys = list(transfers[0].keys or ())
        waiting = sum(each.pages for each in self._offloads if each.is_stored is None)
        # However long one prompt is, it is stored if nothing else waits.
        if not keys or (waiting and waiting + len(keys) > BACKLOG_PAGES):
            return False
        offload = Offload(len(keys), None if self._is_writer else True)
        self._offloads.append(offload)
        if self._is_writer:
            slots = transfers[0].device_indices.cpu().clone()
            store = self._moves.storing(keys, slots, self.record_offload_ready)

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
