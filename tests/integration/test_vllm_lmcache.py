"""vLLM's CPU engine with LMCache's connector, over LMCache's server, over two nodes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.other_engines import (
    LMCacheServer,
    VllmServer,
    environment_of,
    plugin,
    tiny_model,
)
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess

PROMPT_TOKENS = 600
CHUNKS = PROMPT_TOKENS // 128


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Return a cluster without nodes."""
    with LocalCluster() as cluster:
        yield cluster


def connector(server: LMCacheServer) -> dict[str, Any]:
    """Return vLLM's configuration of LMCache's connector."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        # The one in vLLM's tree calls CUDA.
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": int(server.port),
        },
    }


def test_an_engine_reads_what_another_one_stored_through_lmcache(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Both LMCache servers and both engines are new; the tokens are equal."""
    venv = environment_of("vllm")
    model = tiny_model(venv, tmp_path / "tiny")
    numbers = random.Random(7)
    prompt = [numbers.randrange(3, 4000) for _ in range(PROMPT_TOKENS)]
    nodes = cluster.start_many(2, pool="64MiB")
    said, hits = [], []
    for node in nodes:
        with LMCacheServer(venv, l2(cluster, node), chunk_tokens=128) as server:
            server.wait()
            flags = ("--disable-hybrid-kv-cache-manager",)
            with VllmServer(venv, model, connector(server), *flags) as engine:
                engine.wait()
                said.append(engine.ask(prompt))
                with cluster.client(nodes[0]) as watcher:
                    wait_until(lambda: watcher.stats()["home_pool_pages"] == CHUNKS)
                hits.append(engine.metric("vllm:external_prefix_cache_hits_total"))
            wait_until(lambda: server.adapter()["locked"] == 0)
    assert said[0] == said[1]
    assert hits == [0, CHUNKS * 128]


def l2(cluster: LocalCluster, node: NodeProcess) -> str:
    """Return the adapter's JSON for a node, with deadlines that no busy machine comes to."""
    patient = {"op_timeout_s": 20, "exists_timeout_s": 20, "verify": "full"}
    return plugin(node.ready["home"], cluster=cluster.name, **patient)
