"""A decode engine's caches, as SGLang 0.5.23 builds them where decode offloads its KV cache.

That is --disaggregation-decode-enable-offload-kvcache. A `Decoder` owns a device pool in ordinary
memory and SGLang's DecodeKVCacheOffloadManager, which builds host pool, HiCacheController and
storage backend from the server's arguments. `generate` takes the scheduler's steps for one request:
it offloads the pages of the output as they fill.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import torch
from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from peercache.sglang import PeerCacheStore
from tests.integration.sglang_pools import DEVICE_PAGES, DTYPE, PAGE_TOKENS, device_pool
from tests.integration.sglang_rig import Shape, buffers, content, ranks
from tests.pace import wait_until
from tests.system.nodes import Closing


class Decoder(Closing):
    """The decode side of one request at a time; use it as a context manager."""

    def __init__(self, extra_config: dict[str, Any], layout: str = "page_first") -> None:
        """Build the pools and the manager; the backend is loaded by name, as the server does it."""
        self._arguments = get_context().override_server_args(
            page_size=PAGE_TOKENS,
            served_model_name="tiny/model",
            disaggregation_mode="decode",
            disaggregation_decode_enable_offload_kvcache=True,
            hicache_ratio=1.5,
            hicache_mem_layout=layout,
            hicache_io_backend="kernel",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(
                {
                    "backend_name": "peercache",
                    "module_path": PeerCacheStore.__module__,
                    "class_name": PeerCacheStore.__name__,
                    "interface_v1": 1,
                    **extra_config,
                }
            ),
        )
        self._arguments.install()
        self._device = device_pool("mha")
        self._allocator = PagedTokenToKVPoolAllocator(
            self._device.size, PAGE_TOKENS, DTYPE, "cpu", self._device, need_sort=False
        )
        self._requests = ReqToTokenPool(2, DEVICE_PAGES * PAGE_TOKENS, "cpu", False)
        # The manager counts the ranks of its group.
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        with ranks(Shape()):
            tree = UnifiedRadixCache(
                CacheInitParams(
                    disable=True,
                    req_to_token_pool=self._requests,
                    token_to_kv_pool_allocator=self._allocator,
                    page_size=PAGE_TOKENS,
                    tree_components=(ComponentType.FULL,),
                )
            )
            self._manager = DecodeKVCacheOffloadManager(
                self._requests, self._allocator, torch.distributed.group.WORLD, tree
            )

    @property
    def store(self) -> Any:
        """Return the backend that SGLang built."""
        return self._manager.cache_controller.storage_backend

    def generate(self, prompt: list[int], output: list[int], seed: int) -> int:
        """Take a request from its transfer to its end; return how many tokens were left in use.

        seed: of the bytes of all its pages, which prefill and decode have computed.
        """
        tokens = len(prompt) + len(output)
        request = Req("rid", "", array("q", prompt), SamplingParams(max_new_tokens=len(output)))
        with ranks(Shape()):
            rows = self._allocator.alloc(-(-tokens // PAGE_TOKENS) * PAGE_TOKENS)
            self._requests.alloc([request])
            self._requests.write((request.kv.req_pool_idx, slice(0, tokens)), rows[:tokens])
            request.kv.kv_allocated_len = tokens
            for buffer, data in zip(
                buffers(self._device), content(self._device, tokens, seed), strict=True
            ):
                buffer.view(torch.uint8).reshape(len(buffer), -1)[rows[:tokens]] = data
            for token in output:
                request.output_ids.append(token)
                self._manager.offload_kv_cache(request)
                self._manager.check_offload_progress()
            request.finished_reason = FINISH_LENGTH(len(output))
            if not self._manager.offload_kv_cache(request):
                self._manager.finalize_release_on_finish(request)
            wait_until(self._is_idle, "the output is offloaded")
        return self._device.size - self._allocator.available_size()

    def _is_idle(self) -> bool:
        self._manager.check_offload_progress()
        return not (self._manager.ongoing_offload or self._manager.ongoing_backup)

    def close(self) -> None:
        """Detach the storage backend, and give SGLang its arguments back."""
        self._manager.cache_controller.detach_storage_backend()
        self._manager.release_host_resources()
        torch.distributed.destroy_process_group()
        self._arguments.restore()
