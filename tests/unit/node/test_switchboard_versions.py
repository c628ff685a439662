"""What a node says to a peer of the build that came before, on real sockets."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from peercache.actors.effects import Send
from peercache.wire.codec import encode
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.directory import Lookup, SummaryWanted
from peercache.wire.messages.session import Welcome
from tests.pace import until
from tests.unit.node.test_switchboard import (
    CLUSTER,
    ME,
    Calling,
    calling,  # noqa: F401 - a fixture
    member,
    running,
)

OTHER = 0x22


async def test_a_welcome_names_the_newest_version_that_both_speak(
    tmp_path: Path,
    calling: Calling,  # noqa: F811
) -> None:
    """So each side knows what the other understands."""
    async with running(tmp_path) as board:
        for newest, spoken in ((WIRE_VERSION_OLDEST, WIRE_VERSION_OLDEST), (99, WIRE_VERSION)):
            welcome = await calling(board).greet(wire_oldest=1, wire_newest=newest)

            assert isinstance(welcome, Welcome)
            assert welcome.wire == spoken


@pytest.mark.parametrize("spoken", [WIRE_VERSION_OLDEST, WIRE_VERSION])
async def test_a_message_that_the_build_before_does_not_know_is_not_sent_to_it(
    spoken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted; what both know is sent all the same, and so is what another node knows."""
    since = attrs.evolve(SummaryWanted.declared, since=WIRE_VERSION)
    monkeypatch.setattr(SummaryWanted, "declared", since)
    async with running(tmp_path) as near, running(tmp_path, OTHER) as far:
        near.members[OTHER] = member(OTHER, far.address)
        welcome = Welcome(0, spoken, member(OTHER, far.address), 4096)
        raw = encode(Envelope(OTHER, ME, welcome), cluster=CLUSTER)
        # A lookup is refused to nodes, so that its arrival shows without an actor.
        near.board.perform(Send(OTHER, Lookup(1, bytes(16))))
        # The Welcome of this build has come; no certificate stands for the name in it.
        await until(lambda: near.dropped("identity") == 1)
        near.links._answered(far.address, near.links._dialled[far.address], raw)

        near.board.perform(Send(OTHER, SummaryWanted()))
        near.board.perform(Send(OTHER, Lookup(1, bytes(16))))
        await until(lambda: far.dropped("not_allowed") == 2)

        is_older = spoken < WIRE_VERSION
        assert near.dropped("wire_version") == is_older
        assert len(far.mailboxes.publisher) == (not is_older)
