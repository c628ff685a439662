"""Routing: each message of the wire and each fact has one mailbox, and mypy knows which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mypy import api

from peercache.actors.mailboxes import ClientGone
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF
from peercache.errors import LocalProtocolError
from peercache.node.admission import SENDERS
from peercache.node.routing import NodeMailboxes, TellPool
from peercache.wire.envelope import MESSAGES
from peercache.wire.messages.session import Counted, Hello, StatsAsked

ROOT = Path(__file__).parents[3]

WRONG_RECEIVERS = """
from peercache.actors.effects import TellPool, TellPublisher, TellRing
from peercache.actors.mailboxes import ClientGone, ViewChanged
from peercache.actors.pool.actor import Pool
from peercache.actors.ring.actor import RingActor
from peercache.actors.runtime import run_actor
from peercache.node.routing import NodeMailboxes
from peercache.wire.messages.directory import Lookup

TellPool(ClientGone(1))
TellRing(ClientGone(1))  # refused: the ring does not hear it
TellPublisher(Lookup(1, b""))  # refused: a question for the directory

async def pair(boxes: NodeMailboxes, pool: Pool, ring: RingActor) -> None:
    await run_actor(ring, boxes.ring, print)
    await run_actor(pool, boxes.pool, print)
    await run_actor(ring, boxes.pool, print)  # refused: the ring at the pool's mailbox
"""

NO_RECEIVER = '''
import attrs
from typing import TypeAlias
from typing_extensions import assert_never
from peercache.actors.mailboxes import RingHears, ViewChanged

@attrs.frozen
class NewFact:
    """A fact that was added to a mailbox, and that its actor does not match."""

NewHears: TypeAlias = RingHears | NewFact

def on_message(message: NewHears) -> int:
    match message:
        case ViewChanged():
            return 1
    assert_never(message)  # refused: NewFact comes here
'''


def mailbox_of(message: Any) -> str:
    """Offer a message; return the name of the one mailbox that it lies in."""
    boxes = NodeMailboxes()
    assert boxes.offer(Origin(5), message, 10)
    (name,) = [name for name, box in boxes.named().items() if len(box)]
    return name


@pytest.mark.parametrize("kind", sorted(SENDERS, key=lambda kind: kind.__name__))
def test_each_message_that_a_peer_may_send_has_one_mailbox(kind: type) -> None:
    """Only what the switchboard answers itself has none."""
    message = kind.__new__(kind)

    if kind in (StatsAsked, Counted):
        with pytest.raises(LocalProtocolError, match="the switchboard answers"):
            mailbox_of(message)
    else:
        assert mailbox_of(message) in NodeMailboxes().named()


@pytest.mark.parametrize("kind", sorted(set(MESSAGES) - set(SENDERS), key=str))
def test_answers_have_no_mailbox_at_a_node(kind: type) -> None:
    """Admission refuses them; a mailbox that took one would be a bug."""
    reason = "the switchboard answers" if kind is Hello else "and takes none"

    with pytest.raises(LocalProtocolError, match=reason):
        mailbox_of(kind.__new__(kind))


def test_a_fact_lies_in_its_receivers_mailbox() -> None:
    """It comes from the node itself."""
    boxes = NodeMailboxes()

    boxes.tell(TellPool(ClientGone(7)))

    assert boxes.pool.take() == (SELF, ClientGone(7))
    assert not any(len(box) for box in boxes.in_order)


def test_mypy_refuses_a_fact_for_the_wrong_actor_and_a_fact_without_a_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that its receiver does not hear must not wait for a test to be found."""
    wrong, missing = tmp_path / "wrong_receivers.py", tmp_path / "no_receiver.py"
    wrong.write_text(WRONG_RECEIVERS)
    missing.write_text(NO_RECEIVER)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)

    cache = str(ROOT / ".mypy_cache" / "routing")
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}"]
    found, _, _ = api.run([*options, "--ignore-missing-imports", str(wrong), str(missing)])

    errors = [line for line in found.splitlines() if ": error:" in line]
    refused = [line.rpartition("/")[2].split(": error:")[0] for line in errors]
    marked = [
        f"{path.name}:{number}"
        for path in (missing, wrong)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# refused" in line
    ]
    assert sorted(set(refused)) == sorted(marked), found
