"""Several hosts: each node says where the others reach it, whatever it knows first."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from peercache import Client
from tests.pace import TIMEOUT_S, assert_within, wait_until
from tests.system.net.hosts import Host, hosts
from tests.system.nodes import CALL_S, NodeProcess, keys_of, pages_of

PORT = 31998
TRIAL = "trial"

READER = """
import json, sys
import numpy as np
from peercache import Client
home, keys = sys.argv[1], sys.argv[2:]
with Client.open(cluster="trial", home=home, fabric="tcp", op_timeout_s=20.0) as client:
    buffers = [np.zeros(131072, np.uint8) for _ in keys]
    hits = client.batch_get(keys, buffers)
print(json.dumps([[hit, bytes(buffer[:8]).hex()] for hit, buffer in zip(hits, buffers)]))
"""


class Trial:
    """Nodes of one trial, each on a host of its own."""

    def __init__(self, folder: str) -> None:
        """Start with no node."""
        self.folder = folder
        self.nodes: list[NodeProcess] = []

    def start(self, host: Host, *flags: str, listen: str = f":{PORT}") -> NodeProcess:
        """Start a node on a host; it listens on every interface."""
        node = NodeProcess(
            ["--insecure", TRIAL, "--listen", listen, "--pool-size", "16MiB", "--metrics-port", "0",
             "--home", f"ipc://{self.folder}/{host.name}.ipc", "--log-format", "json", *flags],
            before=host.command(),
        )  # fmt: skip
        self.nodes.append(node)
        return node

    def client(self, node: NodeProcess) -> Client:
        """Return a client at a node: an ipc socket is reached from every namespace."""
        return Client.open(
            cluster=TRIAL, home=node.ready["home"], op_timeout_s=CALL_S, exists_timeout_s=CALL_S
        )

    def alive(self, node: NodeProcess) -> int:
        """Return how many members a node knows."""
        with self.client(node) as client:
            return int(client.stats().get("home_members_alive", 0))

    def wait_for_each_other(self) -> None:
        """Wait until each node knows every other."""
        for node in self.nodes:
            wait_until(lambda node=node: self.alive(node) == len(self.nodes))


@contextmanager
def trial() -> Iterator[Trial]:
    with tempfile.TemporaryDirectory(prefix="pc-") as folder:
        made = Trial(folder)
        try:
            yield made
        except BaseException:
            for node in made.nodes:
                sys.stderr.write(f"--- {node.flags}\n{node.said()}\n")
            raise
        finally:
            for node in made.nodes:
                node.end()


def told(node: NodeProcess, event: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def read_on(host: Host, home: str, keys: Sequence[str]) -> list[tuple[bool, str]]:
    """Read pages over tcp from a process on a host."""
    done = subprocess.run(
        [*host.command(), sys.executable, "-c", READER, home, *keys],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return [(hit, start) for hit, start in json.loads(done.stdout)]


def assert_page_travels(trial: Trial, places: Sequence[Host]) -> None:
    """A page set at the last host is read, over tcp, on every other."""
    keys = keys_of("travels", 4)
    with trial.client(trial.nodes[-1]) as client:
        assert client.batch_set(keys, pages_of(keys)) == [True] * 4
    wanted = [(True, bytes(page[:8]).hex()) for page in pages_of(keys)]
    for host, node in zip(places[:-1], trial.nodes[:-1], strict=True):
        wait_until(lambda h=host, n=node: read_on(h, n.ready["home"], keys) == wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_three_hosts_without_a_default_route_form_one_cluster(family: str) -> None:
    """None advertises loopback; control and data travel, over IPv4 or IPv6."""
    with hosts(3) as places, trial() as cluster:
        if family == "ipv6":
            for host in places:
                host.unplug(host.ipv4)
        head = places[0].ipv4 if family == "ipv4" else f"[{places[0].ipv6}]"
        cluster.start(places[0])
        for host in places[1:]:
            cluster.start(host, "--discovery-addr", f"{head}:{PORT}")

        cluster.wait_for_each_other()

        for host, node in zip(places, cluster.nodes, strict=True):
            own = host.ipv4 if family == "ipv4" else f"[{host.ipv6}]"
            assert node.ready["control"] == f"{own}:{PORT}"
            assert node.ready["data"].startswith(f"{own}:")
        assert_page_travels(cluster, places)


@pytest.mark.slow
def test_a_name_that_resolves_late_is_followed_and_delays_no_start() -> None:
    """The resolver is dead at first: each node starts alone within seconds, and joins later."""
    with hosts(3) as places, trial() as cluster:
        for host in places:
            began = time.monotonic()
            cluster.start(host, "--discovery-addr", f"head-1:{PORT},head-2:{PORT}")
            # Four lookups of ten seconds each, one after the other, were forty.
            assert_within(time.monotonic() - began, 30.0)
            assert cluster.alive(cluster.nodes[-1]) == 1

        for host in places:
            host.knows({"head-1": places[0].ipv4, "head-2": places[1].ipv4})

        cluster.wait_for_each_other()
        assert_page_travels(cluster, places)


@pytest.mark.slow
def test_a_node_follows_the_address_at_which_it_is_reached() -> None:
    """Its route leads elsewhere: a head with two networks hears of the one that the others use."""
    with hosts(2) as places, trial() as cluster:
        head = places[0]
        subprocess.run(
            f"ip -n {head.name} link add name other0 type bridge && "
            f"ip -n {head.name} address add 10.88.0.1/24 dev other0 && "
            f"ip -n {head.name} link set other0 up && "
            f"ip -n {head.name} route add default via 10.88.0.2",
            shell=True, check=True,
        )  # fmt: skip
        first = cluster.start(head)
        assert first.ready["control"] == f"10.88.0.1:{PORT}"

        cluster.start(places[1], "--discovery-addr", f"{head.ipv4}:{PORT}")

        cluster.wait_for_each_other()
        wait_until(lambda: told(first, "node.address_changed") != [])
        assert told(first, "node.address_changed")[-1]["control"] == f"{head.ipv4}:{PORT}"
        assert_page_travels(cluster, places)


ASK = """
import sys, urllib.request as u
try: r = u.urlopen(sys.argv[1])
except u.HTTPError as e: r = e
print(r.status, r.read().decode())
"""


def asked_on(host: Host, node: NodeProcess, path: str = "/healthz") -> tuple[int, str]:
    """Return status and text of a page of a node, asked for on its host."""
    done = subprocess.run(
        [*host.command(), sys.executable, "-c", ASK, f"http://{node.ready['http']}{path}"],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    status, _, text = done.stdout.partition(" ")
    return int(status), text


@pytest.mark.slow
def test_a_node_that_no_peer_reaches_says_so() -> None:
    """Its advertised address is wrong: health is not 200, and names the setting."""
    with hosts(2) as places, trial() as cluster:
        cluster.start(places[0])
        lost = cluster.start(
            places[1], "--discovery-addr", f"{places[0].ipv4}:{PORT}",
            "--advertise", "10.77.0.200", "--metrics-port", "31997",
        )  # fmt: skip

        wait_until(lambda: told(lost, "node.not_reached") != [])

        status, text = asked_on(places[1], lost)
        assert status == 503
        assert "set advertise" in text
        assert f"10.77.0.200:{PORT}" in text
        # The page shows what was sampled last, some seconds ago.
        wait_until(lambda: "set advertise" in asked_on(places[1], lost, "/")[1])
        assert cluster.alive(cluster.nodes[0]) == 1


def test_a_node_that_every_peer_refuses_says_so() -> None:
    """Its cluster has another name: health is not 200, and tells the peers' reason."""
    with hosts(2) as places, trial() as cluster:
        cluster.start(places[0])
        other = cluster.start(
            places[1], "--insecure", "other", "--metrics-port", "31997",
            "--discovery-addr", f"{places[0].ipv4}:{PORT}",
        )  # fmt: skip

        wait_until(lambda: told(other, "node.not_reached") != [])

        status, text = asked_on(places[1], other)
        assert status == 503
        assert "refuses this one" in text
        assert "cluster" in text
