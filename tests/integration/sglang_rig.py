"""SGLang's own cache controllers over real host pools, small enough for a laptop.

A `Rig` is what one scheduler process has: a device pool (ordinary memory here), a host pool in one
of SGLang's layouts, and HiCacheController or HybridCacheController with a storage backend attached
the way the server attaches it. `back_up` takes the pages of a prompt from device to host to
storage; `prefetch` takes them from storage to host to device, through SGLang's own threads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

import attrs
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_pool_entry
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from tests.integration.sglang_pools import DTYPE, HEADS, LAYERS, PAGE_TOKENS, device_pool, host_pool

_IS_RENAMED = "transfer_layer_id_max" in inspect.signature(build_pool_entry).parameters
LAYERS_MOVED = {"transfer_layer_id_max" if _IS_RENAMED else "transfer_layer_num": LAYERS}
"""The layers of a pool, as SGLang's version names their number."""

WAIT_S = 120.0  # A storage thread that has not answered by then will not.


@attrs.frozen(kw_only=True)
class Shape:
    """What a rig looks like.

    heads: of the whole model; a rank of MHA has its part. None gives each rank HEADS.
    allocator: of the host pool, as SGLang reads it from the backend's configuration.
    """

    kind: str = "mha"
    layout: str = "page_first"
    interface: str = "v1"
    controller: str = "hybrid"
    model: str = "tiny/model"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    heads: int | None = None
    allocator: str = ""


def buffers(device: Any) -> list[torch.Tensor]:
    """Return the device pool's buffers, one (tokens, …) a layer and part."""
    if hasattr(device, "kv_buffer"):
        return list(device.kv_buffer)
    return [*device.k_buffer, *device.v_buffer]


def content(
    device: Any, tokens: int, seed: int, part: tuple[int, int] = (0, 1)
) -> list[torch.Tensor]:
    """Return random bytes for so many tokens, one (tokens, row bytes) a buffer.

    A longer content of the same seed begins with a shorter one.
    part: rank and size where a row holds one rank's heads, a part of all of them.
    """
    rank, size = part
    whole = [
        torch.randint(
            0,
            256,
            (tokens, each[0].nbytes * size),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(1000 * seed + number),
        )
        for number, each in enumerate(buffers(device))
    ]
    return [each.chunk(size, dim=1)[rank] for each in whole]


class Rig:
    """One scheduler process' caches, with a storage backend attached."""

    def __init__(self, shape: Shape, extra_config: dict[str, Any], backend: type) -> None:
        """Build pools and controller; the backend is loaded by name, as the server does it."""
        self.shape = shape
        heads = HEADS if shape.heads is None else shape.heads // shape.tp_size
        self.device = device_pool(shape.kind, heads)
        self._part = (0, 1) if shape.heads is None else (shape.tp_rank, shape.tp_size)
        self.host = host_pool(shape.kind, shape.layout, self.device, allocator=shape.allocator)
        allocator = PagedTokenToKVPoolAllocator(
            self.device.size, PAGE_TOKENS, DTYPE, "cpu", self.device, need_sort=False
        )
        options = {
            "token_to_kv_pool_allocator": allocator,
            "page_size": PAGE_TOKENS,
            "tp_group": None,
            "load_cache_event": threading.Event(),
            "write_policy": "write_through",
            "io_backend": "direct" if shape.layout == "page_first_direct" else "kernel",
            "storage_backend": "dynamic",
            "prefetch_threshold": PAGE_TOKENS,
            "model_name": shape.model,
            "storage_backend_extra_config": {
                "backend_name": "peercache",
                "module_path": backend.__module__,
                "class_name": backend.__name__,
                "interface_v1": 1 if shape.interface == "v1" else 0,
                **({"allocator": shape.allocator} if shape.allocator else {}),
                **extra_config,
            },
        }
        with ranks(shape):
            if shape.controller == "plain":
                self.pools = self.host
                self.controller = HiCacheController(mem_pool_host=self.host, **options)
            else:
                entry = build_pool_entry(
                    name=PoolName.KV,
                    host_pool=self.host,
                    device_pool=self.device,
                    layer_mapping={layer: layer for layer in range(LAYERS)},
                    is_anchor=True,
                    **LAYERS_MOVED,
                )
                self.pools = HostPoolGroup([entry])
                self.controller = HybridCacheController(
                    mem_pool_host=self.pools, **LAYERS_MOVED, **options
                )

    @property
    def store(self) -> Any:
        """Return the backend that SGLang built."""
        return self.controller.storage_backend

    def back_up(self, tokens: list[int], seed: int, **more: Any) -> int:
        """Fill pages on the device, take them to the host and to storage; return pages stored."""
        rows = self.controller.mem_pool_device_allocator.alloc(len(tokens))
        for buffer, data in zip(
            buffers(self.device), content(self.device, len(tokens), seed, self._part), strict=True
        ):
            buffer.view(torch.uint8).reshape(len(buffer), -1)[rows] = data
        slots = self.controller.write(rows)
        keys = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
        with ranks(self.shape):
            self.controller.write_storage(slots, tokens, hash_value=keys, **more)
            operation = self._take(self.controller.ack_backup_queue)
        self.controller.mem_pool_device_allocator.free(rows)
        self.pools.free(slots)
        return operation.completed_tokens // PAGE_TOKENS

    def prefetch(self, tokens: list[int], seed: int) -> tuple[int, bool]:
        """Bring a prompt's pages to the device; return how many, and whether they are right."""
        handle = "rid" if self.shape.controller == "plain" else CacheRequestHandle("rid", 0)
        self.controller.prefetch(handle, tokens)
        operation = self._take(self.controller.prefetch_hit_queue)
        hit_tokens = operation.storage_hit_count
        if hit_tokens == 0:
            return 0, True
        slots = self.pools.alloc(hit_tokens)
        operation.host_indices = slots
        self.controller.prefetch_buffer.put(operation)
        done_tokens = 0
        while True:
            ack = self._take(self.controller.ack_prefetch_queue)
            if ack.completed_tokens is not None:
                done_tokens = ack.completed_tokens
            if ack.completed_req:
                break
        right = self._compare(slots[:done_tokens], len(tokens), seed)
        self.pools.free(slots)
        return done_tokens // PAGE_TOKENS, right

    def close(self) -> None:
        """Detach the storage backend, which closes it."""
        self.controller.detach_storage_backend()

    def _compare(self, slots: torch.Tensor, tokens: int, seed: int) -> bool:
        if len(slots) == 0:
            return True
        rows = self.controller.load(slots)
        self.controller.start_loading()
        right = all(
            torch.equal(buffer.view(torch.uint8).reshape(len(buffer), -1)[rows], data[: len(slots)])
            for buffer, data in zip(
                buffers(self.device), content(self.device, tokens, seed, self._part), strict=True
            )
        )
        self.controller.mem_pool_device_allocator.free(rows)
        return right

    @staticmethod
    def _take(queue: Queue[Any]) -> Any:
        try:
            return queue.get(timeout=WAIT_S)
        except Empty:
            raise AssertionError(f"SGLang's storage thread did not answer in {WAIT_S} s") from None


@contextmanager
def ranks(shape: Shape) -> Iterator[None]:
    """Give SGLang the ranks that its launcher would have given it."""
    with get_parallel().override(
        tp_rank=shape.tp_rank, tp_size=shape.tp_size, pp_rank=shape.pp_rank,
        pp_size=shape.pp_size,
        attn_tp_rank=shape.tp_rank, attn_tp_size=shape.tp_size, attn_dp_rank=0,
        attn_dcp_rank=0, attn_dcp_size=1,
    ):  # fmt: skip
        yield


def prompt(pages: int, seed: int) -> list[int]:
    """Return the token ids of a prompt of whole pages."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 30_000, (pages * PAGE_TOKENS,), generator=generator).tolist()
