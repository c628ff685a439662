"""The build before and this one in one cluster: in every pairing, and upgraded node by node."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.pace import TIMEOUT_S, wait_until
from tests.system.load import Load, Read
from tests.system.nodes import LocalCluster, NodeProcess
from tests.system.previous import BuildClient, build_client, make_previous_build

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("previous")]

PAGES = 24
ROOM_FOR_ALL = "32MiB"

REFUSED = "6204e9fcad99e1811bc2b6657da59cbcf7c25a1d"
"""A build of wire version 3, data port 2, segment layout 2."""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of the build before."""
    return make_previous_build(tmp_path_factory.mktemp("previous"))


@contextlib.contextmanager
def mixed(
    previous: str, order: str, folder: Path
) -> Iterator[tuple[LocalCluster, dict[str, BuildClient]]]:
    """Run a cluster, its nodes in this order (o: the build before, n: this one), with clients.

    Each node has a client of each build, named by its build and its node's place.
    """
    pythons = {"o": previous, "n": sys.executable}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster())
        for build in order:
            cluster.start(pool=ROOM_FOR_ALL, python=pythons[build])
        clients = {}
        for place, node in enumerate(cluster.nodes):
            for build, python in pythons.items():
                name = f"{build}{place}"
                clients[name] = stack.enter_context(
                    build_client(python, cluster.name, node.ready["home"], folder / name)
                )
        for client in clients.values():
            wait_until(
                lambda client=client: client.ask(do="stats").get("home_members_alive") == len(order)
            )
        yield cluster, clients


def keys_by(name: str) -> list[str]:
    """Return the keys that a client stores."""
    return [f"{name}/{number}" for number in range(PAGES)]


def complaints(node: NodeProcess) -> list[str]:
    """Return the warnings and errors of a node's log."""
    lines = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    assert lines, "the node logs nothing"
    return [
        line["event"]
        for line in lines
        if line["level"] in ("warning", "error", "critical")
        and line["event"] != "node.started_insecure"
    ]


@pytest.mark.parametrize("order", ["on", "no"], ids=["the older node first", "the newer one first"])
def test_what_one_build_stores_the_other_reads(previous: str, order: str, tmp_path: Path) -> None:
    """Four clients, two of each build at nodes of each build: each reads what all have stored."""
    with mixed(previous, order, tmp_path) as (cluster, clients):
        for name, client in clients.items():
            assert client.ask(do="set", keys=keys_by(name)) == [True] * PAGES, name
        for name in clients:
            for reader, client in clients.items():
                found = client.ask(do="exists", keys=keys_by(name))
                assert found == [True] * PAGES, f"{reader} does not find what {name} stored"
                got = client.ask(do="get", keys=keys_by(name))
                assert got == [True] * PAGES, f"{reader} does not read what {name} stored"

        # A removal goes through the home node to every member, whatever its build.
        for name, client in clients.items():
            assert client.ask(do="remove", keys=keys_by(name)) == PAGES, name
        for name in clients:
            for reader, client in clients.items():
                got = client.ask(do="get", keys=keys_by(name))
                assert got == [False] * PAGES, f"{reader} reads what {name} removed"

        assert [complaints(node) for node in cluster.nodes] == [[], []]
        said = {name: client.said() for name, client in clients.items()}
        assert [name for name, log in said.items() if "error" in log.lower()] == [], said


def test_a_build_whose_tags_have_32_bits_of_a_name_is_refused(tmp_path: Path) -> None:
    """As a member and as a client; neither build reads what the other has stored."""
    older = make_previous_build(tmp_path / "older", REFUSED)
    with LocalCluster() as cluster, contextlib.ExitStack() as stack:

        def client_of(python: str, node: NodeProcess, name: str) -> BuildClient:
            home, log = node.ready["home"], tmp_path / name
            return stack.enter_context(build_client(python, cluster.name, home, log))

        node, old = cluster.start(), cluster.start(python=older)
        own, others = client_of(sys.executable, node, "own"), client_of(older, old, "others")
        for client, name in ((own, "new"), (others, "old")):
            assert client.ask(do="set", keys=keys_by(name)) == [True] * PAGES
        for client, name in ((own, "old"), (others, "new")):
            assert client.ask(do="get", keys=keys_by(name)) == [False] * PAGES
            assert client.ask(do="stats")["home_members_alive"] == 1
        assert "node.peer_refused" in complaints(node)
        stranger = client_of(older, node, "stranger")
        assert stranger.process.wait(TIMEOUT_S) == 1
        assert "upgrade the older side" in stranger.said()


NODES = 5
UPGRADED_POOL = "16MiB"
"""Of a node: room for ten times its own pages."""

HIT_RATE = 0.9

SETTLED = 1500
"""Pages that are read between two nodes: some seconds. An operator takes longer."""


def test_a_rolling_upgrade_keeps_the_hit_rate(previous: str, tmp_path: Path) -> None:
    """Stop a node, start this build on its disk, next: engines of the build before read all along.

    By SIGTERM, without a drain, after its pages have gone to disk.
    """
    with LocalCluster() as cluster, contextlib.ExitStack() as stack:

        def start(place: int, python: str, seed: NodeProcess | None) -> NodeProcess:
            flags = ["--disk-enabled", "true", "--disk-path", str(tmp_path / str(place))]
            flags += ["--disk-size", UPGRADED_POOL]
            if seed is not None:
                flags += ["--discovery-addr", seed.ready["control"]]
            return cluster.start(f"n{place}", pool=UPGRADED_POOL, flags=flags, python=python)

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
