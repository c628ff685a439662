"""Whole SGLang engines on a CPU, each a process at home with a node, and prompts for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.processes import HERE, ROOT, Child, StandaloneNode
from tests.integration.tiny_llama import VOCABULARY

START_S = 900.0
DYNAMIC = {
    "backend_name": "peercache",
    "module_path": "peercache.sglang",
    "class_name": "PeerCacheStore",
    "interface_v1": 1,
}
"""What has SGLang load the backend by the name of its class."""


PLUGINS = "sglang.srt.plugins"


def installed(folder: Path) -> Path:
    """Return a folder that makes SGLang find our entry point, as an installation does.

    The tests use the sources of this checkout: SGLang's environment has no distribution of them.
    """
    text = (ROOT / "pyproject.toml").read_text()
    points = text.partition(f'[project.entry-points."{PLUGINS}"]\n')[2].partition("\n\n")[0]
    info = folder / "peercache_kv-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: peercache-kv\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{PLUGINS}]\n" + points.replace('"', "") + "\n")
    return folder


def start_engine(
    model: Path,
    node: StandaloneNode,
    extra: Mapping[str, Any] = DYNAMIC,
    *,
    backend: str = "dynamic",
    options: Mapping[str, Any] | None = None,
    **environment: str,
) -> Child:
    """Start an engine; extra: what configures its storage, options: arguments of sglang.Engine."""
    return Child(
        str(HERE / "engine_process.py"),
        str(model),
        json.dumps({**extra, "home": node.home}),
        backend,
        json.dumps(options or {}),
        PEERCACHE_TEST_CPU_ENGINE="1",
        SGLANG_USE_CPU_ENGINE="1",
        HF_HUB_OFFLINE="1",
        **environment,
    )


def wait_for(*engines: Child) -> None:
    """Return when all serve; they start at the same time."""
    for engine in engines:
        assert engine.receive(START_S)["ready"]


def a_prompt(seed: int, tokens: int) -> list[int]:
    """Return token ids that are no special ones."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=tokens)


def from_storage(reply: dict[str, Any]) -> int:
    """Return how many prompt tokens came out of the store, which SGLang names by its class."""
    details = reply["cached"] or {}
    # Whether it was loaded dynamically or is one of SGLang's own: what operators see is PeerCache.
    assert not details or details["storage_backend"] == "PeerCacheStore", details
    return int(details.get("storage", 0))


def from_linker(reply: dict[str, Any]) -> int:
    """Return how many prompt tokens a linker brought, which SGLang counts as those of a host."""
    details = reply["cached"] or {}
    assert "storage_backend" not in details, details
    return int(details.get("host", 0))
