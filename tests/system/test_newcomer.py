"""A node joins: what it stores at once is found at once, by clients that have not heard of it."""

from __future__ import annotations

from tests.system.nodes import LocalCluster, keys_of, pages_of, read

POOL = "32MiB"


def test_pages_of_a_node_that_has_just_joined_are_found() -> None:
    """Or the set says itself that owners do not know them yet."""
    with LocalCluster() as cluster:
        # Room for all pages: the last ones stored would be evicted for those that were read.
        reader = cluster.client(cluster.start(pool=POOL))
        lost, found = [], 0
        for turn in range(3):
            writer = cluster.client(cluster.start(pool=POOL))
            for number in range(40):
                keys = keys_of(f"newcomer-{turn}-{number}", 4)
                before = writer.stats().get("pages_unpublished", 0)
                assert all(writer.batch_set(keys, pages_of(keys)))
                if writer.stats().get("pages_unpublished", 0) == before:
                    hits = read(reader, keys).count(True)
                    found += hits
                    lost += [(turn, number)] * (hits < len(keys))

        assert lost == []
        assert found
