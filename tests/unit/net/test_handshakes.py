"""Handshakes of the control plane: why they fail, and which never end."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.net import handshakes as module
from peercache.net import sockets
from peercache.net.handshakes import FailedHandshakes, HalfHandshakes
from peercache.net.peers import ControlTls
from peercache.net.sockets import Dialer, Listener
from peercache.observability import reasons
from tests.certificates import Certificates
from tests.descriptors import no_descriptors, open_files
from tests.pace import TIMEOUT_S, wait_until

HALF = b"\x16\x03\x01\x02\x00\x01"
"""The head of a record that is never whole."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The authority of the listener."""
    certificates = Certificates(tmp_path_factory.mktemp("ours") / "ca")
    certificates.node("one")
    certificates.client("fine")
    return certificates


@pytest.fixture
def listener(certificates: Certificates) -> Iterator[Listener]:
    """A listener with the certificate of node "one"."""
    tls = control_tls(certificates, "node-one")
    listener = Listener(on_removed=lambda _: None, tls=tls)
    listener.listen_tcp("listen", "127.0.0.1", 0)
    yield listener
    listener.close()


def control_tls(certificates: Certificates, name: str) -> ControlTls:
    """Return nng's settings for an issued certificate."""
    names = {"ca_pem": "ca.crt", "cert_pem": f"{name}.crt", "key_pem": f"{name}.key"}
    texts = {kind: (certificates.folder / file).read_text() for kind, file in names.items()}
    return ControlTls(SimpleNamespace(**texts))


def context_of(certificates: Certificates, name: str = "") -> ssl.SSLContext:
    """Return what a client that knows the authority shows: a certificate, or none."""
    context = ssl.create_default_context(cafile=certificates.folder / "ca.crt")
    context.check_hostname = False
    if name:
        context.load_cert_chain(
            certificates.folder / f"{name}.crt", certificates.folder / f"{name}.key"
        )
    return context


def connect(listener: Listener) -> socket.socket:
    """Connect as a stranger."""
    return socket.create_connection(("127.0.0.1", *listener.tcp_ports()), TIMEOUT_S)


def strangers(listener: Listener, count: int) -> list[socket.socket]:
    """Connect as so many strangers, and return when the listener has taken them."""
    before = set(open_files())
    connections = [connect(listener) for _ in range(count)]
    wait_until(lambda: len(set(open_files()) - before) == 2 * count, "both ends of each are open")
    return connections


def shake_hands(listener: Listener, context: ssl.SSLContext) -> bytes:
    """Return what a client receives after its handshake; b"" where it is refused."""
    with (
        contextlib.suppress(OSError),
        connect(listener) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        return encrypted.recv(1)
    return b""


def test_each_failed_handshake_is_counted_once_with_its_reason(
    listener: Listener, certificates: Certificates, tmp_path: Path
) -> None:
    """As far as Mbed TLS distinguishes them; the peer that comes in is none of them."""
    others = Certificates(tmp_path / "other")
    others.client("fine")
    stranger = context_of(others, "client-fine")
    stranger.verify_mode = ssl.CERT_NONE
    old = context_of(certificates, "client-fine")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    cases = {
        reasons.NO_CERTIFICATE: lambda: shake_hands(listener, context_of(certificates)),
        reasons.BAD_CERTIFICATE: lambda: shake_hands(listener, stranger),
        reasons.OLD_TLS: lambda: shake_hands(listener, old),
        reasons.NO_TLS: lambda: said(listener, b"GET / HTTP/1.1\r\n\r\n"),
    }
    failed = FailedHandshakes()

    for reason, attempt in cases.items():
        assert attempt() == b""
        reported: dict[str, int] = {}
        wait_until(lambda reported=reported: bool(reported.update(failed.news()) or reported))  # type: ignore[misc]
        assert reported == {reason: 1}
    assert shake_hands(listener, context_of(certificates, "client-fine")) != b""
    assert failed.news() == {}


def said(listener: Listener, what: bytes) -> bytes:
    """Return what a listener answers to bytes that are no TLS."""
    with connect(listener) as stranger:
        stranger.sendall(what)
        with contextlib.suppress(ConnectionResetError):
            return stranger.recv(64)
    return b""


def test_refused_handshakes_are_counted_where_nng_reports_no_reason(
    listener: Listener, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pynng that does not show nng's log."""
    monkeypatch.setattr(module, "_has_nng_log", lambda: False)
    failed = FailedHandshakes()

    assert shake_hands(listener, context_of(certificates)) == b""

    reported: dict[str, int] = {}
    wait_until(lambda: bool(reported.update(failed.news()) or reported))
    assert reported == {reasons.HANDSHAKE: 1}


def test_half_handshakes_end_after_a_silence_and_no_other_connection_does(
    listener: Listener, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nng waits forever for a peer that has begun a handshake, or has said nothing at all."""
    halves = HalfHandshakes(listener.tcp_ports)
    with connected(listener, certificates) as client:
        silent = strangers(listener, 6)
        for each in silent[::2]:
            each.sendall(HALF)
        elsewhere = socket.socketpair()
        assert halves.end_silent(listener.remotes(), most=100) == []
        monkeypatch.setattr(module, "SILENCE_S", 0.0)

        ended = halves.end_silent(listener.remotes(), most=100)

        assert ended == ["127.0.0.1"] * 6
        for each in silent:
            assert closed(each)
        # nng closes its ends, too.
        wait_until(lambda: halves.end_silent(listener.remotes(), most=100) == [])
        assert len(listener.pipes()) == 1
        client.send(b"still here")
        wait_until(lambda: listener.receive_now() is not None)
        elsewhere[0].send(b"x")
        assert elsewhere[1].recv(1) == b"x"
    for each in (*silent, *elsewhere):
        each.close()


def test_of_too_many_half_handshakes_the_longest_silent_end(
    listener: Listener, certificates: Certificates
) -> None:
    """A flood costs so many descriptors, and a peer that comes then is let in."""
    halves = HalfHandshakes(listener.tcp_ports)
    early = strangers(listener, 3)
    # The kernel reports a silence in milliseconds.
    time.sleep(0.05)
    late = strangers(listener, 2)

    assert halves.end_silent([], most=2) == ["127.0.0.1"] * 3

    assert all(closed(each) for each in early)
    for each in late:
        each.setblocking(False)
        with pytest.raises(BlockingIOError):
            each.recv(1)
    with connected(listener, certificates):
        assert len(listener.pipes()) == 1
    for each in (*early, *late):
        each.close()


def test_half_handshakes_are_ended_without_a_free_descriptor(
    listener: Listener, certificates: Certificates
) -> None:
    """They may have taken the last one, and go on to hold it."""
    with HalfHandshakes(listener.tcp_ports) as halves:
        silent = strangers(listener, 6)
        with no_descriptors():
            ended = halves.end_silent([], most=0)
            assert all(closed(each) for each in silent)
    for each in silent:
        each.close()

    assert ended == ["127.0.0.1"] * 6
    with connected(listener, certificates):
        assert len(listener.pipes()) == 1


@pytest.mark.parametrize(
    ("written", "plain"),
    [("fe80::1%eth0", "fe80::1"), ("::FFFF:10.0.0.1", "10.0.0.1"), ("FE80:0::1", "fe80::1")],
)
def test_an_address_has_one_spelling(written: str, plain: str) -> None:
    """Else an admitted peer would be taken for one that never ended its handshake."""
    assert module.plain((written, 7, 0, 2)) == module.plain((plain, 7))


@pytest.mark.parametrize(
    ("listens_at", "hosts"),
    [("::", ("127.0.0.1", "[::1]")), ("::1", ("[::1]",)), ("0.0.0.0", ("127.0.0.1",))],
)
def test_a_peer_that_came_in_is_none_of_them_at_any_address(
    certificates: Certificates,
    listens_at: str,
    hosts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nng and the kernel spell addresses differently, most of all IPv4 over an IPv6 socket."""
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    # A dialer whose connection is ended here does not dial again, not even once after its close.
    monkeypatch.setattr(sockets, "RECONNECT_MIN_MS", sockets.NEVER_MS)
    monkeypatch.setattr(sockets, "RECONNECT_MAX_MS", sockets.NEVER_MS)
    listener = Listener(on_removed=lambda _: None, tls=control_tls(certificates, "node-one"))
    listener.listen_tcp("listen", listens_at, 0)
    halves = HalfHandshakes(listener.tcp_ports)
    try:
        for host in hosts:
            with connected(listener, certificates, host):
                assert halves.end_silent([], most=100) != []
                wait_until(lambda: len(listener.pipes()) == 0)
            wait_until(lambda: halves.end_silent([], most=100) == [])
            with connected(listener, certificates, host):
                assert halves.end_silent(listener.remotes(), most=100) == []
                assert len(listener.pipes()) == 1
            wait_until(lambda: len(listener.pipes()) == 0)
    finally:
        listener.close()


def test_connections_that_end_as_they_begin_leave_no_entry(
    certificates: Certificates, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their end may be reported before their beginning; such an entry would stay forever."""
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    monkeypatch.setattr(sockets, "RECONNECT_MIN_MS", 1)
    monkeypatch.setattr(sockets, "RECONNECT_MAX_MS", 2)
    halves = HalfHandshakes(listener.tcp_ports)
    for turn in range(60):
        with connected(listener, certificates):
            halves.end_silent([], most=100)
            time.sleep(0.002 * (turn % 5))
        wait_until(partial(are_over, listener, time.monotonic()), "no connection is open")


def are_over(listener: Listener, since: float) -> bool:
    """Return whether no connection is open.

    nng loses the end of a few TLS connections. A node closes them after its silence; here that
    is done after two seconds.
    """
    if time.monotonic() - since > 2.0:
        for pipe in listener.pipes():
            listener.disconnect(pipe)
    return not listener.pipes()


@contextlib.contextmanager
def connected(
    listener: Listener, certificates: Certificates, host: str = "127.0.0.1"
) -> Iterator[Dialer]:
    """Have a peer with a good certificate connected."""
    is_in = threading.Event()
    dialer = Dialer(
        f"tls+tcp://{host}:{listener.tcp_ports()[0]}",
        on_connected=is_in.set,
        tls=control_tls(certificates, "client-fine"),
    )
    assert is_in.wait(TIMEOUT_S)
    wait_until(lambda: len(listener.pipes()) == 1)
    yield dialer
    dialer.close()


def closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True
