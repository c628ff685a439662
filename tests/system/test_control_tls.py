"""Control over TLS: which certificates come in, as what, and what the others see."""

from __future__ import annotations

import datetime as dt
import random
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.model.ids import incarnation_of, new_nonce
from peercache.model.keys import Namespace, page_keys
from peercache.model.member import ALIVE, Member
from peercache.model.records import RECORD, changes_from_bytes
from peercache.net.peers import ControlTls
from peercache.net.sockets import Dialer, reached
from peercache.node.node import Node
from peercache.trust.identity import CertificateRole
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import WIRE_VERSION, Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Lookup, Put, ReportChanges, RequestChanges
from peercache.wire.messages.membership import Join, RequestView, ShareView
from peercache.wire.messages.pool import Clear, Removed, Reserve
from peercache.wire.messages.session import (
    Hello,
    HelloRequired,
    OpenChannel,
    Refused,
    ReportStats,
    RequestStats,
    Welcome,
)
from tests.certificates import ALIKE, Certificates
from tests.contracts.frozen.record import sample
from tests.hostile.strangers import metric
from tests.pace import FACTOR, PROMPT_S, TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import Closing, LocalCluster, NodeProcess, flags_of, keys_of, pages_of, read

OURS = Namespace("ours")

SETTLED_S = 6.0
"""A certificate's life that is long enough to connect with it."""


class Secured(LocalCluster):
    """A cluster with certificates."""

    def __init__(self, folder: Path) -> None:
        """Make its authority in a folder."""
        super().__init__()
        self.certificates = Certificates(folder, self.name)

    def start_secured(self, name: str, *flags: str) -> NodeProcess:
        """Start a node with a certificate of this name."""
        files = self.certificates.node(name)
        return self.start(flags=[*flags_of(files), "--metrics-port=-1", *flags])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Secured]:
    with Secured(tmp_path / "ca") as cluster:
        yield cluster


class Speaker(Closing):
    """A process that shows a certificate, or none, and then sends what it likes."""

    def __init__(
        self, node: NodeProcess, cluster: str, settings: dict[str, str] | None, identity: int = 5
    ) -> None:
        self.cluster, self.identity = cluster, identity
        tls = None
        if settings is not None:
            texts = {name[4:] + "_pem": Path(file).read_text() for name, file in settings.items()}
            tls = ControlTls(SimpleNamespace(**texts))
        self.dialer = Dialer(f"{'tls+' if tls else ''}tcp://{node.ready['control']}", tls=tls)

    def ask(self, message: Message, *, within_s: float = TIMEOUT_S) -> Message | None:
        """Say something; return the next message that comes."""
        raw = encode(Envelope(self.identity, 0, message), cluster=self.cluster)
        assert self.dialer.send(raw)
        return self.hear(within_s)

    def hear(self, within_s: float = TIMEOUT_S) -> Message | None:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if (raw := self.dialer.receive()) is not None:
                return decode(raw, cluster=self.cluster).message
            time.sleep(0.005)
        return None

    def close(self) -> None:
        self.dialer.close()


def hello(cluster: str, **fields: Any) -> Hello:
    said = Hello(1, WIRE_VERSION, WIRE_VERSION, cluster, False, 16384, "", b"", "ours", "", "", b"")
    return attrs.evolve(said, **fields)


def member_of(cluster: Secured, node: NodeProcess, name: str) -> Member:
    """Return a node as its Welcome describes it."""
    with Speaker(node, cluster.name, cluster.certificates.client(f"asks-{name}")) as speaker:
        welcome = speaker.ask(hello(cluster.name))
    assert isinstance(welcome, Welcome), welcome
    assert welcome.member.name == name
    return welcome.member


def test_a_secured_cluster_finds_each_other_and_its_pages(cluster: Secured) -> None:
    """Nodes join over TLS, and a client finds at one what was stored at the other."""
    one, two = cluster.start_secured("one"), cluster.start_secured("two")
    settings = cluster.certificates.client("engine")
    writer, reader = cluster.client(one, **settings), cluster.client(two, **settings)
    wait_until(lambda: writer.stats().get("home_members_alive") == 2)
    wait_until(lambda: reader.stats()["members"] == 2)
    keys = keys_of("secured", 8)

    assert writer.batch_set(keys, pages_of(keys)) == [True] * 8
    wait_until(lambda: reader.batch_exists(keys) == 8)
    assert read(reader, keys) == [True] * 8
    over_tcp = cluster.client(two, fabric="tcp", **settings)
    wait_until(lambda: over_tcp.batch_exists(keys) == 8)
    assert read(over_tcp, keys) == [True] * 8
    assert writer.clear() == 8
    assert "refused" not in one.said() + two.said()
    first = member_of(cluster, one, "one")
    assert first.incarnation == incarnation_of(cluster.name, "one", first.nonce)


def test_half_handshakes_hold_no_peer_back(cluster: Secured) -> None:
    """Connections that say nothing, and probes that hang up at once."""
    node = cluster.start_secured("one")
    host, _, port = node.ready["control"].rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(100)]
    for _ in range(20):
        assert reached(f"tls+tcp://{node.ready['control']}", 1.0)
    started = time.monotonic()
    with Speaker(node, cluster.name, cluster.certificates.client("fine")) as speaker:
        assert isinstance(speaker.ask(hello(cluster.name)), Welcome)

    assert_within(time.monotonic() - started, PROMPT_S)
    for each in silent:
        each.close()
    assert reached("tls+tcp://127.0.0.1:1", 1.0) is False


def test_no_certificate_speaks_for_another_node(cluster: Secured) -> None:
    """Neither a client's, nor another node's: the incarnation follows from the name."""
    node = cluster.start_secured("one")
    victim = member_of(cluster, node, "one")
    client, other = cluster.certificates.client("c"), cluster.certificates.node("other")
    nonce = new_nonce(random.Random(1))
    as_victim = hello(cluster.name, is_node=True, name=victim.name, nonce=victim.nonce)
    as_other = attrs.evolve(as_victim, name="other", nonce=nonce)
    own = incarnation_of(cluster.name, "other", nonce)

    for settings, identity, said, reason in (
        (client, victim.incarnation, as_victim, "role"),
        (other, victim.incarnation, as_victim, "name"),
        (other, victim.incarnation, as_other, "incarnation"),
        (other, own, attrs.evolve(as_other, nonce=bytes(16)), "incarnation"),
    ):
        with Speaker(node, cluster.name, settings, identity) as speaker:
            refused = speaker.ask(said)
            assert isinstance(refused, Refused), refused
            assert refused.reason == reason
            assert isinstance(speaker.ask(Lookup(2, bytes(16))), HelloRequired)
    with Speaker(node, cluster.name, other, own) as speaker:
        assert isinstance(speaker.ask(as_other), Welcome)
    assert metric(node, "peercache_messages_dropped")["incarnation"] == 2


def test_a_member_speaks_about_itself_only(cluster: Secured) -> None:
    """Records of another holder, another's entry, and members that no certificate stands for."""
    node = cluster.start_secured("one")
    victim = member_of(cluster, node, "one")
    nonce = new_nonce(random.Random(2))
    own = incarnation_of(cluster.name, "attacker", nonce)
    forged = np.zeros(1, RECORD)
    forged["holder"] = victim.incarnation
    entry = Member(own, 1, ALIVE, 255, "h", "127.0.0.1:1", "", "", "", "attacker", nonce)
    invented = attrs.evolve(entry, incarnation=77)
    with Speaker(node, cluster.name, cluster.certificates.node("attacker"), own) as attacker:
        assert isinstance(
            attacker.ask(hello(cluster.name, is_node=True, name="attacker", nonce=nonce)), Welcome
        )
        renamed = attrs.evolve(entry, name="x")
        for message in (Put(1, forged.tobytes()), Join(victim), Join(renamed)):
            refused = attacker.ask(message)
            assert isinstance(refused, Refused), refused
            assert refused.reason == "not_its_own"
        attacker.ask(ShareView(0, (invented,)), within_s=0.5)
    with Speaker(node, cluster.name, cluster.certificates.client("looks")) as client:
        client.ask(hello(cluster.name))
        view = client.ask(RequestView(3, b""))
    assert isinstance(view, ShareView)
    assert [member.incarnation for member in view.view] == [victim.incarnation]
    assert metric(node, "peercache_messages_refused")


def test_each_certificate_may_do_what_its_role_states(cluster: Secured) -> None:
    """A reader clears nothing, an operator clears and watches, namespaces restrict."""
    node = cluster.start_secured("one")
    writer = cluster.client(node, namespace=OURS, **cluster.certificates.client("engine"))
    keys = keys_of("roles", 4)
    wait_until(lambda: writer.batch_set(keys, pages_of(keys)) == [True] * 4)
    certificates = cluster.certificates

    with Speaker(node, cluster.name, certificates.client("reads")) as reader:
        assert isinstance(reader.ask(hello(cluster.name)), Welcome)
        for message in (Clear(2, OURS.tag()), Reserve(2, 1, OURS.tag(), b"", b"")):
            refused = reader.ask(message)
            assert isinstance(refused, Refused), refused
            assert refused.reason == "role"
        assert isinstance(reader.ask(RequestStats(3)), ReportStats)
        reported = reader.ask(RequestChanges(4, 0, 0, 0, 0.0))
        assert isinstance(reported, ReportChanges), reported
        assert len(changes_from_bytes(reported.held)) == len(keys)
    with Speaker(node, cluster.name, certificates.client("narrow", "ours")) as narrow:
        refused = narrow.ask(hello(cluster.name, namespace="theirs"))
        assert isinstance(refused, Refused), refused
        assert refused.reason == "namespace"
        assert isinstance(narrow.ask(hello(cluster.name)), Welcome)
        # Memory and events are of all namespaces.
        for message in (sample(OpenChannel, 0), RequestChanges(4, 0, 0, 0, 0.0)):
            refused = narrow.ask(message)
            assert isinstance(refused, Refused), refused
            assert refused.reason == "namespace"
    assert read(writer, keys) == [True] * 4
    with Speaker(node, cluster.name, certificates.operator("root")) as operator:
        assert isinstance(operator.ask(hello(cluster.name, namespace="")), Welcome)
        refused = operator.ask(Lookup(2, bytes(16)))
        assert isinstance(refused, Refused), refused
        assert isinstance(operator.ask(RequestChanges(3, 0, 0, 0, 0.0)), ReportChanges)
        assert operator.ask(Clear(4, OURS.tag(), TIMEOUT_S)) == Removed(4, 4)


def test_tenants_whose_names_agree_in_32_bits_share_no_page(cluster: Secured) -> None:
    """A tenant that chose its name by the other's hash reads, keeps, drops and plants nothing.

    Page keys are no secret, and a writer may store a page under any key.
    """
    ours, theirs = ALIKE
    near, far = cluster.start_secured("near"), cluster.start_secured("far")
    certificates = cluster.certificates
    owner = cluster.client(near, namespace=ours, **certificates.client("owner", ours))
    keys, planted = keys_of("stored", 4), keys_of("planted", 4)
    wait_until(lambda: owner.batch_set(keys, pages_of(keys)) == [True] * 4)
    stored, wanted = (page_keys(names, Namespace(ours).digest()) for names in (keys, planted))

    for node in (near, far):  # In its home node's memory, and over tcp.
        files = certificates.client(f"at-{node.ready['data'].rpartition(':')[2]}", theirs)
        tenant = cluster.client(node, namespace=theirs, **files)
        wait_until(lambda tenant=tenant: tenant.batch_exists(stored) == 4)  # type: ignore[misc]
        buffers = [np.zeros_like(page) for page in pages_of(keys)]
        assert tenant.batch_get(stored, buffers) == [False] * 4
        assert tenant.retain(stored, 60.0) == tenant.remove(stored) == 0
        tenant.clear()  # Of what it has planted before.
        assert tenant.batch_set(wanted, pages_of(planted)) == [True] * 4
    assert read(owner, keys) == [True] * 4
    assert read(owner, planted) == [False] * 4


def test_certificates_rotate_without_a_restart(cluster: Secured) -> None:
    """New connections see the new one; what is open stays open."""
    node = cluster.start_secured("one")
    with Speaker(node, cluster.name, cluster.certificates.client("stays")) as stays:
        assert isinstance(stays.ask(hello(cluster.name)), Welcome)
        before = shown(cluster, node)

        cluster.certificates.issue(CertificateRole.NODE, "one", is_renewal=True)

        wait_until(lambda: shown(cluster, node) != before)
        assert isinstance(stays.ask(RequestStats(3)), ReportStats)


def shown(cluster: Secured, node: NodeProcess) -> bytes:
    """Return the certificate that a node shows now."""
    files = cluster.certificates.client(f"looks-{time.monotonic_ns()}")
    context = ssl.create_default_context(cafile=files["tls_ca"])
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    host, _, port = node.ready["control"].rpartition(":")
    with (
        socket.create_connection((host, int(port)), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname="peercache") as encrypted,
    ):
        certificate = encrypted.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def test_a_revoked_certificate_loses_its_connection(cluster: Secured) -> None:
    """Within seconds, and it does not come in again."""
    node = cluster.start_secured("one")
    settings = cluster.certificates.client("bad")
    with (
        Speaker(node, cluster.name, settings) as speaker,
        Speaker(node, cluster.name, settings, identity=6) as again,
    ):
        assert isinstance(speaker.ask(hello(cluster.name)), Welcome)

        cluster.certificates.authority.revoke("client-bad")

        wait_until(lambda: metric(node, "peercache_messages_dropped").get("revoked", 0) >= 1)
        # Over another connection: nng's TLS does not always notice an end that comes together with
        # a last message, and dials no more.
        assert isinstance(again.ask(hello(cluster.name)), Refused)


def test_an_expired_certificate_loses_its_connection(cluster: Secured) -> None:
    """Others stay: a connection lasts as long as what was shown when it was made."""
    node = cluster.start_secured("one")
    lifetime = dt.timedelta(seconds=SETTLED_S * FACTOR)
    stays = cluster.certificates.client("stays")
    with (
        Speaker(node, cluster.name, stays, identity=6) as other,
        Speaker(node, cluster.name, cluster.certificates.client("short", lifetime=lifetime)) as one,
    ):
        assert isinstance(other.ask(hello(cluster.name)), Welcome)
        assert isinstance(one.ask(hello(cluster.name)), Welcome)
        assert isinstance(one.ask(RequestStats(3)), ReportStats)

        wait_until(lambda: metric(node, "peercache_messages_dropped").get("expired", 0) >= 1)

        # Made again in the last second of the certificate, it is not let in.
        assert not isinstance(one.ask(RequestStats(4), within_s=1.0), ReportStats)
        assert isinstance(other.ask(RequestStats(3)), ReportStats)


def test_a_node_refuses_a_clients_certificate_of_its_own(cluster: Secured) -> None:
    config = Config(**cluster.certificates.client("c"))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="node"):
        Node(config, in_process=True)
