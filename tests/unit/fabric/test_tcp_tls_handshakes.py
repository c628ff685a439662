"""What a handshake at the data port may cost, and whose turn it is when many connect."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.tls import Contexts, TlsSession
from peercache.observability import reasons
from peercache.trust.authority import CA_KEY
from peercache.trust.identity import SHARED_NAME, URI_CHARACTERS_MAX, CertificateRole, Identity
from tests.contracts.fabric_suite import GRANULE
from tests.contracts.fakes import PlainMemory
from tests.pace import PROMPT_S, TIMEOUT_S, wait_until
from tests.unit.fabric.secured import Cluster, connect, greeting_of, openssl_client, serve
from tests.unit.fabric.serving import PageServer

CERTIFICATES_BYTES_MAX = 32 * 2**10
"""The longest chain that a peer may have, as in _tls_context.c."""
NOW = dt.datetime.now(dt.timezone.utc)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster.of(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def server(cluster: Cluster) -> Iterator[PageServer]:
    running = serve(PlainMemory.of(GRANULE, GRANULE), cluster.node(), threads=1)
    yield running
    running.close()


def hello(size: int, piece: int) -> bytes:
    """Return the records of a ClientHello of this size, of which the last byte never comes."""
    message = (b"\x01" + size.to_bytes(3, "big") + b"\x03\x03" + bytes(size))[: 3 + size]
    parts = [message[at : at + piece] for at in range(0, len(message), piece)]
    return b"".join(struct.pack(">BHH", 22, 0x0301, len(part)) + part for part in parts)


def served(server: PageServer, context: ssl.SSLContext) -> bool:
    """Return whether a client with these certificates is admitted."""
    with contextlib.suppress(OSError), context.wrap_socket(connect(server)) as client:
        client.sendall(greeting_of())
        return wire.decode_answer(client.recv(wire.ANSWER_BYTES)) == ""
    return False


# --- what a handshake may cost --------------------------------------------------------------------


@pytest.mark.parametrize(("size", "piece"), [(200, 1), (20_000, 2**14)], ids=["bytes", "long"])
def test_hello_of_too_many_records_or_bytes_ends_its_connection(
    server: PageServer, cluster: Cluster, size: int, piece: int
) -> None:
    """Before it is complete, because its cost grows faster than its size."""
    with connect(server) as stranger:
        stranger.settimeout(PROMPT_S)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(hello(size, piece))
            assert stranger.recv(1) == b""

    wait_until(lambda: server.refusals(reasons.BROKEN_TLS) == 1)
    assert served(server, openssl_client(cluster.client_files()))


def chained(
    folder: Path, *chain: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> ssl.SSLContext:
    """Return a client that shows these certificates."""
    pem = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "chain").write_bytes(pem + private)
    context = openssl_client(None)
    context.load_cert_chain(folder / "chain")
    return context


def signed(
    name: str,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
    uri: str = "",
) -> x509.Certificate:
    """Return a certificate: an authority's, or one of an identity."""
    builder = (
        x509.CertificateBuilder(issuer, named(name), key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - dt.timedelta(1))
        .not_valid_after(NOW + dt.timedelta(1))
        .add_extension(x509.BasicConstraints(ca=not uri, path_length=None), critical=True)
    )
    if uri:
        names = [x509.DNSName(SHARED_NAME), x509.UniformResourceIdentifier(uri)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def test_longest_chain_of_an_honest_client_fits(
    server: PageServer, cluster: Cluster, tmp_path: Path
) -> None:
    """The longest name of an identity, and three authorities with keys of 4096 bits."""
    folder = cluster.certificates.folder
    root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    root_key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    assert isinstance(root_key, ec.EllipticCurvePrivateKey)
    between, own = rsa.generate_private_key(65537, 4096), ec.generate_private_key(ec.SECP256R1())
    chain = [signed("a", between, root.subject, root_key)]
    chain += [signed(name, between, chain[-1].subject, between) for name in "bc"]
    spaces = tuple(f"{number:02}" + "n" * 240 for number in range(63))
    uri = Identity(
        cluster.certificates.authority.cluster, CertificateRole.CLIENT, "x", spaces
    ).uri()
    chain = [signed("leaf", own, named("c"), between, uri), *chain[::-1]]
    sizes = [len(each.public_bytes(serialization.Encoding.DER)) for each in chain]

    assert URI_CHARACTERS_MAX * 0.95 < len(uri) <= URI_CHARACTERS_MAX
    assert sum(sizes) < CERTIFICATES_BYTES_MAX
    assert served(server, chained(tmp_path, *chain, key=own))


def test_certificates_without_end_are_not_read(
    server: PageServer, cluster: Cluster, tmp_path: Path
) -> None:
    """A stranger may show any; each takes as long to read as a signature."""
    key = ec.generate_private_key(ec.SECP256R1())
    stranger = signed("stranger", key, named("unknown"), key)
    size = len(stranger.public_bytes(serialization.Encoding.DER))
    chain = [stranger] * (CERTIFICATES_BYTES_MAX // size + 1)

    assert not served(server, chained(tmp_path, *chain[:2], key=key))
    wait_until(lambda: server.refusals(reasons.UNKNOWN_CA) == 1)
    assert not served(server, chained(tmp_path, *chain, key=key))
    wait_until(lambda: server.refusals(reasons.BROKEN_TLS) == 1)
    assert served(server, openssl_client(cluster.client_files()))


# --- whose turn it is -----------------------------------------------------------------------------


def test_one_hosts_handshakes_wait_for_each_other_and_not_all_others_for_them(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the loop wait for a step: it accepts meanwhile."""
    hosts: dict[int, str] = {}
    stepped: list[str] = []
    gate = threading.Semaphore(0)
    open_session, step = Contexts.open, TlsSession.step

    def opened(contexts: Contexts, connection: socket.socket) -> TlsSession:
        session = open_session(contexts, connection)
        hosts[id(session)] = connection.getpeername()[0]
        return session

    def held(session: TlsSession) -> bool | None:
        stepped.append(hosts[id(session)])
        assert gate.acquire(timeout=TIMEOUT_S)
        return step(session)

    monkeypatch.setattr(Contexts, "open", opened)
    monkeypatch.setattr(TlsSession, "step", held)
    address = ("127.0.0.1", server.port)
    with ExitStack() as stack:
        for count in range(20):
            stack.enter_context(socket.create_connection(address, TIMEOUT_S, ("127.0.0.1", 0)))
            wait_until(lambda count=count: server.connections() == count + 1, within_s=PROMPT_S)
        stack.enter_context(socket.create_connection(address, TIMEOUT_S, ("127.0.0.2", 0)))
        wait_until(lambda: server.connections() == 21, within_s=PROMPT_S)
        wait_until(lambda: len(hosts) == 21)
        gate.release(2)
        wait_until(lambda: len(stepped) == 3)
        gate.release(1000)

    # The first step had begun, and one more of that host may have waited for it.
    assert "127.0.0.2" in stepped[:3]


def test_one_host_leaves_half_of_the_newcomers_places_to_others(cluster: Cluster) -> None:
    """Those beyond are refused, or those that are silent make room."""
    server = serve(PlainMemory.of(GRANULE, GRANULE), cluster.node(), threads=1, newcomers_max=8)
    address = ("127.0.0.1", server.port)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(address, TIMEOUT_S, ("127.0.0.1", 0)))
        wait_until(lambda: server.refusals(reasons.SILENT) + server.refusals(wire.BUSY) == 4)
        others = [
            stack.enter_context(socket.create_connection(address, TIMEOUT_S, ("127.0.0.2", 0)))
            for _ in range(4)
        ]
        wait_until(lambda: server.connections() == 8)
        others[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            others[0].recv(1)
    server.close()
