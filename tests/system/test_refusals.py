"""Who is refused at the control and the data port, why, and that nothing else notices."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import attrs
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache import Client
from peercache.fabric.tcp import wire
from peercache.net.handshakes import SILENCE_S
from peercache.observability import reasons
from peercache.trust import authority as authority_module
from peercache.trust.identity import CertificateRole, Identity
from peercache.wire.messages.session import Hello, Refused
from tests.certificates import LIFETIME, Certificates
from tests.hostile.strangers import metric
from tests.pace import TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import NodeProcess, keys_of, pages_of, read
from tests.system.test_control_tls import Secured, Speaker, hello

# One worker makes the cluster once for all of them.
pytestmark = pytest.mark.xdist_group("refusals")

GRANULE = 16_384
EPOCH = datetime.fromtimestamp(0, timezone.utc)
COUNTED_BY = {"control": "peercache_messages_dropped", "data": "peercache_tcp_refused"}
"""The metric of each port."""


@attrs.frozen
class World:
    """A node, its authority and another one, and a client that reads a page of the node."""

    cluster: Secured
    node: NodeProcess
    others: Certificates
    reader: Client

    def address(self, port: str) -> tuple[str, int]:
        """Return where a port of the node is."""
        host, _, number = self.node.ready[port].rpartition(":")
        return host, int(number)

    def issued(self, name: str, lifetime: timedelta = LIFETIME) -> dict[str, str]:
        """Return a client's certificate of this name, made where there is none."""
        certificates = self.cluster.certificates
        files = certificates.folder / f"client-{name}.crt", certificates.folder / "ca.crt"
        if not files[0].exists():
            return certificates.client(name, lifetime=lifetime)
        key = files[0].with_suffix(".key")
        return dict(zip(("tls_cert", "tls_ca", "tls_key"), map(str, (*files, key)), strict=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The node "one", with a page that the reader fetches over tcp."""
    folder = tmp_path_factory.mktemp("refusals")
    with Secured(folder / "ca") as cluster:
        one, two = cluster.start_secured("one"), cluster.start_secured("two")
        cluster.wait_for_members(two, 2)
        engine = cluster.certificates.client("engine")
        writer = cluster.client(one, **engine)
        keys = keys_of("served", 4)
        assert writer.batch_set(keys, pages_of(keys)) == [True] * 4
        reader = cluster.client(two, fabric="tcp", **engine)
        wait_until(lambda: reader.batch_exists(keys) == 4)
        yield World(cluster, one, Certificates(folder / "other", cluster.name), reader)


def context_of(settings: dict[str, str] | None) -> ssl.SSLContext:
    """Return a client that believes every server, with a certificate or without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if settings is not None:
        context.load_cert_chain(settings["tls_cert"], settings["tls_key"])
    return context


def over_tls(world: World, port: str, context: ssl.SSLContext, said: bytes = b"") -> bytes:
    """Shake hands and say something; return what comes, b"" from a port that hangs up."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(world.address(port), TIMEOUT_S) as plain,
        context.wrap_socket(plain) as encrypted,
    ):
        encrypted.sendall(said)
        return encrypted.recv(wire.ANSWER_BYTES)
    return b""


def in_clear_text(world: World, port: str, said: bytes) -> bytes:
    """Say something without TLS; return what comes until the port hangs up."""
    received = b""
    with (
        contextlib.suppress(ConnectionResetError),
        socket.create_connection(world.address(port), 2 * SILENCE_S) as stranger,
    ):
        stranger.sendall(said)
        while piece := stranger.recv(4096):
            received += piece
    return received


def greeting_of(world: World, incarnation: int = 0) -> bytes:
    """Return what a client sends first at the data port."""
    node = incarnation or int(world.node.ready["node"], 16)
    return wire.encode_greeting(
        wire.greet(cluster=world.cluster.name, granule=GRANULE, incarnation=node)
    )


def identified(world: World, port: str, settings: dict[str, str], said: Hello) -> None:
    """Come as far as the handshake, and be refused for what the certificate states."""
    if port == "data":
        answer = over_tls(world, port, context_of(settings), greeting_of(world))
        assert wire.decode_answer(answer) != ""
        return
    with Speaker(world.node, world.cluster.name, settings) as speaker:
        assert isinstance(speaker.ask(said), Refused)


def without_certificate(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """TLS and nothing else, as a browser has it."""
    assert over_tls(world, port, context_of(None), greeting_of(world)) == b""


def of_another_authority(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """A certificate for this cluster's name, which another authority signed."""
    path = world.others.folder / "client-fine.crt"
    files = {"tls_cert": str(path), "tls_key": str(path.with_suffix(".key"))}
    if not path.exists():
        world.others.client("fine")
    assert over_tls(world, port, context_of(files), greeting_of(world)) == b""


def expired(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """A certificate that was good a second ago."""
    settings = world.issued("late", timedelta(seconds=1))
    time.sleep(2.2)  # The end is the whole of its second.
    assert over_tls(world, port, context_of(settings), greeting_of(world)) == b""


def of_tomorrow(world: World, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that is not valid yet: most often a clock is wrong."""
    # The other certificates of this test are valid now.
    with monkeypatch.context() as patch:
        patch.setattr(authority_module, "CLOCK_DIFFERENCE", timedelta(days=-1))
        settings = world.issued("early", timedelta(days=3))
    assert over_tls(world, port, context_of(settings), greeting_of(world)) == b""


def with_old_tls(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """TLS 1.2 with a good certificate."""
    context = context_of(world.issued("old"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert over_tls(world, port, context) == b""


def plain(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """The protocol of a browser, without TLS."""
    received = in_clear_text(world, port, b"GET / HTTP/1.1\r\n\r\n")
    # At most an alert of TLS comes back.
    assert received == b"" or received[:1] == b"\x15"


def half_a_handshake(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """The head of a record, and then nothing."""
    assert in_clear_text(world, port, b"\x16\x03\x01\x02\x00\x01") == b""


def of_another_cluster(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """Of the same authority, for another cluster."""
    authority = world.cluster.certificates.authority
    identity = Identity("elsewhere", CertificateRole.CLIENT, f"guest-{port}")
    path = authority.issue(identity, lifetime=LIFETIME)
    files = {"tls_cert": str(path), "tls_key": str(path.with_suffix(".key"))}
    ca = str(world.cluster.certificates.folder / "ca.crt")
    identified(world, port, {"tls_ca": ca, **files}, hello(world.cluster.name))


def in_a_wrong_role(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """A client that claims to be a node; an operator that wants pages."""
    if port == "control":
        as_node = hello(world.cluster.name, is_node=True, name="client", nonce=bytes(16))
        identified(world, port, world.issued("claims"), as_node)
        return
    settings = world.cluster.certificates.operator("boss")
    identified(world, port, settings, hello(world.cluster.name))


def revoked(world: World, port: str, _: pytest.MonkeyPatch) -> None:
    """A certificate that was lost."""
    settings = world.issued(f"lost-{port}")
    kept = {name: Path(path).read_bytes() for name, path in settings.items()}
    known = world.node.said().count("tls.revocations_changed")
    world.cluster.certificates.authority.revoke(f"client-lost-{port}")
    wait_until(lambda: world.node.said().count("tls.revocations_changed") > known)
    for name, path in settings.items():
        Path(path).write_bytes(kept[name])
    identified(world, port, settings, hello(world.cluster.name))


Attempt = Callable[[World, str, pytest.MonkeyPatch], None]

REFUSED: list[tuple[Attempt, str, str]] = [
    # attempt, reason at the control port, reason at the data port
    (without_certificate, reasons.NO_CERTIFICATE, reasons.NO_CERTIFICATE),
    (of_another_authority, reasons.BAD_CERTIFICATE, reasons.UNKNOWN_CA),
    (expired, reasons.BAD_CERTIFICATE, reasons.EXPIRED),
    (of_tomorrow, reasons.BAD_CERTIFICATE, reasons.NOT_YET_VALID),
    (with_old_tls, reasons.OLD_TLS, reasons.OLD_TLS),
    (plain, reasons.NO_TLS, reasons.NO_TLS),
    (half_a_handshake, reasons.SILENT, reasons.SILENT),
    (of_another_cluster, "cluster", wire.CLUSTER),
    (in_a_wrong_role, "role", wire.ROLE),
    (revoked, "revoked", wire.REVOKED),
]


@pytest.mark.parametrize("port", COUNTED_BY)
@pytest.mark.parametrize(
    ("attempt", "control", "data"),
    # Silence is waited for.
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[0] is half_a_handshake))
        for row in REFUSED
    ],
    ids=[row[0].__name__ for row in REFUSED],
)
def test_is_refused_counted_and_harms_no_other(
    world: World, attempt: Attempt, control: str, data: str, port: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In time, with a reason, once in the log; and no key is reported."""
    reason = {"control": control, "data": data}[port]
    before = metric(world.node, COUNTED_BY[port]).get(reason, 0)
    begun = time.monotonic()

    attempt(world, port, monkeypatch)

    assert_within(time.monotonic() - begun, 2 * SILENCE_S)
    wait_until(lambda: metric(world.node, COUNTED_BY[port]).get(reason, 0) > before)
    served = keys_of("served", 4)
    assert read(world.reader, served) == [True] * 4
    fresh = world.cluster.client(world.node, fabric="tcp", **world.issued("honest"))
    assert fresh.batch_exists(served) == 4
    said = world.node.said()
    assert_reported_once_a_minute(said, "tcp" if port == "data" else "node", reason)
    for key in world.cluster.certificates.folder.rglob("*.key"):
        for secret in key.read_text().splitlines()[1:-1]:
            assert secret not in said


def assert_reported_once_a_minute(said: str, component: str, reason: str) -> None:
    """Check that the log reports a reason and peer, and not again within a minute."""
    reported: dict[tuple[object, ...], datetime] = {}
    for line in map(json.loads, said.splitlines()):
        is_refusal = re.fullmatch(rf"{component}\.\w+_refused", line["event"])
        if not is_refusal or line["reason"] != reason:
            continue
        key = (line["event"], line.get("at", line.get("peer")))
        at = datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00"))
        assert at - reported.get(key, EPOCH) > timedelta(seconds=59)
        reported[key] = at
    assert reported
