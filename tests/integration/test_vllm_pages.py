"""The tier as README and the page on vLLM configure it, in vLLM's CPU engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.other_engines import VllmServer, environment_of, tier, tiny_model
from tests.integration.pages import json_of, node_of_a_page
from tests.pace import wait_until

PAGES = ("README.md", "docs/how-to/use-with-vllm.md")


def test_the_tier_of_the_pages_stores_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user pastes it; only the first tier is another one, because a CPU has no GPU's blocks."""
    venv = environment_of("vllm")
    shown, other = (json_of(page, "--kv-transfer-config") for page in PAGES)
    assert shown == other
    connector = tier("")
    assert shown["kv_connector"] == connector["kv_connector"]
    tiers = shown["kv_connector_extra_config"]["secondary_tiers"]
    connector["kv_connector_extra_config"]["secondary_tiers"] = tiers
    model = tiny_model(venv, tmp_path / "tiny")
    with node_of_a_page(tmp_path, monkeypatch), VllmServer(venv, model, connector) as engine:
        engine.wait()
        engine.ask(range(3, 603))
        wait_until(lambda: engine.metric("vllm:kv_offload_tiering_write_bytes_total") > 0)
        assert engine.metric("vllm:kv_offload_peercache_home_lost") == 0
