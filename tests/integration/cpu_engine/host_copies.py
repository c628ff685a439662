"""SGLang 0.5.23 without an accelerator: what its CPU build lacks, outside the storage path.

Everything between SGLang's host pool and its storage backend is SGLang's own code here. Three
things around it need a stand-in on a machine without an accelerator:

* the schemas of two torchvision operators. PyPI's torchvision is a CUDA build, whose extension
  does not load with a CPU torch, and whose Python side refuses to import without them;
* pinned memory: `HostKVCache` is built with pin_memory=False, and leaves no memory free;
* the kernels that copy between device pool and host pool: written here with torch indexing. The
  "device" is ordinary memory, so they only have to put the same rows in the same places.

`prepare()` before the first import of SGLang, or PYTHONPATH to this folder together with
PEERCACHE_TEST_CPU_ENGINE=1 (then sitecustomize.py does it in every process of an engine).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_PACKAGE = "sglang.srt.mem_cache.pool_host."
_KV_SENDER = "sglang.srt.disaggregation.mooncake.conn"
_POOLS = ("base", "common", "mha", "mla", "dsa", "mamba")
EQUIPPED = {_KV_SENDER, *(_PACKAGE + name for name in _POOLS)}
_declared: list[torch.library.Library] = []


def _bytes(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """View a contiguous tensor as bytes in a shape."""
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.view(torch.uint8).reshape(*shape)


def _layer(address: int, indices: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """View the rows of one layer, far enough for the indices, through its address."""
    rows = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(int(address))
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)


# ruff: noqa: ANN001, ANN003, ANN201
# The names and arguments below are those of SGLang's kernels. `lf` is layer-first, `pf` page-first,
# `ph` page-head; MHA moves K and V the way MLA moves its one buffer.


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_):
    _bytes(dst, -1, item_size)[dst_indices] = _bytes(src, -1, item_size)[src_indices]


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla(
    src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_
):
    for layer in range(num_layers):
        rows = _layer(src_layers[layer], src_indices, item_size)[src_indices]
        _layer(dst_layers[layer], dst_indices, item_size)[dst_indices] = rows


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size,
    num_layers, **_,
):  # fmt: skip
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    host = _bytes(dst, -1, num_layers, item_size)
    for layer in range(num_layers):
        rows = _layer(src_layers[layer], src_indices, item_size)[src_indices]
        host[dst_indices, layer] = rows


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim,
    num_layers, **_,
):  # fmt: skip
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_per_layer_mla_pf_lf(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    host = _bytes(src, -1, src_layout_dim // item_size, item_size)
    _bytes(dst, -1, item_size)[dst_indices] = host[src_indices, layer_id]


def transfer_kv_per_layer_pf_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim,
    num_layers, page_size, head_num, **_,
):  # fmt: skip
    head_bytes = item_size // head_num
    page, offset = dst_indices // page_size, dst_indices % page_size
    for layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        host = _bytes(dst, -1, head_num, page_size, num_layers, head_bytes)
        for layer in range(num_layers):
            rows = _layer(layers[layer], src_indices, item_size)[src_indices]
            for head, part in enumerate(rows.view(-1, head_num, head_bytes).unbind(1)):
                host[page, head, offset, layer] = part


def transfer_kv_per_layer_ph_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim,
    page_size, head_num, **_,
):  # fmt: skip
    head_bytes = item_size // head_num
    page, offset = src_indices // page_size, src_indices % page_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        host = _bytes(src, -1, head_num, page_size, src_layout_dim // item_size, head_bytes)
        heads = [host[page, head, offset, layer_id] for head in range(head_num)]
        rows = torch.stack(heads, dim=1).reshape(-1, item_size)
        _bytes(dst, -1, item_size)[dst_indices] = rows


def transfer_kv_mamba_lf_pf(
    src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    transfer_kv_all_layer_mla_lf_pf(
        src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    )


def transfer_kv_mamba_pf_lf(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    transfer_kv_per_layer_mla_pf_lf(
        src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
    )


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size, **_):
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, page_size, **_
):
    layers = len(src_ptrs) // len(dst_ptrs)
    page, offset = dst_indices // page_size, dst_indices % page_size
    for part, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            dst[page, layer, offset] = src_ptrs[part * layers + layer][src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size, **_
):
    page, offset = src_indices // page_size, src_indices % page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[page, layer_id, offset]


_KERNELS = {name: value for name, value in globals().items() if name.startswith("transfer_kv_")}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Equips SGLang's modules right after their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name not in EQUIPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _equip(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _equip(module: ModuleType) -> None:
    if module.__name__ == _PACKAGE + "base":
        # SGLang leaves 10 GiB of the host free, which a machine that tests may not have.
        module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
        build = module.HostKVCache.__init__

        def init(self: Any, *arguments: Any, **options: Any) -> None:
            # Before 0.5.21 pools state it by place: what builds them passes pin_memory=False.
            if not arguments:
                options["pin_memory"] = False
            build(self, *arguments, **options)

        module.HostKVCache.__init__ = init
        return
    if module.__name__ == _PACKAGE + "common":
        # Pools that are no HostKVCache from the start pin what they have allocated.
        module._cuda_host_register = lambda *_: None
        return
    if module.__name__ == _KV_SENDER:
        # It would copy indices into pinned memory and wait for a CUDA event.
        module.MooncakeKVSender.supports_host_tensor_indices = False
        return
    for name, kernel in _KERNELS.items():
        if not hasattr(module, name):
            setattr(module, name, kernel)


def prepare() -> None:
    """Stand in for what is missing; idempotent, before SGLang is imported."""
    if _declared or "torchvision" in sys.modules:
        return
    if not os.environ.get("PEERCACHE_TEST_CPU_ENGINE"):
        # It would make SGLang import the CPU build of sgl_kernel, which is not on PyPI.
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    sys.meta_path.insert(0, _AfterImport())
