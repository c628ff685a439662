"""Pages of real nodes that are not used for their time to live, in memory and on disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from peercache.model.keys import Namespace
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess, free_port, keys_of, pages_of, read

PAGES = 16
TTL_S = 4.0


def metric(node: NodeProcess, name: str) -> float:
    """Return a metric of a node."""
    lines = node.page("/metrics").splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


@pytest.mark.slow
def test_pages_of_a_namespace_expire_in_memory_and_free_it() -> None:
    """Those that are read live on, and those of another namespace do not expire."""
    flags = ("--quotas", f"chat=50%,ttl={TTL_S:g}s", "--metrics-port", free_port())
    with LocalCluster() as cluster:
        node = cluster.start(flags=flags)
        chat = cluster.client(node, namespace=Namespace("chat"))
        other = cluster.client(node, namespace=Namespace("other"))
        keys, kept = keys_of("chat", PAGES), keys_of("other", PAGES)
        assert all(chat.batch_set(keys, pages_of(keys)))
        assert all(other.batch_set(kept, pages_of(kept)))
        expired = 'peercache_namespace_pages_expired_total{namespace="chat",tier="pool"}'

        until = time.monotonic() + 2 * TTL_S
        while time.monotonic() < until:
            assert all(read(chat, keys[:4]))
            time.sleep(0.2)
        wait_until(lambda: metric(node, expired) == PAGES - 4)

        assert read(chat, keys) == [True] * 4 + [False] * (PAGES - 4)
        assert all(read(other, kept))
        assert metric(node, "peercache_pool_pages") == PAGES + 4


@pytest.mark.slow
def test_the_time_that_a_node_is_down_counts_for_its_disk(tmp_path: Path) -> None:
    """A page that expired meanwhile is a miss after the restart, and its place is free."""
    flags = [
        "--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "64MiB",
        "--disk-ttl", f"{TTL_S:g}s", "--metrics-port", free_port(),
    ]  # fmt: skip
    with LocalCluster() as cluster:
        node = cluster.start("a", flags=flags)
        keys = keys_of("disk", PAGES)
        with cluster.client(node) as client:
            assert all(client.batch_set(keys, pages_of(keys)))
            wait_until(lambda: client.stats().get("home_disk_pages") == PAGES)
        node.terminate()
        time.sleep(TTL_S + 1.0)

        again = cluster.start("a", flags=flags)
        with cluster.client(again) as client:
            assert not any(read(client, keys))
            wait_until(lambda: client.stats().get("home_disk_open") == 1)
            wait_until(lambda: client.stats().get("home_disk_pages") == 0)
            assert not any(client.batch_get(keys, pages_of(keys)))
        assert metric(again, 'peercache_disk_pages_lost_total{reason="expired"}') == PAGES
