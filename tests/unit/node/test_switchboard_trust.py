"""What a switchboard does as certificates cease to be good, and with peers of other releases."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import pytest
import trio

from peercache.actors.effects import Send, SendTo
from peercache.errors import Rejected
from peercache.net.peers import Peer
from peercache.node import admission
from peercache.observability.reasons import EXPIRED
from peercache.wire.codec import encode
from peercache.wire.envelope import MESSAGES, WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.directory import Lookup, RequestSummary
from peercache.wire.messages.membership import Heartbeat
from peercache.wire.messages.session import Refused, ReportRevocations, RequestStats, Welcome
from tests.pace import until
from tests.unit.node.test_switchboard import (
    CLUSTER,
    ME,
    Calling,
    calling,
    member,
    running,
)

__all__ = ["calling"]

OTHER = 0x22


@attrs.define
class FickleGate:
    """A gate that admits every process until it does not."""

    is_open: bool = True

    def identity(self, _: Peer) -> None:
        """Admit a process of no name, or refuse."""
        if not self.is_open:
            raise Rejected("revoked", "not any more")

    def admits(self, _: Peer) -> bool:
        """Return whether it is still open."""
        return self.is_open

    def check_node(self, peer: Peer, _: str | None) -> None:
        """Refuse as `identity` does."""
        self.identity(peer)


async def test_a_link_to_a_revoked_peer_ends_and_is_not_made_again(tmp_path: Path) -> None:
    """The end that has dialled hangs up, too: the other one may be the thief."""
    gate = FickleGate()
    async with running(tmp_path, gate=gate) as one, running(tmp_path, OTHER) as two:
        one.board.perform(SendTo(two.address, Heartbeat(member(ME, one.address), b"digest")))
        await until(lambda: len(two.admission.sessions) == 1)

        one.board.judge_again()
        await trio.sleep(0.1)
        assert len(two.admission.sessions) == 1
        gate.is_open = False
        one.board.judge_again()

        await until(lambda: not two.admission.sessions)
        # Counted once as it ends, and again when nng dials again.
        await until(lambda: one.dropped("revoked") >= 2)
        assert not two.admission.sessions
        gate.is_open = True
        await until(lambda: len(two.admission.sessions) == 1)


async def test_a_link_to_a_peer_whose_certificate_expires_ends(tmp_path: Path) -> None:
    """The end that has dialled hangs up, too."""
    async with running(tmp_path) as one, running(tmp_path, OTHER) as two:
        one.board.perform(SendTo(two.address, Heartbeat(member(ME, one.address), b"digest")))
        await until(lambda: len(two.admission.sessions) == 1)
        (taken,) = two.admission.sessions
        (dialled,) = one.links._dialled.values()
        assert dialled.peer is not None

        dialled.peer = attrs.evolve(dialled.peer, valid_until=time.time() + 60.0)
        one.board.end_expired()
        assert one.dropped(EXPIRED) == 0
        dialled.peer = attrs.evolve(dialled.peer, valid_until=time.time() - 1.0)
        one.board.end_expired()

        assert one.dropped(EXPIRED) == 1
        await until(lambda: taken not in two.admission.sessions)


async def test_every_connection_is_made_again_where_an_authority_is_dropped(
    tmp_path: Path, calling: Calling
) -> None:
    """Both those that this node has dialled and those that it has taken."""
    async with running(tmp_path) as one, running(tmp_path, OTHER) as two:
        one.board.perform(SendTo(two.address, Heartbeat(member(ME, one.address), b"digest")))
        await calling(one).greet()
        await until(lambda: len(two.admission.sessions) == 1)
        (taken,), (dialled,) = one.admission.sessions, two.admission.sessions

        one.board.connect_again()

        await until(lambda: taken not in one.admission.sessions)
        await until(lambda: len({*two.admission.sessions} - {dialled}) == 1)


async def test_clients_are_notified_of_the_revoked_certificates_and_nodes_are_not(
    tmp_path: Path, calling: Calling
) -> None:
    """A client with its welcome, and again when the list changes."""
    async with running(tmp_path, revoked=ReportRevocations(b"first")) as one:
        client, node = calling(one), calling(one, OTHER)
        assert isinstance(await client.greet(), Welcome)
        assert await client.hear() == ReportRevocations(b"first")
        assert isinstance(await node.greet(is_node=True), Welcome)

        one.inbound.notify_clients(ReportRevocations(b"second"))

        assert await client.hear() == ReportRevocations(b"second")
        # The next thing that a node receives is the answer.
        assert isinstance(await node.ask(RequestStats(3)), Refused)


BEFORE, NEXT = WIRE_VERSION - 1, WIRE_VERSION + 1


async def test_a_welcome_names_the_newest_version_that_both_speak(
    tmp_path: Path,
    calling: Calling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So each side knows what the other understands."""
    monkeypatch.setattr(admission, "WIRE_VERSION_OLDEST", BEFORE)
    async with running(tmp_path) as board:
        for newest, spoken in ((BEFORE, BEFORE), (99, WIRE_VERSION)):
            welcome = await calling(board).greet(wire_oldest=1, wire_newest=newest)

            assert isinstance(welcome, Welcome)
            assert welcome.wire == spoken


async def test_a_peer_below_the_oldest_version_spoken_is_refused(
    tmp_path: Path,
    calling: Calling,
) -> None:
    async with running(tmp_path) as board:
        oldest = WIRE_VERSION_OLDEST
        refused = await calling(board).greet(wire_oldest=1, wire_newest=oldest - 1)
        welcome = await calling(board).greet(wire_oldest=1, wire_newest=oldest)

        assert isinstance(refused, Refused)
        assert refused.reason == "wire_version"
        assert isinstance(welcome, Welcome)
        assert welcome.wire == oldest


def test_every_message_came_with_a_released_version() -> None:
    assert all(3 <= kind.declared.since <= WIRE_VERSION for kind in MESSAGES)


@pytest.mark.parametrize("spoken", [WIRE_VERSION, NEXT])
async def test_a_message_that_the_release_before_does_not_know_is_not_sent_to_it(
    spoken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted; what both know is sent all the same, and so is what another node knows."""
    since = attrs.evolve(RequestSummary.declared, since=NEXT)
    monkeypatch.setattr(RequestSummary, "declared", since)
    async with running(tmp_path) as near, running(tmp_path, OTHER) as far:
        near.members[OTHER] = member(OTHER, far.address)
        welcome = Welcome(0, spoken, member(OTHER, far.address), 4096)
        raw = encode(Envelope(OTHER, ME, welcome), cluster=CLUSTER)
        # A lookup is refused to nodes, so that its arrival shows without an actor.
        near.board.perform(Send(OTHER, Lookup(1, bytes(16))))
        # The Welcome of this build has come; no certificate stands for the name in it.
        await until(lambda: near.dropped("identity") == 1)
        near.links._answered(far.address, near.links._dialled[far.address], raw)

        near.board.perform(Send(OTHER, RequestSummary()))
        near.board.perform(Send(OTHER, Lookup(1, bytes(16))))
        await until(lambda: far.dropped("not_allowed") == 2)

        is_older = spoken < NEXT
        assert near.dropped("wire_version") == is_older
        assert len(far.mailboxes.publisher) == (not is_older)
