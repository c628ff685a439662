"""A rolling upgrade under load: each of five nodes is drained, and started again on its disk."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from peercache import Client
from peercache.wire.messages.draining import DrainNode
from tests.system.nodes import (
    LocalCluster,
    NodeProcess,
    empty,
    keys_of,
    page_of,
    pages_of,
    wait_until,
)
from tests.system.test_draining import ended, operating, told

pytestmark = pytest.mark.slow

NODES = 5
PAGES = 24
POOL = "16MiB"
"""Of a node: room for five times its own pages."""

HIT_RATE = 0.9
BATCH = 8


class Load:
    """A reader at each node, that reads what all have stored, over and over."""

    def __init__(self, clients: list[Client], keys: list[str]) -> None:
        self.clients, self.keys = clients, keys
        self.asked = self.hits = 0
        self.wrong: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        rng = random.Random(1)
        while not self._is_over.wait(0.01):
            keys = rng.sample(self.keys, BATCH)
            buffers = empty(BATCH)
            hits = rng.choice(self.clients).batch_get(keys, buffers)
            self.asked += BATCH
            self.hits += sum(hits)
            self.wrong += [
                key
                for key, buffer, hit in zip(keys, buffers, hits, strict=True)
                if hit and bytes(buffer) != bytes(page_of(key))
            ]


def test_a_rolling_upgrade_keeps_the_hit_rate(tmp_path: Path) -> None:
    """Drain, start again, next: most reads hit all the time, and none has a wrong byte."""
    with LocalCluster() as cluster:

        def start(place: int, seed: NodeProcess | None) -> NodeProcess:
            flags = ["--disk-enabled", "true", "--disk-path", str(tmp_path / str(place))]
            flags += ["--disk-size", POOL]
            if seed is not None:
                flags += ["--discovery-addr", seed.ready["control"]]
            return cluster.start(f"n{place}", pool=POOL, flags=flags)

        nodes = [start(0, None)]
        nodes += [start(place, nodes[0]) for place in range(1, NODES)]
        clients = [cluster.client(node) for node in nodes]
        for client in clients:
            wait_until(lambda c=client: c.stats().get("home_members_alive") == NODES)
        keys: list[str] = []
        for place, client in enumerate(clients):
            own = keys_of(f"of {place}", PAGES)
            assert client.batch_set(own, pages_of(own)) == [True] * PAGES
            keys += own

        with Load(clients, keys) as load:
            for place in range(NODES):
                with operating(cluster, nodes[place]) as operator:
                    told(operator, DrainNode(1, 30.0))
                assert ended(nodes[place]) == 0
                nodes[place] = start(place, nodes[(place + 1) % NODES])
                home = clients[place]
                wait_until(lambda c=home: c.stats().get("home_members_alive") == NODES)

        assert load.wrong == []
        assert load.asked > 50 * BATCH
        assert load.hits / load.asked >= HIT_RATE, f"{load.hits} of {load.asked}"
        print(f"hit rate {load.hits / load.asked:.4f} of {load.asked} reads")
