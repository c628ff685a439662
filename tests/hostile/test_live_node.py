"""A live node under fire: garbage on every port, while others are served."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable

import attrs
import pytest

from peercache.fabric.tcp import wire as tcp_wire
from peercache.wire.envelope import MESSAGES
from peercache.wire.messages.pool import Clear, Remove
from tests.hostile.garbage import any_message, conversation, enveloped, hello, mutated, noise
from tests.hostile.strangers import (
    MIB,
    Bystander,
    Caller,
    Vitals,
    metric,
    one_node,
    ports_of,
    received,
)
from tests.pace import wait_until
from tests.system.nodes import NodeProcess

PORTS = ("control", "home", "data", "http")
DESCRIPTORS_SPARE = 8
"""What a node may have open beyond before: a link or a timer of nng's."""

HARMLESS = tuple(kind for kind in MESSAGES if kind not in (Clear, Remove))
"""All but what rightly takes the bystander's pages away."""


@attrs.define
class Fire:
    """Garbage of one seed against one node; counts what it has sent."""

    node: NodeProcess
    cluster: str
    rng: random.Random
    connections: int = 0
    messages: int = 0

    def connect_and_babble(self, port: str) -> None:
        """Connect, say something wrong, and hang up: politely, rudely, or after the answer."""
        self.connections += 1
        with contextlib.suppress(OSError), ports_of(self.node)[port]() as connection:
            end = self.rng.random()
            if end < 0.4:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(conversation(self.rng))
            if end > 0.95:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1.0)
                received(connection, 4096)

    def say_to_nng(self, port: str, count: int, body: Callable[[], bytes]) -> None:
        """Say things over one connection that nng takes for messages."""
        self.connections += 1
        self.messages += count
        with contextlib.suppress(OSError), Caller.at(self.node, port) as caller:
            for at in range(0, count, 50):
                frames = [caller.framed(body()) for _ in range(min(50, count - at))]
                caller.connection.sendall(b"".join(frames))
                _empty(caller.connection)

    def as_stranger(self) -> bytes:
        """Return noise, or a real message with something wrong, of an unknown sender."""
        if self.rng.random() < 0.3:
            return noise(self.rng)
        message = any_message(self.rng)
        return mutated(enveloped(message, cluster=self.cluster, sender=99), self.rng)

    def as_reader(self) -> bytes:
        """Return a message that a reader may send, with fields that make no sense."""
        message = any_message(self.rng, HARMLESS)
        target = self.rng.choice((0, int(self.node.ready["node"], 16), 5))
        return enveloped(message, cluster=self.cluster, sender=99, target=target)

    def ask_for_pages(self, count: int) -> None:
        """Ask the data port for pages that do not exist, each time over a new connection."""
        incarnation = int(self.node.ready["node"], 16)
        greeting = tcp_wire.encode_greeting(
            tcp_wire.greet(cluster=self.cluster, granule=16384, incarnation=incarnation)
        )
        for _ in range(count):
            self.connections += 1
            self.messages += 1
            head = struct.pack(
                "<4sIQQ", b"PCtr", self.rng.choice((0, 1, 4096, 4097, 2**32 - 1)), incarnation,
                self.rng.choice((0, 1, 2**33, 2**63)),
            )  # fmt: skip
            with contextlib.suppress(OSError), ports_of(self.node)["data"]() as connection:
                connection.sendall(
                    mutated(greeting, self.rng) if self.rng.random() < 0.2 else greeting
                )
                connection.sendall(mutated(head + noise(self.rng), self.rng))


def _empty(connection: socket.socket) -> None:
    """Read what came back, so that no answer is held up for us."""
    connection.settimeout(None)  # With a timeout Python would wait, whatever the flag requests.
    with contextlib.suppress(BlockingIOError):
        while connection.recv(2**16, socket.MSG_DONTWAIT):
            pass


def barrage(fire: Fire, *, connections: int, messages: int) -> None:
    """Fire so many connections and messages, spread over all ports and kinds."""
    for index in range(connections):
        fire.connect_and_babble(PORTS[index % len(PORTS)])
    size = 500
    for index in range(messages // size):
        port = ("control", "home")[index % 2]
        if index % 4 < 2:
            fire.say_to_nng(port, size, fire.as_stranger)
        else:
            greeted = [enveloped(hello(fire.cluster), cluster=fire.cluster, sender=99)]
            fire.say_to_nng(
                port, size, lambda greeted=greeted: greeted.pop() if greeted else fire.as_reader()
            )
    fire.ask_for_pages(messages // 100)


def assert_well(node: NodeProcess) -> None:
    """Assert that a node lives, and knows of no bug of its own."""
    assert node.process.poll() is None
    said = node.said()
    assert '"error"' not in said, said[-4000:]
    assert "Traceback" not in said, said[-4000:]


@pytest.mark.parametrize(
    ("connections", "messages"),
    [
        pytest.param(1200, 4000, id="short"),
        pytest.param(24_000, 80_000, id="long", marks=pytest.mark.slow),
    ],
)
def test_a_node_under_fire_serves_others_and_stays_as_it_was(
    connections: int, messages: int
) -> None:
    """Garbage on all ports: no hit is lost, memory, threads and descriptors are as before."""
    seed = random.SystemRandom().randrange(2**32)
    with one_node() as (cluster, node):
        fire = Fire(node, cluster.name, random.Random(seed))
        with Bystander(cluster, node) as bystander:
            barrage(fire, connections=connections // 10, messages=messages // 10)
            before = Vitals.of(node)
            started = time.monotonic()

            barrage(fire, connections=connections, messages=messages)

            took_s = time.monotonic() - started
            wait_until(
                lambda: Vitals.of(node).descriptors <= before.descriptors + DESCRIPTORS_SPARE
            )
            after = Vitals.of(node)
            print(
                f"seed {seed}: {fire.connections} connections, {fire.messages} messages, "
                f"{(connections + messages) / took_s:.0f}/s; {bystander.reads} reads, the longest "
                f"{bystander.longest_s:.2f} s; {before} -> {after}"
            )
        assert_well(node)
        assert after.threads <= before.threads + 1
        assert after.rss_bytes < before.rss_bytes + 48 * MIB
        dropped = metric(node, "peercache_messages_dropped")
        refused = metric(node, "peercache_tcp_refused")
        print(dropped, refused)
        assert dropped["malformed"] > messages // 20
        assert dropped["stranger"] > 0
        assert dropped["not_allowed"] > messages // 50
        assert refused["malformed"] > 0
