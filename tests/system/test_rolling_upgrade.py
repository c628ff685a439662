"""A rolling upgrade under load: five nodes of the build before, each replaced by this one."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.pace import wait_until
from tests.system.load import Load, Read
from tests.system.nodes import LocalCluster, NodeProcess
from tests.system.previous import BuildClient, build_client, make_previous_build

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("previous")]

NODES = 5
PAGES = 24
POOL = "16MiB"
"""Of a node: room for ten times its own pages."""

HIT_RATE = 0.9

SETTLED = 1500
"""Pages that are read between two nodes: some seconds. An operator takes longer."""


def test_a_rolling_upgrade_from_the_build_before_keeps_the_hit_rate(tmp_path: Path) -> None:
    """Stop a node, start this build on its disk, next: engines of the build before read all along.

    By SIGTERM, without a drain, after its pages have gone to disk.
    """
    previous = make_previous_build(tmp_path / "previous")
    with LocalCluster() as cluster, contextlib.ExitStack() as stack:

        def start(place: int, python: str, seed: NodeProcess | None) -> NodeProcess:
            flags = ["--disk-enabled", "true", "--disk-path", str(tmp_path / str(place))]
            flags += ["--disk-size", POOL]
            if seed is not None:
                flags += ["--discovery-addr", seed.ready["control"]]
            return cluster.start(f"n{place}", pool=POOL, flags=flags, python=python)

        nodes = [start(0, previous, None)]
        nodes += [start(place, previous, nodes[0]) for place in range(1, NODES)]
        clients = [
            stack.enter_context(
                build_client(previous, cluster.name, node.ready["home"], tmp_path / f"log-{place}")
            )
            for place, node in enumerate(nodes)
        ]

        def sees_all(client: BuildClient) -> bool:
            return bool(client.ask(do="stats").get("home_members_alive") == NODES)

        keys: list[str] = []
        for place, client in enumerate(clients):
            wait_until(partial(sees_all, client))
            own = [f"of {place}/{number}" for number in range(PAGES)]
            assert client.ask(do="set", keys=own) == [True] * PAGES
            keys += own

        def reads(client: BuildClient) -> Read:
            return lambda asked: list(client.ask(do="get", keys=list(asked)))

        readers = [reads(client) for client in clients]
        with Load(readers, keys) as load:
            for place in range(NODES):
                assert nodes[place].terminate() == 0
                nodes[place] = start(place, sys.executable, nodes[(place + 1) % NODES])
                with build_client(
                    sys.executable, cluster.name, nodes[place].ready["home"], tmp_path / "look"
                ) as look:
                    # As an operator does: the next one when all is well, with the disk's pages.
                    wait_until(partial(sees_all, look))
                    wait_until(lambda look=look: all(look.ask(do="exists", keys=keys)))  # type: ignore[misc]

                settled = load.asked + SETTLED
                wait_until(lambda settled=settled: load.asked >= settled)  # type: ignore[misc]

        assert load.failed is None
        assert load.wrong == 0
        assert load.hit_rate >= HIT_RATE, f"{load.hits} of {load.asked}"
        print(f"hit rate {load.hit_rate:.4f} of {load.asked} reads")
