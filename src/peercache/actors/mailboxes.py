"""Mailboxes: the messages of the actors of a node, grouped by receiver.

Each actor has one union of types, `...Message`: the messages of the wire for its mailbox, and the
facts that other actors of the node send it. A fact crosses no socket: it is never encoded and never
lost. mypy refuses a fact for an actor that does not handle it (`actors.effects`) and a message of
the wire without a receiver (`node.switchboard`).
"""

from __future__ import annotations

from math import inf
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.origin import Origin
from peercache.actors.ports import DiskEnded, DiskFact, DiskOpened, LateEnded, RdmaFact
from peercache.model.hash_ring import HashRing
from peercache.model.keys import Tag, Tags
from peercache.model.member import Member
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Lookup,
    Put,
    Repair,
    ReportStale,
    RequestChanges,
    RequestFreshSummary,
    RequestSummary,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
    VerifyRecords,
)
from peercache.wire.messages.membership import (
    CompareView,
    CopiesEvicted,
    Heartbeat,
    HeartbeatSeen,
    Join,
    OfferPages,
    OfferSpill,
    PagesTaken,
    ReportDrainState,
    ReportRoom,
    RequestRoom,
    RequestView,
    RequestViewChanges,
    ShareView,
)
from peercache.wire.messages.pool import (
    Abort,
    Clear,
    Commit,
    Committed,
    Demote,
    Granted,
    LiveReservations,
    Promote,
    Remove,
    Removed,
    Reserve,
    ReserveMirror,
    Retain,
    Retained,
    Touched,
)
from peercache.wire.messages.session import ChannelsHeld, OpenChannel

# --- membership -----------------------------------------------------------------------------------


@attrs.frozen
class PeerAnswered:
    """node → membership: the process at an address that this node dialled is this member."""

    address: str
    member: Member


@attrs.frozen
class AddressesFound:
    """node → membership: discovery gives these addresses, and no others."""

    addresses: tuple[str, ...]


MembershipMessage: TypeAlias = (
    Join
    | Heartbeat
    | HeartbeatSeen
    | ShareView
    | RequestView
    | RequestViewChanges
    | CompareView
    | PeerAnswered
    | AddressesFound
)


# --- several actors -------------------------------------------------------------------------------


@attrs.frozen
class ViewChanged:
    """membership → ring, directory, removal, placement: the view of now, dead and left included."""

    members: tuple[Member, ...]


@attrs.frozen(eq=False)
class RecordsChanged:
    """pool → directory and publisher: records in force, and drops that end records."""

    records: npt.NDArray[np.void]
    drops: npt.NDArray[np.void]


@attrs.frozen
class PoolGrew:
    """node → pool, rdma; pool → promote: the first `usable_bytes` of page memory are usable."""

    usable_bytes: int


@attrs.frozen
class NamespaceNamed:
    """node → pool → disk: a writer of this namespace has connected; quotas may name it."""

    name: str


# --- ring -----------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class RingBuilt:
    """node → ring: the ring that it asked for is there."""

    ring: HashRing


RingMessage: TypeAlias = ViewChanged | RingBuilt


# --- removal --------------------------------------------------------------------------------------

RemovalMessage: TypeAlias = Remove | Clear | Removed | Retain | Demote | Retained | ViewChanged


# --- directory shard ------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class RingChanged:
    """ring → publisher, directory: the ring as it is now."""

    ring: HashRing


StreamMessage: TypeAlias = Put | Delete | Repair
"""One numbered change of a holder's records."""

Summary: TypeAlias = StreamSummary | HandedOver


@attrs.frozen
class CommitAnswered:
    """publisher → directory: answer `origin`, now that the own pool's records are in the shard.

    The pool notifies the shard of them before it notifies the publisher of the commit.
    """

    origin: Origin
    committed: Committed


@attrs.frozen
class RemovalDone:
    """disk → pool → publisher → directory: pages are removed here; answer `origin`.

    The publisher waits until the owners of their records know that, for a part of timeout_s; the
    directory answers behind what its own shard has to take. Also removal → directory: all members
    have answered, or their time is over.
    """

    origin: Origin
    removed: Removed
    timeout_s: float = 0.0


@attrs.frozen
class HeldDead:
    """membership → directory, pool: others held this node dead.

    They may have stored pages without its shard, and have forgotten that it relies on their copies.
    """


DirectoryMessage: TypeAlias = (
    Lookup | ReportStale | StreamMessage | Summary | RecordsChanged | ViewChanged | RingChanged
    | CommitAnswered | RemovalDone | HeldDead
)  # fmt: skip


# --- publisher ------------------------------------------------------------------------------------


@attrs.frozen
class Republish:
    """membership → publisher: this node was found dead, so others may have dropped its records."""


@attrs.frozen
class ReserveAhead:
    """publisher → pool: the slots ahead that a Commit requested, now that it is answered."""

    origin: Origin
    reserve: Reserve


@attrs.frozen(eq=False)
class PagesCommitted:
    """pool → publisher: new records, and the client that waits until they are published.

    The publisher answers `origin` with Committed(request, sequence, states, records, published) as
    soon as all owners that are not lagging have acknowledged, or after timeout_s.
    """

    origin: Origin
    request: int
    sequence: int
    states: bytes
    records: npt.NDArray[np.void]
    """The records that this commit made, dtype RECORD; may be empty."""
    here: npt.NDArray[np.void]
    """Records of pages that were there already, for the client's cache."""
    timeout_s: float
    ahead: int = 0
    offsets: bytes = b""
    """A reservation made ahead, which the answer reports."""
    then: tuple[ReserveAhead, ...] = ()
    """What the pool receives as soon as the Commit is answered."""


OwnerAnswer: TypeAlias = Acknowledged | SummaryMatches | SummaryDiffers
"""What a directory owner answers to a message of the publisher's stream."""

PublisherMessage: TypeAlias = (
    PagesCommitted | RecordsChanged | RingChanged | Republish | OwnerAnswer | VerifyRecords
    | RequestSummary | RequestFreshSummary | RequestChanges | RemovalDone
)  # fmt: skip


# --- pool -----------------------------------------------------------------------------------------


@attrs.frozen
class ClientGone:
    """node → pool: the client's process has exited; its reservations end."""

    client: int


PROMOTER = Origin(0)
"""The promote actor as a client of its node's pool: messages between actors of this node come from
0. No peer has this identity, or one of the next two: those of peers begin at FIRST_IDENTITY."""


TAKER = Origin(1)
"""The placement actor as a client of its node's pool."""


ITSELF = Origin(2)
"""The node as a client of its own actors."""


@attrs.frozen(eq=False)
class SpilledPages:
    """Pages that their holder offers before it evicts them, coldest first.

    ages: (n,) float64, seconds since each was touched; pages are evicted for it that were touched
          so many times longer ago, and not within min_age_s either. Negative: nothing is evicted
          for it.
    """

    ages: npt.NDArray[np.float64]
    min_age_s: float
    times: float = 1.0


@attrs.frozen
class TakeOver:
    """placement → pool: slots for pages that another node offers, before they are read.

    Answered by Granted. What is removed after `offered_at`, when the offer arrived, is not
    committed: it may have waited for longer than removals are remembered. inf: it arrives now.
    Only free room is given, unless `spilled` says more.
    """

    reserve: Reserve
    spilled: SpilledPages | None = None
    offered_at: float = inf


@attrs.frozen
class TakenOver:
    """placement → pool: commit what was read of a TakeOver. Answered by Committed.

    Answered once the owners of the records know of them, or after a second: `published` says so.

    ages: (n,) float64, seconds since each page was touched; None: 0. is_copy: CopiesMade follows.
    """

    commit: Commit
    ages: npt.NDArray[np.float64] | None = None
    is_copy: bool = False


@attrs.frozen
class DrainChanged:
    """placement → pool: from now on clients' pages are refused, or taken again."""

    is_draining: bool


@attrs.frozen
class RequestGive:
    """placement → pool: which pages are handed over next, hottest first? Answered by PagesToGive.

    again: begin with the hottest ones of now.
    """

    again: bool


@attrs.frozen
class RequestSpill:
    """placement → pool: if little room is left, which pages are evicted next? ColdPages answers.

    only_new: this node may have missed removals; pages that it has now are never named again.
    """

    only_new: bool = False


@attrs.frozen
class PagesGiven:
    """placement → pool: another node holds these pages now, and the owners of their records know.

    drops: dtype DROP. The pool evicts them, but those that were stored again or touched meanwhile.
    """

    drops: npt.NDArray[np.void]


@attrs.frozen
class RequestCopies:
    """placement → pool: of which pages is there no copy? PagesToCopy answers.

    only_new: this node may have missed removals; pages that it has now are never named again.
    again: name those again that no node took, if there are no others.
    """

    only_new: bool = False
    again: bool = True


@attrs.frozen
class CopiesMade:
    """placement → pool: of these pages a node has copies now, and the owners of the records know.

    drops: dtype DROP, of the pages here. node: its incarnation; 0: no node has one.
    is_sure: False if the node has not answered: it may have the copies.
    """

    drops: npt.NDArray[np.void]
    node: int
    is_sure: bool = True


@attrs.frozen
class CopiesLost:
    """placement → pool: what a node reports of the copies that it had.

    It comes after the CopiesMade of every answer that the node sent before it.
    """

    node: int
    report: CopiesEvicted


@attrs.frozen
class HoldersChanged:
    """placement → pool: only these other nodes may hold copies now; all other copies are lost."""

    nodes: tuple[int, ...]


@attrs.frozen(eq=False)
class PagesWritten:
    """disk → pool: these pages are on disk, in lengths[i] bytes each.

    keys: n packed keys, 16 bytes each; lengths: (n,) int64.
    """

    keys: bytes
    lengths: npt.NDArray[np.int64]


@attrs.frozen
class PagesForgotten:
    """disk → pool: these pages are on disk no longer. keys: packed."""

    keys: bytes


@attrs.frozen
class RequestResident:
    """disk → pool: which of these pages are in memory, unchanged? Answered by Resident.

    keys, generations: packed, 16 and 8 bytes a page. with_ages: whether their ages matter.
    """

    number: int
    keys: bytes
    generations: bytes
    with_ages: bool = False


@attrs.frozen
class RequestAges:
    """disk → pool: which of these pages are in memory, and used how long ago? Answered by PageAges.

    keys: packed.
    """

    keys: bytes


@attrs.frozen
class RequestColdest:
    """disk → pool: which pages are evicted next? Answered by PagesColdest.

    full_part: of the pool, from which on there are eviction candidates.
    """

    full_part: float


@attrs.frozen
class RequestHeld:
    """disk → pool: which pages are in memory only? Answered by PagesHeld."""


@attrs.frozen
class PagesSought:
    """promote → pool → disk: where are these pages? The disk answers with PagesFound.

    number: of the question; keys: packed.
    resident: one byte a page, 1 where it is in memory; the pool fills it in.
    """

    number: int
    keys: bytes
    resident: bytes = b""


@attrs.frozen
class PromoteAnswered:
    """promote → pool: answer `origin` with these states and the records of PROMOTED pages."""

    origin: Origin
    request: int
    keys: tuple[bytes, ...]
    states: bytes


PoolMessage: TypeAlias = (
    Reserve | ReserveMirror | Commit | Abort | LiveReservations | Touched | Remove | Clear
    | Retain | Demote | ReserveAhead | ClientGone | PoolGrew | NamespaceNamed
    | PagesWritten | PagesForgotten | RequestResident | RequestColdest | RequestHeld
    | PagesSought | PromoteAnswered | TakeOver | TakenOver | DrainChanged | RequestGive
    | RequestSpill | PagesGiven | RequestRoom | RemovalDone | RequestAges
    | RequestCopies | CopiesMade | HoldersChanged | CopiesLost | HeldDead
)  # fmt: skip


# --- disk -----------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class PagesStored:
    """pool → disk: pages that were committed, all of one namespace.

    The disk answers with PagesWritten for those that it has already.
    """

    records: npt.NDArray[np.void]
    namespace: Tag


@attrs.frozen
class PagesDemoted:
    """pool → disk: pages that left memory and are on disk: there they are the hottest now.

    age_s: how long ago the last of them was used.
    """

    keys: bytes
    age_s: float = 0.0


@attrs.frozen(eq=False)
class Resident:
    """pool → disk: the answer to RequestResident, one byte a page: 1 for a page in memory.

    ages: (n,) float64, seconds since each of those in memory was used; 0 if nothing depends on it.
    """

    number: int
    resident: bytes
    ages: npt.NDArray[np.float64]


@attrs.frozen(eq=False)
class PageAges:
    """pool → disk: the answer to RequestAges.

    ages: (n,) float64, seconds since each page was used; 0 if it is retained, inf if it is not in
          memory.
    """

    keys: bytes
    ages: npt.NDArray[np.float64]


@attrs.frozen
class PagesColdest:
    """pool → disk: the eviction candidates, by namespace."""

    groups: tuple[PagesStored, ...]


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
    """node → disk: the content of DiskOpened, with the index that a thread has built from it.

    index: a DiskIndex of the disk actor's own; to make one takes seconds for a million pages.
    """

    opened: DiskOpened
    index: object


@attrs.frozen(eq=False)
class RequestLoad:
    """promote → disk: load pages into reserved slots of the pool. Answered by PagesLoaded.

    job:     a number that no other RequestLoad had.
    keys:    n packed keys; lengths, offsets: (n,) of the pages and of their slots in page memory.
    until:   deadline, in the actors' time.
    """

    job: int
    keys: bytes
    namespace: Tag
    lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.uint64]
    until: float


@attrs.frozen
class PagesHeld:
    """pool → disk: the pages that are in memory only, by namespace, hottest first."""

    groups: tuple[PagesStored, ...]


@attrs.frozen
class RequestFlush:
    """node → disk: the node stops; write every page that is in memory only."""


DiskMessage: TypeAlias = (
    PagesStored | PagesDemoted | PagesRemoved | Resident | PageAges | PagesColdest | PagesHeld
    | PagesSought | RequestLoad | RequestFlush | NamespaceNamed | DiskIndexed | DiskFact
)  # fmt: skip


# --- promote --------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class PagesFound:
    """disk → promote: the answer to PagesSought.

    resident:   one byte a page, 1 where it is in memory.
    lengths:    (n,) int64 of the pages on disk, 0 where it is not there.
    namespaces: (n,) TAG.
    """

    number: int
    resident: bytes
    lengths: npt.NDArray[np.int64]
    namespaces: Tags


@attrs.frozen(eq=False)
class PagesLoaded:
    """disk → promote: the outcome of each page of a RequestLoad, as in a LoadDone.

    A page that left the disk before its load is DISK_DAMAGED; one that was removed while it was
    loaded is DISK_UNTRIED. The slots of DISK_LATE pages may still be written to, until LateEnded.
    """

    job: int
    outcomes: bytes
    checksums: npt.NDArray[np.uint64]


PromoteMessage: TypeAlias = (
    Promote | PagesFound | Granted | Committed | PagesLoaded | LateEnded | DiskEnded | PoolGrew
)


# --- placement ------------------------------------------------------------------------------------


@attrs.frozen
class DrainBegan:
    """node → placement: hand the pages over, for at most so long. until: in the actors' time."""

    until: float


@attrs.frozen
class DrainCancelled:
    """node → placement: keep the pages, and take new ones again."""


@attrs.frozen(eq=False)
class PagesToGive:
    """pool → placement: the answer to RequestGive.

    groups: pages by namespace, hottest first; none: there are no more.
    left:   pages behind these; left_bytes: of their slots.
    unfinished: reservations of clients that may still be committed.
    """

    groups: tuple[PagesStored, ...]
    left: int
    unfinished: int
    left_bytes: int = 0


@attrs.frozen(eq=False)
class ColdPages:
    """pool → placement: the answer to RequestSpill, coldest first; no groups: no page is named.

    groups: (namespace, records, ages); ages: (n,) float64, seconds since each was touched, negative
            where the page is on disk too. coldest_age_s: of the page that goes first.
    """

    groups: tuple[tuple[Tag, npt.NDArray[np.void], npt.NDArray[np.float64]], ...]
    coldest_age_s: float


@attrs.frozen(eq=False)
class PagesToCopy:
    """pool → placement: the answer to RequestCopies; no groups: each page has a copy.

    groups: (namespace, records, ages), as in ColdPages, the deepest page first. node: it may have
            copies of all of them, so it is asked first; 0: none may.
    """

    groups: tuple[tuple[Tag, npt.NDArray[np.void], npt.NDArray[np.float64]], ...]
    node: int = 0


@attrs.frozen
class PullDone:
    """node → placement: the outcome of a Pull, one byte a page: 1 where its bytes are verified.

    Nothing writes to the slots any more.
    """

    job: int
    arrived: bytes


PlacementMessage: TypeAlias = (
    OfferPages | PagesTaken | ReportDrainState | ViewChanged | DrainBegan | DrainCancelled
    | PagesToGive | Granted | Committed | PullDone | OfferSpill | ReportRoom | ColdPages
    | PagesToCopy | CopiesEvicted
)  # fmt: skip


# --- rdma -----------------------------------------------------------------------------------------


@attrs.frozen
class ClientsConnected:
    """node → rdma: the clients that have an admitted connection now; each second."""

    clients: frozenset[int]


RdmaMessage: TypeAlias = OpenChannel | ChannelsHeld | ClientsConnected | PoolGrew | RdmaFact
