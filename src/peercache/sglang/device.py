"""The pages of an engine's device pool, as a host pool of HiCache would have them.

SGLang keeps K and V of each layer in a tensor of their own, (tokens, heads, head size), so a page
is one run of memory in each of them. In this order of runs, all K and then all V, its bytes are
those of a page of HiCache in the layout `layer_first`: servers with and without a host tier share
such pages.

`DevicePool` is the pool itself, if the processor can read its memory: pages are moved in place.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from peercache.errors import ConfigError

NHD = "nhd"

_FACTS = (
    "dtype",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
)
"""Attributes that SGLang's host pools take over from the device pool."""


def layers_of(pool: Any) -> list[list[torch.Tensor]]:
    """Return the tensors of each layer: K and V, or one; raise ConfigError for other pools."""
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == NHD:
        if pool.is_quantized_kv_cache or pool.k_scale_buffer is not None:
            raise ConfigError("linker", "does not serve a KV cache that has scales")
        return [list(pair) for pair in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    if type(pool) is MLATokenToKVPool and pool.kv_scale_buffer is None:
        return [[buffer] for buffer in pool.kv_buffer]
    kind = f"{type(pool).__name__} in the layout {getattr(pool, 'kv_cache_layout', NHD)}"
    raise ConfigError(
        "linker",
        f"serves plain MHA and MLA models, not the pool {kind}: use the storage backend instead, "
        "with --enable-hierarchical-cache",
    )


class DevicePool:
    """A device pool with the interface of a host pool that `HostPages` reads."""

    layout = "layer_first"

    def __init__(self, pool: Any, page_tokens: int) -> None:
        """Read the geometry; raise ConfigError for a pool that the linker does not serve."""
        self.layers = layers_of(pool)
        self.is_replicated = isinstance(pool, MLATokenToKVPool)
        self.page_size = page_tokens
        # All K and then all V: the order of a flat page.
        self.kv_buffer = [tensor for part in zip(*self.layers, strict=True) for tensor in part]
        self.target_layer_num = len(self.layers)
        first = self.kv_buffer[0]
        self.size = first.shape[0] // page_tokens * page_tokens
        self.size_per_token: int = sum(each[0].nbytes for each in self.kv_buffer)
        for name in _FACTS:
            if hasattr(pool, name):
                setattr(self, name, getattr(pool, name))

    def get_size_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return self.size_per_token

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return addresses and sizes of the runs of pages, page by page, in the flat order."""
        rows = slots[:: self.page_size].tolist()
        tensors = [(each.data_ptr(), each[0].nbytes) for each in self.kv_buffer]
        addresses = [begin + row * row_bytes for row in rows for begin, row_bytes in tensors]
        return addresses, [row_bytes * self.page_size for _, row_bytes in tensors] * len(rows)
