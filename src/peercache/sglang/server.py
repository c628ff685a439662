"""Reads what the SGLang server of this process says about its model.

SGLang gives a storage backend the served model's name and nothing about the weights behind it.
The server's own configuration says more; each version keeps it in another place.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from typing import Any

from peercache.engines.weights import weights_identity

_BAGS = ("model", "serving", "lora")
"""Namespaces of SGLang's resolved configuration that hold what we read, since 0.5.20."""

_FACTS = ("dtype", "kv_cache_dtype", "quantization", "modelopt_quant", "json_model_override_args")
"""Options that change what the model computes from the same weight files."""

DEFAULT_VERSION = "default"
"""SGLang's weight version until a trainer names one."""


class Server:
    """The server of this process; every answer is None or empty where SGLang does not say it."""

    def __init__(self) -> None:
        """Find the server's configuration; there may be none, as in tests of SGLang."""
        self._sources = list(_sources())

    @property
    def model_path(self) -> str:
        """Folder or repository that the weights came from, "" if unknown."""
        return str(self._value("model_path") or "")

    @property
    def has_adapters(self) -> bool:
        """Whether requests may use LoRA adapters."""
        return bool(self._value("enable_lora") or self._value("lora_paths"))

    def weight_version(self) -> str:
        """Return the version that the last weight update named; read before every call."""
        return str(self._value("weight_version") or DEFAULT_VERSION)

    def weights(self, version: str) -> dict[str, str]:
        """Return the facts that two servers share if a page of one is right for the other."""
        return self.loaded_weights | version_facts(version)

    @cached_property
    def loaded_weights(self) -> dict[str, str]:
        """Facts of the weights that the server loaded at its start.

        They are read once: files that change later are not what this process computes with.
        """
        if not self.model_path:
            return {}
        cache = self._value("download_dir")
        facts: dict[str, object] = {
            "model": weights_identity(self.model_path, self._value("revision"), cache)
        }
        facts |= {name: self._value(name) for name in _FACTS}
        if self._value("load_format") == "dummy":
            facts["load_format"] = "dummy"
        if scales := self._value("quantization_param_path"):
            facts["quantization_scales"] = weights_identity(str(scales))
        for name, path in sorted(self._adapters()):
            facts[f"lora {name}"] = f"{path} {weights_identity(path, None, cache)}"
        written = {name: str(value) for name, value in facts.items() if value is not None}
        return {name: value for name, value in written.items() if value not in {"", "{}"}}

    @cached_property
    def draft_weights(self) -> dict[str, str]:
        """Facts of the draft model that fills the draft pools, {} where it is the model itself."""
        path = self._value("speculative_draft_model_path")
        if not path:
            return {}
        revision = self._value("speculative_draft_model_revision")
        identity = weights_identity(str(path), revision, self._value("download_dir"))
        facts = {"draft": identity}
        if quantized := self._value("speculative_draft_model_quantization"):
            facts["draft_quantization"] = str(quantized)
        return facts

    def _value(self, name: str) -> Any:
        for source in self._sources:
            value = getattr(source, name, None)
            if value is not None:
                return value
        return None

    def _adapters(self) -> Iterable[tuple[str, str]]:
        """Yield name and path of each adapter that the server was started with.

        SGLang derives an adapter's hash from these two, so new weights under an old path would
        look like the old ones. Adapters that are loaded later have random names.
        """
        named = self._value("lora_paths") or []
        if isinstance(named, dict):
            yield from ((str(name), str(path)) for name, path in named.items())
            return
        for each in named:
            if isinstance(each, str):
                name, _, path = each.partition("=")
                yield name, path or name
            elif isinstance(each, dict):
                yield str(each.get("lora_name")), str(each.get("lora_path"))
            else:
                yield str(getattr(each, "lora_name", "")), str(getattr(each, "lora_path", ""))


def version_facts(version: str) -> dict[str, str]:
    """Return the fact that a weight update adds, {} before the first one."""
    return {} if version == DEFAULT_VERSION else {"version": version}


def separates_requests() -> bool:
    """Return whether page hashes tell LoRA adapters and cache salts apart: since SGLang 0.5.20."""
    with suppress(ImportError):
        return hasattr(import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed")
    return False


def _sources() -> Iterable[Any]:
    """Yield the objects that hold the server's configuration, the most exact first."""
    with suppress(Exception):  # each version fails in its own way where no server has started
        context = import_module("sglang.srt.runtime_context")
        for bag in _BAGS:
            with suppress(Exception):
                yield context.get_context().config_bag(bag)
        yield context.get_server_args()
        return
    with suppress(Exception):
        yield import_module("sglang.srt.server_args").get_global_server_args()
