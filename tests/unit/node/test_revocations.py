"""The list of revoked certificates reaches every node, and only what an authority signed."""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import pytest
import trio

from peercache.actors.effects import Send
from peercache.config.settings import Config
from peercache.errors import Rejected
from peercache.model.keys import COPIES
from peercache.model.member import ALIVE, DEAD, Member
from peercache.node import revocations as module
from peercache.node.revocations import TAKE_S, VOID_S, RevocationSpread
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics, totals_of
from peercache.trust.files import LiveTls, common_name_of
from peercache.trust.identity import CertificateRole
from peercache.wire.messages.pool import Clear
from peercache.wire.messages.session import ReportRevocations
from tests.certificates import Certificates
from tests.contracts.frozen.record import sample


class Node:
    """One node's part, with certificates in a folder of its own."""

    def __init__(self, certificates: Certificates, number: int, folder: Path) -> None:
        """Issue its certificate."""
        settings = certificates.node(f"n{number}")
        settings["tls_crl"] = str(folder / f"{number}.crl")
        Path(settings["tls_crl"]).write_text(certificates.revoked())
        live = LiveTls.open(Config.load(settings), is_node=True, log=get_logger())
        assert live is not None
        self.list = Path(settings["tls_crl"])
        self.live = live
        self.said: list[Send] = []
        self.own: list[Send] = []
        self.said_to_clients: list[ReportRevocations] = []
        self.now = 100.0
        self.metrics = Metrics()
        member = sample(Member, 0)
        self.members = [
            attrs.evolve(member, incarnation=1, state=ALIVE),
            attrs.evolve(member, incarnation=2, state=ALIVE),
            attrs.evolve(member, incarnation=3, state=DEAD),
        ]
        self.spread = RevocationSpread(
            live,
            own=1,
            members=lambda: self.members,
            perform=lambda send: (self.own if send.to == 1 else self.said).append(send),
            notify_clients=self.said_to_clients.append,
            rng=random.Random(1),
            metrics=self.metrics,
            clock=lambda: self.now,
        )


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path) -> Certificates:
    certificates = Certificates(tmp_path / "ca")
    certificates.client("first")
    certificates.authority.revoke("client-first")
    return certificates


def test_copies_of_other_nodes_pages_are_dropped_with_each_revocation(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Also at the start, of what the disk has kept; a list without a new number drops nothing."""
    near, far = Node(certificates, 1, tmp_path), Node(certificates, 2, tmp_path)
    drop = Send(1, Clear(0, COPIES, VOID_S))
    assert near.own == far.own == [drop]
    certificates.node("bad")
    certificates.authority.revoke("node-bad")
    near.list.write_text(certificates.revoked())

    assert near.live.look()
    far.spread.take(near.said[0].message)
    assert near.own == far.own == [drop, drop]

    certificates.authority.revoke("node-bad")
    near.list.write_text(certificates.revoked())
    assert near.live.look()
    assert near.own == [drop, drop]


def test_new_list_of_a_file_is_reported_to_every_live_member(
    certificates: Certificates, tmp_path: Path
) -> None:
    """One operator copies it to one node."""
    near, far = Node(certificates, 1, tmp_path), Node(certificates, 2, tmp_path)
    serial = certificates.serial_of(certificates.client("bad"))
    certificates.authority.revoke("client-bad")
    near.list.write_text(certificates.revoked())

    assert near.live.look()

    assert [said.to for said in near.said] == [2]
    message = near.said[0].message
    assert isinstance(message, ReportRevocations)
    far.spread.take(message)
    with pytest.raises(Rejected, match="revoked"):
        far.live.admit(common_name_of(serial), ["peercache://tests/client/bad"])
    assert not far.live.look()
    assert far.list.read_text() == certificates.revoked()
    assert far.said == []  # The first one has reported all.
    assert near.said_to_clients == far.said_to_clients == [message]


def test_node_that_took_a_list_reports_a_newer_one_of_its_own_file(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Each newer list is reported once; a change of other files reports none."""
    node = Node(certificates, 1, tmp_path)
    for number in range(2):
        certificates.client(f"bad-{number}")
        certificates.authority.revoke(f"client-bad-{number}")
        newer = certificates.revoked()
        if number == 0:
            node.spread.take(ReportRevocations(newer.encode()))
            assert node.said == []
        else:
            node.list.write_text(newer)
            assert node.live.look()

    certificates.issue(CertificateRole.NODE, "n1", is_renewal=True)
    assert node.live.look()

    assert [said.message for said in node.said] == [ReportRevocations(newer.encode())]
    assert len(node.said_to_clients) == 2


def test_list_that_no_authority_signed_is_dropped_and_counted(
    certificates: Certificates, tmp_path: Path
) -> None:
    """A member cannot revoke another one."""
    node = Node(certificates, 1, tmp_path)
    other = Certificates(tmp_path / "other")
    other.client("x")
    other.authority.revoke("client-x")

    for lists in (other.revoked().encode(), b"\xff\xfe", b"", b"x" * 200_000):
        node.now += 2 * TAKE_S
        node.spread.take(ReportRevocations(lists))

    assert node.live.revocations.numbers == (1,)
    assert totals_of(node.metrics.messages_dropped) == {"revocation_list": 4.0}


def test_member_that_sends_many_lists_costs_two_verifications_a_second(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same list again costs a comparison."""
    node = Node(certificates, 1, tmp_path)
    taken = []
    monkeypatch.setattr(LiveTls, "take_list", lambda _, text: taken.append(text) or False)
    same = ReportRevocations(certificates.revoked().encode())

    for number in range(1_000):
        node.now += 0.001
        node.spread.take(ReportRevocations(b"%d" % number))
        node.spread.take(same)

    assert len(taken) == 2
    assert totals_of(node.metrics.messages_dropped) == {"revocations_often": 998.0}


async def test_node_that_was_away_learns_of_it_later(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node notifies a member now and then; one that is dead is not notified."""
    monkeypatch.setattr(module, "SPREAD_S", 0.01)
    node = Node(certificates, 1, tmp_path)

    with trio.move_on_after(0.5):
        await node.spread.run()

    assert {said.to for said in node.said} == {2}
    assert len(node.said) >= 3
