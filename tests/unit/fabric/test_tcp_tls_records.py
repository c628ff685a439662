"""TLS records that come in parts, as after a lost packet: waiting for the rest costs nothing."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.fabric.tcp import wire
from tests.contracts.fabric_suite import GRANULE, Owner
from tests.contracts.fakes import PlainMemory
from tests.pace import FACTOR
from tests.unit.fabric.secured import (
    Cluster,
    connect,
    greeting_of,
    incarnation,
    openssl_client,
    serve,
)
from tests.unit.fabric.serving import PageServer

WATCHED_S = FACTOR
"""A slow machine needs a part of it for what comes before."""


class Records:
    """A client that has the records of what it sends, to send them as it likes."""

    def __init__(self, server: PageServer, settings: dict[str, str]) -> None:
        self.connection: socket.socket = connect(server)
        self._into, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = openssl_client(settings).wrap_bio(self._into, self._out)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.connection.sendall(self._out.read())
                self._into.write(self.connection.recv(65536))
        self.connection.sendall(self._out.read())

    def of(self, said: bytes) -> bytes:
        """Return the records that say this."""
        self._tls.write(said)
        return self._out.read()

    def receive(self, count: int) -> bytes:
        """Return so many bytes of the server's."""
        got = b""
        while len(got) < count:
            with contextlib.suppress(ssl.SSLWantReadError):
                got += self._tls.read(count - len(got))
                continue
            received = self.connection.recv(65536)
            assert received, "the server has hung up"
            self._into.write(received)
        return got


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[PageServer, dict[str, str]]]:
    """A server with one page, b"page" under generation 2, and a client's certificate."""
    cluster = Cluster.of(tmp_path)
    memory = PlainMemory.of(GRANULE, GRANULE)
    Owner(memory).store(0, b"page", 2)
    running = serve(memory, cluster.node(), threads=1)
    yield running, cluster.client_files()
    running.close()


@pytest.mark.parametrize("cut", [1, 3, 5, 20], ids=["type", "head", "whole-head", "body"])
def test_a_record_that_is_not_whole_costs_no_processor_time_and_is_answered_in_the_end(
    server: tuple[PageServer, dict[str, str]], cut: int
) -> None:
    """Its first bytes are in the session, and nothing can be done with them."""
    running, settings = server
    client = Records(running, settings)
    client.connection.sendall(client.of(greeting_of()))
    client.receive(wire.ANSWER_BYTES)
    request = client.of(wire.encode_request(*np.array([[0], [4], [2]], np.uint64), incarnation()))
    client.connection.sendall(request[:cut])

    before = time.process_time()
    # Nothing to wait for: what must not happen is that a thread is busy.
    time.sleep(WATCHED_S)
    busy_s = time.process_time() - before
    client.connection.sendall(request[cut:])
    answer = client.receive(wire.ANSWER_BYTES + 4)
    client.connection.close()

    assert answer.endswith(b"page")
    assert busy_s < WATCHED_S / 4
