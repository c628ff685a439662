"""A reader and an evicting writer at the edge of the LRU, for a long time."""

from __future__ import annotations

import random

import pytest

from tests.system.endurance.load import Corpus, EdgeWriter, Load, Reader, follow
from tests.system.nodes import LocalCluster, keys_of

PAGE_BYTES = 32 * 1024
POOL_PAGES = 128
BATCH = 32
SECONDS = 30.0
SLOWER = 20
"""How many times longer a slow machine may take for what is counted below."""
VERIFIED_MIN = 50_000
"""Verified hits of each fabric: together more than a hundred thousand."""
MISSED_MIN = 1000
WRITTEN_MIN = 10 * POOL_PAGES


@pytest.mark.slow
@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_thirty_seconds_at_the_edge_of_the_pool_give_no_wrong_byte(fabric: str) -> None:
    """A writer evicts as fast as it can; every page that two readers get is compared as a whole."""
    corpus = Corpus(keys_of(f"edge-{fabric}", 4 * POOL_PAGES), PAGE_BYTES)
    with LocalCluster() as cluster:
        (node,) = cluster.start_many(1, pool=f"{POOL_PAGES * PAGE_BYTES // 1024}KiB")
        writer = EdgeWriter(cluster.client(node), corpus, 8)
        readers = [Reader(cluster.client(node, fabric=fabric), corpus, BATCH) for _ in range(2)]
        load = Load()
        load.run(writer.step)
        for seed, reader in enumerate(readers):
            rng = random.Random(seed)
            load.run(lambda reader=reader, rng=rng: follow(reader, writer, POOL_PAGES, rng))

        def hits_and_misses() -> tuple[int, int]:
            hits = sum(reader.counts.hits for reader in readers)
            return hits, sum(reader.counts.pages for reader in readers) - hits

        def enough() -> bool:
            hits, misses = hits_and_misses()
            written = writer.counts.hits
            return hits > VERIFIED_MIN and misses > MISSED_MIN and written > WRITTEN_MIN

        with load:
            load.last(SECONDS)
            for _ in range(SLOWER):
                if load.error is None and not enough():
                    load.last(SECONDS)

        hits, misses = hits_and_misses()
        evicted = sum(int(r.client.stats().get("pages_missed_evicted", 0)) for r in readers)
        print(
            f"{fabric}: {hits} verified, {misses} missed ({evicted} evicted while they were read), "
            f"{writer.counts.hits} written"
        )
        assert hits > VERIFIED_MIN
        assert misses > MISSED_MIN, "the readers were never at the edge"
        assert writer.counts.hits > WRITTEN_MIN
