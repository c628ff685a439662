"""The cache of one engine's scheduler without a host tier, as SGLang 0.5.23 builds it.

A `Linked` owns a device pool in ordinary memory and SGLang's UnifiedRadixCache over it, with
PeerCacheLinker. `compute` puts a prompt's pages into the tree, which stores them; `restore` takes
the steps of the scheduler for a request.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from peercache.sglang import PeerCacheLinker, linker
from tests.integration.sglang_pools import DTYPE, LAYERS, PAGE_TOKENS, device_pool
from tests.integration.sglang_rig import WAIT_S, Shape, buffers, content, ranks

REQUESTS = 8
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
        """Build pool, tree and linker. shape: ranks of the scheduler.

        is_staged: the linker moves pages as to an accelerator, through memory of its own.
        """
        self._shape = Shape(kind=kind, **shape)
        self.device = device_pool(kind)
        self._arguments = get_context().override_server_args(
            page_size=PAGE_TOKENS,
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
        self.allocator = PagedTokenToKVPoolAllocator(
            self.device.size, PAGE_TOKENS, DTYPE, "cpu", self.device, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(REQUESTS, self.device.size, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            tree_components=(ComponentType.FULL,),
        )
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
            rows = self.allocator.alloc(len(tokens))
            for buffer, data in zip(
                buffers(self.device), content(self.device, len(tokens), seed), strict=True
            ):
                buffer.view(torch.uint8).reshape(len(buffer), -1)[rows] = data
            self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=rows))
            self.settle()

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

    def loaded(self, request: Req, seed: int) -> tuple[int, bool]:
        """Take what is stored to the device; return the pages of its prefix, and if all are right.

        Each layer is compared as soon as it is ready, as an engine uses it.
        """
        with ranks(self._shape):
            request.host_loaded_length, request.last_node = self.tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=request.best_match_node,
                    host_hit_length=request.host_hit_length,
                    req=request,
                )
            )
            request.prefix_len += request.host_loaded_length
            index = self.tree.ready_to_load_host_cache()
            assert (index >= 0) == (request.host_loaded_length > 0)
            counter = self.tree.linker.layer_done_counter
            counter.set_consumer(index)
            rows = self.tree.prefix_device_indices(request)
            wanted = content(self.device, len(rows), seed)
            pairs = list(zip(buffers(self.device), wanted, strict=True))
            is_right = True
            for layer in range(LAYERS):
                counter.wait_until(layer)
                for buffer, data in pairs[layer::LAYERS]:
                    held = buffer.view(torch.uint8).reshape(len(buffer), -1)[rows]
                    is_right &= torch.equal(held, data)
            assert self.tree.finish_external_linker_loads([request]) == []
        return len(rows) // PAGE_TOKENS, is_right

    def restore(self, tokens: list[int], seed: int) -> tuple[int, bool]:
        """Take the scheduler's steps for a request."""
        return self.loaded(self.matched([*tokens, 1]), seed)

    def close(self) -> None:
        """Close the linker, twice; give SGLang its arguments back."""
        self.tree.linker.close()
        self.tree.linker.close()
        self._arguments.restore()
