"""SGLang's pools in ordinary memory, built as each version since 0.5.12 builds them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

try:
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
except ModuleNotFoundError:  # before 0.5.16
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, MLATokenToKVPoolHost

    # As host_copies.py does it for later versions.
    memory_pool_host.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

    def get_mha_host_pool_cls(pool: Any) -> type:
        """Return the one class that there is."""
        return MHATokenToKVPoolHost

    HAS_TWO_BUFFERS = False
else:
    HAS_TWO_BUFFERS = True
    """Whether K and V of other widths are in two buffers: since 0.5.16."""


PAGE_TOKENS = 16
LAYERS = 3
DEVICE_PAGES = 48
HEADS = 4
DTYPE = torch.bfloat16

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
HAS_SHARED_POOLS = importlib.util.find_spec("sglang.srt.mem_cache.storage.mmap") is not None
"""Whether this version of SGLang has the allocator `shm`."""

SHARED_POOL = "memfd:sglang_host_pool"
"""How the kernel shows memory of SGLang's allocator `shm`."""

EVERY_POOL = tuple(("mha", x) for x in MHA_LAYOUTS) + tuple(("mla", x) for x in MLA_LAYOUTS)


def device_pool(kind: str, heads: int = HEADS) -> Any:
    """Return SGLang's device pool, in ordinary memory. heads: of this rank, for MHA."""
    common = {
        "size": DEVICE_PAGES * PAGE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": DTYPE,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=8, **common)
    v_head_dim = 16 if kind == "asymmetric" else 8
    return MHATokenToKVPool(head_num=heads, head_dim=8, v_head_dim=v_head_dim, **common)


def host_pool(
    kind: str,
    layout: str,
    device: Any = None,
    page_tokens: int = PAGE_TOKENS,
    allocator: str = "",
) -> Any:
    """Return SGLang's host pool in one of its layouts.

    allocator: what allocates it, "" for SGLang's own default.
    """
    device = device or device_pool(kind)
    common = {
        "host_to_device_ratio": 1.5,
        "host_size": 0,
        "page_size": page_tokens,
        "layout": layout,
        **({"allocator_type": allocator} if allocator else {}),
    }
    if not hasattr(device, "get_device_pool_infos"):  # before 0.5.21: of the device pool itself
        kind_of = MLATokenToKVPoolHost if kind == "mla" else get_mha_host_pool_cls(device)
        return kind_of(device, pin_memory=False, **common)
    info = device.get_device_pool_infos()[0].buffer_info
    common |= {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
    }
    if kind == "mla":
        return MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **common)
    return get_mha_host_pool_cls(info)(info, **common)


def shared_pools(pool: Any) -> list[int]:
    """Return the addresses of a pool's tensors that are in SGLang's memory files."""
    mapped = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if SHARED_POOL in line
    ]
    addresses = [tensor.data_ptr() for tensor in tensors_of(pool)]
    return [each for each in addresses if any(begin <= each < end for begin, end in mapped)]


def filled(pool: Any, seed: int = 0) -> Any:
    """Fill a pool's memory with random bytes; return it."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors_of(pool):
        tensor.view(torch.uint8).random_(generator=generator)
    return pool


def tensors_of(pool: Any) -> list[torch.Tensor]:
    """Return all memory of a pool."""
    whole = getattr(pool, "kv_buffer", None)
    if whole is None:
        whole = pool.get_hybrid_pool_buffer()
    return [whole] if isinstance(whole, torch.Tensor) else list(whole)


def bytes_of(pool: Any) -> list[bytes]:
    """Return all bytes of a pool; random bytes make numbers that equal nothing, not themselves."""
    return [bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in tensors_of(pool)]


def flat_page(pool: Any, page: int) -> bytes:
    """Return the bytes of a page as SGLang flattens it."""
    flat = pool.get_data_page(page * pool.page_size, flat=True)
    return bytes(flat.contiguous().view(torch.uint8).numpy())


def storage_config(**changes: Any) -> HiCacheStorageConfig:
    """Return what SGLang's controller makes of a plain server; fields of its version only."""
    facts = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "org/model",
        "extra_config": {},
    }
    known = {field.name for field in dataclasses.fields(HiCacheStorageConfig)}
    return HiCacheStorageConfig(**{k: v for k, v in {**facts, **changes}.items() if k in known})


def page_hash(number: int) -> str:
    """Return a key of the form that SGLang's are."""
    return hashlib.sha256(str(number).encode()).hexdigest()
