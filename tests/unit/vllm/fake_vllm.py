"""The parts of vLLM that the tier imports, where vLLM is not installed."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

VERSION = "0.32.0"


class LookupResult(enum.Enum):
    """Answers to a lookup."""

    MISS = 1
    HIT = 2
    RETRY = 3


class Medium(enum.Enum):
    """Where a tier keeps chunks."""

    STORAGE = "STORAGE"


class Locality(enum.Enum):
    """How far a tier is."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@attrs.frozen
class RequestOffloadingContext:
    """What a tier wants of a request."""

    policy: str = "chunk_level"


@attrs.frozen
class JobResult:
    """The end of a job."""

    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@attrs.frozen(kw_only=True)
class OffloadingEvent:
    """A change of what a tier holds."""

    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False


class Detector:
    """Decides whether chunks are stored to a tier."""

    def __init__(self) -> None:
        """Begin without pressure."""
        self.is_pressed = False
        self.stats = {"store_latency_ema": 0.123456}

    def is_under_pressure(self) -> bool:
        """Return whether stores are dropped."""
        return self.is_pressed


METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


class Stats:
    """What a tier reports: values by labels."""

    def __init__(self) -> None:
        """Begin with none."""
        self.gauges: dict[str, dict[tuple[str, ...], float]] = {}
        self.counters: dict[str, dict[tuple[str, ...], float]] = {}

    def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
        """Note a value."""
        self.gauges.setdefault(name, {})[labelvalues] = value

    def increase_counter(
        self, name: str, value: float = 1, labelvalues: tuple[str, ...] = ()
    ) -> None:
        """Count."""
        counter = self.counters.setdefault(name, {})
        counter[labelvalues] = counter.get(labelvalues, 0) + value


class SecondaryTierManager:
    """The base class."""

    def __init__(self, offloading_spec: Any, view: memoryview, tier_type: str, bp: Any) -> None:
        """Keep what vLLM's keeps."""
        self.tier_type = tier_type


@attrs.define
class Job:
    """One transfer, as vLLM's scheduler submits it."""

    job_id: int
    keys: list[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


def job(number: int, keys: list[bytes], rows: list[int], *, request: str = "") -> Job:
    """Return a store; a load where a request is named."""
    ids = np.array(rows, np.int32)
    return Job(number, keys, ids, bool(request), SimpleNamespace(req_id=request or "r"))


def spec(**other: Any) -> SimpleNamespace:
    """Return an offloading spec; `other` changes its configuration."""
    facts: dict[str, Any] = {
        "groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",)),),
        "model": SimpleNamespace(name="a/model", dtype="torch.bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "kv_cache_layout": "NHD",
        "canonical_layout": False,
        "replicated_layout": False,
    }
    events = SimpleNamespace(enable_kv_cache_events=True)
    config = SimpleNamespace(**{**facts, **other})
    return SimpleNamespace(config=config, kv_events_config=events)


def engine(*draft: str | None, **other: Any) -> SimpleNamespace:
    """Return a VllmConfig; `other` changes an option in whichever part has it.

    draft: model and revision of a draft.
    """
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "revision": None, "model_weights": "", "dtype": "torch.bfloat16", "seed": 0,
            "quantization": None, "quantization_config": None, "hf_overrides": {},
        },
        "load_config": {
            "download_dir": None, "load_format": "auto", "model_loader_extra_config": {},
        },
        "cache_config": {"kv_cache_dtype_skip_layers": []},
    }  # fmt: skip
    for name, value in other.items():
        next(part for part in parts.values() if name in part)[name] = value
    made = {name: SimpleNamespace(**part) for name, part in parts.items()}
    model, revision = draft or (None, None)
    made["speculative_config"] = SimpleNamespace(model=model, revision=revision)
    return SimpleNamespace(**made)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins where the tier imports them from."""
    parts: dict[str, dict[str, Any]] = {
        **{METRICS[:end]: {} for end, sign in enumerate(METRICS) if sign == "."},
        "vllm": {"__version__": VERSION},
        METRICS: {"OffloadingConnectorStats": Stats},
        "vllm.v1": {},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.base": {
            "Locality": Locality,
            "LookupResult": LookupResult,
            "Medium": Medium,
            "RequestOffloadingContext": RequestOffloadingContext,
            "OffloadingCounterMetadata": SimpleNamespace,
            "OffloadingEvent": OffloadingEvent,
            "OffloadingGaugeMetadata": SimpleNamespace,
        },
        "vllm.v1.kv_offload.tiering": {},
        "vllm.v1.kv_offload.tiering.base": {
            "JobResult": JobResult,
            "SecondaryTierManager": SecondaryTierManager,
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    forget()


def forget() -> None:
    """Have the next test import the tier again."""
    for name in [name for name in sys.modules if name.startswith("peercache.vllm")]:
        del sys.modules[name]
