"""A retained page stays at its holder while all others are evicted, whichever node was asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache import Client
from tests.pace import wait_until
from tests.system.nodes import EVICTED_IS_GONE, LocalCluster, keys_of, pages_of, read

pytestmark = pytest.mark.slow

MINE = 24
FLOOD = 256
"""Four times what the pool of 8 MiB has room for."""


def flood(client: Client, name: str) -> None:
    """Set pages that push all others out."""
    others = keys_of(name, FLOOD)
    for begin in range(0, FLOOD, 16):
        part = others[begin : begin + 16]
        assert client.batch_set(part, pages_of(part)) == [True] * 16


def test_retained_pages_outlive_a_flood_until_their_time() -> None:
    """A client of another node asks; the holder keeps them, and lets them go when asked to."""
    with LocalCluster() as cluster:
        cluster.start_many(2, pool="8MiB", flags=EVICTED_IS_GONE)
        holder = cluster.client(cluster.nodes[0])
        asker = cluster.client(cluster.nodes[1])
        keys = keys_of("retained", MINE)

        assert holder.batch_set(keys, pages_of(keys)) == [True] * MINE
        wait_until(lambda: asker.retain(keys[:8], 3600) == 8)
        assert asker.retain(keys_of("nowhere", 2), 3600) == 0

        flood(holder, "first")
        assert read(holder, keys) == [True] * 8 + [False] * (MINE - 8)
        assert read(asker, keys[:8]) == [True] * 8

        assert asker.retain(keys[:8], 0) == 8
        flood(holder, "second")
        assert read(holder, keys) == [False] * MINE


def test_a_page_on_disk_is_retained_once_it_has_been_read(tmp_path: Path) -> None:
    """Reading brings it into memory, where it then outlives a flood; the others do not."""
    with LocalCluster() as cluster:
        disk = ("--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "256MiB")
        node = cluster.start(pool="8MiB", flags=disk)
        client = cluster.client(node)
        keys = keys_of("spilled", MINE)

        assert client.batch_set(keys, pages_of(keys)) == [True] * MINE
        wait_until(lambda: client.stats()["home_disk_pages"] >= MINE)
        flood(client, "first")
        assert client.retain(keys[:8], 3600) == 0
        wait_until(lambda: read(client, keys[:8]) == [True] * 8)
        wait_until(lambda: client.retain(keys[:8], 3600) == 8)
        flood(client, "second")
        assert client.retain(keys, 3600) == 8
        assert read(client, keys[:8]) == [True] * 8
