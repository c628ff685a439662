"""Routing: the mailboxes of a node, and which of them a message of the wire or a fact goes to.

A message states its receiver (`wire.messages.declared`); mypy refuses a fact without a mailbox.
"""

from __future__ import annotations

from typing import Any, final

import attrs

from peercache.actors.effects import Tell
from peercache.actors.mailboxes import (
    DirectoryMessage,
    DiskMessage,
    HandoverMessage,
    MembershipMessage,
    PoolMessage,
    PromoteMessage,
    PublisherMessage,
    RdmaMessage,
    RemovalMessage,
    RingMessage,
)
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF, Mailbox, Turn
from peercache.errors import LocalProtocolError
from peercache.wire.messages.declared import Message, Receiver


@final
@attrs.frozen(eq=False)
class NodeMailboxes:
    """One mailbox for each actor of a node.

    The order of the fields is the order in which a turn looks at them. The publisher comes
    before the directory: it answers a Commit, and what it tells other nodes takes time.
    """

    membership: Mailbox[MembershipMessage] = attrs.field(factory=Mailbox, init=False)
    ring: Mailbox[RingMessage] = attrs.field(factory=Mailbox, init=False)
    publisher: Mailbox[PublisherMessage] = attrs.field(factory=Mailbox, init=False)
    directory: Mailbox[DirectoryMessage] = attrs.field(factory=Mailbox, init=False)
    pool: Mailbox[PoolMessage] = attrs.field(factory=Mailbox, init=False)
    disk: Mailbox[DiskMessage] = attrs.field(factory=Mailbox, init=False)
    promote: Mailbox[PromoteMessage] = attrs.field(factory=Mailbox, init=False)
    rdma: Mailbox[RdmaMessage] = attrs.field(factory=Mailbox, init=False)
    removal: Mailbox[RemovalMessage] = attrs.field(factory=Mailbox, init=False)
    handover: Mailbox[HandoverMessage] = attrs.field(factory=Mailbox, init=False)
    turn: Turn = attrs.field(init=False)

    @turn.default
    def _of_all(self) -> Turn:
        return Turn(tuple(self.named().values()))

    def named(self) -> dict[str, Mailbox[Any]]:
        """Return every mailbox by the name of its actor."""
        names = [field.name for field in attrs.fields(NodeMailboxes)]
        return {name: getattr(self, name) for name in names if name != "turn"}

    def tell(self, told: Tell) -> None:
        """Put a fact from inside the node into its receiver's mailbox."""
        mailbox: Mailbox[Any] = getattr(self, told.actor)
        mailbox.tell(SELF, told.fact)

    def offer(self, sender: Origin, message: Message, size_bytes: int) -> bool:
        """Put a message from the network into its receiver's mailbox; False if that is full.

        `trust.rights` lets no message in that is not for an actor.
        """
        declared = message.declared
        # A node's own connections have no pipe: its message is for this node's own pages.
        receiver = declared.to if sender.pipe else declared.of_node or declared.to
        if receiver is Receiver.NODE:
            raise LocalProtocolError(f"the switchboard answers {type(message).__name__}")
        if receiver is Receiver.ASKER:
            raise LocalProtocolError(f"a node sends {type(message).__name__}, and takes none")
        mailbox: Mailbox[Any] = getattr(self, receiver.value)
        return mailbox.offer(sender, message, size_bytes)
