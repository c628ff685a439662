"""The caches of one engine's scheduler, as SGLang 0.5.23 builds them for a hybrid model.

A `Cache` owns device pools in ordinary memory, SGLang's UnifiedRadixCache over them, and the host
pools and controller that the cache builds for itself from the server's arguments, with a storage
backend attached. `compute` puts a prompt's pages into the tree; `restore` takes the steps of the
scheduler for a request. The cache copies, stores, asks and fetches through its own threads.
"""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Callable
from typing import Any

import attrs
import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from peercache.sglang.pages import object_keys
from tests.integration.sglang_pools import flat_page
from tests.integration.sglang_rig import DTYPE, PAGE_TOKENS, WAIT_S, Shape, ranks

TOKENS = 64 * PAGE_TOKENS
"""Of a device pool."""

WINDOW_TOKENS = 2 * PAGE_TOKENS
STATES = 16
FULL_LAYERS, SIDE_LAYERS = [1, 3, 4], [0, 2]
"""Layers of the model, by their pool."""

REQUESTS = 8
_numbers = itertools.count()
CONTEXT_TOKENS = 64 * PAGE_TOKENS

SIDE = {"window": "swa", "states": "mamba"}
"""Names of the side pools."""


@attrs.define
class Restored:
    """What a request found.

    tokens: of its prefix on the device, after storage and host memory gave theirs.
    from_storage: how many of them came out of storage.
    """

    tokens: int
    from_storage: int
    pages: dict[str, list[torch.Tensor]]
    """Bytes of the prefix on the device: rows of each buffer of each pool."""


class Cache:
    """A scheduler's caches; use it as a context manager."""

    def __init__(
        self,
        kind: str,
        layout: str,
        backend: type,
        extra_config: dict[str, Any] | None = None,
        model: str = "tiny/model",
    ) -> None:
        """Build pools, tree and controller; the backend is loaded by name, as the server does it.

        kind: "window" has layers of full attention and of a sliding window, "states" layers of full
        attention and of a recurrent state.
        """
        self.kind = kind
        self._shape = Shape()
        self._arguments = get_context().override_server_args(
            page_size=PAGE_TOKENS,
            _mamba_cache_chunk_size=PAGE_TOKENS,
            served_model_name=model,
            enable_hierarchical_cache=True,
            hicache_ratio=1.5,
            hicache_mem_layout=layout,
            hicache_io_backend="direct" if layout == "page_first_direct" else "kernel",
            hicache_write_policy="write_through",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(
                {
                    "backend_name": "peercache",
                    "module_path": backend.__module__,
                    "class_name": backend.__name__,
                    "interface_v1": 1,
                    "prefetch_threshold": PAGE_TOKENS,
                    **(extra_config or {}),
                }
            ),
        )
        arguments = self._arguments.install()
        with ranks(self._shape):
            params = hybrid_params(kind)
            self.requests = params.req_to_token_pool
            self.allocator = params.token_to_kv_pool_allocator
            self.tree = UnifiedRadixCache(params)
            self.tree.init_hicache(arguments, params)
        self.given: dict[tuple[str, str], bytes] = {}
        self.loaded: dict[str, list[bytes]] = {}
        controller = self.tree.cache_controller
        controller.write_storage = self._listen(controller.write_storage, self._note_given)
        controller.load = self._listen(controller.load, self._note_loaded)

    @property
    def store(self) -> Any:
        """Return the backend that SGLang built."""
        return self.tree.cache_controller.storage_backend

    def host_pool(self, name: str) -> Any:
        """Return SGLang's host pool of a name."""
        return self.tree.host_pool_group.get_pool(PoolName(name))

    def remove(self, name: str, hashes: list[str]) -> int:
        """Remove pages of a pool from the cluster; return how many went."""
        attached = self.store._registration.attached
        spaces = attached.spaces if name == "kv" else attached.sides[name].spaces
        return int(attached.client.remove(object_keys(hashes, spaces.digests)))

    def pools(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers of each device pool, (slots, bytes of a row) each, of one layer."""
        return hybrid_pools(self.kind, self.allocator, self.requests)

    def compute(self, tokens: list[int], seed: int) -> None:
        """Fill pages of a prompt on the device, put them into the tree, and store them."""
        with ranks(self._shape):
            full, side = self._allocate(len(tokens))
            content = self.content(len(tokens), len(side), seed)
            for name, rows in (("kv", full), (self.kind, side)):
                for buffer, data in zip(self.pools()[name], content[name], strict=True):
                    buffer[rows] = data
            key = RadixKey(array("q", tokens))
            params = InsertParams(key=key, value=full)
            if self.kind == "states":
                params.mamba_value = side
            self.tree.insert(params)
            self.settle()

    def content(self, tokens: int, side_rows: int, seed: int) -> dict[str, list[torch.Tensor]]:
        """Return the random bytes of a prompt: rows of each buffer of each pool."""
        return hybrid_content(self.pools(), self.kind, tokens, side_rows, seed)

    def restore(self, tokens: list[int]) -> Restored:
        """Take the scheduler's steps for a request; return what is on the device then."""
        request = Req(f"request-{next(_numbers)}", "", array("q", tokens), SamplingParams())
        with ranks(self._shape):
            from_storage = self._prefetch(request)
            request.init_next_round_input(self.tree)
            request.host_loaded_length, request.last_node = self.tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=request.best_match_node,
                    host_hit_length=request.host_hit_length,
                    req=request,
                )
            )
            request.prefix_len += request.host_loaded_length
            self.tree.ready_to_load_host_cache()
            self.settle()
        full = self.tree.prefix_device_indices(request)
        if self.kind == "states":
            held = request.kv.mamba_pool_idx
            side = torch.empty(0, dtype=torch.int64) if held is None else held.reshape(1)
        else:
            side = self.allocator.translate_loc_from_full_to_swa(full[-WINDOW_TOKENS:])
        pages = {
            name: [buffer[rows] for buffer in self.pools()[name]]
            for name, rows in (("kv", full), (self.kind, side))
        }
        return Restored(len(full), from_storage, pages)

    def settle(self) -> None:
        """Let SGLang finish what it copies and stores, as the scheduler's loop does."""
        ends = time.monotonic() + WAIT_S
        tree = self.tree
        with ranks(self._shape):
            while True:
                tree.check_hicache_events()
                if not (
                    tree.ongoing_write_through or tree.ongoing_backup or tree.ongoing_load_back
                ):
                    return
                assert time.monotonic() < ends, f"SGLang is not done in {WAIT_S} s"
                time.sleep(0.001)

    def close(self) -> None:
        """Detach the storage backend, which closes it; give SGLang its arguments back."""
        self.tree.detach_storage_backend()
        self._arguments.restore()

    def _prefetch(self, request: Req) -> int:
        """Do what `Scheduler._prefetch_kvcache` does, and wait; return tokens out of storage."""
        request.init_next_round_input(self.tree, cow_mamba=False)
        matched = request.prefix_len + request.host_hit_length
        tokens = request.full_untruncated_fill_ids
        end = request._compute_max_prefix_len(len(tokens))
        self.tree.prefetch_from_storage(
            request.cache_request_handle,
            request.last_host_node,
            tokens[matched:end],
            self.tree.get_last_hash_value(request.last_host_node),
            None,
            matched_prefix_tokens=tokens[:matched],
        )
        ends = time.monotonic() + WAIT_S
        while not self.tree.check_prefetch_progress(request.cache_request_handle):
            assert time.monotonic() < ends, f"SGLang's prefetch is not done in {WAIT_S} s"
            self.tree.check_hicache_events()
            time.sleep(0.001)
        return self.tree.pop_prefetch_loaded_span(request.cache_request_handle)[0]

    @staticmethod
    def _listen(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def listening(*arguments: Any, **options: Any) -> Any:
            note(*arguments, **options)
            return method(*arguments, **options)

        return listening

    def _note_given(
        self, slots: Any, tokens: Any, hashes: Any, *_: Any, extra_pools: Any = None
    ) -> None:
        """Note the host pages that SGLang gives to its storage."""
        kv = PoolTransfer(name=PoolName.KV, host_indices=slots, keys=hashes)
        for each in (kv, *(extra_pools or ())):
            pages = self._host_pages(each.name, each.host_indices)
            keys = each.keys[-len(pages) :]
            self.given |= {(each.name.value, k): p for k, p in zip(keys, pages, strict=True)}

    def _note_loaded(self, *, host_indices: Any, extra_pools: Any = None, **_: Any) -> None:
        """Note the host pages that SGLang loads to the device."""
        self.loaded = {"kv": self._host_pages(PoolName.KV, host_indices)}
        for each in extra_pools or ():
            self.loaded[each.name.value] = self._host_pages(each.name, each.host_indices)

    def _host_pages(self, name: Any, slots: torch.Tensor) -> list[bytes]:
        pool = self.host_pool(name)
        pages = slots[:: pool.page_size] // pool.page_size
        return [flat_page(pool, page) for page in pages.tolist()]

    def _allocate(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a prompt in the KV pool and in the side pool."""
        return hybrid_rows(self.kind, self.allocator, self.requests, tokens)


def hybrid_rows(
    kind: str, allocator: Any, requests: Any, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows for a prompt in the KV pool and in the side pool."""
    if kind == "states":
        return allocator.alloc(tokens), requests.mamba_allocator.alloc(1)
    full = allocator.full_attn_allocator.alloc(tokens)
    side = allocator.swa_attn_allocator.alloc(tokens)
    allocator.set_full_to_swa_mapping(full, side)
    return full, side


def hybrid_pools(kind: str, allocator: Any, requests: Any) -> dict[str, list[torch.Tensor]]:
    """Return the buffers of each device pool, (slots, bytes of a row) each, of one layer."""
    kv = allocator.get_kvcache()
    full = [*kv.full_kv_pool.k_buffer, *kv.full_kv_pool.v_buffer]
    if kind == "window":
        side = [*kv.swa_kv_pool.k_buffer, *kv.swa_kv_pool.v_buffer]
    else:
        state = requests.mamba_pool.mamba_cache
        side = [layer for part in (*state.conv, state.temporal) for layer in part]
    return {"kv": [_rows(each) for each in full], kind: [_rows(each) for each in side]}


def hybrid_content(
    pools: dict[str, list[torch.Tensor]], kind: str, tokens: int, side_rows: int, seed: int
) -> dict[str, list[torch.Tensor]]:
    """Return the random bytes of a prompt: rows of each buffer of each pool."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: [
            torch.randint(0, 256, (rows, each.shape[1]), dtype=torch.uint8, generator=generator)
            for each in pools[name]
        ]
        for name, rows in (("kv", tokens), (kind, side_rows))
    }


def _rows(buffer: torch.Tensor) -> torch.Tensor:
    """Return a layer's buffer as bytes, one row a slot."""
    return buffer.view(torch.uint8).reshape(len(buffer), -1)


def hybrid_params(kind: str) -> CacheInitParams:
    """Return what the scheduler builds for a hybrid model: with a "window" or with "states"."""
    return _window_params() if kind == "window" else _state_params()


def _window_params() -> CacheInitParams:
    """Return what the scheduler builds for a model of full and sliding-window layers."""
    pool = SWAKVPool(
        size=TOKENS, size_swa=TOKENS, page_size=PAGE_TOKENS, dtype=DTYPE, head_num=4, head_dim=8,
        swa_attention_layer_ids=SIDE_LAYERS, full_attention_layer_ids=FULL_LAYERS, device="cpu",
    )  # fmt: skip
    allocator = SWATokenToKVPoolAllocator(
        TOKENS, TOKENS, PAGE_TOKENS, DTYPE, "cpu", pool, need_sort=False
    )
    pool.register_mapping(allocator.full_to_swa_index_mapping)
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(REQUESTS, CONTEXT_TOKENS, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE_TOKENS,
        sliding_window_size=WINDOW_TOKENS,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
    )


def _state_params() -> CacheInitParams:
    """Return what the scheduler builds for a model of full-attention and recurrent layers."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=8,
        conv_kernel=4,
    )  # fmt: skip
    requests = HybridReqToTokenPool(
        size=REQUESTS, mamba_size=STATES, mamba_spec_state_size=REQUESTS,
        max_context_len=CONTEXT_TOKENS, device="cpu", enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
            shape=shape, layers=SIDE_LAYERS,
        ),
        mamba_layer_ids=SIDE_LAYERS, enable_mamba_extra_buffer=True,
    )  # fmt: skip
    pool = HybridLinearKVPool(
        size=TOKENS, dtype=DTYPE, page_size=PAGE_TOKENS, head_num=4, head_dim=8,
        full_attention_layer_ids=FULL_LAYERS, device="cpu", mamba_pool=requests.mamba_pool,
    )  # fmt: skip
    return CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
            TOKENS, PAGE_TOKENS, DTYPE, "cpu", pool, need_sort=False
        ),
        page_size=PAGE_TOKENS,
        enable_mamba_extra_buffer=True,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA),
    )
