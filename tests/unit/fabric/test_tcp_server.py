"""The page server against clients that are no clients of ours, and against its own clock."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from peercache.errors import AddressTaken
from peercache.fabric.tcp import server as tcp_server
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.sockets import open_listeners
from peercache.model.reads import PeerRead
from peercache.model.seal import SEAL_BYTES
from peercache.observability import reasons
from peercache.trust.sharing import Sharing
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, Owner, member_of
from tests.contracts.fakes import PlainMemory
from tests.examples import examples
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, wait_until
from tests.unit.fabric.serving import CLUSTER, PageServer, fabric_for

PAGE_MEMORY_BYTES = 16 * 2**20
STEP_BYTES_MAX = 2**20
"""What the server hands the kernel at a time, as in _serving.h."""

PLACES = 8

OFFSETS = st.integers(0, PAGE_MEMORY_BYTES // GRANULE).map(lambda granule: granule * GRANULE)
OFFSETS |= st.integers(0, 2**64 - 1)
LENGTHS = st.integers(0, 3 * GRANULE) | st.integers(0, 2**64 - 1)


@pytest.fixture
def memory() -> PlainMemory:
    """Page memory of committed slots; word i is 2 i + 2."""
    plain = PlainMemory.of(PAGE_MEMORY_BYTES, GRANULE)
    plain.seals["word"] = 2 * np.arange(len(plain.seals)) + 2
    plain.seals["length"] = len(plain.pages)
    return plain


def connect(server: PageServer, host: str = "127.0.0.1") -> socket.socket:
    """Connect without a greeting. host: the address to connect from."""
    return socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S, (host, 0))


def greeting(**other: object) -> bytes:
    """Return an honest greeting, or one that differs in what is named."""
    known = {
        "cluster": CLUSTER,
        "granule": GRANULE,
        "incarnation": INCARNATION,
    }
    return wire.encode_greeting(wire.greet(**{**known, **other}))  # type: ignore[arg-type]


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly so many bytes, or fewer if the server closes."""
    got = b""
    while len(got) < count and (piece := connection.recv(count - len(got))):
        got += piece
    return got


def greeted(server: PageServer, host: str) -> tuple[socket.socket, str]:
    """Connect from a host; return the connection, and why it was refused."""
    connection = connect(server, host)
    connection.sendall(greeting())
    return connection, wire.decode_answer(receive(connection, wire.ANSWER_BYTES))


def admitted(server: PageServer, host: str = "127.0.0.1") -> socket.socket:
    """Connect and be accepted."""
    connection, refused = greeted(server, host)
    assert refused == ""
    return connection


def serves(server: PageServer) -> bool:
    """Return whether an honest client reads a page."""
    fabric = fabric_for(GRANULE)
    member = member_of(INCARNATION, data=server.address)
    into = Destination.of([[10]])
    offsets = np.array([3 * GRANULE], np.uint64)
    got = fabric.read(
        PeerRead(member, offsets, into.lengths, into.runs, np.array([8], np.uint64)), deadline()
    )
    fabric.close()
    return got.seals["word"].tolist() == [8]


def deadline() -> float:
    """Return a time that no test should come to."""
    return time.monotonic() + TIMEOUT_S


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (greeting(cluster="another"), wire.CLUSTER),
        (greeting(granule=2 * GRANULE), wire.GRANULE),
        (greeting(incarnation=INCARNATION + 1), wire.INCARNATION),
        (greeting()[:4] + struct.pack("<H", 1) + greeting()[6:], wire.VERSION),
        (b"GET / HTTP/1.1\r\nHost: peercache\r\n\r\n", wire.MALFORMED),
    ],
)
def test_stranger_is_notified_of_why_and_counted(
    server: PageServer, said: bytes, reason: str
) -> None:
    """The answer names the reason, the connection ends, and honest clients are served on."""
    with connect(server) as stranger:
        stranger.sendall(said)
        answer = receive(stranger, wire.ANSWER_BYTES)
        stranger.shutdown(socket.SHUT_WR)
        rest = receive(stranger, 1)

    assert wire.decode_answer(answer) == reason
    assert rest == b""
    assert server.refusals(reason) == 1
    assert serves(server)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (struct.pack("<4sIQQ", b"PCtr", 2**32 - 1, INCARNATION, 1), wire.MALFORMED),
        (struct.pack("<4sIQQ", b"PCtr", 1, INCARNATION, 2**63), wire.BOUNDS),
        (struct.pack("<4sIQQ", b"PCtr", 1, INCARNATION + 1, 1), wire.INCARNATION),
        (struct.pack("<4sIQQ", b"PCtx", 1, INCARNATION, 1), wire.MALFORMED),
        (b"\xff" * wire.REQUEST_BYTES, wire.MALFORMED),
    ],
)
def test_request_is_refused_by_its_head_alone(server: PageServer, head: bytes, reason: str) -> None:
    """The refusal comes while none of the entries has been sent: nothing waits to buffer them."""
    with admitted(server) as client:
        client.sendall(head)
        answer = receive(client, wire.ANSWER_BYTES)

    assert wire.decode_status(answer) == reason
    assert server.refusals(reason) == 1
    assert serves(server)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    slots=st.lists(st.tuples(OFFSETS, LENGTHS), min_size=1, max_size=8),
    total=st.none() | st.integers(0, 2**64 - 1),
)
@example(slots=[(2**64 - GRANULE, GRANULE)], total=None)
@example(slots=[(2**64 - GRANULE, 2 * GRANULE)], total=None)
@example(slots=[(PAGE_MEMORY_BYTES, 1)], total=None)
@example(slots=[(PAGE_MEMORY_BYTES - GRANULE, GRANULE + 1)], total=None)
@example(slots=[(0, PAGE_MEMORY_BYTES + 1)], total=None)
@example(slots=[(0, 1), (0, 2**64 - 1)], total=0)
@example(slots=[(0, 0)], total=None)
@example(slots=[(1, 1)], total=None)
@example(slots=[(0, 2**63), (0, 2**63)], total=0)
@example(slots=[(0, 5)], total=6)
def test_slots_are_served_only_if_they_are_in_the_page_memory(
    server: PageServer, slots: list[tuple[int, int]], total: int | None
) -> None:
    """The C server accepts exactly what Python's unbounded numbers find inside."""
    said = sum(length for _, length in slots) % 2**64 if total is None else total
    inside = all(
        length > 0 and offset % GRANULE == 0 and offset + length <= PAGE_MEMORY_BYTES
        for offset, length in slots
    )
    honest = said == sum(length for _, length in slots)
    head = struct.pack("<4sIQQ", b"PCtr", len(slots), INCARNATION, said)

    with admitted(server) as client:
        client.sendall(head + b"".join(struct.pack("<QQQ", *slot, 2) for slot in slots))
        reason = wire.decode_status(receive(client, wire.ANSWER_BYTES))

    if inside and honest:
        assert reason == ""
    else:
        allowed = {wire.MALFORMED} if inside else {wire.BOUNDS}
        allowed |= {wire.BOUNDS} if said > wire.REQUEST_BYTES_MAX else set()
        assert reason in allowed


def test_refusal_reaches_a_client_that_sends_on(server: PageServer) -> None:
    """What the server did not read does not reset the connection before the reason is read."""
    count = wire.COUNT_MAX
    offsets = np.full(count, PAGE_MEMORY_BYTES, np.uint64)
    bad = wire.encode_request(offsets, np.ones(count, np.uint64), offsets, INCARNATION)
    with admitted(server) as client:
        client.sendall(bad + bad)
        answer = receive(client, wire.ANSWER_BYTES)

    assert wire.decode_status(answer) == wire.BOUNDS


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(garbage=st.binary(max_size=300), greeted=st.booleans())
def test_garbage_ends_its_own_connection_only(
    server: PageServer, garbage: bytes, greeted: bool
) -> None:
    """Whatever is sent, with or without a greeting before it, the server serves on."""
    client = admitted(server) if greeted else connect(server)
    with client, contextlib.suppress(OSError):
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        receive(client, 2**20)

    assert serves(server)


@pytest.mark.parametrize(
    ("limit", "is_greeted", "said"),
    [
        ("SILENCE_S", False, greeting()[:20]),
        (
            "REQUEST_S",
            True,
            wire.encode_request(*np.array([[0, 0], [1, 1], [1, 1]], np.uint64), INCARNATION)[:-1],
        ),
        ("IDLE_S", True, b""),
    ],
    ids=["half a greeting", "half a request", "nothing"],
)
def test_client_that_stops_is_hung_up_on(
    server: PageServer,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    *,
    is_greeted: bool,
    said: bytes,
) -> None:
    """In mid-greeting, in mid-request, and between two requests."""
    monkeypatch.setattr(tcp_server, limit, 0.05)
    with admitted(server) if is_greeted else connect(server) as client:
        client.sendall(said)
        assert receive(client, 1) == b""


def test_client_that_does_not_receive_is_hung_up_on(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused client holds neither a send nor a connection forever."""
    monkeypatch.setattr(tcp_server, "SEND_STALL_S", 0.05)
    count = 200
    lengths = np.full(count, 2**20, np.uint64)
    request = wire.encode_request(
        np.zeros(count, np.uint64), lengths, np.full(count, 2, np.uint64), INCARNATION
    )
    with admitted(server) as client:
        client.sendall(request)
        wait_until(lambda: server.connections() == 0)
        got = receive(client, 200 * 2**20)

    assert len(got) < 200 * 2**20


def test_connection_beyond_the_limit_is_notified_that_we_are_busy(memory: PlainMemory) -> None:
    """The limit holds, is reported, and gives way when a client leaves."""
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, connections_max=1)
    with admitted(server) as first, connect(server) as second:
        # It is in the middle of a response, which it does not take, so it cannot make room.
        whole = np.array([len(memory.pages)], np.uint64)
        nowhere, word = np.array([0], np.uint64), np.array([2], np.uint64)
        first.sendall(wire.encode_request(nowhere, whole, word, INCARNATION))
        receive(first, wire.ANSWER_BYTES)
        second.sendall(greeting())
        answer = receive(second, wire.ANSWER_BYTES)
    wait_until(lambda: server.connections() == 0)
    served = serves(server)
    server.close()

    assert wire.decode_answer(answer) == wire.BUSY
    assert server.refusals(wire.BUSY) == 1
    assert served


def test_page_rewritten_while_it_is_sent_goes_on_as_zeros(
    server: PageServer, memory: PlainMemory
) -> None:
    """The client has half of the old page when the owner evicts it and stores another.

    A seal that the server had loaded before its send would still be the old page's, and vouch for
    bytes of both. Of the other page not a byte goes out that the kernel had not taken.
    """
    length = PAGE_MEMORY_BYTES
    owner = Owner(memory)
    owner.store(0, b"\x01" * length, 10)
    request = wire.encode_request(*np.array([[0], [length], [10]], np.uint64), INCARNATION)
    with admitted(server) as client:
        client.sendall(request)
        begun = receive(client, wire.ANSWER_BYTES + 1)
        # 16 MiB do not fit into the buffers of a connection: the send is not over.
        owner.store(0, b"\x02" * length, 12)
        rest = receive(client, length - 1)
        seal = receive(client, SEAL_BYTES)

    assert begun[-1:] == b"\x01"
    assert rest[-1:] == b"\x00"
    assert rest.count(b"\x02") <= STEP_BYTES_MAX
    assert seal == bytes(SEAL_BYTES)


async def test_listeners_of_every_interface_share_one_port() -> None:
    """IPv4 and IPv6 clients find the same advertised port."""
    listeners = await open_listeners("", 0)
    names = [listener.socket.getsockname() for listener in listeners]
    for listener in listeners:
        await listener.aclose()

    assert len({name[1] for name in names}) == 1
    assert names[0][1] != 0
    assert any(listener.socket.family == socket.AF_INET for listener in listeners)


async def test_listeners_of_an_ipv6_address_speak_it() -> None:
    """A host in figures of either family is bound as it is."""
    try:
        listeners = await open_listeners("::1", 0)
    except OSError as error:
        if error.errno in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
            pytest.skip("this machine has no IPv6")
        raise
    name = listeners[0].socket.getsockname()
    for listener in listeners:
        await listener.aclose()

    assert name[0] == "::1"


async def test_taken_port_is_named() -> None:
    """An explicit port in use is an error that names it."""
    first = await open_listeners("127.0.0.1", 0)
    port = first[0].socket.getsockname()[1]

    with pytest.raises(AddressTaken, match=f"127.0.0.1:{port}"):
        await open_listeners("127.0.0.1", port)

    await first[0].aclose()


# --- floods ---------------------------------------------------------------------------------------


def test_newcomer_that_is_silent_for_longest_makes_room(
    memory: PlainMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ones that came later stay."""
    monkeypatch.setattr(tcp_server, "HOST_NEWCOMERS_MAX", 3)
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE)
    with contextlib.ExitStack() as stack:
        first, *others = [stack.enter_context(connect(server)) for _ in range(3)]
        wait_until(lambda: server.connections() == 3)
        stack.enter_context(connect(server))
        gone = receive(first, 1)
        wait_until(lambda: server.connections() == 3)
        others[0].sendall(greeting())
        answer = receive(others[0], wire.ANSWER_BYTES)
    server.close()

    assert gone == b""
    assert wire.decode_answer(answer) == ""
    assert server.refusals(reasons.SILENT) == 1


def test_idle_client_makes_room_for_a_new_one(memory: PlainMemory) -> None:
    """An admitted client that asks for nothing costs another one nothing."""
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, connections_max=2)
    with admitted(server, "127.0.0.1") as oldest, admitted(server, "127.0.0.2") as second:
        third = admitted(server, "127.0.0.3")
        gone = receive(oldest, 1)
        second.sendall(wire.encode_request(*np.array([[0], [1], [2]], np.uint64), INCARNATION))
        answer = receive(second, wire.ANSWER_BYTES)
        third.close()
    server.close()

    assert gone == b""
    assert wire.decode_status(answer) == ""
    assert server.refusals(wire.BUSY) == 0


def test_one_host_has_half_of_the_places(memory: PlainMemory) -> None:
    """Also if it is the first and the only one, and keeps each of them busy."""
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, connections_max=PLACES)
    whole = np.array([[0] * 9, [PAGE_MEMORY_BYTES] * 9, [2] * 9], np.uint64)
    with contextlib.ExitStack() as stack:

        def answer(host: str) -> str:
            connection, refused = greeted(server, host)
            held.append(stack.enter_context(connection))
            if not refused:
                # More than it receives: no idle connection can be closed to make room.
                connection.sendall(wire.encode_request(*whole, INCARNATION))
                receive(connection, wire.ANSWER_BYTES)
            return refused

        held: list[socket.socket] = []
        greedy = [answer("127.0.0.1") for _ in range(PLACES // 2 + 1)]
        other = answer("127.0.0.2")
        held[0].close()
        wait_until(lambda: answer("127.0.0.1") == "")
    server.close()

    assert greedy == [""] * (PLACES // 2) + [wire.BUSY]
    assert other == ""


def test_greeting_that_trickles_ends(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is not silence, and yet no reason to wait forever."""
    monkeypatch.setattr(tcp_server, "ADMISSION_S", 0.3)
    begun = time.monotonic()
    with connect(server) as client, contextlib.suppress(OSError):
        for byte in greeting():
            client.sendall(bytes([byte]))
            time.sleep(0.05)
        receive(client, 1)

    assert_within(time.monotonic() - begun, PROMPT_S)
    assert server.refusals(reasons.SILENT) == 1


# --- the memory that is reported ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "length"),
    [(0, GRANULE), (1, GRANULE), (4, GRANULE), (2, GRANULE), (2**64 - 2, 1), (3, 1)],
)
def test_stranger_gets_zeros_for_what_no_record_names(
    memory: PlainMemory, server: PageServer, generation: int, length: int
) -> None:
    """Uncommitted, removed and replaced pages, and what is behind a page, stay here."""
    owner = Owner(memory)
    memory.pages[:] = 0xAA
    owner.store(0, b"\xaa" * (GRANULE - 1), 2)
    memory.words[1] = generation | 1
    slots = [(0, length, generation), (GRANULE, length, generation)]
    head = struct.pack("<4sIQQ", b"PCtr", 2, INCARNATION, 2 * length)
    with admitted(server) as client:
        client.sendall(head + b"".join(struct.pack("<QQQ", *slot) for slot in slots))
        status = receive(client, wire.ANSWER_BYTES)
        rest = receive(client, 2 * length + 2 * SEAL_BYTES)

    assert wire.decode_status(status) == ""
    assert rest == bytes(2 * length + 2 * SEAL_BYTES)


def test_page_of_a_later_portion_is_looked_at_as_any(
    memory: PlainMemory, server: PageServer
) -> None:
    """That a page of the portion before was shown does not count for the one in its place."""
    owner = Owner(memory)
    owner.store(0, b"\x01", 2)
    owner.store(GRANULE, b"\x02", 4)
    memory.pages[GRANULE + 1 : 2 * GRANULE] = 0xAA
    shown = wire.PORTION_PAGES_MAX
    slots = [(0, 1, 2)] * shown + [(GRANULE, GRANULE, 4)]
    with admitted(server) as client:
        client.sendall(wire.encode_request(*np.array(slots, np.uint64).T.copy(), INCARNATION))
        receive(client, wire.ANSWER_BYTES)
        first = receive(client, shown * (1 + SEAL_BYTES))
        rest = receive(client, GRANULE + SEAL_BYTES)

    assert first[:shown] == b"\x01" * shown
    assert rest == bytes(GRANULE + SEAL_BYTES)


def test_page_in_several_steps_is_looked_at_before_each(
    memory: PlainMemory, server: PageServer
) -> None:
    """What is evicted while its bytes go out goes on as zeros, also in the middle of a portion."""
    size = 3 * 2**20
    owner = Owner(memory)
    owner.store(0, b"\x01" * size, 2)
    requests = [[0] * 5, [size] * 5, [2] * 5]
    with admitted(server) as client:
        client.sendall(wire.encode_request(*np.array(requests, np.uint64), INCARNATION))
        receive(client, wire.ANSWER_BYTES + 1)
        memory.words[0] = 3
        rest = receive(client, 5 * (size + SEAL_BYTES) - 1)

    assert rest[-SEAL_BYTES - size :] == bytes(size + SEAL_BYTES)


@pytest.mark.parametrize("shares", [True, False])
def test_process_of_this_host_reads_if_its_user_shares_the_host(
    memory: PlainMemory, shares: bool
) -> None:
    """Without certificates, the kernel reports whose process connects over loopback."""
    uid = os.geteuid() if shares else os.geteuid() + 1
    sharing = Sharing(uid=uid, uids=frozenset({uid}))
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, sharing=sharing)

    served = serves(server)
    server.close()

    assert served == shares
    assert server.refusals(wire.OWNER) == (0 if shares else 1)
