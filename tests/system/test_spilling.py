"""A node whose pool is full moves its coldest pages to nodes with free memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peercache import Client
from tests.pace import TIMEOUT_S, wait_until
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
FULL = 7 * BATCH
"""Pages of which nothing has to move yet: an eighth of the pool is left."""
FLAGS = ("--spill", "on", "--placement-min-age", "0", "--metrics-port=-1")


def counted(node: NodeProcess, series: str) -> int:
    """Return the value of a series of a node's metrics."""
    lines = node.page("/metrics").splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"peercache_{series} ")]
    return int(float(value))


def moved(node: NodeProcess) -> int:
    """Return how many pages a node has moved to others."""
    return counted(node, 'placement_pages{outcome="moved"}')


def reported(cluster: LocalCluster, node: NodeProcess) -> dict[str, dict[str, Any]]:
    """Return what the command shows of pages that moved, by the names of nodes."""
    said = command("status", "--at", node.ready["control"], "--cluster", cluster.name, "--json")
    statuses = [member["status"] for member in json.loads(said.stdout)["members"]]
    return {status["name"]: status["spilled"] for status in statuses}


def store_slowly(client: Client, keys: list[str], busy: NodeProcess, first: int = 0) -> None:
    """Store pages as fast as the full node moves others: what is stored at once has room then.

    first: those before it are stored.
    """
    for begin in range(first, len(keys), BATCH):
        batch = keys[begin : begin + BATCH]
        assert all(client.batch_set(batch, pages_of(batch, SIZE)))
        # An eighth of the pool is kept free or elsewhere: as much as the next batch needs.
        wait_until(lambda due=begin + 2 * BATCH - 64: moved(busy) >= due)


def peer(name: str, **moved_pages: int) -> dict[str, Any]:
    """Return a row of what a node moved to and from another one."""
    nothing = {"given": 0, "given_bytes": 0, "taken": 0, "taken_bytes": 0}
    return {"name": name, **nothing, **moved_pages}


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
            store_slowly(client, keys, busy)

            assert read(client, keys, SIZE) == [True] * len(keys)

            assert counted(idle, "pages_taken_over_total") == moved(busy) >= 64
            assert counted(busy, "placement_bytes") == moved(busy) * SIZE
            names = busy.ready["control"], idle.ready["control"]
            figures = reported(cluster, busy)
            given, taken = (figures[name]["peers"] for name in names)
            count, size = moved(busy), moved(busy) * SIZE
            assert given == [peer(names[1], given=count, given_bytes=size)]
            assert taken == [peer(names[0], taken=count, taken_bytes=size)]
            assert client.remove(keys[:BATCH]) == BATCH
            assert read(client, keys[:BATCH], SIZE) == [False] * BATCH


def test_a_memory_node_joins_keeps_pages_and_hands_them_back_when_it_is_drained() -> None:
    """It has no engine and no setting but its pool, and joins when the other one is full.

    What has room goes back where it came from; the rest is a miss, and as many as the drain lost.
    """
    with LocalCluster() as cluster:
        busy = cluster.start(pool="16MiB", flags=FLAGS)
        keys = keys_of("lent", BATCH * 12)
        with cluster.client(busy) as client:
            store_slowly(client, keys[:FULL], busy)
            lent = cluster.start(pool="32MiB")
            cluster.wait_for_members(busy, 2)
            store_slowly(client, keys, busy, FULL)
            assert read(client, keys, SIZE) == [True] * len(keys)

            at = (lent.ready["control"], "--cluster", cluster.name, "--json")
            drained = command("drain", *at, "--timeout", str(TIMEOUT_S))

            assert (drained.returncode, drained.stderr) == (0, "")
            last = json.loads(drained.stdout.splitlines()[-1])
            assert (last["state"], last["left"]) == ("left", 0)
            assert lent.process.wait(TIMEOUT_S) == 0
        # A client that has read from the memory node may still have its pages mapped.
        with cluster.client(busy) as client:
            wait_until(lambda: client.stats()["home_members_alive"] == 1)
            hits = read(client, keys, SIZE)
            # An eighth of the busy node's pool is free.
            assert last["given"] == counted(busy, "pages_taken_over_total") >= BATCH // 2
            assert hits.count(False) == last["lost"]
            assert client.remove(keys) == hits.count(True)
            assert read(client, keys, SIZE) == [False] * len(keys)
