"""The types of the mailboxes: mypy refuses a message that its receiver does not hear."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

WRONG_RECEIVERS = """
from peercache.actors.effects import NotifyPool, NotifyPublisher, NotifyRing
from peercache.actors.mailboxes import ClientGone, ViewChanged
from peercache.actors.pool.actor import Pool
from peercache.actors.ring.actor import RingActor
from peercache.actors.runtime import run_actor
from peercache.node.switchboard import NodeMailboxes
from peercache.wire.messages.directory import Lookup

NotifyPool(ClientGone(1))
NotifyRing(ClientGone(1))  # refused: the ring does not hear it
NotifyPublisher(Lookup(1, b""))  # refused: a question for the directory

async def pair(boxes: NodeMailboxes, pool: Pool, ring: RingActor) -> None:
    await run_actor(ring, boxes.ring, print, print)
    await run_actor(pool, boxes.pool, print, print)
    await run_actor(ring, boxes.pool, print, print)  # refused: the ring at the pool's mailbox
"""

NO_RECEIVER = '''
import attrs
from typing import TypeAlias
from typing_extensions import assert_never
from peercache.actors.mailboxes import RingMessage, ViewChanged

@attrs.frozen
class NewFact:
    """A fact that was added to a mailbox, and that its actor does not match."""

NewMessage: TypeAlias = RingMessage | NewFact

def on_message(message: NewMessage) -> int:
    match message:
        case ViewChanged():
            return 1
    assert_never(message)  # refused: NewFact comes here
'''


def test_mypy_refuses_a_fact_for_the_wrong_actor_and_a_fact_without_a_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that its receiver does not hear must not wait for a test to be found."""
    wrong, missing = tmp_path / "wrong_receivers.py", tmp_path / "no_receiver.py"
    wrong.write_text(WRONG_RECEIVERS)
    missing.write_text(NO_RECEIVER)
    # As `make types` does it, which comes first in `make test`: its cache makes this quick.
    monkeypatch.chdir(ROOT)

    found, _, _ = api.run([str(wrong), str(missing)])

    errors = [line for line in found.splitlines() if ": error:" in line]
    refused = [line.rpartition("/")[2].split(": error:")[0] for line in errors]
    marked = [
        f"{path.name}:{number}"
        for path in (missing, wrong)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# refused" in line
    ]
    assert sorted(set(refused)) == sorted(marked), found
