"""The secondary tier in vLLM's CPU engine, over two nodes: another engine, and a dead holder."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.other_engines import (
    EVERY_PAGE,
    VllmServer,
    environment_of,
    tier,
    tiny_model,
)
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess

PROMPT_TOKENS = 600
CHUNKS = PROMPT_TOKENS // 128
CHUNK_BYTES = 256 << 10
"""Of 128 tokens: vLLM's block on a CPU, of keys and values of four layers with two heads."""

READ_BYTES = "vllm:kv_offload_tiering_read_bytes_total"
FAILED_LOADS = "vllm:kv_offload_tiering_promotion_job_failures_total"


def prompt(seed: int) -> list[int]:
    """Return a prompt of its own."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, 4000) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def venv() -> Path:
    """Return vLLM's environment."""
    return environment_of("vllm")


@pytest.fixture(scope="module")
def model(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tests' Llama."""
    return tiny_model(venv, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Return a cluster without nodes."""
    with LocalCluster() as cluster:
        yield cluster


def at(cluster: LocalCluster, node: NodeProcess) -> dict[str, Any]:
    """Return a connector with the tier at a node, with deadlines that no busy machine comes to."""
    patient = {"op_timeout_s": 20, "exists_timeout_s": 20, "verify": "full"}
    return tier(node.ready["home"], cluster=cluster.name, **patient)


def test_another_engine_loads_what_the_first_one_stored_and_outlives_its_node(
    cluster: LocalCluster, venv: Path, model: Path
) -> None:
    """Equal tokens from the other node's chunks; flipped bytes and a dead node are computed."""
    first, second = cluster.start_many(2, pool="64MiB")
    watcher = cluster.client(first)
    with VllmServer(venv, model, at(cluster, first)) as engine:
        engine.wait()
        said = {seed: engine.ask(prompt(seed)) for seed in (1, 2, 3)}
        wait_until(lambda: watcher.stats()["home_pool_pages"] == 3 * CHUNKS)

    with VllmServer(venv, model, at(cluster, second)) as engine:
        engine.wait()
        assert engine.ask(prompt(1)) == said[1]
        assert engine.metric(READ_BYTES) * 3 == watcher.stats()["home_pool_bytes_stored"]
        first.flip(EVERY_PAGE)
        assert engine.ask(prompt(2)) == said[2]
        assert engine.metric(FAILED_LOADS) == 1
        watcher.close()
        first.kill()
        assert engine.ask(prompt(3)) == said[3]
        assert engine.ask(prompt(1)) == said[1]
        assert engine.metric(READ_BYTES) * 3 == 3 * CHUNKS * CHUNK_BYTES
        assert engine.process.poll() is None


def test_an_engine_that_computes_otherwise_takes_no_chunk(
    cluster: LocalCluster, venv: Path, model: Path
) -> None:
    """Its model's files are the same, and vLLM tells a tier nothing else of the model."""
    node = cluster.start("one", pool="64MiB")
    watcher = cluster.client(node)
    for flags, pages in (((), CHUNKS), (("--hf-overrides", '{"rope_theta": 50.0}'), 2 * CHUNKS)):
        with VllmServer(venv, model, at(cluster, node), *flags) as engine:
            engine.wait()
            engine.ask(prompt(1))
            wait_until(lambda pages=pages: watcher.stats()["home_pool_pages"] == pages)
            assert engine.metric(READ_BYTES) == 0
            assert "vllm.engine_unknown" not in engine.said()
