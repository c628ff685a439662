"""Another user of the host, without certificates: at every port, from every address of the host.

A process may connect to 127.0.0.1 from any address of its host, and the network of the host may
even let another host reach 127.0.0.1. The tests make hosts for this, in network namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import pytest

from peercache.fabric.tcp import wire
from peercache.net.sockets import PAIR1_GREETING
from peercache.wire.codec import decode
from peercache.wire.messages.session import Refused, Welcome
from tests.hostile.garbage import enveloped, hello
from tests.hostile.strangers import Caller
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import NodeProcess
from tests.system.separate_hosts import (
    Host,
    ip,
    members_at,
    open_client,
    separate_hosts,
    skip_reason,
)
from tests.system.test_users import NODE

CLUSTER = "users"
STRANGER = 65_534

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made")

SAY = """
import encodings.idna, os, socket, sys
uid, source, at, said, first, framed = int(sys.argv[1]), *sys.argv[2:5], *map(int, sys.argv[5:])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
host, _, port = at.rpartition(":")

def take(size):
    taken = b""
    while len(taken) < size and (heard := connection.recv(size - len(taken))):
        taken += heard
    return taken

with socket.socket() as connection:
    connection.settimeout(20)
    connection.bind((source, 0))
    connection.connect((host, int(port)))
    connection.sendall(bytes.fromhex(said))
    heard = take(first)
    if framed:
        heard = take(int.from_bytes(take(8), "big"))
    print(heard.hex())
"""
"""Sends bytes as a user, from an address; prints the first bytes of the answer, or the message of
nng that follows them."""


@contextmanager
def node_on(host: Host, *flags: str, uid: int = 0) -> Iterator[NodeProcess]:
    """Run a node on a host, as a user."""
    with tempfile.TemporaryDirectory(prefix="pc-") as folder:
        os.chown(folder, uid, uid)
        host.path("/dev/shm").chmod(0o1777)
        before = host.wrapped([sys.executable, "-c", NODE, str(uid)])
        node = NodeProcess(
            ["--cluster", CLUSTER, "--home", f"ipc://{folder}/n.ipc", "--pool-size", "16MiB",
             "--metrics-port=-1", "--log-format", "json", "--listen", "127.0.0.1:0", *flags],
            before=before,
        )  # fmt: skip
        try:
            yield node
        finally:
            sys.stderr.write(node.said())
            node.end()


@attrs.frozen
class Question:
    """What a process sends to one of a node's ports, and how it learns that it was admitted.

    first: how many bytes of the answer it reads. is_framed: then a message of nng.
    """

    sent: Callable[[NodeProcess], bytes]
    is_admitted: Callable[[bytes], bool]
    first: int
    is_framed: bool = False


def greeting_of_data(node: NodeProcess) -> bytes:
    """Return what a reader sends to the data port."""
    incarnation = int(node.ready["node"], 16)
    return wire.encode_greeting(wire.greet(cluster=CLUSTER, granule=16384, incarnation=incarnation))


def hello_of_control(_: NodeProcess) -> bytes:
    """Return what a reader sends to the control port."""
    claim = enveloped(hello(CLUSTER), cluster=CLUSTER, sender=5)
    return PAIR1_GREETING + Caller(None, is_local=False).framed(claim)  # type: ignore[arg-type]


def is_welcome(heard: bytes) -> bool:
    """Return whether a node has answered a Hello with a Welcome."""
    # After nng's count of hops.
    answer = decode(heard[4:], cluster=CLUSTER).message
    assert isinstance(answer, (Welcome, Refused)), answer
    assert isinstance(answer, Welcome) or answer.reason == "owner"
    return isinstance(answer, Welcome)


def status_of_http(node: NodeProcess) -> bytes:
    """Return what a browser sends for the node's state."""
    return f"GET /api/v1/status HTTP/1.0\r\nHost: {node.ready['http']}\r\n\r\n".encode()


QUESTIONS = {
    "data": Question(
        greeting_of_data, lambda heard: wire.decode_answer(heard) == "", wire.ANSWER_BYTES
    ),
    "control": Question(hello_of_control, is_welcome, len(PAIR1_GREETING), is_framed=True),
    "http": Question(status_of_http, lambda heard: heard.endswith(b" 200"), len("HTTP/1.1 200")),
}


def is_admitted(host: Host, node: NodeProcess, port: str, *, uid: int, source: str) -> bool:
    """Return whether a process of a user, at an address of a host, is admitted at 127.0.0.1."""
    question = QUESTIONS[port]
    command = [sys.executable, "-c", SAY, str(uid), source, node.ready[port],
               question.sent(node).hex(), str(question.first),
               str(int(question.is_framed))]  # fmt: skip
    done = subprocess.run(
        host.wrapped(command), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert not done.returncode, done.stderr
    return question.is_admitted(bytes.fromhex(done.stdout))


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with separate_hosts("host-a") as ((host,), _):
        yield host


@pytest.mark.parametrize("port", QUESTIONS)
def test_another_user_is_a_stranger_from_every_address_of_the_host(host: Host, port: str) -> None:
    """And the node's own user is not."""
    with node_on(host) as node:
        admitted = {
            (uid, source): is_admitted(host, node, port, uid=uid, source=source)
            for uid in (0, STRANGER)
            for source in ("127.0.0.1", "127.8.9.1", host.address)
        }

    assert {uid for (uid, _), is_in in admitted.items() if is_in} == {0}
    assert sum(admitted.values()) == 3


@pytest.mark.parametrize("port", QUESTIONS)
def test_a_user_that_shares_the_host_is_admitted_from_its_address(host: Host, port: str) -> None:
    with node_on(host, "--share-uids", str(STRANGER)) as node:
        assert is_admitted(host, node, port, uid=STRANGER, source=host.address)


def test_a_node_of_another_user_does_not_join(host: Host) -> None:
    """It connects from the host's address, and listens there: a trial admits it, no other does."""
    ip(f"-n {host.namespace} route replace local 127.0.0.0/8 dev lo table local src {host.address}")
    try:
        for flags, members in ((["--insecure", "--share-uids", str(STRANGER)], 2), ([], 1)):
            with node_on(host, *flags) as node, node_on(
                # The page's templates may lie where this user cannot read.
                host, "--insecure", "--listen", f"{host.address}:0", "--metrics-port=0",
                "--discovery", node.ready["control"], uid=STRANGER,
            ) as stranger:  # fmt: skip
                insecure = "--insecure" in flags
                client = open_client(
                    host, cluster=CLUSTER, home=node.ready["home"], insecure=insecure
                )
                if members == 1:
                    wait_until(lambda: "share_uids = 65534" in stranger.said())
                members_at(client, members)
    finally:
        ip(f"-n {host.namespace} route replace local 127.0.0.0/8 dev lo table local src 127.0.0.1")


@pytest.mark.parametrize("port", QUESTIONS)
def test_another_host_that_route_localnet_lets_in_is_refused(port: str) -> None:
    """Its process has the uid of the node's user, but on another host: that proves nothing."""
    with separate_hosts("host-a", "host-b") as ((a, b), _):
        for each in (a, b):
            switch = "echo 1 > /proc/sys/net/ipv4/conf/eth0/route_localnet"
            assert not each.run(switch).returncode
        ip(f"-n {b.namespace} addr del 127.0.0.1/8 dev lo")
        ip(f"-n {b.namespace} route add 127.0.0.1 via {a.address} dev eth0 src {b.address}")
        with node_on(a) as node:
            assert is_admitted(a, node, port, uid=0, source=a.address)
            assert not is_admitted(b, node, port, uid=0, source=b.address)
