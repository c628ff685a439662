"""SGLang's own host pools beside KV, on a CPU: windows, states, indexers, rows of DeepSeek V4.

A pool that a device pool fills is built over that device pool, in ordinary memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from tests.integration.sglang_pools import (  # noqa: F401 - their tests import them from here
    PAGE_TOKENS,
    bytes_of,
    filled,
    flat_page,
    host_pool,
    tensors_of,
)

PAGES = 24
DSA_PAGE_TOKENS = 64
"""The only page size that SGLang's indexer has outside of AMD and Intel devices."""


def mamba(layout: str = "page_first", *, extra: bool = False) -> Any:
    """Return a pool of recurrent states; extra: with further states beside them."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, PAGES, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(2, PAGES, 6, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(PAGES, 5, dtype=torch.float32),) if extra else (),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout=layout)


def dsa(layout: str = "page_first") -> tuple[Any, Any]:
    """Return the KV pool of sparse attention, and the pool of its indexer."""
    device = DSATokenToKVPool(
        size=PAGES * DSA_PAGE_TOKENS, page_size=DSA_PAGE_TOKENS, kv_lora_rank=32,
        dtype=torch.bfloat16, qk_rope_head_dim=8, layer_num=3, device="cpu", index_head_dim=128,
        enable_memory_saver=False, kv_cache_dim=40, index_buf_size=PAGES * DSA_PAGE_TOKENS,
    )  # fmt: skip
    anchor = host_pool("mla", layout, device, page_tokens=DSA_PAGE_TOKENS)
    decl = make_dsa_indexer_pool_decl(device)
    return anchor, DSAIndexerPoolHost(decl, anchor, pin_memory=False)


def window(layout: str = "page_first") -> Any:
    """Return the pool of a sliding window: heads of fewer layers."""
    device = MHATokenToKVPool(
        size=PAGES * PAGE_TOKENS, page_size=PAGE_TOKENS, dtype=torch.bfloat16, layer_num=2,
        device="cpu", enable_memory_saver=False, head_num=4, head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return host_pool("mha", layout, device)


def v4_rows(layout: str = "page_first", name: str = "deepseek_v4_c4") -> Any:
    """Return a pool of compressed rows of DeepSeek V4."""
    buffers = [torch.zeros(PAGES, 96, dtype=torch.uint8) for _ in range(3)]
    return DeepSeekV4PagedHostPool(
        name, buffers, 96, PAGES, PAGE_TOKENS, layout=layout, pin_memory=False
    )


def v4_anchor() -> Any:
    """Return the pool of DeepSeek V4 that numbers pages and holds no bytes."""
    return LogicalHostPool(PAGES * PAGE_TOKENS, PAGE_TOKENS)


def moved_to(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the host indices of these pages."""
    slots = torch.tensor(pages, dtype=torch.int64)[:, None] * pool.page_size
    return (slots + torch.arange(pool.page_size)).reshape(-1)


def plain_config(**changes: Any) -> SimpleNamespace:
    """Return what SGLang's controller makes of a plain server."""
    facts = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "org/model", "extra_config": {},
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})
