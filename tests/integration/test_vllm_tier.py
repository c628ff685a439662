"""The secondary tier in vLLM's CPU engine, over two nodes: another engine, and a dead holder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.integration.other_engines import (
    EVERY_PAGE,
    VLLM_VERSION,
    EngineProcess,
    VllmServer,
    environment_of,
    tier,
    tiny_model,
)
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess
from tests.system.relay import SlowLink

PROMPT_TOKENS = 600
CHUNKS = PROMPT_TOKENS // 128
CHUNK_BYTES = 256 << 10
"""Of 128 tokens: vLLM's block on a CPU, of keys and values of four layers with two heads."""

READ_BYTES = "vllm:kv_offload_tiering_read_bytes_total"
STORES_DROPPED = "vllm:kv_offload_tiering_backpressure_stores_dropped_total"
SHUT_OUT = "vllm:kv_offload_peercache_shut_out"
MISSED = "vllm:kv_offload_peercache_missed_chunks_total"
EVENTS = {
    "enable_kv_events": True, "locality": "REMOTE",
    "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
}  # fmt: skip
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


def at(cluster: LocalCluster, node: NodeProcess, **more: Any) -> dict[str, Any]:
    """Return a connector with the tier at a node, with deadlines that no busy machine comes to."""
    patient = {"op_timeout_s": 20, "exists_timeout_s": 20, "verify": "full", **more}
    return tier(node.ready["home"], cluster=cluster.name, **patient)


class Router:
    """What a router has of a tier's chunks, by the events that vLLM publishes."""

    def __init__(self, folder: Path) -> None:
        """Choose an endpoint; vLLM binds it."""
        self.endpoint = f"ipc://{folder}/events"
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}
        # Without its own prefix cache vLLM publishes nothing.
        self.flags = ("--enable-prefix-caching", "--kv-events-config", json.dumps(config))
        self.tokens: dict[Any, list[int]] = {}
        """By the hash of a block: its tokens."""

    @contextmanager
    def reading(self) -> Iterator[Callable[[], int]]:
        """Yield what returns how many blocks the tier holds by now."""
        with zmq.Context() as context, context.socket(zmq.SUB) as reader:
            reader.subscribe(b"")
            reader.connect(self.endpoint)

            def now() -> int:
                while reader.poll(50):
                    for event in msgspec.msgpack.decode(reader.recv_multipart()[-1])[1]:
                        self._take(event)
                return len(self.tokens)

            yield now

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("ownership") != "peercache":
            return
        assert (event["medium"], event["locality"]) == ("STORAGE", "LOCAL")
        for at, block in enumerate(event["block_hashes"]):
            if event["type"] == "BlockRemoved":
                del self.tokens[block]
            else:
                size = event["block_size"]
                self.tokens[block] = event["token_ids"][at * size : (at + 1) * size]


def test_another_engine_loads_what_the_first_one_stored_and_outlives_its_node(
    cluster: LocalCluster, venv: Path, model: Path, tmp_path: Path
) -> None:
    """Equal tokens from the other node's chunks; flipped bytes and a dead node are computed."""
    first, second = cluster.start_many(2, pool="64MiB")
    watcher = cluster.client(first)
    router = Router(tmp_path)
    with (
        VllmServer(venv, model, at(cluster, first, **EVENTS), *router.flags) as engine,
        router.reading() as blocks,
    ):
        engine.wait()
        said = {seed: engine.ask(prompt(seed)) for seed in (1, 2, 3)}
        wait_until(lambda: watcher.stats()["home_pool_pages"] == 3 * CHUNKS)
        # vLLM publishes with the steps of its scheduler.
        wait_until(lambda: bool(engine.ask(prompt(4)[:20])) and blocks() == 3 * CHUNKS)
        parts = [prompt(seed)[i * 128 : i * 128 + 128] for seed in (1, 2, 3) for i in range(CHUNKS)]
        assert sorted(router.tokens.values()) == sorted(parts)
        assert engine.metric(STORES_DROPPED) == engine.metric(SHUT_OUT) == 0
        assert SHUT_OUT in "".join(engine.metrics())

    with VllmServer(venv, model, at(cluster, second)) as engine:
        engine.wait()
        assert engine.ask(prompt(1)) == said[1]
        assert engine.metric(READ_BYTES) * 3 == watcher.stats()["home_pool_bytes_stored"]
        first.flip(EVERY_PAGE)
        assert engine.ask(prompt(2)) == said[2]
        assert engine.metric(FAILED_LOADS) == 1
        assert engine.metric(MISSED) == CHUNKS
        watcher.close()
        first.kill()
        assert engine.ask(prompt(3)) == said[3]
        assert engine.ask(prompt(1)) == said[1]
        assert engine.metric(READ_BYTES) * 3 == 3 * CHUNKS * CHUNK_BYTES
        assert engine.process.poll() is None


def test_an_engine_computes_what_takes_longer_to_read(venv: Path, model: Path) -> None:
    """A new engine reads over a fast link, and declines all chunks over a slow one."""
    compute_s = 10.0  # A busy machine has a twentieth of it to measure the link.
    costs = {"fabric": "tcp", "decline": "cost", "page_compute_ms": 1000 * compute_s}
    prompts = [prompt(seed) for seed in range(2)]
    with SlowLink.open() as link, LocalCluster() as cluster:
        first = cluster.start(pool="64MiB", flags=link.flags)
        second = cluster.start(pool="64MiB")
        cluster.wait_for_members(second, 2)
        watcher = cluster.client(first)
        with VllmServer(venv, model, at(cluster, first)) as engine:
            engine.wait()
            said = [engine.ask(each) for each in prompts]
            wait_until(lambda: watcher.stats()["home_pool_pages"] == 2 * CHUNKS)

        chunk_times = (0.0, 5 * compute_s)
        read = []
        for seconds, each, tokens in zip(chunk_times, prompts, said, strict=True):
            link.data.byte_s = seconds / CHUNK_BYTES
            with VllmServer(venv, model, at(cluster, second, **costs)) as engine:
                engine.wait()
                assert engine.ask(each) == tokens
                read.append(engine.metric(READ_BYTES))
                assert engine.metric(FAILED_LOADS) == 0
        assert read == [CHUNKS * CHUNK_BYTES, 0]


def test_an_engine_that_computes_otherwise_takes_no_chunk(
    cluster: LocalCluster, venv: Path, model: Path
) -> None:
    """Its model's files are the same, and vLLM gives a tier nothing else of the model."""
    node = cluster.start("one", pool="64MiB")
    watcher = cluster.client(node)
    for flags, pages in (((), CHUNKS), (("--hf-overrides", '{"rope_theta": 50.0}'), 2 * CHUNKS)):
        with VllmServer(venv, model, at(cluster, node), *flags) as engine:
            engine.wait()
            engine.ask(prompt(1))
            wait_until(lambda pages=pages: watcher.stats()["home_pool_pages"] == pages)
            assert engine.metric(READ_BYTES) == 0
            assert "vllm.engine_unknown" not in engine.said()


def test_events_and_back_pressure_under_vllms_own_manager(
    cluster: LocalCluster, venv: Path
) -> None:
    """A healthy node is not shut out; what is evicted or reset is reported as removed."""
    node = cluster.start("one", pool="64MiB")
    driver = Path(__file__).with_name("vllm_tier.py")
    command = [venv / "bin/python", driver, node.ready["home"], cluster.name]
    with EngineProcess(command) as process:
        said = process.finish()
    found = json.loads(said.splitlines()[-1])
    average = found.pop("average")
    assert average < 0.05, "vLLM shuts out a tier of another host above 0.05 s a MiB"
    assert found == {
        "version": VLLM_VERSION, "completions": 41, "dropped": 0, "fits": True, "found": 3,
        "gone": 0, "after_reset": 0,
    }  # fmt: skip
    assert said.count("vllm.stores_shut_out") == said.count("vllm.stores_admitted") >= 1
