"""The gate: which processes may be at the other end of a connection."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import attrs
import pytest

from peercache.errors import Rejected
from peercache.net.peers import Gate, Peer, Transport
from peercache.observability.reasons import EXPIRED
from peercache.trust.identity import CertificateRole, Identity, identity_among
from peercache.trust.sharing import Sharing

REMOTE = ("192.0.2.7", 40000)
HERE = ("192.0.2.1", 31998)


class Judge:
    """Certificates of cluster c, of which one is revoked."""

    def admit(self, common_name: str, alternative_names: Iterable[str]) -> Identity:
        """Return the owner, as `LiveTls` does."""
        if common_name == "revoked":
            raise Rejected("revoked", "it is revoked")
        return identity_among(alternative_names)


def shows(role: CertificateRole, name: str, common_name: str = "1") -> Peer:
    uri = Identity("c", role, name).uri()
    return Peer(Transport.TCP, None, HERE, REMOTE, common_name, ("peercache", uri))


@pytest.fixture
def gate() -> Gate:
    return Gate(Sharing.of(), Judge())


def test_the_node_that_was_meant_is_accepted(gate: Gate) -> None:
    """By its name; at a discovery address any node of the cluster is."""
    gate.check_node(shows(CertificateRole.NODE, "a"), "a")
    gate.check_node(shows(CertificateRole.NODE, "a"), None)


@pytest.mark.parametrize(
    ("peer", "name", "reason"),
    [
        (shows(CertificateRole.NODE, "b"), "a", "name"),
        (shows(CertificateRole.CLIENT, "a"), "a", "role"),
        (shows(CertificateRole.OPERATOR, "a"), None, "role"),
        (shows(CertificateRole.NODE, "a", "revoked"), "a", "revoked"),
        (Peer(Transport.TCP, None, HERE, REMOTE), None, "certificate"),
    ],
)
def test_no_other_process_is_taken_for_a_member(
    gate: Gate, peer: Peer, name: str | None, reason: str
) -> None:
    """An address may have passed to another process since the member was learned of."""
    with pytest.raises(Rejected) as refused:
        gate.check_node(peer, name)

    assert refused.value.reason == reason


def test_a_certificate_that_is_revoked_later_admits_no_longer(gate: Gate) -> None:
    assert gate.admits(shows(CertificateRole.NODE, "a"))
    assert not gate.admits(shows(CertificateRole.NODE, "a", "revoked"))


def test_a_certificate_that_expires_admits_no_longer(gate: Gate) -> None:
    good = shows(CertificateRole.NODE, "a")
    assert gate.admits(attrs.evolve(good, valid_until=time.time() + 60.0))

    late = attrs.evolve(good, valid_until=time.time() - 1.0)

    assert not gate.admits(late)
    with pytest.raises(Rejected) as refused:
        gate.check_node(late, "a")
    assert refused.value.reason == EXPIRED


def test_without_certificates_the_user_decides() -> None:
    """Over ipc by the kernel's word; a process of another host has no user."""
    gate = Gate(Sharing.of(insecure=True), None)

    assert gate.identity(Peer(Transport.IPC, uid=os.geteuid())) is None
    assert gate.identity(Peer(Transport.TCP, None, HERE, REMOTE)) is None
    for foreign in (4711, None):
        assert not gate.admits(Peer(Transport.IPC, uid=foreign))
    # No socket has these ends, so no user stands for them.
    ends = (("127.0.0.1", 1), ("127.0.0.1", 2))
    assert not gate.admits(Peer(Transport.TCP, None, *ends))


def test_with_neither_certificates_nor_insecure_no_peer_is_beyond_loopback() -> None:
    """Whichever end dialled: a member that names such an address is not believed either."""
    gate = Gate(Sharing.of(), None)
    peer = Peer(Transport.TCP, None, HERE, REMOTE)

    assert not gate.admits(peer)
    with pytest.raises(Rejected, match="insecure = true"):
        gate.check_node(peer, None)
