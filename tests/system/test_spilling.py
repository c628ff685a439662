"""A node whose pool is full moves its coldest pages to nodes with free memory."""

from __future__ import annotations

import json

import pytest

from tests.pace import wait_until
from tests.system.nodes import (
    LocalCluster,
    NodeProcess,
    command,
    keys_of,
    pages_of,
    read,
)

pytestmark = pytest.mark.slow

SIZE = 256 * 1024
BATCH = 8
BATCHES = 16
FLAGS = ("--spill", "on", "--placement-min-age", "0", "--metrics-port=-1")


def counted(node: NodeProcess, series: str) -> int:
    """Return the value of a series of a node's metrics."""
    lines = node.page("/metrics").splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"peercache_{series} ")]
    return int(float(value))


def moved(node: NodeProcess) -> int:
    """Return how many pages a node has moved to others."""
    return counted(node, 'placement_pages{outcome="moved"}')


def reported(cluster: LocalCluster, node: NodeProcess) -> int:
    """Return how many pages the members of a cluster have moved, as the command shows it."""
    said = command("status", "--at", node.ready["control"], "--cluster", cluster.name, "--json")
    members = json.loads(said.stdout)["members"]
    return sum(member["status"]["spilled"]["moved"] for member in members)


@pytest.mark.parametrize("fabric", ["auto", "tcp"])
def test_the_memory_of_an_idle_node_keeps_the_pages_of_a_busy_one(fabric: str) -> None:
    """The busy node stores twice what its pool holds, and every page is a hit afterwards.

    Each of them has its own bytes, and a removal removes those that were moved too.
    """
    flags = (*FLAGS, "--fabric", fabric)
    with LocalCluster() as cluster:
        busy = cluster.start(pool="16MiB", flags=flags)
        idle = cluster.start(pool="64MiB", flags=flags)
        cluster.wait_for_members(busy, 2)
        keys = keys_of("spilled", BATCH * BATCHES)
        with cluster.client(busy, fabric=fabric) as client:
            for begin in range(0, len(keys), BATCH):
                batch = keys[begin : begin + BATCH]
                assert all(client.batch_set(batch, pages_of(batch, SIZE)))
                # An eighth of the pool is kept free or elsewhere: as much as the next batch needs.
                wait_until(lambda due=begin + 2 * BATCH - 64: moved(busy) >= due)

            assert read(client, keys, SIZE) == [True] * len(keys)

            assert counted(idle, "pages_taken_over_total") == moved(busy) >= 64
            assert counted(busy, "placement_bytes") == moved(busy) * SIZE
            wait_until(lambda: reported(cluster, busy) == moved(busy))
            assert client.remove(keys[:BATCH]) == BATCH
            assert read(client, keys[:BATCH], SIZE) == [False] * BATCH
