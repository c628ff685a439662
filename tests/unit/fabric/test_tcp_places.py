"""Places at the data port: one certificate leaves three quarters of them to all others."""

from __future__ import annotations

import contextlib
from pathlib import Path

from peercache.fabric.tcp import wire
from tests.contracts.fakes import PlainMemory
from tests.pace import wait_until
from tests.unit.fabric.secured import Cluster, incarnation, serve
from tests.unit.fabric.test_tcp_tls import GRANULE, connect, openssl_client

PLACES = 16


def test_one_certificate_has_a_quarter_of_the_places(tmp_path: Path) -> None:
    """It is refused one more, and gets it when one of its own has gone; others are let in."""
    cluster = Cluster.of(tmp_path)
    greeting = wire.encode_greeting(
        wire.greet(cluster="tests", granule=GRANULE, incarnation=incarnation())
    )
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
