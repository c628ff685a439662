"""Routing: each message of the wire and each fact has one mailbox."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from peercache.actors.effects import NotifyPool
from peercache.actors.mailboxes import (
    ClientGone,
    DirectoryMessage,
    MembershipMessage,
    PlacementMessage,
    PoolMessage,
    PromoteMessage,
    PublisherMessage,
    RdmaMessage,
    RemovalMessage,
)
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF
from peercache.errors import LocalProtocolError
from peercache.node.switchboard import NodeMailboxes
from peercache.wire.envelope import MESSAGES
from peercache.wire.messages.declared import Message, Receiver
from peercache.wire.messages.session import Hello

SENT = {kind for kind in MESSAGES if kind.declared.senders}


def mailbox_of(message: Any) -> str:
    """Offer a message; return the name of the one mailbox that it is in."""
    boxes = NodeMailboxes()
    assert boxes.offer(Origin(5), message, 10)
    (name,) = [name for name, box in boxes.named().items() if len(box)]
    return name


@pytest.mark.parametrize("kind", sorted(SENT, key=lambda kind: kind.__name__))
def test_each_message_that_a_peer_may_send_has_one_mailbox(kind: type) -> None:
    """Only what the switchboard answers itself has none."""
    message = kind.__new__(kind)

    if kind.declared.to is Receiver.NODE:
        with pytest.raises(LocalProtocolError, match="the switchboard answers"):
            mailbox_of(message)
    else:
        assert mailbox_of(message) in NodeMailboxes().named()


@pytest.mark.parametrize("kind", sorted(set(MESSAGES) - SENT, key=str))
def test_answers_have_no_mailbox_at_a_node(kind: type) -> None:
    """Admission refuses them; a mailbox that took one would be a bug."""
    reason = "the switchboard answers" if kind is Hello else "and takes none"

    with pytest.raises(LocalProtocolError, match=reason):
        mailbox_of(kind.__new__(kind))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_actor_that_a_message_names_takes_it(kind: type[Message]) -> None:
    """Its union of messages shows it, with which mypy checks the actor."""
    taken = {
        "membership": MembershipMessage,
        "publisher": PublisherMessage,
        "directory": DirectoryMessage,
        "pool": PoolMessage,
        "promote": PromoteMessage,
        "rdma": RdmaMessage,
        "removal": RemovalMessage,
        "placement": PlacementMessage,
    }
    named = {kind.declared.to, kind.declared.of_node or kind.declared.to}

    for actor, takes in taken.items():
        # Answers of one actor to another of the same node are messages that no peer may send.
        is_named = Receiver(actor) in named
        assert (kind in get_args(takes)) is is_named or not (is_named or kind.declared.senders)


def test_a_fact_is_in_its_receivers_mailbox() -> None:
    """It comes from the node itself."""
    boxes = NodeMailboxes()

    boxes.deliver(NotifyPool(ClientGone(7)))

    assert boxes.pool.take() == (SELF, ClientGone(7))
    assert not any(len(box) for box in boxes.named().values())
