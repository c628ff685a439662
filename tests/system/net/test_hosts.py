"""Several hosts: each node announces where the others reach it, whatever it knows first."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.pace import TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import NodeProcess
from tests.system.separate_hosts import (
    Host,
    Talker,
    members_at,
    open_client,
    separate_hosts,
    skip_reason,
)

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made")

PORT = 31998
TRIAL = "trial"
HOME = "ipc:///run/peercache/home.ipc"
PAGES = 4
DEAD_RESOLVER = "nameserver 10.97.0.99\noptions timeout:5 attempts:2\n"
"""A server that never answers: each name costs the resolver of the system ten seconds."""


class Trial:
    """Nodes of one trial, each on a host of its own, and a client at each."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        """Start with no node, on hosts that know no name."""
        self.nodes: list[NodeProcess] = []
        self._clients: list[Talker] = []
        self._homes: list[tuple[Host, str]] = []
        for host in hosts:
            host.knows({})
            host.path("/etc/resolv.conf").write_text(DEAD_RESOLVER)

    def start(self, host: Host, *flags: str, listen: str = f":{PORT}") -> NodeProcess:
        """Start a node on a host; it listens on every interface."""
        node = NodeProcess(
            ["--insecure", "--cluster", TRIAL, "--listen", listen, "--pool-size", "16MiB",
             "--metrics-port", "0", "--home", HOME, "--log-format", "json", *flags],
            before=host.wrapped([]),
        )  # fmt: skip
        self.nodes.append(node)
        said = flags[flags.index("--cluster") + 1] if "--cluster" in flags else TRIAL
        self._homes.append((host, said))
        return node

    @property
    def clients(self) -> list[Talker]:
        """A client at each node, opened when first asked for: that is not the node's start."""
        for host, said in self._homes[len(self._clients) :]:
            self._clients.append(open_client(host, home=HOME, cluster=said, insecure=True))
        return self._clients

    def wait_for_each_other(self) -> None:
        """Wait until each node knows every other."""
        for client in self.clients:
            members_at(client, len(self.nodes))

    def assert_page_travels(self) -> None:
        """A page set at the last host is read, over tcp, on every other."""
        *others, last = self.clients
        assert last.ask("set", "travels", PAGES) == PAGES
        for client in others:
            wait_until(lambda client=client: client.ask("get", "travels", PAGES) == PAGES)


@contextmanager
def trial(count: int) -> Iterator[tuple[Trial, list[Host]]]:
    """Give hosts without a default route, and a trial that ends with the block."""
    with separate_hosts(*(f"host-{number}" for number in range(count))) as (hosts, _):
        made = Trial(hosts)
        try:
            yield made, hosts
        except BaseException:
            for node in made.nodes:
                sys.stderr.write(f"--- {node.flags}\n{node.said()}\n")
            raise
        finally:
            for node in made.nodes:
                node.end()


def ip(line: str) -> None:
    """Change the network of a host."""
    subprocess.run(["ip", *shlex.split(line)], check=True, capture_output=True)


def reported(node: NodeProcess, event: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_three_hosts_without_a_default_route_form_one_cluster(family: str) -> None:
    """None advertises loopback; control and data travel, over IPv4 or IPv6."""
    with trial(3) as (cluster, places):
        if family == "ipv6":
            for host in places:
                ip(f"-n {host.namespace} address del {host.address}/24 dev eth0")
        head = places[0].address if family == "ipv4" else f"[{places[0].ipv6}]"
        cluster.start(places[0])
        for host in places[1:]:
            cluster.start(host, "--discovery-addr", f"{head}:{PORT}")

        cluster.wait_for_each_other()

        for host, node in zip(places, cluster.nodes, strict=True):
            own = host.address if family == "ipv4" else f"[{host.ipv6}]"
            assert node.ready["control"] == f"{own}:{PORT}"
            assert node.ready["data"].startswith(f"{own}:")
        cluster.assert_page_travels()


@pytest.mark.slow
def test_a_name_that_resolves_late_is_followed_and_delays_no_start() -> None:
    """The resolver is dead at first: each node starts alone within seconds, and joins later."""
    with trial(3) as (cluster, places):
        for host in places:
            began = time.monotonic()
            cluster.start(host, "--discovery-addr", f"head-1:{PORT},head-2:{PORT}")
            # Four lookups of ten seconds each, one after the other, were forty.
            assert_within(time.monotonic() - began, 30.0)
            members_at(cluster.clients[-1], 1)

        for host in places:
            host.knows({"head-1": places[0].address, "head-2": places[1].address})

        cluster.wait_for_each_other()
        cluster.assert_page_travels()


@pytest.mark.slow
def test_a_node_follows_the_address_at_which_it_is_reached() -> None:
    """Its route leads elsewhere: a head with two networks learns of the one that the others use."""
    with trial(2) as (cluster, places):
        head = places[0]
        ip(f"-n {head.namespace} link add name other0 type bridge")
        ip(f"-n {head.namespace} address add 10.88.0.1/24 dev other0")
        ip(f"-n {head.namespace} link set other0 up")
        ip(f"-n {head.namespace} route add default via 10.88.0.2")
        first = cluster.start(head)
        assert first.ready["control"] == f"10.88.0.1:{PORT}"

        cluster.start(places[1], "--discovery-addr", f"{head.address}:{PORT}")

        cluster.wait_for_each_other()
        wait_until(lambda: reported(first, "node.address_changed") != [])
        assert reported(first, "node.address_changed")[-1]["control"] == f"{head.address}:{PORT}"
        cluster.assert_page_travels()


ASK = """
import sys, urllib.request as u
try: r = u.urlopen(sys.argv[1])
except u.HTTPError as e: r = e
print(r.status, r.read().decode())
"""


def asked_on(host: Host, node: NodeProcess, path: str = "/healthz") -> tuple[int, str]:
    """Return status and text of a page of a node, asked for on its host."""
    done = subprocess.run(
        host.wrapped([sys.executable, "-c", ASK, f"http://{node.ready['http']}{path}"]),
        check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    status, _, text = done.stdout.partition(" ")
    return int(status), text


@pytest.mark.slow
def test_a_node_that_no_peer_reaches_reports_it() -> None:
    """Its advertised address is wrong: health is not 200, and names the setting."""
    with trial(2) as (cluster, places):
        cluster.start(places[0])
        lost = cluster.start(
            places[1], "--discovery-addr", f"{places[0].address}:{PORT}",
            "--advertise", "10.97.0.200", "--metrics-port", "31997",
        )  # fmt: skip

        wait_until(lambda: reported(lost, "node.not_reached") != [])

        status, text = asked_on(places[1], lost)
        assert status == 503
        assert "set advertise" in text
        assert f"10.97.0.200:{PORT}" in text
        # The page shows what was sampled last, some seconds ago.
        wait_until(lambda: "set advertise" in asked_on(places[1], lost, "/")[1])
        members_at(cluster.clients[0], 1)


def test_a_node_that_every_peer_refuses_reports_it() -> None:
    """Its cluster has another name: health is not 200, and notifies the peers' reason."""
    with trial(2) as (cluster, places):
        cluster.start(places[0])
        other = cluster.start(
            places[1], "--cluster", "other", "--metrics-port", "31997",
            "--discovery-addr", f"{places[0].address}:{PORT}",
        )  # fmt: skip

        wait_until(lambda: reported(other, "node.not_reached") != [])

        status, text = asked_on(places[1], other)
        assert status == 503
        assert "refuses this one" in text
        assert "cluster" in text
