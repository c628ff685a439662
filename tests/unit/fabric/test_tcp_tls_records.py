"""TLS records as no library of ours sends them: in parts, of one byte, and without data."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from peercache.fabric.tcp import tls, wire
from peercache.fabric.tcp.client import Scatter
from peercache.fabric.tcp.sockets import Line
from peercache.fabric.tcp.tls import TlsContext
from peercache.model.seal import SEAL_BYTES
from peercache.observability import reasons
from peercache.observability.reasons import REFUSED
from tests.contracts.fabric_suite import GRANULE, Owner
from tests.contracts.fakes import PlainMemory
from tests.pace import FACTOR, PROMPT_S, TIMEOUT_S
from tests.unit.fabric.forged_records import HANDSHAKE, KEY_UPDATE, TICKET, Side
from tests.unit.fabric.scripted_peer import peer_that
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

WATCHED_S = FACTOR
"""A slow machine needs a part of it for what comes before."""
REQUEST = wire.encode_request(*np.array([[0], [4], [2]], np.uint64), incarnation())
"""For the first page of a server."""
ANSWER_BYTES = wire.ANSWER_BYTES + 4 + SEAL_BYTES
RECORD_BYTES = 2**14
IN_A_ROW_MAX = 64
"""Records and messages without data that a peer accepts, as in _tls.c."""
KEY_UPDATES_MAX = IN_A_ROW_MAX // 2
"""Each is a record and a message."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster.of(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def memory() -> PlainMemory:
    """Memory with one page, b"page" under generation 2."""
    plain = PlainMemory.of(GRANULE, GRANULE)
    Owner(plain).store(0, b"page", 2)
    return plain


@pytest.fixture
def server(memory: PlainMemory, cluster: Cluster) -> Iterator[PageServer]:
    """Its server, of one thread."""
    running = serve(memory, cluster.node(), threads=1)
    yield running
    running.close()


@contextlib.contextmanager
def admitted(server: PageServer, cluster: Cluster) -> Iterator[Side]:
    """Connect as a client, and be accepted."""
    with connect(server) as connection:
        side = Side(connection, openssl_client(cluster.client_files()))
        side.send(greeting_of())
        assert wire.decode_answer(side.receive(wire.ANSWER_BYTES)) == ""
        yield side


# --- records that are not whole -------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 3, 5, 20], ids=["type", "head", "whole-head", "body"])
def test_a_record_that_is_not_whole_costs_no_processor_time_and_is_answered_in_the_end(
    server: PageServer, cluster: Cluster, cut: int
) -> None:
    """Its first bytes are in the session, and nothing can be done with them."""
    with admitted(server, cluster) as client:
        request = client.forger.record(REQUEST)
        client.connection.sendall(request[:cut])

        before = time.process_time()
        # Nothing to wait for: what must not happen is that a thread is busy.
        time.sleep(WATCHED_S)
        busy_s = time.process_time() - before
        client.connection.sendall(request[cut:])
        answer = client.receive(wire.ANSWER_BYTES + 4)

    assert answer.endswith(b"page")
    assert busy_s < WATCHED_S / 4


# --- records without data -------------------------------------------------------------------------


def test_key_updates_without_data_end_their_connection(
    server: PageServer, cluster: Cluster
) -> None:
    """A key costs the serving thread more than the record costs its sender."""
    with admitted(server, cluster) as client:
        client.connection.settimeout(PROMPT_S)
        updates = [client.forger.key_update() for _ in range(KEY_UPDATES_MAX + 1)]
        client.connection.sendall(b"".join(updates))

        assert client.receive(1) == b""


def test_key_update_before_each_request_is_honest(server: PageServer, cluster: Cluster) -> None:
    """Data in between start the count again, also after nearly too many."""
    with admitted(server, cluster) as client:
        for count in [1] * (2 * KEY_UPDATES_MAX) + [KEY_UPDATES_MAX - 1] * 2:
            updates = [client.forger.key_update() for _ in range(count)]
            client.connection.sendall(b"".join(updates) + client.forger.record(REQUEST))
            answer = client.receive(ANSWER_BYTES)
            assert answer[wire.ANSWER_BYTES : wire.ANSWER_BYTES + 4] == b"page"


def test_request_in_records_of_one_byte_leaves_others_their_turn(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """A reader whose request comes later is answered first."""
    sends, may_send = threading.Semaphore(0), threading.Semaphore(0)

    def before_send() -> None:
        sends.release()
        may_send.acquire()

    server = serve(memory, cluster.node(), threads=1, before_send=before_send)
    pages = np.array([[0], [4], [2]], np.uint64).repeat(50, axis=1)
    with (
        admitted(server, cluster) as first,
        admitted(server, cluster) as slow,
        admitted(server, cluster) as honest,
    ):
        # Both requests arrive while the thread is busy.
        first.send(REQUEST)
        sends.acquire()
        said = wire.encode_request(*pages, incarnation())
        slow.connection.sendall(b"".join(slow.forger.record(bytes([each])) for each in said))
        honest.send(REQUEST)
        # A response has two parts, the page and its seal.
        may_send.release(4)
        honest.connection.settimeout(PROMPT_S)
        try:
            answer = honest.receive(ANSWER_BYTES)
        finally:
            may_send.release(1000)
        later = slow.receive(wire.ANSWER_BYTES + 50 * (4 + SEAL_BYTES))
    server.close()

    assert answer.count(b"page") == 1
    assert later.count(b"page") == 50


async def test_bytes_of_a_client_that_is_not_admitted_leave_the_loop_its_turns(
    cluster: Cluster,
) -> None:
    """Each in a record of its own."""
    with sessions(cluster) as (near, far):
        line = Line(near[0], near[1])
        for _ in range(200):
            assert far[1].send_at_once(b"-")
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            with trio.fail_after(TIMEOUT_S):
                assert await line.receive(bytearray(200))
            nursery.cancel_scope.cancel()

    assert turns >= 100


# --- new keys -------------------------------------------------------------------------------------


def counting(context: ssl.SSLContext) -> list[int]:
    """Return where the context counts the new keys of the other side."""
    seen: list[int] = []

    def notice(*message: Any) -> None:
        direction, kind = message[1], message[4]
        if direction == "read" and kind == KEY_UPDATE[0]:
            seen.append(kind)

    # Python documents no other way to see the messages of TLS.
    context._msg_callback = notice  # type: ignore[attr-defined]
    return seen


def test_server_replaces_its_key_after_a_number_of_records(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AES-GCM protects a limited number with one key, and OpenSSL does not count them."""
    monkeypatch.setattr(tls, "KEY_RECORDS_MAX", 4)
    size = 40 * RECORD_BYTES
    memory = PlainMemory.of(size, GRANULE)
    page = np.random.default_rng(0).bytes(size)
    Owner(memory).store(0, page, 2)
    context = openssl_client(cluster.client_files())
    seen = counting(context)
    with closing(serve(memory, cluster.node())) as server, connect(server) as connection:
        side = Side(connection, context)
        said = wire.encode_request(*np.array([[0], [size], [2]], np.uint64), incarnation())
        side.send(greeting_of())
        side.send(said)
        answer = side.receive(2 * wire.ANSWER_BYTES + size + SEAL_BYTES)

    assert answer[2 * wire.ANSWER_BYTES :].startswith(page)
    assert len(seen) in {10, 11}


def test_reader_replaces_its_key_after_a_number_of_records(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is a record."""
    monkeypatch.setattr(tls, "KEY_RECORDS_MAX", 4)
    context = server_context(cluster)
    seen = counting(context)

    def script(connection: socket.socket) -> None:
        side = Side(connection, context, is_server=True)
        side.receive(len(greeting_of()))
        side.session.write(wire.encode_answer(""))
        side.flush()
        while side.receive(len(REQUEST)):
            side.session.write(answer_with_page())
            side.flush()

    with peer_that(script) as peer, closing(fabric_with(cluster.client())) as fabric:
        page, into = one_page(attrs.make_class("At", ["address"])(peer.member.data))
        for _ in range(40):
            into.memory[:] = 0
            assert fabric.read(page, time.monotonic() + TIMEOUT_S).failure == ""
            assert into.page(0) == b"page"
        fabric.forget(page.member.incarnation)

    assert len(seen) == 10


def test_new_key_for_each_record_is_honest_on_both_sides(
    memory: PlainMemory, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of records without data is for those in a row."""
    monkeypatch.setattr(tls, "KEY_RECORDS_MAX", 1)
    with (
        closing(serve(memory, cluster.node())) as server,
        closing(fabric_with(cluster.client())) as fabric,
    ):
        page, into = one_page(server)
        got = [fabric.read(page, time.monotonic() + TIMEOUT_S).failure for _ in range(200)]

    assert got == [""] * 200
    assert into.page(0) == b"page"


# --- what a server sends to a reader --------------------------------------------------------------


@contextlib.contextmanager
def sessions(
    cluster: Cluster,
) -> Iterator[list[tuple[socket.socket, Any]]]:
    """Yield a server's and a client's end of one connection, and their sessions."""
    ends = socket.socketpair()
    contexts = (
        TlsContext(cluster.node().files, is_server=True),
        TlsContext(cluster.client().files, is_server=False),
    )
    with ends[0], ends[1]:
        made = []
        for end, context in zip(ends, contexts, strict=True):
            end.setblocking(False)
            made.append(context.open(end))
        done = 0
        while done < 2:
            done = [made[1].step(), made[0].step()].count(True)
        yield list(zip(ends, made, strict=True))
        for session in made:
            session.close()


def test_reader_keeps_its_deadline_with_a_server_that_sends_single_bytes(cluster: Cluster) -> None:
    """What has arrived is not read to its end."""
    into = np.zeros(100, np.uint8)
    with sessions(cluster) as (near, far):
        for _ in into:
            assert near[1].send_at_once(b"-")
        plan = Scatter(np.array([into.ctypes.data], np.uint64), np.array([100], np.uint64))

        late = plan.receive(far[0].fileno(), far[1], left_s=0.0)
        rest = plan.receive(far[0].fileno(), far[1], left_s=TIMEOUT_S)

    assert (late, rest) == (1, 99)
    assert into.tobytes() == b"-" * 100


def key_updates(side: Side) -> bytes:
    """Return too many of them."""
    return b"".join(side.forger.key_update() for _ in range(KEY_UPDATES_MAX + 1))


def tickets(side: Side) -> bytes:
    """Return too many of them, in one record."""
    return side.forger.record(TICKET * IN_A_ROW_MAX, HANDSHAKE)


@pytest.mark.parametrize("flood", [key_updates, tickets])
def test_server_that_sends_messages_without_end_is_not_read(
    cluster: Cluster, flood: Callable[[Side], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """The read ends long before its deadline, and the log names the reason."""
    done = threading.Event()
    context = server_context(cluster)
    context.num_tickets = 0

    def script(connection: socket.socket) -> None:
        side = Side(connection, context, is_server=True)
        side.receive(len(greeting_of()))
        connection.sendall(flood(side))
        done.wait()

    with caplog.at_level(logging.WARNING), peer_that(script) as peer:
        got, _ = read(peer.member.data, cluster)
        done.set()

    assert got == REFUSED
    assert reasons.BROKEN_TLS in caplog.text


def test_server_with_tickets_is_read(cluster: Cluster) -> None:
    """They come before its first answer."""
    context = server_context(cluster)
    context.num_tickets = 8

    def script(connection: socket.socket) -> None:
        side = Side(connection, context, is_server=True)
        side.receive(len(greeting_of()))
        side.session.write(wire.encode_answer("") + answer_with_page())
        side.flush()
        connection.recv(65536)

    with peer_that(script) as peer:
        got, page = read(peer.member.data, cluster)

    assert (got, page) == ("", b"page")


def answer_with_page() -> bytes:
    """Return the response to REQUEST."""
    return wire.encode_status("") + b"page" + b"\x02" + bytes(SEAL_BYTES - 1)


def server_context(cluster: Cluster) -> ssl.SSLContext:
    """Return a server with the certificate of node "one", in Python's ssl."""
    settings = cluster.node_files()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings["tls_cert"], settings["tls_key"])
    return context


def read(address: str, cluster: Cluster) -> tuple[str, bytes]:
    """Read the first page of the node at an address; return the failure and the page."""
    page, into = one_page(attrs.make_class("At", ["address"])(address))
    with closing(fabric_with(cluster.client())) as fabric:
        return fabric.read(page, time.monotonic() + TIMEOUT_S).failure, into.page(0)
