"""TLS of the data port: who is let in, what each may read, and what a stranger costs."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.fabric.tcp import server as tcp_server
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.tls import Contexts, TlsSession
from peercache.model.keys import Namespace
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD, SEAL_BYTES
from peercache.observability import reasons
from peercache.observability.reasons import (
    DEADLINE,
    INTERNAL,
    PEER_UNREACHABLE,
    REFUSED,
)
from peercache.trust import authority as authority_module
from peercache.trust.files import LiveTls
from tests.contracts.fabric_suite import GRANULE, Owner
from tests.contracts.fakes import PlainMemory
from tests.pace import FACTOR, PROMPT_S, TIMEOUT_S, assert_within, paced, wait_until
from tests.unit.fabric.secured import (
    Cluster,
    connect,
    fabric_with,
    greeting_of,
    incarnation,
    member_at,
    one_page,
    openssl_client,
    serve,
)
from tests.unit.fabric.serving import PageServer

MEMORY_BYTES = 16 * 2**20
SHORT = dt.timedelta(seconds=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster of the server."""
    return Cluster.of(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Another authority, of a cluster with the same name."""
    return Cluster.of(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def memory() -> PlainMemory:
    """Memory with one page, b"page", under generation 2 in the space of "mine"."""
    plain = PlainMemory.of(MEMORY_BYTES, GRANULE)
    Owner(plain).store(0, b"page", 2)
    plain.seals["space"][0] = Namespace("mine").space_tag()
    return plain


@pytest.fixture
def server(memory: PlainMemory, cluster: Cluster) -> Iterator[PageServer]:
    """Its server, with the certificate of node "one"."""
    running = serve(memory, cluster.node())
    yield running
    running.close()


def read(
    server: PageServer,
    tls: LiveTls | None,
    *,
    name: str = "one",
    size: int = 4,
    timeout_s: float = TIMEOUT_S,
    generation: int = 2,
) -> tuple[Fetched, bytes]:
    """Read the first page as a client with this certificate."""
    page, into = one_page(server, name, size=size, generation=generation)
    with contextlib.closing(fabric_with(tls)) as fabric:
        got = fabric.read(page, time.monotonic() + timeout_s)
    return got, into.page(0)


def serves(server: PageServer, cluster: Cluster) -> bool:
    """Return whether a client with a good certificate reads."""
    got, page = read(server, cluster.client())
    return (got.failure, page) == ("", b"page")


# --- certificates ---------------------------------------------------------------------------------


def test_client_and_node_read(server: PageServer, cluster: Cluster) -> None:
    """A node reads too: an engine with an embedded node has its certificate."""
    as_client = read(server, cluster.client())
    as_node = read(server, cluster.node("two"))

    assert (as_client[0].failure, as_client[1]) == ("", b"page")
    assert (as_node[0].failure, as_node[1]) == ("", b"page")
    assert as_client[0].seals["space"].tolist() == [Namespace("mine").space_tag()]


def test_operator_reads_no_page(server: PageServer, cluster: Cluster) -> None:
    """Its certificate is about nodes, not about pages."""
    answer = reported(server, openssl_client(cluster.operator_files()))

    assert wire.decode_answer(answer) == wire.ROLE
    wait_until(lambda: server.refusals(wire.ROLE) == 1)


def test_certificate_of_another_authority_is_refused(
    server: PageServer, cluster: Cluster, others: Cluster
) -> None:
    """By the client, to which the server shows one of a CA that it does not know."""
    got, _ = read(server, others.client())

    assert got.failure == REFUSED
    wait_until(lambda: server.refusals(reasons.REFUSED_BY_PEER) == 1)
    assert serves(server, cluster)


def reported(server: PageServer, context: ssl.SSLContext) -> bytes:
    """Greet over TLS; return the answer, or nothing where the server hung up."""
    greeting = greeting_of()
    try:
        with context.wrap_socket(connect(server)) as stranger:
            stranger.sendall(greeting)
            return stranger.recv(wire.ANSWER_BYTES)
    except (ssl.SSLError, OSError):
        return b""


def settings_of(kind: str, cluster: Cluster, others: Cluster) -> dict[str, str] | None:
    """Return the files that a stranger of some kind shows."""
    match kind:
        case "none":
            return None
        case "foreign":
            return others.client_files()
        case "early":
            return cluster.client_files("early", lifetime=dt.timedelta(days=3))
        case _:
            return cluster.client_files()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("none", reasons.NO_CERTIFICATE),
        ("foreign", reasons.UNKNOWN_CA),
        # The reason distinguishes it from an expired one: most often a clock is wrong.
        ("early", reasons.NOT_YET_VALID),
        ("old TLS", reasons.OLD_TLS),
    ],
)
def test_a_stranger_that_believes_every_server_comes_no_further(
    server: PageServer,
    cluster: Cluster,
    others: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    reason: str,
) -> None:
    """As `openssl s_client`, whose good certificate is answered."""
    if kind == "early":
        monkeypatch.setattr(authority_module, "CLOCK_DIFFERENCE", dt.timedelta(days=-1))
    context = openssl_client(settings_of(kind, cluster, others))
    if kind == "old TLS":
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    assert reported(server, context) == b""

    wait_until(lambda: server.refusals(reason) == 1)
    monkeypatch.undo()
    assert wire.decode_answer(reported(server, openssl_client(cluster.client_files()))) == ""
    assert serves(server, cluster)


def test_session_is_never_resumed(server: PageServer, cluster: Cluster) -> None:
    """A ticket would let a client in again whose certificate has been revoked since."""
    context = openssl_client(cluster.client_files())
    greeting = greeting_of()
    with context.wrap_socket(connect(server)) as first:
        first.sendall(greeting)
        answer = first.recv(wire.ANSWER_BYTES)
        ticket = first.session
        assert ticket is None or not ticket.has_ticket
    assert wire.decode_answer(answer) == ""


def test_certificate_that_has_expired_is_refused(server: PageServer, cluster: Cluster) -> None:
    """It was good when the process began."""

    def story(pace_s: float) -> tuple[bytes, bytes]:
        lifetime = SHORT + dt.timedelta(seconds=pace_s)
        late = cluster.client_files(f"late-{pace_s:g}", lifetime=lifetime)
        before = reported(server, openssl_client(late))
        time.sleep(lifetime.total_seconds() + 1)
        return before, reported(server, openssl_client(late))

    before, after = paced(story, lambda both: both[0] != b"")

    assert wire.decode_answer(before) == ""
    assert after == b""
    wait_until(lambda: server.refusals(reasons.EXPIRED) >= 1)


def test_server_whose_certificate_has_expired_is_not_read(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """The client looks at the server's certificate as the server does at the client's."""
    late = serve(memory, cluster.node("late", lifetime=SHORT), "late")
    time.sleep(SHORT.total_seconds() + 1)

    got, page = read(late, cluster.client(), name="late")
    late.close()

    assert got.failure == REFUSED
    assert page != b"page"


@pytest.mark.parametrize("shown", ["node of another name", "client"])
def test_who_answers_in_the_place_of_the_member_is_not_read(
    memory: PlainMemory, cluster: Cluster, shown: str
) -> None:
    """The incarnation follows from the name in a node's certificate; a client's serves nothing."""
    impostor = cluster.client("one") if shown == "client" else cluster.node("two")
    with contextlib.closing(serve(memory, impostor)) as server:
        got, page = read(server, cluster.client())

    assert (got.failure, page == b"page") == (REFUSED, False)


def test_revoked_certificate_is_refused(memory: PlainMemory, cluster: Cluster) -> None:
    """From the moment on that the server knows the list."""
    ours = cluster.node()
    thief = cluster.client("thief")
    server = serve(memory, ours)
    before, _ = read(server, thief)
    with (
        contextlib.closing(fabric_with(cluster.client())) as honest,
        contextlib.closing(fabric_with(thief)) as open_before,
    ):
        page, _ = one_page(server)
        assert honest.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        assert open_before.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        cluster.certificates.authority.revoke("client-thief")
        assert ours.look()
        # The channel that was open is closed, too; the honest one stays.
        wait_until(lambda: server.connections() == 1)
        over_it = open_before.read(page, time.monotonic() + TIMEOUT_S)

    after, _ = read(server, thief)
    still = serves(server, cluster)
    server.close()

    assert before.failure == ""
    assert over_it.failure == after.failure == REFUSED
    assert still
    wait_until(lambda: server.refusals(wire.REVOKED) == 2)


def test_open_channel_of_a_dropped_authority_is_closed(
    memory: PlainMemory, cluster: Cluster, others: Cluster, tmp_path: Path
) -> None:
    """It was good while both were trusted; a good client opens a new one, and notices nothing."""
    bundle = tmp_path / "ca.crt"
    texts = [(each.certificates.folder / "ca.crt").read_text() for each in (cluster, others)]
    bundle.write_text("".join(texts))
    ours = cluster.live(
        {**cluster.certificates.node("bundled"), "tls_ca": str(bundle)}, is_node=True
    )
    server = serve(memory, ours, "bundled")
    theirs = cluster.live({**others.client_files("old"), "tls_ca": str(bundle)})
    page, _ = one_page(server, "bundled")
    with (
        contextlib.closing(fabric_with(cluster.client())) as good,
        contextlib.closing(fabric_with(theirs)) as old,
    ):
        assert good.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        assert old.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        bundle.write_text(texts[0])
        assert ours.look()
        wait_until(lambda: server.connections() == 0)

        assert old.read(page, time.monotonic() + TIMEOUT_S).failure != ""
        assert good.read(page, time.monotonic() + TIMEOUT_S).failure == ""
    server.close()


def test_plain_client_reads_nothing_from_a_tls_server(server: PageServer, cluster: Cluster) -> None:
    """And the server reports in its metrics what came."""
    got, page = read(server, None)

    assert got.failure == PEER_UNREACHABLE
    assert page != b"page"
    wait_until(lambda: server.refusals(reasons.NO_TLS) == 1)
    assert serves(server, cluster)


def test_tls_client_reads_nothing_from_a_plain_server(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """A listener without certificates at a member's address gets a handshake and no greeting."""
    plain = PageServer(memory, incarnation=incarnation(), granule=GRANULE)

    got, page = read(plain, cluster.client())
    plain.close()

    assert got.failure in {REFUSED, PEER_UNREACHABLE}
    assert page != b"page"


def test_new_connections_use_the_renewed_certificate(memory: PlainMemory, cluster: Cluster) -> None:
    """And a channel that is open goes on."""

    def story(pace_s: float) -> list[str]:
        name, lifetime = f"renewed-{pace_s:g}", SHORT + dt.timedelta(seconds=pace_s)
        ours = cluster.node(name, lifetime=lifetime)
        server = serve(memory, ours, name)
        page, _ = one_page(server, name)
        with contextlib.closing(fabric_with(cluster.client())) as fabric:
            first = fabric.read(page, time.monotonic() + TIMEOUT_S)
            cluster.certificates.issue(ours.files.identity.role, name, is_renewal=True)
            assert ours.look()
            time.sleep(lifetime.total_seconds() + 0.5)
            open_channel = fabric.read(page, time.monotonic() + TIMEOUT_S)
        new_channel, _ = read(server, cluster.client(), name=name)
        server.close()
        return [first.failure, open_channel.failure, new_channel.failure]

    # Where the first read comes too late, its certificate has expired.
    assert paced(story, lambda failures: failures[0] == "") == ["", "", ""]


# --- rights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespaces", "expected"),
    [((), b"page"), (("mine",), b"page"), (("other", "mine"), b"page"), (("other",), bytes(4))],
)
def test_restricted_certificate_reads_its_namespaces_only(
    server: PageServer, cluster: Cluster, namespaces: tuple[str, ...], expected: bytes
) -> None:
    """Of another namespace not a byte arrives, and no key; a certificate without any reads all."""
    name = "-".join(("reader", *namespaces))
    got, page = read(server, cluster.client(name, *namespaces))

    assert got.failure == ""
    assert page == expected
    assert got.seals["word"].tolist() == ([2] if expected == b"page" else [0])


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_restricted_certificate_reads_no_page_of_a_space_that_is_nearly_its_own(
    memory: PlainMemory, server: PageServer, cluster: Cluster, bit: int
) -> None:
    """The serving thread compares 64 bits of the namespace's name."""
    memory.seals["space"][0] ^= np.uint64(1 << bit)

    got, page = read(server, cluster.client(f"near-{bit}", "mine"))

    assert (got.failure, page) == ("", bytes(4))
    assert got.seals["word"].tolist() == [0]


@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_restricted_client_sees_no_byte_of_a_page_that_takes_the_slot(
    memory: PlainMemory, cluster: Cluster, step: int
) -> None:
    """The slot goes to another namespace after a step was looked at, and before it is sent."""
    owner, size = Owner(memory), 8 * 2**20
    owner.store(0, b"\x01" * size, 10)
    memory.seals["space"][0] = Namespace("mine").space_tag()
    steps = iter(range(100))

    def take_the_slot() -> None:
        if next(steps) == step:
            owner.store(0, b"\x02" * size, 12)

    server = serve(memory, cluster.node(), before_send=take_the_slot)
    page, into = one_page(server, size=size, generation=10)
    with contextlib.closing(fabric_with(cluster.client("mine-only", "mine"))) as fabric:
        got = fabric.read(page, time.monotonic() + TIMEOUT_S)
    server.close()

    assert got.failure == ""
    assert next(steps) > step + 1
    assert into.page(0).count(b"\x02") == 0
    assert 0 < into.page(0).count(b"\x01") < size
    assert got.seals["word"].tolist() == [0]


# --- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\xff" * 300],
)
def test_stranger_is_hung_up_on_and_delays_no_client(
    server: PageServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Half a handshake, plain text, noise, and silence."""

    def story(pace_s: float) -> bool:
        monkeypatch.setattr(tcp_server, "SILENCE_S", pace_s)
        with connect(server) as stranger:
            stranger.sendall(said)
            served = serves(server, cluster)
            stranger.settimeout(PROMPT_S)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        return served

    # A client that is not scheduled is silent as well.
    assert paced(story, kept_up=bool)


def test_peer_that_stops_in_the_handshake_ends_a_read_at_its_deadline(cluster: Cluster) -> None:
    """Whatever it sends before, byte by byte."""
    ended = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            # The head of a record of 4 KiB that never is complete.
            connection.sendall(b"\x16\x03\x03\x10\x00")
            while not ended.wait(0.01):
                connection.sendall(b"\x00")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        stub = attrs.make_class("Stub", ["address"])
        page, _ = one_page(stub(f"127.0.0.1:{listener.getsockname()[1]}"))
        begun = time.monotonic()
        with contextlib.closing(fabric_with(cluster.client())) as fabric:
            got = fabric.read(page, begun + 0.3)
        seconds = time.monotonic() - begun
        ended.set()
        thread.join()

    assert got.failure == DEADLINE
    assert_within(seconds, PROMPT_S)


def test_destination_that_is_no_memory_is_an_error_and_no_crash(
    server: PageServer, cluster: Cluster
) -> None:
    """OpenSSL would write there; the kernel is asked before."""
    runs = PageRuns.of([[(4096, 4)]])
    asked = np.array([[0], [2]], np.uint64)
    page = PeerRead(member_at(server), asked[0], runs.lengths, runs, asked[1])
    with contextlib.closing(fabric_with(cluster.client())) as fabric:
        got = fabric.read(page, time.monotonic() + TIMEOUT_S)

    assert (got.failure, got.seals["word"].tolist()) == (INTERNAL, [int(ODD)])
    assert serves(server, cluster)


def test_no_page_byte_and_no_key_crosses_the_wire_in_clear_text(
    memory: PlainMemory, server: PageServer, cluster: Cluster
) -> None:
    """Everything that both sides say passes a relay that keeps it."""
    secret, key = b"a page of known bytes " * 1000, b"known page key 1"
    Owner(memory).store(0, secret, 2)
    memory.seals["key"][0] = np.void(key)
    passed = bytearray()

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := source.recv(2**16):
                passed.extend(said)
                sink.sendall(said)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as relay:
        page, into = one_page(server, size=len(secret))
        address = f"127.0.0.1:{relay.getsockname()[1]}"
        page = attrs.evolve(page, member=attrs.evolve(page.member, data=address))

        def run() -> None:
            with relay.accept()[0] as theirs, connect(server) as ours:
                back = threading.Thread(target=carry, args=(ours, theirs))
                back.start()
                carry(theirs, ours)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        with contextlib.closing(fabric_with(cluster.client())) as fabric:
            got = fabric.read(page, time.monotonic() + TIMEOUT_S)
        thread.join()

    assert got.failure == ""
    assert into.page(0) == secret
    assert got.seals["key"][0].tobytes() == key
    assert len(passed) > len(secret) + SEAL_BYTES
    assert b"known" not in passed


def test_hundred_requests_sent_at_once_are_all_answered(
    memory: PlainMemory, server: PageServer, cluster: Cluster
) -> None:
    """Several requests come in one record, and no poll sees those that TLS has read ahead."""
    Owner(memory).store(0, b"page", 2)
    greeting = greeting_of()
    request = wire.encode_request(*np.array([[0], [4], [2]], np.uint64), incarnation())
    context = openssl_client(cluster.client_files())
    expected = wire.ANSWER_BYTES + 100 * (wire.ANSWER_BYTES + 4 + SEAL_BYTES)
    with context.wrap_socket(connect(server)) as client:
        client.sendall(greeting + 100 * request)
        got = b""
        while len(got) < expected and (piece := client.recv(expected)):
            got += piece

    assert len(got) == expected
    assert got.count(b"page") == 100


def test_reader_that_does_not_receive_holds_up_no_other(
    memory: PlainMemory, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ciphertext waits for its own socket only, and it is hung up on in the end."""
    monkeypatch.setattr(tcp_server, "SEND_STALL_S", 0.5)
    memory.seals["length"][0] = MEMORY_BYTES
    server = serve(memory, cluster.node())
    greeting = greeting_of()
    whole = np.array([[0] * 9, [MEMORY_BYTES] * 9, [2] * 9], np.uint64)
    context = openssl_client(cluster.client_files())
    with context.wrap_socket(connect(server)) as stuck:
        stuck.sendall(greeting + wire.encode_request(*whole, incarnation()))
        assert stuck.recv(1)
        begun = time.monotonic()
        got, page = read(server, cluster.client())
        seconds = time.monotonic() - begun
        wait_until(lambda: server.connections() == 0)
    server.close()

    assert got.failure == ""
    assert page == memory.pages[:4].tobytes()
    assert_within(seconds, PROMPT_S)


def test_warm_channel_shakes_no_hands(
    server: PageServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One handshake for many reads."""
    opened: list[socket.socket] = []
    right = Contexts.open

    def counted(contexts: Contexts, connection: socket.socket) -> TlsSession:
        opened.append(connection)
        return right(contexts, connection)

    page, _ = one_page(server)
    with contextlib.closing(fabric_with(cluster.client())) as fabric:
        monkeypatch.setattr(Contexts, "open", counted)
        got = [fabric.read(page, time.monotonic() + TIMEOUT_S).failure for _ in range(5)]

    assert got == [""] * 5
    # The server is of this process: each handshake has two ends.
    assert len(opened) == 2


BRIEF = dt.timedelta(seconds=2 * FACTOR)


def test_open_channel_of_a_certificate_that_expires_is_closed(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """By the server; that of another client stays."""
    server = serve(memory, cluster.node())
    late = cluster.live(cluster.client_files("ends", lifetime=BRIEF))
    with (
        contextlib.closing(fabric_with(late)) as expires,
        contextlib.closing(fabric_with(cluster.client())) as stays,
    ):
        page, _ = one_page(server)
        for fabric in (expires, stays):
            assert fabric.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        assert server.connections() == 2

        wait_until(lambda: server.connections() == 1)

        assert stays.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        assert expires.read(page, time.monotonic() + TIMEOUT_S).failure == REFUSED
    server.close()


def test_open_channel_to_a_server_whose_certificate_expires_is_used_no_more(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """The client looks, too: the server may be who stole the certificate."""
    server = serve(memory, cluster.node("short", lifetime=BRIEF), "short")
    with contextlib.closing(fabric_with(cluster.client())) as fabric:
        page, _ = one_page(server, "short")
        assert fabric.read(page, time.monotonic() + TIMEOUT_S).failure == ""

        wait_until(
            lambda: fabric.read(page, time.monotonic() + TIMEOUT_S).failure == REFUSED,
        )
    server.close()
