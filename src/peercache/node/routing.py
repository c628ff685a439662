"""Routing: the mailboxes of a node, and which of them a message of the wire or a fact goes to.

mypy checks that both are total: a message of the wire, or a fact, without a mailbox is an error.
"""

from __future__ import annotations

from typing import Any, final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import (
    Tell,
    TellDirectory,
    TellDisk,
    TellHandover,
    TellMembership,
    TellPool,
    TellPromote,
    TellPublisher,
    TellRdma,
    TellRemoval,
    TellRing,
)
from peercache.actors.mailboxes import (
    DirectoryHears,
    DiskHears,
    HandoverHears,
    MembershipHears,
    PoolHears,
    PromoteHears,
    PublisherHears,
    RdmaHears,
    RemovalHears,
    RingHears,
)
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF, Mailbox, Turn
from peercache.errors import LocalProtocolError
from peercache.wire.envelope import Message
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Disputed,
    Doubted,
    HandedOver,
    Located,
    Lookup,
    Put,
    Repair,
    StreamSummary,
    SummaryAsked,
    SummaryDiffers,
    SummaryMatches,
    SummaryWanted,
)
from peercache.wire.messages.draining import (
    CancelDrain,
    DrainAsked,
    DrainNode,
    DrainTold,
    PagesOffered,
    PagesTaken,
)
from peercache.wire.messages.following import ChangesAsked, ChangesTold
from peercache.wire.messages.membership import (
    Heartbeat,
    HeartbeatSeen,
    Join,
    ViewAsked,
    ViewChanges,
    ViewChangesAsked,
    ViewCompared,
    ViewShared,
)
from peercache.wire.messages.operations import ClusterAsked, ClusterTold, StatusAsked, StatusTold
from peercache.wire.messages.overlap import OverlapAsked, OverlapTold
from peercache.wire.messages.pool import (
    Abort,
    Clear,
    Commit,
    Committed,
    Granted,
    LiveReservations,
    Remove,
    Removed,
    Reserve,
    ReserveMirror,
    Touched,
)
from peercache.wire.messages.promote import Promote, Promoted
from peercache.wire.messages.rdma import ChannelOpened, ChannelsHeld, OpenChannel
from peercache.wire.messages.retain import Retain, Retained
from peercache.wire.messages.session import (
    Counted,
    Hello,
    Refused,
    RevocationsTold,
    SayHello,
    Stats,
    StatsAsked,
    Welcome,
)


@final
@attrs.frozen(eq=False)
class NodeMailboxes:
    """One mailbox for each actor of a node.

    The order of the fields is the order in which the switchboard serves them. The publisher comes
    before the directory: it answers a Commit, and what it tells other nodes takes time.
    """

    turn: Turn = attrs.field(factory=Turn, init=False)
    """The turn of all of them."""
    membership: Mailbox[MembershipHears] = attrs.field(factory=Mailbox, init=False)
    ring: Mailbox[RingHears] = attrs.field(factory=Mailbox, init=False)
    publisher: Mailbox[PublisherHears] = attrs.field(factory=Mailbox, init=False)
    directory: Mailbox[DirectoryHears] = attrs.field(factory=Mailbox, init=False)
    pool: Mailbox[PoolHears] = attrs.field(factory=Mailbox, init=False)
    disk: Mailbox[DiskHears] = attrs.field(factory=Mailbox, init=False)
    promote: Mailbox[PromoteHears] = attrs.field(factory=Mailbox, init=False)
    rdma: Mailbox[RdmaHears] = attrs.field(factory=Mailbox, init=False)
    removal: Mailbox[RemovalHears] = attrs.field(factory=Mailbox, init=False)
    handover: Mailbox[HandoverHears] = attrs.field(factory=Mailbox, init=False)
    in_order: tuple[Mailbox[Any], ...] = attrs.field(init=False)

    @in_order.default
    def _every_mailbox(self) -> tuple[Mailbox[Any], ...]:
        every = tuple(self.named().values())
        for mailbox in every:
            mailbox.turn = self.turn
        return every

    def named(self) -> dict[str, Mailbox[Any]]:
        """Return every mailbox by the name of its actor."""
        names = [field.name for field in attrs.fields(NodeMailboxes)]
        return {name: getattr(self, name) for name in names if name not in ("turn", "in_order")}

    def tell(self, told: Tell) -> None:
        """Put a fact from inside the node into its receiver's mailbox."""
        match told:
            case TellMembership(fact):
                self.membership.tell(SELF, fact)
            case TellDirectory(fact):
                self.directory.tell(SELF, fact)
            case TellPublisher(fact):
                self.publisher.tell(SELF, fact)
            case TellPool(fact):
                self.pool.tell(SELF, fact)
            case TellDisk(fact):
                self.disk.tell(SELF, fact)
            case TellPromote(fact):
                self.promote.tell(SELF, fact)
            case TellRing(fact):
                self.ring.tell(SELF, fact)
            case TellRdma(fact):
                self.rdma.tell(SELF, fact)
            case TellHandover(fact):
                self.handover.tell(SELF, fact)
            case TellRemoval(fact):
                self.removal.tell(SELF, fact)
            case _:
                assert_never(told)

    def offer(self, sender: Origin, message: Message, size_bytes: int) -> bool:
        """Put a message from the network into its receiver's mailbox; False if that is full.

        `trust.rights` lets no message in that is not for an actor.
        """
        match message:
            case Lookup() | Disputed() | Put() | Delete() | StreamSummary() | Repair():
                return self.directory.offer(sender, message, size_bytes)
            case HandedOver():
                return self.directory.offer(sender, message, size_bytes)
            case Acknowledged() | SummaryDiffers() | SummaryMatches() | Doubted():
                return self.publisher.offer(sender, message, size_bytes)
            case SummaryWanted() | SummaryAsked() | ChangesAsked():
                return self.publisher.offer(sender, message, size_bytes)
            case Reserve() | ReserveMirror() | Commit() | Abort() | LiveReservations():
                return self.pool.offer(sender, message, size_bytes)
            case Touched():
                return self.pool.offer(sender, message, size_bytes)
            case Remove() | Clear() | Retain():
                # A client means every member; a member tells this node to see to its own pages.
                box: Mailbox[Any] = self.removal if sender.pipe else self.pool
                return box.offer(sender, message, size_bytes)
            case Removed() | Retained():
                return self.removal.offer(sender, message, size_bytes)
            case PagesOffered() | PagesTaken():
                return self.handover.offer(sender, message, size_bytes)
            case Promote():
                return self.promote.offer(sender, message, size_bytes)
            case (
                Join() | Heartbeat() | HeartbeatSeen() | ViewShared() | ViewAsked()
                | ViewChangesAsked() | ViewCompared()
            ):  # fmt: skip
                return self.membership.offer(sender, message, size_bytes)
            case OpenChannel() | ChannelsHeld():
                return self.rdma.offer(sender, message, size_bytes)
            case (
                Hello() | StatsAsked() | Counted() | RevocationsTold()
                | StatusAsked() | ClusterAsked()
                | DrainNode() | CancelDrain() | DrainAsked() | OverlapAsked()
            ):  # fmt: skip
                raise LocalProtocolError(f"the switchboard answers {type(message).__name__}")
            case (
                Welcome() | Refused() | SayHello() | Located() | Granted() | Committed()
                | Stats() | Promoted() | ChannelOpened() | ViewChanges()
                | StatusTold() | ClusterTold() | DrainTold() | OverlapTold()
                | ChangesTold()
            ):  # fmt: skip
                raise LocalProtocolError(f"a node sends {type(message).__name__}, and takes none")
        assert_never(message)
