"""What a node sends to a peer of the release before, on real sockets.

The releases are N-1 and N, also while a build speaks only one version.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from peercache.actors.effects import Send
from peercache.node import admission
from peercache.wire.codec import encode
from peercache.wire.envelope import MESSAGES, WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.directory import Lookup, RequestSummary
from peercache.wire.messages.session import Refused, Welcome
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
BEFORE, NEXT = WIRE_VERSION - 1, WIRE_VERSION + 1


async def test_a_welcome_names_the_newest_version_that_both_speak(
    tmp_path: Path,
    calling: Calling,  # noqa: F811
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
    calling: Calling,  # noqa: F811
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
    assert all(4 <= kind.declared.since <= WIRE_VERSION for kind in MESSAGES)


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
