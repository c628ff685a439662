"""With two copies of each page, pages outlive the kill of the node that stored them."""

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
from tests.system.test_spilling import counted

pytestmark = pytest.mark.slow

SIZE = 256 * 1024
BATCH = 8
FLAGS = ("--copies", "2", "--placement-min-age", "0", "--metrics-port=-1")


def is_safe(*nodes: NodeProcess) -> bool:
    """Return whether each page of these nodes has a copy, as far as they know."""
    return all(counted(node, "pages_single") == 0 for node in nodes)


def copied(node: NodeProcess, name: str) -> int:
    """Return how many pages the live members of a cluster have copied, as the command shows it."""
    said = command("status", "--at", node.ready["control"], "--cluster", name, "--json")
    members = json.loads(said.stdout)["members"]
    return sum(m["status"]["copied"]["copied"] for m in members if m["answers"])


@pytest.mark.parametrize("fabric", ["auto", "tcp"])
def test_pages_outlive_the_kill_of_two_nodes_one_after_the_other(fabric: str) -> None:
    """Every page is a hit with its own bytes after each kill: what is lost is copied again.

    What is removed is removed at both nodes.
    """
    flags = (*FLAGS, "--fabric", fabric)
    with LocalCluster() as cluster:
        first, second, third = [cluster.start(pool="16MiB", flags=flags) for _ in range(3)]
        cluster.wait_for_members(first, 3)
        keys = keys_of("copied", 3 * BATCH)
        with cluster.client(first, fabric=fabric) as client:
            for begin in range(0, len(keys), BATCH):
                batch = keys[begin : begin + BATCH]
                assert all(client.batch_set(batch, pages_of(batch, SIZE)))
        wait_until(lambda: is_safe(first, second, third))
        assert copied(first, cluster.name) == len(keys)

        with cluster.client(third, fabric=fabric) as client:
            assert client.remove(keys[:BATCH]) == 2 * BATCH
            first.kill()
            there = [False] * BATCH + [True] * 2 * BATCH
            assert read(client, keys, SIZE) == there
            # The dead node is noticed, and what it held is copied again.
            wait_until(lambda: copied(third, cluster.name) == 2 * BATCH)
            wait_until(lambda: is_safe(second, third))
            second.kill()
            assert read(client, keys, SIZE) == there


def test_a_copy_made_after_a_page_was_retained_outlives_a_flood_too() -> None:
    """No member but its holder had the page when it was retained."""
    with LocalCluster() as cluster:
        first = cluster.start(pool="8MiB", flags=FLAGS)
        keys = keys_of("retained", BATCH)
        with cluster.client(first) as client:
            assert all(client.batch_set(keys, pages_of(keys, SIZE)))
            assert client.retain(keys, 3600) == BATCH
        second = cluster.start(pool="8MiB", flags=FLAGS)
        cluster.wait_for_members(first, 2)
        wait_until(lambda: is_safe(first))
        wait_until(lambda: counted(second, "pool_bytes_retained") > 0)
        first.kill()

        with cluster.client(second) as client:
            for number in range(4):
                flood = keys_of(f"flood-{number}", 2 * BATCH)
                client.batch_set(flood, pages_of(flood, SIZE))

            assert read(client, keys, SIZE) == [True] * BATCH
