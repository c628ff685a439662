"""Mailboxes: everything that the actors of a node hear, grouped by the actor that hears it.

Each actor has one union of types, `...Hears`: the messages of the wire that its mailbox takes, and
the facts that other actors of the node tell it. A fact crosses no socket: it is never encoded and
never lost. mypy refuses a fact for an actor that does not hear it (`actors.effects`) and a message
of the wire without a receiver (`node.routing`).
"""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.origin import Origin
from peercache.actors.storage_port import DiskFact, DiskOpened
from peercache.model.hash_ring import HashRing
from peercache.model.member import Member
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Disputed,
    Lookup,
    Put,
    Repair,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)
from peercache.wire.messages.membership import Heartbeat, HeartbeatSeen, Join, ViewAsked, ViewShared
from peercache.wire.messages.pool import (
    Abort,
    Clear,
    Commit,
    Committed,
    Granted,
    LiveReservations,
    Remove,
    Reserve,
    Touched,
)
from peercache.wire.messages.promote import Promote
from peercache.wire.messages.rdma import ChannelOpened, ChannelsHeld, OpenChannel
from peercache.wire.messages.session import Refused

# --- membership -----------------------------------------------------------------------------------

MembershipHears: TypeAlias = Join | Heartbeat | HeartbeatSeen | ViewShared | ViewAsked


# --- several actors -------------------------------------------------------------------------------


@attrs.frozen
class ViewChanged:
    """membership → ring, directory: the view as it is now, dead and left included."""

    members: tuple[Member, ...]


@attrs.frozen(eq=False)
class RecordsChanged:
    """pool, disk → directory and publisher: records in force, and drops that end records."""

    records: npt.NDArray[np.void]
    drops: npt.NDArray[np.void]


@attrs.frozen
class PoolGrew:
    """node → pool, verbs: the first `usable_bytes` of the page memory are populated."""

    usable_bytes: int


# --- ring -----------------------------------------------------------------------------------------

RingHears: TypeAlias = ViewChanged


# --- directory shard ------------------------------------------------------------------------------

StreamMessage: TypeAlias = Put | Delete | Repair
"""One numbered change of a holder's records."""

DirectoryHears: TypeAlias = (
    Lookup | Disputed | StreamMessage | StreamSummary | RecordsChanged | ViewChanged
)


# --- publisher ------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class RingChanged:
    """ring → publisher: the ring as it is now."""

    ring: HashRing


@attrs.frozen
class Republish:
    """membership → publisher: this node was found dead, so others may have dropped its records."""


@attrs.frozen
class ReserveAhead:
    """publisher → pool: what a Commit asked for beside, now that the Commit is answered."""

    origin: Origin
    reserve: Reserve


@attrs.frozen(eq=False)
class PagesCommitted:
    """pool → publisher: new records, and the client that waits until they are published.

    The publisher answers `origin` with Committed(request, sequence, states, records, published) as
    soon as each record has one owner's acknowledgement, or after patience_s.
    """

    origin: Origin
    request: int
    sequence: int
    states: bytes
    records: npt.NDArray[np.void]
    """The records that this commit made, dtype RECORD; may be empty."""
    here: npt.NDArray[np.void]
    """Records of pages that were there already, for the client's cache."""
    patience_s: float
    ahead: int = 0
    offsets: bytes = b""
    """A reservation made ahead, which the answer tells of."""
    then: tuple[ReserveAhead, ...] = ()
    """What the pool hears as soon as the Commit is answered."""


OwnerAnswer: TypeAlias = Acknowledged | SummaryMatches | SummaryDiffers
"""What a directory owner answers to a message of the publisher's stream."""

PublisherHears: TypeAlias = PagesCommitted | RecordsChanged | RingChanged | Republish | OwnerAnswer


# --- pool -----------------------------------------------------------------------------------------


@attrs.frozen
class ClientGone:
    """node → pool: the client's process has exited; its reservations end."""

    client: int


DISK_TIER = Origin(0)
"""The disk tier as a client of its own pool: messages between actors of this node come from 0, and
no message from the network does. Its reservations end when the store is done with their slots."""

PoolHears: TypeAlias = (
    Reserve | Commit | Abort | LiveReservations | Touched | Remove | Clear
    | ReserveAhead | ClientGone | PoolGrew
)  # fmt: skip


# --- disk -----------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class PagesStored:
    """pool → disk: pages that a client has committed, all of one namespace."""

    records: npt.NDArray[np.void]
    namespace: int


@attrs.frozen
class PagesRemoved:
    """pool → disk: what is to go from disk too; the disk answers `origin`.

    keys: the pages that went from memory.
    """

    origin: Origin
    message: Remove | Clear
    keys: bytes


@attrs.frozen(eq=False)
class DiskIndexed:
    """node → disk: what DiskOpened tells, with the index that a thread has made of it.

    index: a DiskIndex of the disk actor's own; to make one takes seconds for a million pages.
    """

    opened: DiskOpened
    index: object


DiskHears: TypeAlias = (
    Promote | PagesStored | PagesRemoved | Granted | Committed | DiskIndexed | DiskFact
)


# --- rdma -----------------------------------------------------------------------------------------


@attrs.frozen
class RdmaServes:
    """node → rdma: the devices are open, and some of the memory is registered."""


@attrs.frozen
class RdmaAbsent:
    """node → rdma: there will be no channels. reason: a sentence, for clients that ask for one."""

    reason: str


@attrs.frozen
class PairOpened:
    """verbs → rdma: what came of a WantPair. answer: for the client; is_open: it has a channel."""

    origin: Origin
    channel: int
    is_open: bool
    answer: ChannelOpened | Refused


RdmaHears: TypeAlias = OpenChannel | ChannelsHeld | RdmaServes | RdmaAbsent | PairOpened


# --- verbs: the keeper of the rdma devices --------------------------------------------------------


@attrs.frozen
class WantPair:
    """rdma → verbs: make the other end of a channel, or say again what it opens."""

    origin: Origin
    wanted: OpenChannel


@attrs.frozen
class DropPair:
    """rdma → verbs: destroy a channel of a client."""

    client: int
    channel: int


VerbsHears: TypeAlias = WantPair | DropPair | PoolGrew
