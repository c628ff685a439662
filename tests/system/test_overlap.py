"""Where a prompt lies: real nodes, asked by a client and over HTTP."""

from __future__ import annotations

import pytest

from peercache.model.records import ON_DISK, RESIDENT
from tests.system.nodes import LocalCluster, keys_of, pages_of, wait_until

PAGES = 24


@pytest.mark.slow
def test_a_client_learns_which_nodes_hold_a_prompt() -> None:
    """Of three nodes two hold parts of it, and one of those dies."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(3)
        keys = keys_of("overlap", PAGES)
        clients = [cluster.client(node) for node in nodes]
        assert all(clients[0].batch_set(keys[:16], pages_of(keys[:16])))
        assert all(clients[1].batch_set(keys[8:20], pages_of(keys[8:20])))
        holders = [int(node.ready["node"], 16) for node in nodes]

        wait_until(lambda: clients[2].overlap(keys).whole)
        for client in clients:
            told = client.overlap(keys)
            runs = dict(zip(told.holders, told.run().tolist(), strict=True))
            pages = dict(zip(told.holders, told.pages(RESIDENT).tolist(), strict=True))
            assert runs == {holders[0]: 16, holders[1]: 0}
            assert pages == {holders[0]: 16, holders[1]: 12}
            assert (told.stored(), told.stored(ON_DISK)) == (20, 0)

        nodes[0].kill()
        wait_until(lambda: clients[2].overlap(keys).holders == (holders[1],))
        assert clients[2].overlap(keys).stored() == 0
