"""Names the namespace of a vLLM engine's chunks.

vLLM's block hashes identify the tokens, adapters and salts of a chunk, but not the format of its
bytes. This module puts that into the namespace, from the configuration that vLLM passes to a tier.

vLLM passes the model's name and the cache's type to a tier, but not the revision that it serves,
the quantization of the weights, or overrides of the model's configuration. All of that is in the
configuration of the scheduler that creates the tier: a caller of the tier's constructor has it.
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
"""Options that change what the model computes from the same weight files, or how it is stored."""

_PARTS = ("model_config", "load_config", "cache_config")


def configuration_of_caller() -> Any | None:
    """Return the VllmConfig of the engine that creates a tier; None if no caller has one."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get(CONFIGURATION)
        if all(hasattr(found, part) for part in _PARTS):
            return found
        frame = frame.f_back
    return None


def weights_of(engine: Any, name: str) -> dict[str, str]:
    """Return facts that are equal in two engines if they compute the same chunks.

    engine: a VllmConfig. name: the model's name, as passed to a tier.
    """
    model, load = engine.model_config, engine.load_config
    folder, revision = load.download_dir, model.revision
    facts: dict[str, object] = {"weights": weights_identity(name, revision, folder)}
    # Weights in an object store are not in the folder that represents the model.
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
    chunk_bytes:    size of one chunk of all ranks, with its padding.
    engine_version: version of vLLM, because its layout of a row may change.
    name:           the name in the setting; "" means the model's name, and then `weights` count,
                    too.
    weights:        facts about the weights, from `weights_of`.
    reset:          separates chunks after a reset of the engine's cache from those before it.
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
    # Hosts mount a model at different paths: its weights identify it.
    model = config.model.name
    model = model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model
    computed = {} if name else dict(weights)
    if reset:
        computed["reset"] = reset
    return Namespace.of(name or f"{ENGINE}/{model}", geometry, coordinates, computed)
