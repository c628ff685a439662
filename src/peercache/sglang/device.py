"""The pages of an engine's device pool, as a host pool of HiCache would have them.

SGLang keeps K and V of each layer in a tensor of their own, (tokens, heads, head size), so a page
is one run of memory in each of them. In this order of runs, all K and then all V, its bytes are
those of a page of HiCache in the layout `layer_first`: servers with and without a host tier share
such pages.

`DevicePool` is the pool itself: if the processor can read its memory, pages are moved in place.
`StagedPool` is pinned memory for a few pages, for the pool of an accelerator. Pages are read and
verified there, and then copied to the device layer by layer; or gathered there, and then stored.

A hybrid model has several pools: one for its layers of full attention, and one for those of a
sliding window, for recurrent states, or for the keys of an indexer. `pools_of` returns them with
the layers of the model that each of them serves.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from peercache.errors import ConfigError

NHD = "nhd"
LINKER = "linker"

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
            raise ConfigError(LINKER, "does not serve a KV cache that has scales")
        return [list(pair) for pair in zip(pool.k_buffer, pool.v_buffer, strict=True)]
    if type(pool) is MLATokenToKVPool and pool.kv_scale_buffer is None:
        return [[buffer] for buffer in pool.kv_buffer]
    kind = f"{type(pool).__name__} in the layout {getattr(pool, 'kv_cache_layout', NHD)}"
    raise ConfigError(
        LINKER,
        f"serves plain MHA and MLA models, not the pool {kind}: use the storage backend instead, "
        "with --enable-hierarchical-cache",
    )


class DevicePool:
    """A device pool with the interface of a host pool that `HostPages` reads.

    layers: the tensors of each of its layers. of_model: its layers by those of the model.
    """

    layout = "layer_first"
    pool_class = "MHATokenToKVPoolHost"
    """Of the host pool that has the same pages: with and without a host tier they are shared."""

    def __init__(
        self,
        pool: Any,
        page_tokens: int,
        of_model: Mapping[int, int] | None = None,
        layers: list[list[torch.Tensor]] | None = None,
    ) -> None:
        """Read the geometry; raise ConfigError for a pool that the linker does not serve."""
        self._read(layers_of(pool) if layers is None else layers, page_tokens, of_model)
        self.is_replicated = isinstance(pool, MLATokenToKVPool)
        for name in _FACTS:
            if hasattr(pool, name):
                setattr(self, name, getattr(pool, name))

    def _read(
        self,
        layers: list[list[torch.Tensor]],
        page_tokens: int,
        of_model: Mapping[int, int] | None,
    ) -> None:
        if not all(tensor.is_contiguous() for layer in layers for tensor in layer):
            # Its bytes would be those of a copy.
            raise ConfigError(LINKER, "does not serve layers whose rows are not one run of memory")
        self.layers = layers
        self.of_model = dict(enumerate(range(len(layers))) if of_model is None else of_model)
        self.page_size = page_tokens
        # All K and then all V: the order of a flat page.
        self.kv_buffer = [tensor for part in zip(*self.layers, strict=True) for tensor in part]
        self.target_layer_num = len(self.layers)
        first = self.kv_buffer[0]
        self.size = first.shape[0] // page_tokens * page_tokens
        self.size_per_token: int = sum(each[0].nbytes for each in self.kv_buffer)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page in all layers."""
        return self.size_per_token * self.page_size

    def get_size_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return self.size_per_token

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return addresses and sizes of the runs of pages, page by page, in the flat order."""
        rows = slots[:: self.page_size].tolist()
        tensors = [(each.data_ptr(), each[0].nbytes) for each in self.kv_buffer]
        addresses = [begin + row * row_bytes for row in rows for begin, row_bytes in tensors]
        return addresses, [row_bytes * self.page_size for _, row_bytes in tensors] * len(rows)


class StatePool(DevicePool):
    """The recurrent states of a model: each is a page, with the states of all its layers."""

    pool_class = "StatePool"

    def __init__(self, pool: Any, of_model: Mapping[int, int]) -> None:
        """Read the geometry; raise ConfigError for states that the linker does not serve."""
        state = pool.mamba_cache
        # A model of convolutions has no temporal state.
        parts = [part for part in (state.temporal, *state.conv) if part.numel()]
        known = {"temporal", "conv"}
        fields = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
        if pool._slot_siblings or any(  # noqa: SLF001 - SGLang has no other way
            value is not None for name, value in fields.items() if name not in known
        ):
            raise ConfigError(LINKER, "does not serve states with further states next to them")
        layers = [[part[layer] for part in parts] for layer in range(pool.num_mamba_layers)]
        self._read(layers, 1, of_model)
        self.is_replicated = False
        self.num_mamba_layers = len(layers)
        self.conv_dtype = [str(each.dtype) for each in state.conv]
        self.conv_state_shapes = [tuple(each.shape[2:]) for each in state.conv]
        self.temporal_dtype = str(state.temporal.dtype)
        self.temporal_state_shape = tuple(state.temporal.shape[2:])


class IndexPool(DevicePool):
    """The keys of an indexer of sparse attention, in the pages of KV."""

    pool_class = "IndexPool"

    def __init__(self, pool: Any, page_tokens: int) -> None:
        """Read the geometry; raise ConfigError for keys that the linker does not serve."""
        if pool.kpool_use_compress:
            raise ConfigError(LINKER, "does not serve an indexer that compresses its keys")
        # Layers that use the keys of another layer have no rows. A row is a page: cut into equal
        # parts, it has the addresses of as many tokens.
        held = [
            (layer, keys.view(torch.uint8).reshape(len(keys) * page_tokens, -1))
            for layer, keys in enumerate(pool.index_k_with_scale_buffer)
            if len(keys)
        ]
        of_model = {layer: place for place, (layer, _) in enumerate(held)}
        self._read([[keys] for _, keys in held], page_tokens, of_model)
        self.is_replicated = True


def pools_of(params: Any) -> dict[Any, DevicePool]:
    """Return the pools of a model by SGLang's names, first that of full attention.

    params: SGLang's CacheInitParams. Raises ConfigError for a pool that the linker does not serve.
    """
    pool, page_tokens = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    begin = getattr(pool, "start_layer", 0) or 0
    if type(pool) is SWAKVPool:
        full, window = (
            {
                layer - begin: place
                for layer, (place, is_w) in pool.layers_mapping.items()
                if is_w is of
            }
            for of in (False, True)
        )
        return {
            PoolName.KV: DevicePool(pool.full_kv_pool, page_tokens, full),
            PoolName.SWA: DevicePool(pool.swa_kv_pool, page_tokens, window),
        }
    if type(pool) is HybridLinearKVPool:
        requests = params.req_to_token_pool
        further = (
            requests.mamba_ckpt_pool,
            requests.short_conv_pool.enabled,
            requests.ngram_pool.enabled,
        )
        if any(further):
            raise ConfigError(LINKER, "does not serve states with further states next to them")
        full, states = (
            {layer - begin: place for layer, place in places.items()}
            for places in (pool.full_attention_layer_id_mapping, requests.mamba_map)
        )
        return {
            PoolName.KV: DevicePool(pool.full_kv_pool, page_tokens, full),
            PoolName.MAMBA: StatePool(requests.mamba_pool, states),
        }
    if type(pool) is DSATokenToKVPool and pool.kv_scale_buffer is None:
        layers = [[buffer] for buffer in pool.kv_buffer]
        return {
            PoolName.KV: DevicePool(pool, page_tokens, layers=layers),
            PoolName.INDEXER: IndexPool(pool, page_tokens),
        }
    return {PoolName.KV: DevicePool(pool, page_tokens)}


class StagedPool(DevicePool):
    """Room for pages of a device pool in pinned memory, with the interface of a host pool.

    A page is one run of bytes here, in the flat order. Thread-safe: loads and stores take room.
    """

    def __init__(self, pool: DevicePool, size: int) -> None:
        """Allocate room for `size` bytes, and at least two pages."""
        vars(self).update(vars(pool))
        self.pool_class = pool.pool_class
        self._bytes = [each.view(torch.uint8).reshape(-1) for each in self.kv_buffer]
        self._row_bytes = [each[0].nbytes for each in self.kv_buffer]
        ends = np.cumsum(self._row_bytes) * self.page_size
        self._offsets = [0, *ends[:-1].tolist()]
        self.device = self.kv_buffer[0].device
        self.device_module = torch.get_device_module(self.device)
        pages = max(2, size // self.page_bytes)
        is_pinned = self.device.type != "cpu"
        self.content = torch.empty(
            (pages, self.page_bytes), dtype=torch.uint8, pin_memory=is_pinned
        )
        self.kv_buffer = [self.content]
        self.size = pages * self.page_size
        self._lock = threading.Lock()
        self._free = list(range(pages))

    @property
    def pages(self) -> int:
        """All room, in pages."""
        return len(self.content)

    def take(self, pages: int) -> list[int] | None:
        """Return the numbers of so many free pages; None if there are fewer."""
        with self._lock:
            if pages > len(self._free):
                return None
            taken, self._free = self._free[:pages], self._free[pages:]
            return taken

    def give_back(self, pages: list[int]) -> None:
        """Free pages that were taken."""
        with self._lock:
            self._free += pages

    def slots(self, pages: list[int]) -> torch.Tensor:
        """Return the token slots of pages, as those of a host pool."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_size
        return (first + torch.arange(self.page_size)).reshape(-1)

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return address and size of each page, one run."""
        page_bytes, begin = self.content.shape[1], self.content.data_ptr()
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        return [begin + page * page_bytes for page in pages], [page_bytes] * len(pages)

    def to_device(self, layer: int, pages: list[int], slots: list[int]) -> None:
        """Begin to copy one layer of the model to the device. slots: the first of each page."""
        place = self.of_model.get(layer)
        if place is None:
            return
        for staged, on_device in self._pairs(place, pages, slots):
            on_device.copy_(staged, non_blocking=True)

    def from_device(self, pages: list[int], slots: list[int]) -> None:
        """Begin to copy all layers of pages from the device."""
        for layer in range(len(self.layers)):
            for staged, on_device in self._pairs(layer, pages, slots):
                staged.copy_(on_device, non_blocking=True)

    def _pairs(
        self, layer: int, pages: list[int], slots: list[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of each part of a layer of each page, here and on the device."""
        for number in range(layer, len(self._bytes), len(self.layers)):
            row, offset = self._row_bytes[number], self._offsets[number]
            length = row * self.page_size
            for page, slot in zip(pages, slots, strict=True):
                yield (
                    self.content[page, offset : offset + length],
                    self._bytes[number][slot * row : slot * row + length],
                )
