"""The cache of one engine's scheduler without a host tier, as SGLang 0.5.23 builds it.

A `Linked` owns device pools in ordinary memory and SGLang's UnifiedRadixCache over them, with
PeerCacheLinker. `compute` puts a prompt's pages into the tree, which stores them; `restore` takes
the steps of the scheduler for a request.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from peercache.sglang import PeerCacheLinker, linker
from peercache.sglang.pages import object_keys
from tests.integration.sglang_cache import (
    FULL_LAYERS,
    SIDE,
    SIDE_LAYERS,
    WINDOW_TOKENS,
    hybrid_content,
    hybrid_params,
    hybrid_pools,
    hybrid_rows,
)
from tests.integration.sglang_pools import DTYPE, LAYERS, PAGE_TOKENS, device_pool
from tests.integration.sglang_rig import WAIT_S, Shape, buffers, content, ranks
from tests.integration.sglang_side_pools import DSA_PAGE_TOKENS

REQUESTS = 8
INDEXED_LAYERS = [0, 2]
"""Layers of sparse attention with an indexer of their own."""

_numbers = itertools.count()


class Linked:
    """A scheduler's cache; close it at the end."""

    def __init__(
        self,
        client_factory: Callable[..., Any],
        kind: str = "mha",
        settings: dict[str, Any] | None = None,
        *,
        is_staged: bool = False,
        **shape: Any,
    ) -> None:
        """Build pools, tree and linker. kind: of KV pages, or of a hybrid model's side pool.

        shape: ranks of the scheduler.

        is_staged: the linker moves pages as to an accelerator, through memory of its own.
        """
        self._shape = Shape(kind=kind, **shape)
        self.kind = kind
        self.page_tokens = DSA_PAGE_TOKENS if kind == "indexer" else PAGE_TOKENS
        self._arguments = get_context().override_server_args(
            page_size=self.page_tokens,
            _mamba_cache_chunk_size=PAGE_TOKENS,
            served_model_name=self._shape.model,
            tp_size=self._shape.tp_size,
        )
        arguments = self._arguments.install()
        try:
            self._build(client_factory, arguments, settings, is_staged=is_staged)
        except BaseException:
            # A refusal is tried too: the next test has SGLang's own arguments.
            self._arguments.restore()
            raise

    def _build(
        self,
        client_factory: Callable[..., Any],
        arguments: Any,
        settings: dict[str, Any] | None,
        *,
        is_staged: bool,
    ) -> None:
        params = hybrid_params(self.kind) if self.kind in SIDE else plain_params(self.kind)
        self.allocator = params.token_to_kv_pool_allocator
        self.requests = params.req_to_token_pool
        self.device = self.allocator.get_kvcache()
        with ranks(self._shape), patch.object(linker, "is_addressable", lambda _: not is_staged):
            self.tree = UnifiedRadixCache(params)
            self.linker = PeerCacheLinker(
                arguments,
                params,
                components=set(self.tree.components),
                extra_config=settings,
                client_factory=client_factory,
            )
        self.tree.init_cache_linker(self.linker)

    def compute(self, tokens: list[int], seed: int) -> None:
        """Fill pages of a prompt on the device, put them into the tree, and store them."""
        with ranks(self._shape):
            rows = self._allocate(len(tokens))
            for name, pools in self.pools().items():
                content = self.content(len(tokens), seed)[name]
                for buffer, data in zip(pools, content, strict=True):
                    buffer[rows[name]] = data
            params = InsertParams(key=RadixKey(array("q", tokens)), value=rows["kv"])
            if self.kind == "states":
                params.mamba_value = rows["states"]
            self.tree.insert(params)
            self.settle()

    def pools(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers of each device pool, (slots, bytes of a row) each, of one layer."""
        if self.kind in SIDE:
            return hybrid_pools(self.kind, self.allocator, self.requests)
        pools = {
            "kv": [each.view(torch.uint8).reshape(len(each), -1) for each in buffers(self.device)]
        }
        if self.kind == "indexer":
            # A row is a page; a layer that uses the keys of another one has no rows.
            pools["indexer"] = [each for each in self.device.index_k_with_scale_buffer if len(each)]
        return pools

    def content(self, tokens: int, seed: int) -> dict[str, list[torch.Tensor]]:
        """Return the bytes of a prompt that ends here, of each buffer of each pool."""
        if self.kind in SIDE:
            rows = 1 if self.kind == "states" else tokens
            return hybrid_content(self.pools(), self.kind, tokens, rows, seed)
        found = {"kv": content(self.device, tokens, seed)}
        if self.kind == "indexer":
            generator = torch.Generator().manual_seed(seed)
            shape = (self.device.size // self.page_tokens, self.pools()["indexer"][0].shape[1])
            found["indexer"] = [
                torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)[
                    : tokens // self.page_tokens
                ]
                for _ in INDEXED_LAYERS
            ]
        return found

    def _allocate(self, tokens: int) -> dict[str, torch.Tensor]:
        if self.kind in SIDE:
            full, side = hybrid_rows(self.kind, self.allocator, self.requests, tokens)
            return {"kv": full, self.kind: side}
        return self._with_indexer(self.allocator.alloc(tokens))

    def _with_indexer(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind != "indexer":
            return {"kv": rows}
        return {"kv": rows, "indexer": rows[:: self.page_tokens] // self.page_tokens}

    def settle(self) -> None:
        """Let SGLang take all results, as the scheduler's loop does."""
        ends = time.monotonic() + WAIT_S
        while self.tree.linker.pending_offloads:
            self.tree.check_hicache_events()
            assert time.monotonic() < ends, f"the linker is not done in {WAIT_S} s"
            time.sleep(0.001)

    def matched(self, tokens: list[int]) -> Req:
        """Return a request that has asked what is stored."""
        request = Req(f"request-{next(_numbers)}", "", array("q", tokens), SamplingParams())
        with ranks(self._shape):
            request.init_next_round_input(self.tree)
        return request

    def loaded(self, request: Req, seed: int, computed: int | None = None) -> tuple[int, bool]:
        """Take what is stored to the device; return the pages of its prefix, and if all are right.

        Each layer is compared as soon as it is ready, as an engine uses it.
        computed: pages of the prompt that was computed with this seed; None for all of this one.
        """
        with ranks(self._shape):
            index = self.load_back(request)
            counter = self.tree.linker.layer_done_counter
            counter.set_consumer(index)
            rows = self.rows_of(request)
            if index < 0:
                # SGLang copies a state of the tree to the request later, with its batch.
                rows.pop("states", None)
            pages = len(rows["kv"]) // self.page_tokens
            whole = (len(request.origin_input_ids) - 1) // self.page_tokens
            wanted = self.content((computed or whole) * self.page_tokens, seed)
            is_right = True
            for layer in range(self.layers):
                counter.wait_until(layer)
                is_right &= self.is_right(layer, rows, wanted)
            assert self.tree.finish_external_linker_loads([request]) == []
        return pages, is_right

    @property
    def layers(self) -> int:
        """Return the number of layers of the model."""
        return len(FULL_LAYERS + SIDE_LAYERS) if self.kind in SIDE else LAYERS

    def load_back(self, request: Req) -> int:
        """Take what is stored to the device, as SGLang begins a batch; return its index."""
        request.host_loaded_length, request.last_node = self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=request.best_match_node,
                host_hit_length=request.host_hit_length,
                req=request,
            )
        )
        request.prefix_len += request.host_loaded_length
        index: int = self.tree.ready_to_load_host_cache()
        assert (index >= 0) == (request.host_loaded_length > 0)
        return index

    def free_slots(self) -> list[int]:
        """Return the free slots of each device pool."""
        if self.kind == "window":
            both = (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
            return [each.available_size() for each in both]
        states = (self.requests.mamba_allocator,) if self.kind == "states" else ()
        return [each.available_size() for each in (self.allocator, *states)]

    def remove(self, name: str, hashes: list[str]) -> int:
        """Remove pages of a pool from the cluster; return how many went."""
        attached = self.linker._store._registration.attached
        spaces = attached.spaces if name == "kv" else attached.sides[name].spaces
        return int(attached.client.remove(object_keys(hashes, spaces.digests)))

    def rows_of(self, request: Req) -> dict[str, torch.Tensor]:
        """Return the rows of a request's prefix in each pool."""
        full = self.tree.prefix_device_indices(request)
        rows = self._with_indexer(full)
        if not len(full):
            rows[self.kind if self.kind in SIDE else "kv"] = full
        elif self.kind == "window":
            rows["window"] = self.allocator.translate_loc_from_full_to_swa(full[-WINDOW_TOKENS:])
        elif self.kind == "states":
            rows["states"] = request.kv.mamba_pool_idx.reshape(1)
        return rows

    def is_right(
        self, layer: int, rows: dict[str, torch.Tensor], wanted: dict[str, list[torch.Tensor]]
    ) -> bool:
        """Return whether a layer of the model has these bytes on the device."""
        return all(
            torch.equal(buffer[rows[name]], data)
            for name, buffer, data in self._of_layer(layer, rows, wanted)
        )

    def _of_layer(
        self, layer: int, rows: dict[str, torch.Tensor], wanted: dict[str, list[torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield pool, buffer and wanted bytes of a prefix for each part of a layer of the model."""
        full = FULL_LAYERS if self.kind in SIDE else list(range(LAYERS))
        side = INDEXED_LAYERS if self.kind == "indexer" else SIDE_LAYERS
        for name, layers in (("kv", full), (self.kind, side)):
            if layer not in layers or name not in rows:
                continue
            place = layers.index(layer)
            buffers = self.pools()[name][place :: len(layers)]
            for buffer, data in zip(buffers, wanted[name][place :: len(layers)], strict=True):
                # Of a window there are the last rows of the prefix.
                end = len(rows["kv"]) if name == "window" else len(rows[name])
                yield name, buffer, data[end - len(rows[name]) : end]

    def restore(
        self, tokens: list[int], seed: int, computed: int | None = None
    ) -> tuple[int, bool]:
        """Take the scheduler's steps for a request."""
        return self.loaded(self.matched([*tokens, 1]), seed, computed)

    def close(self) -> None:
        """Close the linker, twice; give SGLang its arguments back."""
        self.tree.linker.close()
        self.tree.linker.close()
        self._arguments.restore()


def plain_params(kind: str) -> CacheInitParams:
    """Return what the scheduler builds for a model with full attention in all layers."""
    if kind == "indexer":
        page_tokens, device = DSA_PAGE_TOKENS, sparse_pool()
    else:
        page_tokens, device = PAGE_TOKENS, device_pool(kind)
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(REQUESTS, device.size, "cpu", False),
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
            device.size, page_tokens, DTYPE, "cpu", device, need_sort=False
        ),
        page_size=page_tokens,
        tree_components=(ComponentType.FULL,),
    )


def sparse_pool() -> DSATokenToKVPool:
    """Return the device pool of sparse attention, with an indexer in some layers."""
    return DSATokenToKVPool(
        size=24 * DSA_PAGE_TOKENS, page_size=DSA_PAGE_TOKENS, kv_lora_rank=32, dtype=DTYPE,
        qk_rope_head_dim=8, layer_num=LAYERS, device="cpu", index_head_dim=128,
        enable_memory_saver=False, kv_cache_dim=40,
        skip_topk_layers=[layer not in INDEXED_LAYERS for layer in range(LAYERS)],
    )  # fmt: skip
