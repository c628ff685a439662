"""What one certificate may have of the data port: places, requests and unsent responses."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from peercache.fabric.tcp import server as tcp_server
from peercache.fabric.tcp import wire
from tests.contracts.fabric_suite import GRANULE, Owner
from tests.contracts.fakes import PlainMemory
from tests.pace import LOOK_S, PROMPT_S, TIMEOUT_S, assert_within, paced, wait_until
from tests.unit.fabric.secured import (
    Cluster,
    connect,
    fabric_with,
    greeting_of,
    incarnation,
    one_page,
    openssl_client,
    serve,
)
from tests.unit.fabric.serving import PageServer

MEMORY_BYTES = 16 * 2**20
HELD_BYTES = 5 * 2**20
"""Room for some responses with TLS, of which one certificate has two."""

PAGES = 9
"""Whole memories that a reader asks for who then does not receive: no socket takes them."""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.of(tmp_path)


@pytest.fixture
def server(cluster: Cluster) -> Iterator[PageServer]:
    """A server of one thread with one page that fills its memory."""
    memory = PlainMemory.of(MEMORY_BYTES, GRANULE)
    Owner(memory).store(0, b"page", 2)
    memory.seals["length"][0] = MEMORY_BYTES
    running = serve(memory, cluster.node(), threads=1, held_bytes_max=HELD_BYTES)
    yield running
    running.close()


def stuck(server: PageServer, context: ssl.SSLContext) -> socket.socket:
    """Return a connection that has asked for much more than it receives."""
    connection = context.wrap_socket(
        socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S),
        server_hostname="peercache",
    )
    whole = np.array([[0] * PAGES, [MEMORY_BYTES] * PAGES, [2] * PAGES], np.uint64)
    connection.sendall(greeting_of())
    connection.sendall(wire.encode_request(*whole, incarnation()))
    return connection


def served_of(connections: Sequence[socket.socket], at_least: int) -> list[bool]:
    """Return which have received bytes of a response: so many, or more within 0.2 s."""
    got = [0] * len(connections)

    def are_served() -> bool:
        for at, connection in enumerate(connections):
            connection.settimeout(LOOK_S)
            with contextlib.suppress(TimeoutError):
                if got[at] <= wire.ANSWER_BYTES:
                    got[at] += len(connection.recv(wire.ANSWER_BYTES + 1 - got[at]))
        return sum(size > wire.ANSWER_BYTES for size in got) >= at_least

    wait_until(are_served)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        are_served()
    return [size > wire.ANSWER_BYTES for size in got]


def read(server: PageServer, cluster: Cluster, name: str) -> str:
    """Read four bytes of the page with a certificate; return the failure."""
    page, _ = one_page(server)
    with contextlib.closing(fabric_with(cluster.client(name))) as fabric:
        return fabric.read(page, time.monotonic() + TIMEOUT_S).failure


def test_readers_of_one_certificate_that_do_not_receive_hold_their_share(
    server: PageServer, cluster: Cluster
) -> None:
    """The others of that certificate wait for their turn, and no other certificate does."""
    context = openssl_client(cluster.client_files("slow"))
    with ExitStack() as stack:
        slow = [stack.enter_context(stuck(server, context)) for _ in range(8)]
        served = served_of(slow, at_least=2)
        assert served.count(True) == 2

        begun = time.monotonic()
        assert read(server, cluster, "other") == ""
        assert_within(time.monotonic() - begun, PROMPT_S)

        # What ends makes room for one that waits.
        slow[served.index(True)].close()
        waiting = [each for each, has_begun in zip(slow, served, strict=True) if not has_begun]
        served_of(waiting, at_least=1)


def test_all_certificates_together_hold_no_more_than_there_is(
    server: PageServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that waits for room has it when those that do not receive have been hung up on."""
    contexts = [openssl_client(cluster.client_files(f"slow-{n}")) for n in range(5)]

    def waiting(pace_s: float) -> int:
        monkeypatch.setattr(tcp_server, "SEND_STALL_S", pace_s)
        with ExitStack() as stack:
            slow = [stack.enter_context(stuck(server, each)) for each in contexts for _ in range(2)]
            served = served_of(slow, at_least=4)
            wait_until(lambda: server.connections() == 0)
            assert read(server, cluster, "other") == ""
            return served.count(False)

    # Where looking took longer than a stall, the first ones have been hung up on meanwhile.
    assert paced(waiting, kept_up=bool)


PLACES = 16


def test_one_certificate_has_a_quarter_of_the_places(cluster: Cluster) -> None:
    """It is refused one more, and gets it when one of its own has gone; others are let in."""
    greeting = greeting_of()
    memory = PlainMemory.of(GRANULE, GRANULE)
    server = serve(memory, cluster.node(), connections_max=PLACES)
    greedy = openssl_client(cluster.client_files("greedy"))
    with contextlib.ExitStack() as stack:

        def answer(context: object = greedy) -> str:
            connection = stack.enter_context(context.wrap_socket(connect(server)))  # type: ignore[attr-defined]
            held.append(connection)
            connection.sendall(greeting)
            return wire.decode_answer(connection.recv(wire.ANSWER_BYTES))

        held: list[object] = []
        admitted = [answer() for _ in range(PLACES // 4)]
        refused = answer()
        other = answer(openssl_client(cluster.client_files("modest")))
        held[0].close()  # type: ignore[attr-defined]
        wait_until(lambda: answer() == "")

    server.close()

    assert admitted == [""] * (PLACES // 4)
    assert refused == wire.BUSY
    assert other == ""
