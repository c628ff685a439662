"""TLS of the data port: bytes around and within a session, answers of a server, and certificates.

An input for a session is a script of steps, each a kind, a length of two bytes, and bytes:

    RAW    the bytes, as they are, next to the records of the session
    FRAME  the bytes in a record, after the handshake
    SPOIL  the next record that is sent differs in one byte: place (two bytes) and difference
    CLOSE  the message that ends a session
"""

from __future__ import annotations

import contextlib
import datetime as dt
import select
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID, NameOID

from peercache.errors import Rejected
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.tls import Contexts, TlsContext, TlsPeer
from peercache.model.keys import Namespace
from peercache.model.member import Member
from peercache.model.reads import PeerRead
from peercache.model.seal import SEAL
from peercache.observability.reasons import PEER_UNREACHABLE, REFUSED
from peercache.trust.authority import CA_KEY
from peercache.trust.files import LiveTls, common_name_of
from peercache.trust.identity import SHARED_NAME, CertificateRole, Identity
from tests.contracts.fabric_suite import GRANULE, Destination, Owner
from tests.contracts.fakes import PlainMemory
from tests.unit.fabric.secured import (
    Cluster,
    fabric_with,
    greeting_of,
    incarnation,
    member_at,
    one_page,
    openssl_client,
    serve,
)
from tests.unit.fabric.serving import PageServer

RAW, FRAME, SPOIL, CLOSE = range(4)
SILENT_S = 10.0
"""A connection that stays open for so long hangs: a node closes one in doubt after 5 s."""
ANSWER_S = 0.5
"""A side that does not go on with a handshake for so long waits for more bytes."""
CONNECTIONS_MAX = 64
ENCRYPTED = 23
"""The type of TLS records whose bytes are authenticated."""
URI, IP = 6, 7
"""Tags of names in certificates."""
NAMES = ExtensionOID.SUBJECT_ALTERNATIVE_NAME


def steps(script: bytes, kinds: int = 4) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the bytes of each step."""
    while len(script) >= 3:
        end = 3 + int.from_bytes(script[1:3], "little")
        yield script[0] % kinds, script[3:end]
        script = script[end:]


def script_of(*given: tuple[int, bytes]) -> bytes:
    """Return the input of these steps."""
    return b"".join(struct.pack("<BH", kind, len(data)) + data for kind, data in given)


@attrs.define
class Side:
    """One side of a session, in Python's ssl, that sends what a script prescribes."""

    connection: socket.socket
    context: ssl.SSLContext
    is_server: bool = False
    _incoming: ssl.MemoryBIO = attrs.field(factory=ssl.MemoryBIO, init=False)
    _outgoing: ssl.MemoryBIO = attrs.field(factory=ssl.MemoryBIO, init=False)
    _change: bytes = attrs.field(default=b"", init=False)
    _spoilt: bool = attrs.field(default=False, init=False)

    def follow(self, script: bytes) -> bool:
        """Send it; return whether a record was spoilt that the other side authenticates."""
        session = self.context.wrap_bio(self._incoming, self._outgoing, server_side=self.is_server)
        is_done = False
        for kind, data in steps(script):
            if kind == RAW:
                self.connection.sendall(data)
            elif kind == SPOIL:
                self._change = data or b"\0"
            else:
                is_done = is_done or self._shakes_hands(session)
                if not is_done:
                    self._flush()
                    break
                with contextlib.suppress(ssl.SSLError):  # After the end of the session.
                    if kind == FRAME:
                        session.write(data)
                    else:
                        session.unwrap()
                self._flush()
            if self._spoilt:
                break
        return self._spoilt

    def _shakes_hands(self, session: ssl.SSLObject) -> bool:
        received = b"-"
        while received and not self._spoilt:
            try:
                session.do_handshake()
                return True
            except ssl.SSLWantReadError:  # noqa: PERF203 - each turn waits for the other side
                self._flush()
                if not select.select([self.connection], [], [], ANSWER_S)[0]:
                    break  # It waits for the rest of what was sent.
                received = self.connection.recv(2**16)
                self._incoming.write(received)
            except ssl.SSLError:
                break  # The caller sends an alert about it.
        return False

    def _flush(self) -> None:
        raw = bytearray(self._outgoing.read())
        bodies = []
        at = 0
        while self._change and at + 5 <= len(raw):
            end = at + 5 + int.from_bytes(raw[at + 3 : at + 5], "big")
            bodies += [(place, raw[at]) for place in range(at + 5, end)]
            at = end
        if bodies:
            place, kind = bodies[int.from_bytes(self._change[:2], "little") % len(bodies)]
            raw[place] ^= self._change[-1] or 1
            self._spoilt = kind == ENCRYPTED
            self._change = b""
        self.connection.sendall(raw)


@attrs.frozen(eq=False)
class _Bench:
    """A server with one page, and what its clients use."""

    server: PageServer
    context: ssl.SSLContext

    def check(self) -> None:
        """Read the page: the server goes on, and keeps few connections."""
        page, into = one_page(self.server)
        got = _fabric().read(page, time.monotonic() + SILENT_S)
        assert (got.failure, into.page(0)) == ("", b"page"), got.failure
        assert self.server.connections() < CONNECTIONS_MAX, "connections stay open"


@cache
def _cluster() -> Cluster:
    return Cluster.of(Path(tempfile.mkdtemp(prefix="peercache-")))


@cache
def _fabric() -> Any:
    return fabric_with(_cluster().client())


@cache
def _bench() -> _Bench:
    memory = PlainMemory.of(2**20, GRANULE)
    Owner(memory).store(0, b"page", 2)
    memory.seals["space"][0] = Namespace("mine").space_tag()
    context = openssl_client(_cluster().client_files())
    return _Bench(serve(memory, _cluster().node()), context)


def _converse(raw: bytes, script: bytes) -> None:
    bench = _bench()
    with (
        socket.create_connection(("127.0.0.1", bench.server.port), SILENT_S) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(raw)
        if not Side(client, bench.context).follow(script):
            with contextlib.suppress(OSError):  # The server has reset it.
                client.shutdown(socket.SHUT_WR)
        while client.recv(2**20):
            pass
    bench.check()


def handshake(data: bytes) -> None:
    """What a stranger sends to the data port: the server closes, and serves others."""
    _converse(data, b"")


def honest_handshakes() -> Iterator[bytes]:
    """Yield the first messages of clients: ours, and one of TLS 1.2."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        session = TlsContext(_cluster().client().files, is_server=False).open(ours)
        session.step()
        yield theirs.recv(2**16)
        session.close()
    older = openssl_client(None)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        older.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    yield outgoing.read()


def session(data: bytes) -> None:
    """A script of a client with a certificate: a spoilt record ends its connection."""
    _converse(b"", data)


def honest_sessions() -> Iterator[bytes]:
    """Yield a request for the page, whole, in parts, spoilt, closed, and garbage between."""
    zero = np.zeros(1, np.uint64)
    asked = wire.encode_request(zero, zero + np.uint64(4), zero + np.uint64(2), incarnation())
    hello, request = (FRAME, greeting_of()), (FRAME, asked)
    yield script_of(hello, request)
    yield script_of((FRAME, greeting_of() + asked + asked), (CLOSE, b""))
    yield script_of((FRAME, greeting_of()[:9]), (FRAME, greeting_of()[9:]), (FRAME, b""), request)
    yield script_of((SPOIL, b"\x00\x03\x01"), hello)
    yield script_of(hello, (SPOIL, b"\x05\x00\x80"), request)
    yield script_of(hello, (RAW, b"\x17\x03\x03\x00\x20" + bytes(32)), request)
    yield script_of(hello, (RAW, b"\x15\x03\x03\x00\x02\x01\x00"))


# --- a server's answers ---------------------------------------------------------------------------


@attrs.define
class _Server:
    """A server that answers each client with the input, in TLS where `context` is set."""

    listener: socket.socket = attrs.field(
        factory=lambda: socket.create_server(("127.0.0.1", 0)), init=False
    )
    context: ssl.SSLContext | None = attrs.field(default=None, init=False)
    data: bytes = attrs.field(default=b"", init=False)

    def run(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            connection.settimeout(SILENT_S)
            with connection, contextlib.suppress(OSError):
                if self.context is None:
                    connection.sendall(self.data)
                else:
                    Side(connection, self.context, is_server=True).follow(self.data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):
                    pass


@cache
def _answering() -> tuple[_Server, Member, ssl.SSLContext, Any]:
    server = _Server()
    threading.Thread(target=server.run, daemon=True).start()
    files = _cluster().node().files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(files.cert_pem + files.key_pem)
        file.flush()
        context.load_cert_chain(file.name)
    port = server.listener.getsockname()[1]
    member = attrs.evolve(member_at(_bench().server), data=f"127.0.0.1:{port}")
    return server, member, context, fabric_with(None)


def answers(data: bytes) -> None:
    """What a server sends, in clear text or TLS: a miss, or two pages and nothing around them."""
    server, member, context, plain = _answering()
    is_tls = data[:1] == b"\1"
    server.context, server.data = context if is_tls else None, data[1:]
    into = Destination.of([[3, 5], [8]])
    numbers = np.arange(2, dtype=np.uint64)
    read = PeerRead(member, numbers * GRANULE, into.lengths, into.runs, numbers * 0 + np.uint64(2))
    fabric = _fabric() if is_tls else plain
    got = fabric.read(read, time.monotonic() + SILENT_S)
    fabric.forget(member.incarnation)
    assert got.failure in {"", PEER_UNREACHABLE, REFUSED}, got.failure
    assert into.gaps_are_untouched(), "bytes next to the pages"
    honest = wire.encode_answer("") + wire.encode_status("")
    if not got.failure and not is_tls:
        assert data[1:].startswith(honest + into.page(0) + into.page(1)), "other bytes"
    _bench().check()


def honest_answers() -> Iterator[bytes]:
    """Yield two pages and their seals, in clear text, and in TLS in one record and in several."""
    raw = (
        wire.encode_answer("")
        + wire.encode_status("")
        + bytes(range(16))
        + bytes(2 * SEAL.itemsize)
    )
    yield b"\0" + raw
    yield b"\0" + wire.encode_answer(wire.BUSY)
    yield b"\1" + script_of((FRAME, raw))
    yield b"\1" + script_of((FRAME, raw[:20]), (SPOIL, b"\x01\x00\x04"), (FRAME, raw[20:]))
    yield b"\1" + script_of((FRAME, raw[:9]), (FRAME, b""), (FRAME, raw[9:60]), (CLOSE, b""))


# --- certificates ---------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Issuer:
    """Signs certificates with names of any bytes for one key. live: a node's files."""

    live: LiveTls
    server: Contexts
    ca: x509.Certificate
    ca_key: Any
    key: ec.EllipticCurvePrivateKey
    key_pem: str

    def signed(self, names: bytes) -> x509.Certificate:
        """Return a certificate. names: the DER of its alternative names."""
        now, serial = dt.datetime.now(dt.timezone.utc), x509.random_serial_number()
        named = x509.NameAttribute(NameOID.COMMON_NAME, common_name_of(serial))
        return (
            x509.CertificateBuilder(self.ca.subject, x509.Name([named]), self.key.public_key())
            .serial_number(serial)
            .not_valid_before(now - dt.timedelta(1))
            .not_valid_after(now + dt.timedelta(1))
            .add_extension(x509.UnrecognizedExtension(NAMES, names), critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )


@cache
def _issuer() -> _Issuer:
    live, key = _cluster().node(), ec.generate_private_key(ec.SECP256R1())
    ca_key = (_cluster().certificates.folder / CA_KEY).read_bytes()
    return _Issuer(
        live,
        Contexts(live, is_server=True),
        x509.load_pem_x509_certificate(live.files.ca_pem.encode()),
        serialization.load_pem_private_key(ca_key, None),
        key,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


def certificate(data: bytes) -> None:
    """A certificate with any further names: its URIs are read as they are, or it is refused.

    An input has steps as a session: RAW is DER as it is, others are a name of this tag.
    """
    issuer = _issuer()
    more = [raw if tag == RAW else _der(0x80 + tag, raw) for tag, raw in steps(data, kinds=8)]
    signed = issuer.signed(_der(0x30, b"".join([_der(0x82, SHARED_NAME.encode()), *more])))
    pem = signed.public_bytes(serialization.Encoding.PEM).decode()
    files = attrs.evolve(issuer.live.files, cert_pem=pem, key_pem=issuer.key_pem)
    with contextlib.suppress(Rejected):
        peer = _shown(issuer.server, TlsContext(files, is_server=False))
        with contextlib.suppress(ValueError):  # Another library refuses them.
            found = x509.load_pem_x509_certificate(pem.encode()).extensions
            names = found.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
            assert list(peer.names) == uris, "other names"
        issuer.live.admit(peer.serial, peer.names)


def _shown(server: Contexts, client: TlsContext) -> TlsPeer:
    """Return what a server reads of a client's certificate; raises Rejected."""
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            end.setblocking(False)
        with closing(server.open(near)) as ours, closing(client.open(far)) as theirs:
            # All bytes of a flight have arrived when the other side continues.
            for _ in range(2):
                theirs.step()
                ours.step()
            return ours.peer()


def honest_names() -> Iterator[bytes]:
    """Yield names as DER: those of a node and a client, other kinds, and text of several lines."""
    for role, spaces in ((CertificateRole.NODE, ()), (CertificateRole.CLIENT, ("a", "b"))):
        uri = Identity(_cluster().certificates.authority.cluster, role, "one", spaces).uri()
        yield script_of((URI, uri.encode()), (URI, b"peercache-until:2000000000"))
    yield script_of((URI, b"a:\nb:"), (IP, bytes(4)))
    yield script_of((URI, b"a:\x1e" + uri.encode()))
    yield script_of((URI, b""), (1, b"a@b"), (RAW, b"\x86\x02x:"))


def _der(tag: int, value: bytes) -> bytes:
    size = len(value).to_bytes((len(value).bit_length() + 7) // 8, "big")
    return bytes([tag, *(size if len(value) < 0x80 else (0x80 + len(size), *size))]) + value
