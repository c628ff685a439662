"""Names the namespace of a vLLM engine's chunks.

vLLM's block hashes say which tokens, adapters and salts a chunk is for, and nothing about what its
bytes mean. That is put into the namespace here, from the configuration that vLLM gives a tier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from peercache.model.keys import Namespace

ENGINE = "vllm"


def namespace_of(
    config: Any,
    chunk_bytes: int,
    engine_version: str,
    name: str = "",
    weights: Mapping[str, str] = MappingProxyType({}),
    reset: str = "",
) -> Namespace:
    """Return the namespace of an engine's chunks.

    config:         vLLM's OffloadingConfig.
    chunk_bytes:    of one chunk of all ranks, with its padding.
    engine_version: of vLLM: how a row is laid out is its own affair, and may change.
    name:           as the setting says; "" is the model's name, and then `weights` count too.
    weights:        what computes the chunks, as `computing` finds it.
    reset:          what tells the chunks after a reset of the engine's cache from those before it.
    """
    groups = [(group.tokens_per_block, tuple(group.layer_names)) for group in config.groups]
    parallel = config.parallel
    geometry = {
        "engine": ENGINE,
        "version": engine_version,
        "dtype": config.model.dtype,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": hashlib.sha256(repr(groups).encode()).hexdigest()[:16],
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
    }
    coordinates = {
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "chunk_bytes": chunk_bytes,
    }
    # Hosts mount one model in several places: its folder is told apart by its weights.
    model = config.model.name
    model = model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model
    computed = {} if name else dict(weights)
    if reset:
        computed["reset"] = reset
    return Namespace.of(name or f"{ENGINE}/{model}", geometry, coordinates, computed)
