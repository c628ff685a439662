"""Names the namespace that separates the pages of one model, layout and rank from all others.

SGLang's page hashes say which tokens a page is for, and nothing about what its bytes mean or
which shard of the model they belong to: its controllers add no suffix. All of that is put into
the namespace here: from the storage configuration (ranks, model name), from the host pool (dtype,
layout, heads), and from the server (the weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peercache.model.keys import Namespace

MAMBA = "mamba"
"""The pool of recurrent states."""

_POOL_FACTS = (
    "dtype",
    "layout",
    "page_size",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "storage_format_tag",
)
"""What the bytes of a page mean. One model name with two of these is refused by the nodes."""

_SIDE_FACTS = (
    "pool_name",
    "conv_dtype",
    "conv_state_shapes",
    "temporal_dtype",
    "temporal_state_shape",
    "num_mamba_layers",
    "indexer_dtype",
    "indexer_page_stride_size",
    "item_bytes",
    "state_page_bytes",
    "ring_size",
    "size_per_token",
)
"""The same of side pools: states of Mamba, an indexer's keys, rows of DeepSeek V4."""

_STAGE_FACTS = ("start_layer", "end_layer", "layer_num", "target_layer_num")
"""Which layers a page holds. Pipeline stages of one model differ in them."""


def model_name(storage_config: Any, pool: Any) -> str:
    """Return the served model's name, "" for none.

    SGLang appends the pool's format to the name, so that "a" in format "b" looks like the model
    "a-b". The format is a fact of the pool here, and is taken off.
    """
    name = str(getattr(storage_config, "model_name", None) or "")
    tag = getattr(pool, "storage_format_tag", None)
    if tag is None:
        return name
    return "" if name == str(tag) else name.removesuffix(f"-{tag}")


def namespace_of(
    storage_config: Any,
    pool: Any,
    page_bytes: int,
    name: str,
    weights: Mapping[str, object],
) -> Namespace:
    """Return the namespace of the pages of one host pool.

    storage_config: SGLang's HiCacheStorageConfig, of any version: a field it lacks has its default.
    pool:           the host pool that was registered.
    page_bytes:     bytes of one page, all its runs together.
    name:           name of the namespace, as it is: "a/b" and "a-b" are two.
    weights:        facts of the weights, {} where the name stands for them.
    """
    geometry = _facts(pool, _POOL_FACTS)
    return _namespace(storage_config, pool, page_bytes, name, weights, geometry, is_own=False)


def side_namespace_of(
    storage_config: Any,
    pool: Any,
    pool_name: str,
    page_bytes: int,
    name: str,
    weights: Mapping[str, object],
) -> Namespace:
    """Return the namespace of the pages of a side pool; `name` is that of the model's KV pages."""
    geometry = _facts(pool, (*_POOL_FACTS, *_SIDE_FACTS))
    geometry |= {"pool": pool_name, "pool_class": type(pool).__name__}
    # A replicated model's KV is the same on every rank. Its Mamba state is not, and neither is a
    # pool that holds attention heads, such as a draft model's: each rank has its own part.
    is_own = pool_name == MAMBA or getattr(pool, "head_num", None) is not None
    return _namespace(storage_config, pool, page_bytes, name, weights, geometry, is_own=is_own)


def _namespace(
    storage_config: Any,
    pool: Any,
    page_bytes: int,
    name: str,
    weights: Mapping[str, object],
    geometry: dict[str, object],
    *,
    is_own: bool,
) -> Namespace:
    """is_own: whether the pages are this rank's own even where the model's KV is replicated."""
    coordinates: dict[str, object] = {}

    def field(name: str, default: object) -> object:
        value = getattr(storage_config, name, default)
        return default if value is None else value

    if is_own or not field("is_mla_model", default=False):
        # Every rank of a replicated model holds the same bytes, and one of them writes them.
        coordinates["tp"] = f"{field('tp_rank', 0)}/{field('tp_size', 1)}"
    coordinates["pp"] = f"{field('pp_rank', 0)}/{field('pp_size', 1)}"
    coordinates["cp"] = f"{field('attn_cp_rank', 0)}/{field('attn_cp_size', 1)}"

    # The stages of a pipeline share the model's name, so what differs among them is a coordinate.
    stage = coordinates if field("pp_size", 1) != 1 else geometry
    stage |= _facts(pool, _STAGE_FACTS)
    stage["page_bytes"] = page_bytes

    if field("should_split_heads", default=False):
        # Pages cut by head groups are a variation that we do not store: ours hold whole ranks.
        geometry["split_heads"] = f"whole ranks, tp_lcm_size {field('tp_lcm_size', 0)}"
    return Namespace.of(name, geometry, coordinates, weights)


def _facts(pool: Any, names: Iterable[str]) -> dict[str, object]:
    """Return the attributes of a pool that it has."""
    found = {name: getattr(pool, name, None) for name in names}
    return {name: str(value) for name, value in found.items() if value is not None}
