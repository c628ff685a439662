"""Finds how a vLLM engine computes: what decides the bytes of its chunks beside the model's files.

vLLM tells a tier the model's name and the cache's type, and not which revision it serves, how the
weights are quantized, or what overrides the model's configuration. All of that stands in the
configuration of the scheduler that builds the tier: a caller of the tier's constructor has it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from peercache.engines.weights import weights_identity

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
    # Weights in an object store lie elsewhere than the folder that stands in for the model.
    if elsewhere := getattr(model, "model_weights", ""):
        facts["weights_at"] = weights_identity(str(elsewhere), revision, folder)
    # A draft model's layers lie in the same chunks.
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
