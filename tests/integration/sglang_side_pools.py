"""SGLang's own host pools next to KV, on a CPU: windows, states, indexers, rows of DeepSeek V4.

A pool that a device pool fills is built over that device pool, in ordinary memory.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import (
    MiniMaxM3Nvfp4IndexKPool,
    MiniMaxM3Nvfp4MainKVPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import (
    MiniMaxM3Nvfp4IndexKPoolHost,
    MiniMaxM3Nvfp4MainKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

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

NVFP4_PAGE_TOKENS = 128
"""The only page size of MiniMax's pools."""


def mamba(layout: str = "page_first", *, extra: bool = False) -> Any:
    """Return a pool of recurrent states; extra: with further states next to them."""
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


def v4_states(layout: str = "page_first") -> Any:
    """Return a pool of DeepSeek V4's compress states: a ring of rows a page of the window."""
    rings = [
        CompressStatePool(
            size=PAGES * 8, ring_size=8, overlap=True, head_dim=4, dtype=torch.float32,
            device="cpu", enable_memory_saver=False, ratio=4, swa_page_size=PAGE_TOKENS,
        )
        for _ in range(3)
    ]  # fmt: skip
    return DeepSeekV4StateHostPool(
        "deepseek_v4_c4_state", rings, PAGES, PAGE_TOKENS, layout=layout, pin_memory=False
    )


def nvfp4(layout: str = "page_first") -> tuple[Any, Any]:
    """Return MiniMax's KV pool of four-bit floats with their scales, and that of its indexer."""
    common = {
        "size": PAGES * NVFP4_PAGE_TOKENS, "page_size": NVFP4_PAGE_TOKENS,
        "dtype": torch.bfloat16, "head_num": 1, "head_dim": 128, "layer_num": 2, "device": "cpu",
        "enable_memory_saver": False,
    }  # fmt: skip
    main, index = MiniMaxM3Nvfp4MainKVPool(**common), MiniMaxM3Nvfp4IndexKPool(**common)
    rows = [each.get_device_pool_infos()[0].buffer_info for each in (main, index)]
    anchor = MiniMaxM3Nvfp4MainKVPoolHost(
        rows[0], 1.5, 0, NVFP4_PAGE_TOKENS, layout, device_capacity_tokens=main.size,
        start_layer=0, end_layer=2,
    )  # fmt: skip
    return anchor, MiniMaxM3Nvfp4IndexKPoolHost(
        rows[1], anchor, layout, pin_memory=False, start_layer=0, end_layer=2
    )


def qsa(layout: str = "page_first") -> Any:
    """Return the pool of QSA's compressed keys: groups of tokens, in the pages of the KV pool."""
    device = QSATokenToKVPool(
        size=PAGES * PAGE_TOKENS, dtype=torch.bfloat16, page_size=PAGE_TOKENS, head_num=4,
        head_dim=8, full_attention_layer_ids=[1, 3], device="cpu",
        mamba_pool=None, qsa_index_kv_heads=1, qsa_index_head_dim=16,
        qsa_compress_ratio=4, qsa_token_topk=8, num_request_slots=4,
    )  # fmt: skip
    return QSAIndexerPoolHost(device, host_pool("mha", layout, device.full_kv_pool))


def v4_anchor() -> Any:
    """Return the pool of DeepSeek V4 that numbers pages and holds no bytes."""
    return LogicalHostPool(PAGES * PAGE_TOKENS, PAGE_TOKENS)


def moved_to(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the host indices of these pages."""
    slots = torch.tensor(pages, dtype=torch.int64)[:, None] * pool.page_size
    return (slots + torch.arange(pool.page_size)).reshape(-1)
