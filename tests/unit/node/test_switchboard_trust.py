"""What a switchboard does with open connections when certificates cease to be good."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import trio

from peercache.actors.effects import SendTo
from peercache.errors import Rejected
from peercache.net.peers import Peer
from peercache.observability.reasons import EXPIRED
from peercache.wire.messages.membership import Heartbeat
from peercache.wire.messages.session import Refused, ReportRevocations, RequestStats, Welcome
from tests.pace import until
from tests.unit.node.test_switchboard import ME, Calling, calling, member, running

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


async def test_clients_are_told_the_revoked_certificates_and_nodes_are_not(
    tmp_path: Path, calling: Calling
) -> None:
    """A client with its welcome, and again when the list changes."""
    async with running(tmp_path, revoked=ReportRevocations(b"first")) as one:
        client, node = calling(one), calling(one, OTHER)
        assert isinstance(await client.greet(), Welcome)
        assert await client.hear() == ReportRevocations(b"first")
        assert isinstance(await node.greet(is_node=True), Welcome)

        one.inbound.tell_clients(ReportRevocations(b"second"))

        assert await client.hear() == ReportRevocations(b"second")
        # The next thing that a node hears is the answer.
        assert isinstance(await node.ask(RequestStats(3)), Refused)
