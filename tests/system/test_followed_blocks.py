"""A router that reads vLLM's format, over real nodes: a connector's blocks come and go."""

from __future__ import annotations

from typing import Any

import pytest

from peercache.client.following import follow_cluster
from peercache.connector.followed_blocks import FollowedBlocks
from peercache.connector.metadata import cluster_store
from peercache.events.blocks import BlockRemoved, BlockStored
from peercache.events.publishing import BlockPublisher
from peercache.model.keys import Namespace
from tests.pace import wait_until
from tests.system.nodes import LocalCluster
from tests.system.test_following import target_of
from tests.unit.connector.rig import PAGE_TOKENS, Engine, mapping_of
from tests.unit.events.test_publishing import ANY, replayed

pytestmark = pytest.mark.slow

PAGES = 8


def known(publisher: BlockPublisher) -> set[Any]:
    """Return the blocks that a router knows which has read everything."""
    names: set[Any] = set()
    for event in [event for _, events in replayed(publisher.replay, 0) for event in events]:
        if isinstance(event, BlockStored):
            names |= set(event.hashes)
        elif isinstance(event, BlockRemoved):
            names -= set(event.hashes)
        else:
            names.clear()
    return names


def test_blocks_go_with_their_pages_and_with_their_node() -> None:
    """Stored, cleared, stored again, and lost with the node that is killed."""
    with LocalCluster() as cluster:
        one, two = cluster.start_many(2)
        store = cluster_store(home=one.ready["home"], cluster=cluster.name)(Namespace("engine"))
        tokens = list(range(PAGES * PAGE_TOKENS))
        with (
            follow_cluster(target_of(cluster, two.ready["control"])) as follower,
            FollowedBlocks(ANY, follower, ANY) as blocks,
            Engine(store, on_stored=blocks.stored) as engine,
        ):

            def keep(request: str) -> None:
                mapping = mapping_of(range(PAGES))
                future, _ = engine.connector.store_kv_async(request, mapping, tokens)
                assert future.result(30) == len(tokens)

            keep("first")
            wait_until(lambda: len(known(blocks.publisher)) == PAGES)

            assert cluster.client(one, namespace=Namespace("engine")).clear() == PAGES
            wait_until(lambda: not known(blocks.publisher))

            keep("again")
            wait_until(lambda: len(known(blocks.publisher)) == PAGES)
            one.kill()
            wait_until(lambda: not known(blocks.publisher))
