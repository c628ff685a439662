"""A soak: everything at once for ten minutes, and afterwards nothing has grown.

`PEERCACHE_SOAK_S=60 pytest -m soak` runs a shorter one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time

import attrs
import pytest

from tests.hostile.garbage import conversation
from tests.hostile.strangers import MIB, Vitals, ports_of
from tests.pace import wait_until
from tests.system.endurance.load import Corpus, EdgeWriter, Load, Reader, follow
from tests.system.nodes import DIES_WRITING, LocalCluster, keys_of, pages_of, read, script

SOAK_S = float(os.environ.get("PEERCACHE_SOAK_S", "600"))
WARM_S = min(20.0, SOAK_S / 3)
"""Until caches, buffers and the allocator have found their size."""

PAGE_BYTES = 32 * 1024
POOL_PAGES = 256
BATCH = 16

NODE_GROWTH_MAX_BYTES = 24 * MIB
OWN_GROWTH_MAX_BYTES = 48 * MIB
"""Of the process with all the clients."""
DESCRIPTORS_SPARE = 8
QUIET_WITHIN_S = 60.0


@attrs.frozen
class Quiet:
    """What everything takes when nothing happens."""

    nodes: list[Vitals]
    own: Vitals


class Soak:
    """A cluster, what goes on in it, and how much of everything was done."""

    def __init__(self, cluster: LocalCluster) -> None:
        """Start three nodes with pools much smaller than what is written."""
        self.cluster = cluster
        self.nodes = cluster.start_many(3, pool=f"{POOL_PAGES * PAGE_BYTES // MIB}MiB")
        self.corpus = Corpus(keys_of("soak", 4 * POOL_PAGES), PAGE_BYTES)
        clients = [
            cluster.client(node, fabric=fabric)
            for node, fabric in zip(self.nodes, ("shm", "tcp", "auto"), strict=True)
        ]
        self.writer = EdgeWriter(clients[0], self.corpus, 8)
        self.readers = [Reader(client, self.corpus, BATCH) for client in clients]
        self.came_and_went = self.died = self.babbled = 0

    def run_for(self, seconds: float, seed: int) -> None:
        """Let everything happen for so long."""
        load = Load()
        load.run(self.writer.step)
        for number, reader in enumerate(self.readers):
            rng = random.Random(seed + number)
            load.run(lambda reader=reader, rng=rng: follow(reader, self.writer, POOL_PAGES, rng))
        rng = random.Random(seed + 100)
        load.run(lambda: self._come_and_go(rng))
        load.run(lambda: self._babble(rng))
        load.run(self._die_writing)
        with load:
            load.last(seconds)

    def _come_and_go(self, rng: random.Random) -> None:
        """Be an engine that starts, stores, reads, removes and ends."""
        node = rng.choice(self.nodes)
        keys = keys_of(f"visitor {self.came_and_went}", 4)
        with self.cluster.client(node, fabric=rng.choice(("shm", "tcp"))) as visitor:
            visitor.batch_set(keys, pages_of(keys))
            read(visitor, keys)
            visitor.remove(keys[:2])
        self.cluster.clients.remove(visitor)
        self.came_and_went += 1

    def _die_writing(self) -> None:
        """Be an engine that is killed between reserve and commit."""
        node = self.nodes[self.died % 3]
        name = f"dead {self.died}"
        with script(DIES_WRITING, self.cluster.name, node.ready["home"], name) as process:
            assert process.wait(60) == -signal.SIGKILL
        self.died += 1
        time.sleep(2)  # One every few seconds is enough to find what does not come back.

    def _babble(self, rng: random.Random) -> None:
        """Be a scanner of ports."""
        for port in ("control", "home", "data"):
            node = rng.choice(self.nodes)
            with contextlib.suppress(OSError), ports_of(node)[port]() as connection:
                connection.sendall(conversation(rng))
        self.babbled += 3
        time.sleep(0.1)

    def quiet(self) -> Quiet:
        """Wait until every slot is free or committed, and measure."""
        for reader in self.readers:
            wait_until(
                lambda reader=reader: reader.client.stats().get("home_pool_bytes_reserved") == 0,
                "no reserved slot",
                QUIET_WITHIN_S,
            )
        # What ends by itself ends within a few seconds: idle links, half greetings, timers.
        time.sleep(6)
        gc.collect()
        return Quiet([Vitals.of(node) for node in self.nodes], Vitals.of_process(os.getpid()))


def assert_not_grown(before: Vitals, after: Vitals, bytes_max: int, what: str) -> None:
    """Assert that a process takes what it took before."""
    assert after.rss_bytes < before.rss_bytes + bytes_max, (what, before, after)
    assert after.threads <= before.threads + 1, (what, before, after)
    assert after.descriptors <= before.descriptors + DESCRIPTORS_SPARE, (what, before, after)


@pytest.mark.soak
def test_after_a_soak_nothing_has_grown_and_nothing_is_reserved() -> None:
    """Memory, descriptors, threads, and slots are what they were after warming up."""
    with LocalCluster() as cluster:
        soak = Soak(cluster)
        soak.run_for(WARM_S, seed=1)
        before = soak.quiet()

        soak.run_for(SOAK_S, seed=1000)

        after = soak.quiet()
        pages = sum(reader.counts.pages for reader in soak.readers)
        hits = sum(reader.counts.hits for reader in soak.readers)
        print(
            f"{hits} of {pages} pages verified, {soak.writer.counts.hits} written, "
            f"{soak.came_and_went} clients came and went, {soak.died} died, "
            f"{soak.babbled} strangers\n{before}\n{after}"
        )
        assert hits > 100 * SOAK_S
        for node, was, now in zip(soak.nodes, before.nodes, after.nodes, strict=True):
            assert_not_grown(was, now, NODE_GROWTH_MAX_BYTES, node.ready["node"])
            assert '"error"' not in node.said()
        assert_not_grown(before.own, after.own, OWN_GROWTH_MAX_BYTES, "clients")
