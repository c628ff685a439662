"""LMCache's own benchmarks over the L2 adapter and two nodes: other servers, flipped bytes."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.other_engines import (
    EVERY_PAGE,
    EngineProcess,
    LMCacheServer,
    environment_of,
    plugin,
)
from tests.pace import FACTOR, assert_within, wait_until
from tests.system.nodes import LocalCluster, NodeProcess, free_port

PROMPTS = 3
"""Beyond that LMCache's benchmark makes prompts again."""


@pytest.fixture(scope="module")
def venv() -> Path:
    """Return LMCache's environment."""
    return environment_of("lmcache")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Return a cluster without nodes."""
    with LocalCluster() as cluster:
        yield cluster


def l2(cluster: LocalCluster, node: NodeProcess, **settings: object) -> str:
    """Return the adapter's JSON for a node, with deadlines that no busy machine comes to."""
    patient = {"op_timeout_s": 20, "exists_timeout_s": 20, "verify": "full", **settings}
    return plugin(node.ready["home"], cluster=cluster.name, **patient)


def run_bench(venv: Path, server: LMCacheServer) -> str:
    """Send prompts of four chunks each through a server, cold and warm; return what is said."""
    with EngineProcess(
        [
            venv / "bin/lmcache", "bench", "server", "--rpc-url", server.rpc_url,
            "--url", server.url, "--mode", "cpu", "--num-tokens", "1024", "--kvcache-shape-spec",
            "(2,256,16,4,64):bfloat16:8", "--num-blocks", "256", "--block-size", "16",
            "--interval", "0.05", "--start", "0", "--end", str(PROMPTS),
        ]
    ) as bench:  # fmt: skip
        return bench.finish()


def cold_hits(said: str) -> list[str]:
    """Return how many of its chunks each prompt had at first."""
    return re.findall(r"seq \d+/cold\] LOOKUP: (\d+/\d+) chunks hit", said)


def sums(said: str) -> list[str]:
    """Return the checksum of each prompt's four chunks, as they were retrieved."""
    return re.findall(r"seq \d+/warm\] CHECKSUM: (\w+) \(4 chunks\)", said)


def test_lmcaches_own_check_of_stored_and_loaded_bytes(cluster: LocalCluster, venv: Path) -> None:
    """`lmcache bench l2` finds and verifies every object."""
    (node,) = cluster.start_many(1, pool="64MiB")
    with EngineProcess(
        [
            venv / "bin/lmcache", "bench", "l2", "--l2-adapter", l2(cluster, node),
            "--no-skip-verify", "--lookup-max-hit-rate", "1.0",
        ]
    ) as bench:  # fmt: skip
        said = bench.finish()
    assert "found=32/32" in said
    assert "All 32 keys data verified OK" in said


def test_another_server_loads_what_a_killed_one_stored_and_no_flipped_byte(
    cluster: LocalCluster, venv: Path
) -> None:
    """Equal sums from the other node's memory; flipped bytes are computed again."""
    first, second = cluster.start_many(2, pool="64MiB")
    with LMCacheServer(venv, l2(cluster, first)) as server:
        server.wait()
        said = run_bench(venv, server)
        assert cold_hits(said) == ["0/4"] * PROMPTS
        right = sums(said)
        assert len(set(right)) == PROMPTS
        watcher = cluster.client(first)
        wait_until(lambda: watcher.stats()["home_pool_pages"] == 4 * PROMPTS)
        server.kill()

    with LMCacheServer(venv, l2(cluster, second)) as server:
        server.wait()
        assert server.listed() == []
        said = run_bench(venv, server)
        assert len(server.listed()) == 4 * PROMPTS
        assert cold_hits(said) == ["4/4"] * PROMPTS
        assert sums(said) == right
        # LMCache unlocks behind the answer.
        wait_until(lambda: server.adapter()["locked"] == 0)
        assert server.adapter()["is_healthy"]

    first.flip(EVERY_PAGE)
    with LMCacheServer(venv, l2(cluster, second)) as server:
        server.wait()
        said = run_bench(venv, server)
        assert sums(said) == right, said


def test_another_size_is_a_miss_and_a_hung_peer_costs_a_second(
    cluster: LocalCluster, venv: Path
) -> None:
    """With the deadlines of production, over tcp; at the close nothing is locked."""
    first, second = cluster.start_many(2, pool="64MiB")
    shared = {"cluster": cluster.name, "fabric": "tcp"}
    patient = {"op_timeout_s": 20, "exists_timeout_s": 20}
    at_first = json.dumps({**shared, **patient, "home": first.ready["home"]})
    at_second = json.dumps({**shared, "exists_timeout_s": 20, "home": second.ready["home"]})
    driver = Path(__file__).with_name("lmcache_hung_peer.py")
    with EngineProcess(
        [venv / "bin/python", driver, at_first, at_second, str(first.process.pid)]
    ) as process:
        said = json.loads(process.finish().splitlines()[-1])
    seconds = said.pop("hung_s"), said.pop("close_s")
    assert said == {
        "stored": 2 << 20, "held": 2, "locked": 2, "loaded": 1, "sum": 1 << 20,
        "another_size": 0, "hung": 0, "locked_at_close": 0,
    }  # fmt: skip
    # A busy machine may add to the second.
    assert_within(seconds[0], 3 * FACTOR)
    assert_within(seconds[1], 20 * FACTOR)


def coordinator(venv: Path, port: int) -> EngineProcess:
    """Return LMCache's coordinator, as a process."""
    return EngineProcess(
        [
            venv / "bin/python", "-m", "lmcache.v1.mp_coordinator", "--host", "127.0.0.1",
            "--port", port, "--disable-metrics",
        ],
        ready="Uvicorn running",
    )  # fmt: skip


def test_lmcaches_lists_quotas_and_pins_reach_the_pages(cluster: LocalCluster, venv: Path) -> None:
    """By LMCache's own factory, HTTP service, eviction controller and coordinator."""
    node = cluster.start("one", pool="16MiB")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    body = {"model_name": "a/model", "world_size": 1, "token_ids": list(range(1024))}
    with coordinator(venv, port) as process:
        process.wait()
        request = urllib.request.Request(
            f"{url}/cache/pins", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["affected"] == 4
        driver = Path(__file__).with_name("lmcache_objects.py")
        line = l2(cluster, node, coordinator_url=url)
        with EngineProcess([venv / "bin/python", driver, line]) as engine:
            said = json.loads(engine.finish().splitlines()[-1])
    size = 256 << 10
    assert "hom" in said.pop("wrong")
    assert "page_size must be positive" in said.pop("refused")
    assert said == {
        "stored": True, "listed": True, "of_no_model": 0,
        "by_salt": {"a": 4 * size, "b": 3 * size},
        "left": ["a", "a", "b", "b", "b"], "by_salt_then": {"a": 2 * size, "b": 3 * size},
        "pinned_stored": True, "pinned_held": 4, "first_held": 0, "pinned_listed": 4, "fits": True,
    }  # fmt: skip
