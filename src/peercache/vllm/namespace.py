"""Names the namespace of a vLLM engine's chunks.

vLLM's block hashes say which tokens, adapters and salts a chunk is for, and nothing about what its
bytes mean. That is put into the namespace here, from the configuration that vLLM gives a tier.

vLLM tells a tier the model's name and the cache's type, and not which revision it serves, how the
weights are quantized, or what overrides the model's configuration. All of that stands in the
configuration of the scheduler that builds the tier: a caller of the tier's constructor has it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from peercache.engines.weights import weights_identity
from peercache.model.keys import Namespace

CONFIGURATION = "vllm_config"
"""The name of the argument of vLLM's scheduler and connectors."""

_FACTS = {
    "model_config": ("dtype", "quantization", "quantization_config", "hf_overrides"),
    "load_config": ("model_loader_extra_config",),
    "cache_config": ("kv_cache_dtype_skip_layers",),
}
"""Options that change what the model computes from the same weight files, or how it is kept."""

_PARTS = ("model_config", "load_config", "cache_config")


def configuration_of_caller() -> Any | None:
    """Return the VllmConfig of the engine that builds a tier; None where no caller has one."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get(CONFIGURATION)
        if all(hasattr(found, part) for part in _PARTS):
            return found
        frame = frame.f_back
    return None


def weights_of(engine: Any, name: str) -> dict[str, str]:
    """Return facts that two engines share if they compute the same chunks.

    engine: a VllmConfig. name: the model's, as a tier is told it.
    """
    model, load = engine.model_config, engine.load_config
    folder, revision = load.download_dir, model.revision
    facts: dict[str, object] = {"weights": weights_identity(name, revision, folder)}
    # Weights in an object store are elsewhere than the folder that stands in for the model.
    if elsewhere := getattr(model, "model_weights", ""):
        facts["weights_at"] = weights_identity(str(elsewhere), revision, folder)
    # A draft model's layers are in the same chunks.
    draft = getattr(engine, "speculative_config", None)
    if draft is not None and draft.model:
        facts["draft"] = weights_identity(str(draft.model), draft.revision, folder)
    for part, options in _FACTS.items():
        facts |= {option: getattr(getattr(engine, part), option, None) for option in options}
    if str(load.load_format) == "dummy":
        facts["load_format"] = f"dummy {model.seed}"
    return {name: _text(value) for name, value in facts.items() if value not in (None, "", {}, [])}


def _text(value: object) -> str:
    """Return a value as a text that is the same in every process."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, sort_keys=True, default=str)
    return str(value)


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
    weights:        what computes the chunks, as `weights_of` finds it.
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
    # Hosts mount one model in several places: its folder is distinguished by its weights.
    model = config.model.name
    model = model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model
    computed = {} if name else dict(weights)
    if reset:
        computed["reset"] = reset
    return Namespace.of(name or f"{ENGINE}/{model}", geometry, coordinates, computed)
