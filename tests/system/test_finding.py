"""Nodes that find each other by a real etcd and a real DNS server, which die and come back."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trustme

from tests.pace import wait_until
from tests.system import separate_hosts
from tests.system.nodes import (
    LocalCluster,
    NodeProcess,
    flags_of,
    free_port,
    keys_of,
    pages_of,
    pause,
    read,
)

pytestmark = pytest.mark.slow

PREFIX = "peercache/nodes"
NAME = "nodes.peercache.test"


@attrs.define(eq=False)
class Etcd:
    """One etcd on loopback; its data outlive its process."""

    folder: Path
    port: str
    peer_port: str
    process: subprocess.Popen[bytes] | None = None
    tls: dict[str, str] = attrs.field(factory=dict)
    """Where it wants certificates: the files of a client, as settings."""

    def start(self, *flags: str) -> None:
        client = f"{self.scheme}://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        self.process = subprocess.Popen(
            ["etcd", "--data-dir", str(self.folder), "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self.answers)

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def answers(self) -> bool:
        try:
            self.values()
        except OSError:
            return False
        return True

    def values(self) -> set[str]:
        """Return what is written below the prefix."""
        begin, end = (base64.b64encode(f"{PREFIX}{c}".encode()).decode() for c in "/0")
        body = json.dumps({"key": begin, "range_end": end}).encode()
        url = f"{self.scheme}://127.0.0.1:{self.port}/v3/kv/range"
        context = None
        if self.tls:
            context = ssl.create_default_context(cafile=self.tls["etcd_ca"])
            context.load_cert_chain(self.tls["etcd_cert"], self.tls["etcd_key"])
        with urllib.request.urlopen(url, data=body, timeout=5, context=context) as answer:
            rows = json.load(answer).get("kvs", [])
        return {base64.b64decode(row["value"]).decode() for row in rows}

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        pause(self.process)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_etcd(*flags: str, tls: dict[str, str] | None = None) -> Iterator[Etcd]:
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd: apt-get install etcd-server")
    with tempfile.TemporaryDirectory() as folder:
        server = Etcd(Path(folder), free_port(), free_port(), tls=tls or {})
        try:
            server.start(*flags)
            yield server
        finally:
            if server.process is not None:
                server.kill()


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    with running_etcd() as server:
        yield server


def test_cluster_that_etcd_brings_together_needs_it_no_more(etcd: Etcd) -> None:
    """Killed, started again, cut off: the cluster serves, and newcomers come when it is back."""
    with LocalCluster() as cluster:
        source = f"etcd://127.0.0.1:{etcd.port}/{PREFIX}"

        def start() -> NodeProcess:
            return cluster.start(flags=["--insecure", "--discovery-addr", source])

        nodes = [start() for _ in range(3)]
        for node in nodes:
            cluster.wait_for_members(node, 3)
        assert etcd.values() == {node.ready["control"] for node in nodes}

        etcd.kill()
        wait_until(lambda: all("discovery.source_failed" in node.said() for node in nodes))
        pages_go_round(cluster, nodes, "dead")
        nodes.append(start())
        wait_until(lambda: "discovery.source_failed" in nodes[3].said())
        cluster.wait_for_members(nodes[3], 1)
        etcd.start()
        for node in nodes:
            cluster.wait_for_members(node, 4)

        etcd.pause()
        nodes.append(start())
        wait_until(lambda: "does not answer within" in nodes[4].said())
        pages_go_round(cluster, nodes[:4], "cut")
        for node in nodes[:4]:
            cluster.wait_for_members(node, 4)
        etcd.resume()
        for node in nodes:
            cluster.wait_for_members(node, 5)

        assert nodes[0].terminate() == 0
        wait_until(lambda: etcd.values() == {node.ready["control"] for node in nodes[1:]})


def certificate_of(authority: trustme.CA, name: str, folder: Path) -> tuple[str, str]:
    """Issue a certificate for 127.0.0.1; return its file and that of its key."""
    issued = authority.issue_cert("127.0.0.1")
    files = folder / f"{name}.crt", folder / f"{name}.key"
    issued.cert_chain_pems[0].write_to_path(str(files[0]))
    files[1].touch(mode=0o600)
    issued.private_key_pem.write_to_path(str(files[1]))
    return str(files[0]), str(files[1])


def test_etcd_that_wants_certificates_brings_nodes_together(tmp_path: Path) -> None:
    """Over TLS, with a certificate of the node's; without one, and by a foreign etcd, by none."""
    authority = trustme.CA()
    ca = str(tmp_path / "ca.crt")
    authority.cert_pem.write_to_path(ca)
    certificate, key = certificate_of(authority, "node", tmp_path)
    server_cert, server_key = certificate_of(authority, "server", tmp_path)
    known = {"etcd_ca": ca, "etcd_cert": certificate, "etcd_key": key}
    foreign = str(tmp_path / "foreign.crt")
    trustme.CA().cert_pem.write_to_path(foreign)
    flags = ["--cert-file", server_cert, "--key-file", server_key,
             "--client-cert-auth", "--trusted-ca-file", ca]  # fmt: skip
    with LocalCluster() as cluster, running_etcd(*flags, tls=known) as etcd:
        source = f"etcds://127.0.0.1:{etcd.port}/{PREFIX}"

        def start(**files: str) -> NodeProcess:
            where = ["--insecure", "--cluster", cluster.name, "--discovery-addr", source]
            return cluster.start(flags=[*where, *flags_of(files)])

        nodes = [start(**known), start(**known)]
        for node in nodes:
            cluster.wait_for_members(node, 2)
        assert etcd.values() == {node.ready["control"] for node in nodes}

        unknown, deceived = start(etcd_ca=ca), start(**{**known, "etcd_ca": foreign})
        wait_until(lambda: "discovery.source_failed" in unknown.said())
        wait_until(lambda: "certificate verify failed" in deceived.said())
        for node in (unknown, deceived):
            cluster.wait_for_members(node, 1)
        assert etcd.values() == {node.ready["control"] for node in nodes}


def pages_go_round(cluster: LocalCluster, nodes: list[NodeProcess], name: str) -> None:
    """Store pages at the first node, and read them at the last."""
    keys = keys_of(name, 8)
    with cluster.client(nodes[0]) as writer, cluster.client(nodes[-1]) as reader:
        assert all(writer.batch_set(keys, pages_of(keys)))
        wait_until(lambda: all(read(reader, keys)))
    cluster.clients = []


def members_on(host: separate_hosts.Host, ready: dict[str, str]) -> int:
    """Return how many live members the node of a host counts."""
    asked = f"import urllib.request as u; print(u.urlopen('http://{ready['http']}/healthz').read())"
    said = host.run(shlex.join([sys.executable, "-c", asked])).stdout
    marked = said.partition('"members_alive": ')[2] or said.partition('"members_alive":')[2]
    return int(marked.partition(",")[0] or 0)


def test_nodes_behind_one_name_find_each_other(tmp_path: Path) -> None:
    """A records come, go, and the DNS server dies: a newcomer is found, and the others stay."""
    reason = separate_hosts.skip_reason()
    if reason:
        pytest.skip(reason)
    if shutil.which("dnsmasq") is None:
        pytest.skip("there is no dnsmasq: apt-get install dnsmasq-base")
    with separate_hosts.separate_hosts("a", "b", "c", "d") as (hosts, _):
        *nodes, names = hosts
        records = names.path("/etc/peercache/records")
        for host in hosts:
            host.path("/etc/resolv.conf").write_text(f"nameserver {names.address}\n")

        def publish(*published: separate_hosts.Host) -> None:
            records.write_text("".join(f"{host.address} {NAME}\n" for host in published))

        def serve_names() -> subprocess.Popen[str]:
            return names.start(
                "dnsmasq --keep-in-foreground --no-resolv --no-hosts --no-poll --user=root "
                "--conf-file=/dev/null --pid-file= --addn-hosts=/etc/peercache/records"
            )

        def start(host: separate_hosts.Host) -> dict[str, str]:
            flags = f"--insecure --pool-size 16MiB --log-format json --discovery dns://{NAME}"
            home = "--home ipc:///run/peercache/home.ipc"
            process = host.start(f"{sys.executable} -m peercache.node {flags} {home}")
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, host.said()
            return dict(json.loads(line))

        publish(nodes[0], nodes[1])
        server = serve_names()
        ready = [start(host) for host in nodes[:2]]
        for host, one in zip(nodes[:2], ready, strict=True):
            wait_until(lambda host=host, one=one: members_on(host, one) == 2)  # type: ignore[misc]

        server.kill()
        server.wait()
        ready.append(start(nodes[2]))
        wait_until(lambda: "does not resolve" in nodes[2].said())
        wait_until(lambda: "discovery.source_failed" in nodes[0].said())
        assert [members_on(host, one) for host, one in zip(nodes, ready, strict=True)] == [2, 2, 1]

        # Only another node's record: the newcomer's own has not come yet.
        publish(nodes[1])
        server = serve_names()
        for host, one in zip(nodes, ready, strict=True):
            wait_until(lambda host=host, one=one: members_on(host, one) == 3)  # type: ignore[misc]
