"""Effects: what actors ask of the world, as plain values, and the protocol of a state actor.

State actors return *effects*, values that say what to do, in the order in which it must be done.
The performer (the node in production, the simulated world in `sims/`) keeps that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.mailboxes import (
    DirectoryMessage,
    DiskMessage,
    PeerAnswered,
    PlacementMessage,
    PoolMessage,
    PromoteMessage,
    PublisherMessage,
    RdmaMessage,
    RemovalMessage,
    RingMessage,
)
from peercache.actors.origin import Origin
from peercache.actors.ports import DiskEffect, RdmaEffect
from peercache.model.hash_ring import HashRing
from peercache.model.member import Member
from peercache.model.records import Records
from peercache.model.runs import U64
from peercache.model.seal import Seals
from peercache.wire.messages.declared import Message

MessageT_contra = TypeVar("MessageT_contra", contravariant=True)


@attrs.frozen
class Send:
    """Send to a member (an incarnation), or back along an Origin. May be lost."""

    to: int | Origin
    message: Message


@attrs.frozen
class SendTo:
    """Send to the node that listens at an address (HOST:PORT), as target 0. May be lost."""

    address: str
    message: Message


@attrs.frozen(eq=False)
class StoreWords:
    """Store generation words: `values[i]` at word `indices[i]`, each one aligned 8-byte store.

    seals: (n,) SEAL, whose key, space and length are stored before the words; None keeps those that
           are there, as for a word that goes odd.
    """

    indices: npt.NDArray[np.int64]
    values: U64
    seals: Seals | None = None


@attrs.frozen
class BuildRing:
    """Build the ring of these members in a thread; the ring actor receives RingBuilt."""

    members: tuple[int, ...]
    build: Callable[[], HashRing]


@attrs.frozen(eq=False)
class Pull:
    """Read pages of another node into slots of this one; the placement actor receives PullDone.

    job:       a number that no other Pull of this node had.
    records:   (n,) RECORD of the member's pages, all of one namespace.
    offsets:   (n,) uint64 of the reserved slots in page memory.
    within_s:  how long it may take.
    is_leaving: whether the member leaves soon, so that no channel to it is kept.
    """

    job: int
    member: Member
    namespace: int
    records: Records
    offsets: U64
    within_s: float
    is_leaving: bool = True


# --- facts to the other actors of this node: never lost, never encoded ----------------------------
# One class per receiver, so that mypy refuses a fact that its receiver does not handle. actor: the
# name of its mailbox.


@attrs.frozen
class NotifyMembership:
    """Send a fact to the membership."""

    actor: ClassVar = "membership"
    fact: PeerAnswered


@attrs.frozen
class NotifyRing:
    """Send a fact to the ring."""

    actor: ClassVar = "ring"
    fact: RingMessage


@attrs.frozen
class NotifyDirectory:
    """Send a fact to the directory shard of this node."""

    actor: ClassVar = "directory"
    fact: DirectoryMessage


@attrs.frozen
class NotifyPublisher:
    """Send a fact to the publisher."""

    actor: ClassVar = "publisher"
    fact: PublisherMessage


@attrs.frozen
class NotifyPool:
    """Send a fact to the pool."""

    actor: ClassVar = "pool"
    fact: PoolMessage


@attrs.frozen
class NotifyDisk:
    """Send a fact to the disk actor."""

    actor: ClassVar = "disk"
    fact: DiskMessage


@attrs.frozen
class NotifyPromote:
    """Send a fact to the promote actor."""

    actor: ClassVar = "promote"
    fact: PromoteMessage


@attrs.frozen
class NotifyRdma:
    """Send a fact to the rdma actor."""

    actor: ClassVar = "rdma"
    fact: RdmaMessage


@attrs.frozen
class NotifyPlacement:
    """Send a fact to the placement actor."""

    actor: ClassVar = "placement"
    fact: PlacementMessage


@attrs.frozen
class NotifyRemoval:
    """Send a fact to the removal actor."""

    actor: ClassVar = "removal"
    fact: RemovalMessage


Notify: TypeAlias = (
    NotifyMembership | NotifyRing | NotifyDirectory | NotifyPublisher | NotifyPool | NotifyDisk
    | NotifyPromote | NotifyRdma | NotifyRemoval | NotifyPlacement
)  # fmt: skip

LocalEffect: TypeAlias = StoreWords | Pull | DiskEffect | RdmaEffect
"""What is done with the memory, the disk and the devices of this node."""

Effect: TypeAlias = Send | SendTo | BuildRing | Notify | LocalEffect


class StateActor(Protocol[MessageT_contra]):
    """A state machine that never awaits. `now` is monotonic seconds, handed in."""

    def on_message(self, sender: Origin, message: MessageT_contra, now: float) -> list[Effect]:
        """Take one message and return what must be done."""

    def on_tick(self, now: float) -> list[Effect]:
        """Do what has come due at `now`; afterwards `deadline()` is later than `now`."""

    def deadline(self) -> float:
        """Return when the next tick is due; inf for never."""

    def check(self) -> None:
        """Assert the invariants, in time that does not grow with the state."""
