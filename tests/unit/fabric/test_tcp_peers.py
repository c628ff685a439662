"""The tcp fabric and peers that are broken, unknown, or other services."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.client import TcpChannel, TcpFabric
from peercache.fabric.tcp.names import Address, Names
from peercache.model.seal import ODD, SEAL_BYTES
from peercache.observability.reasons import DEADLINE, PEER_UNREACHABLE, REFUSED
from peercache.trust.sharing import Sharing
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, member_of
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within
from tests.unit.fabric.scripted_peer import accept, at, peer_that, read
from tests.unit.fabric.serving import PageServer, fabric_for


def test_address_without_a_server_is_unreachable_at_once(fabric: TcpFabric) -> None:
    """A refused connection is known in no time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    begun = time.monotonic()

    got = read(fabric, member_of(INCARNATION, data=f"127.0.0.1:{port}"), Destination.of([[1]]))

    assert got.failure == PEER_UNREACHABLE
    assert_within(time.monotonic() - begun, PROMPT_S)


@pytest.mark.parametrize(
    "data", ["", "nonsense", "host:", ":::1:2", "127.0.0.1:0", "1.2.3.4:99999"]
)
def test_address_that_is_none_is_unreachable(fabric: TcpFabric, data: str) -> None:
    """What a member reports of itself may be anything; a read of it ends as a miss."""
    got = read(fabric, member_of(INCARNATION, data=data), Destination.of([[1]]))

    assert got.failure == PEER_UNREACHABLE


def test_peer_named_by_a_host_name_is_read(server: PageServer, fabric: TcpFabric) -> None:
    """`advertise` may be a name; localhost may be ::1 first, without a listener."""
    member = member_of(INCARNATION, data=f"localhost:{server.port}")

    got = read(fabric, member, Destination.of([[1]]))

    assert got.failure == ""


@pytest.mark.parametrize("other", ["cluster", "granule"])
def test_server_of_another_kind_refuses(server: PageServer, other: str) -> None:
    """Another cluster or granule is a refusal, not an outage."""
    strange = {"cluster": "another", "granule": 2 * GRANULE}
    fabric = fabric_for(strange["granule"] if other == "granule" else GRANULE)  # type: ignore[arg-type]
    if other != "granule":
        fabric = fabric_for(GRANULE, **{other: strange[other]})

    got = read(fabric, at(server), Destination.of([[1]]))
    fabric.close()

    assert got.failure == REFUSED
    assert server.refusals(other) == 1


@pytest.mark.parametrize("shares", [True, False])
def test_port_that_another_user_has_taken_is_not_read(server: PageServer, shares: bool) -> None:
    """A member that has ended leaves its port to any process of the host. Each reader's request
    tells that process what it needs for a page that looks right.
    """
    uid = os.geteuid() if shares else os.geteuid() + 1
    fabric = fabric_for(GRANULE, sharing=Sharing(uid=uid, uids=frozenset({uid})))
    into = Destination.of([[100]])

    got = read(fabric, at(server), into)
    fabric.close()

    assert got.failure == ("" if shares else REFUSED)
    assert (into.page(0) == bytes(100)) is shares


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"PCt"])
def test_another_service_is_unreachable(fabric: TcpFabric, answer: bytes) -> None:
    """A port that was reused by another program is no peer."""
    with peer_that(lambda connection: connection.sendall(answer)) as peer:
        got = read(fabric, peer.member, Destination.of([[1]]))

    assert got.failure == PEER_UNREACHABLE


WHOLE = wire.encode_status("") + bytes(100) + bytes(SEAL_BYTES)
"""A response with one page of 100 bytes."""


@pytest.mark.parametrize(
    ("response", "pages", "failure"),
    [
        pytest.param(bytes(4096), 1, PEER_UNREACHABLE, id="what does not begin as a response"),
        *(
            pytest.param(WHOLE[:-missing], 1, PEER_UNREACHABLE, id=f"a seal without {missing}")
            for missing in (1, 7, 31, 32, 64)
        ),
        # Seals come after the bytes of all pages of a portion.
        pytest.param(wire.encode_status("") + bytes(199), 2, PEER_UNREACHABLE, id="half a portion"),
        # The peer is well, and serves what others ask for.
        pytest.param(wire.encode_status(wire.BOUNDS), 1, REFUSED, id="a refusal"),
    ],
)
def test_response_that_is_not_whole_leaves_no_even_value(
    fabric: TcpFabric, response: bytes, pages: int, failure: str
) -> None:
    """However long it is, and wherever the connection ends."""

    def respond(connection: socket.socket) -> None:
        accept(connection)
        if pages > 1:
            connection.recv((pages - 1) * wire.ENTRY_BYTES, socket.MSG_WAITALL)
        connection.sendall(response)

    with peer_that(respond) as peer:
        got = read(fabric, peer.member, Destination.of([[100]] * pages))

    assert got.failure == failure
    assert got.seals["word"].tolist() == [int(ODD)] * pages


def test_channel_that_stalled_within_a_response_is_closed() -> None:
    """What is left of the response would be read as the next one: any bytes, for any page."""
    received: list[bytes] = []

    def stall(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(wire.encode_status("") + bytes(50))
        received.append(connection.recv(1))

    fabric = fabric_for(GRANULE, stall_s=0.05)
    with peer_that(stall) as peer:
        got = [read(fabric, peer.member, Destination.of([[100]])) for _ in range(2)]

    assert [each.failure for each in got] == [PEER_UNREACHABLE] * 2
    assert received == [b"", b""]
    fabric.close()


def test_channel_ends_its_connection_though_a_forked_child_has_it() -> None:
    """The peer would keep a place for it until it has been idle for too long."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.dup():
        theirs.settimeout(TIMEOUT_S)

        TcpChannel(ours, stall_s=TIMEOUT_S, clock=time.monotonic).close()

        assert theirs.recv(1) == b""


def test_name_server_that_is_silent_costs_no_more_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeout for a connection may be longer than what is left of the call."""
    answers = threading.Event()

    def look_up(_host: str, _port: int, flags: int) -> list[Address]:
        if flags:
            raise OSError
        answers.wait(TIMEOUT_S)
        return []

    monkeypatch.setattr("peercache.fabric.tcp.client.Names", lambda: Names(look_up))
    fabric = fabric_for(GRANULE, connect_timeout_s=TIMEOUT_S)
    begun = time.monotonic()
    got = read(fabric, member_of(INCARNATION, data="name:1"), Destination.of([[1]]), timeout_s=0.05)
    took_s = time.monotonic() - begun
    answers.set()

    assert got.failure == DEADLINE
    assert_within(took_s, PROMPT_S)
    fabric.close()


@pytest.mark.parametrize("ending", ["closes", "resets"])
@pytest.mark.parametrize("answered", [1, 2])
def test_pages_of_answered_requests_stay_when_the_server_closes(
    fabric: TcpFabric, monkeypatch: pytest.MonkeyPatch, answered: int, ending: str
) -> None:
    """A read of three requests, of which some were answered: their pages count, and once.

    The channel was idle before, so a server that closes it at once would be asked again.
    """
    monkeypatch.setattr(wire, "COUNT_MAX", 1)
    word = (8).to_bytes(SEAL_BYTES, "little")
    response = wire.encode_status("") + bytes(100) + word

    def answer_some(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accept(connection)
        connection.sendall(response)
        for _ in range(answered):
            request = wire.REQUEST_BYTES + wire.ENTRY_BYTES
            assert len(connection.recv(request, socket.MSG_WAITALL)) == request
            connection.sendall(response)
        if ending == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))

    with peer_that(answer_some) as peer:
        first = read(fabric, peer.member, Destination.of([[100]]))
        got = read(fabric, peer.member, Destination.of([[100]] * 3))

    assert first.failure == ""
    assert got.failure == PEER_UNREACHABLE
    assert got.seals["word"].tolist() == [8] * answered + [int(ODD)] * (3 - answered)
    assert peer.accepted == 1


def test_answer_on_its_way_counts_when_the_next_request_cannot_be_sent(
    fabric: TcpFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answered, and was gone before the request ahead reached it."""
    monkeypatch.setattr(wire, "COUNT_MAX", 1)
    answered = threading.Event()
    send = TcpChannel._send
    sent: list[bytes] = []

    def send_when_the_server_is_gone(channel: TcpChannel, raw: bytes, until: float) -> str:
        if len(sent) == 2:  # The greeting and the first request.
            assert answered.wait(TIMEOUT_S)
        sent.append(raw)
        return send(channel, raw, until)

    monkeypatch.setattr(TcpChannel, "_send", send_when_the_server_is_gone)

    def answer_and_reset(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(wire.encode_status("") + bytes(100) + bytes(SEAL_BYTES))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        connection.close()
        answered.set()

    with peer_that(answer_and_reset) as peer:
        got = read(fabric, peer.member, Destination.of([[100]] * 2))

    assert got.failure == PEER_UNREACHABLE
    assert got.seals["word"].tolist() == [0, int(ODD)]


def test_request_that_a_deadline_interrupts_is_no_sign_of_an_unreachable_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watchdog ends a send that waits for room; the peer is only slow to take it."""
    monkeypatch.setattr(TcpChannel, "_wait_at_most", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        channel = TcpChannel(ours, stall_s=TIMEOUT_S, clock=time.monotonic)
        until = time.monotonic() + 0.1
        watchdog = threading.Timer(0.1, channel.interrupt)
        watchdog.start()

        failure = channel._send(bytes(2**22), until)
        watchdog.join()

    assert failure == DEADLINE
