"""Rights: which sender may send what, decided from its role and identity, in one place.

Three doors ask here. Control: `Session` and `refusal`, for every message of the wire. Data:
`reads_pages` and `spaces_of`, before a byte is served. HTTP: `reads_state` and `may_read`.

What a right rests on:

* A node is believed about itself only: records and streams of its own incarnation, its own entry of
  a view. What it tells of other members gives addresses to try; masters are told apart by the
  membership actor, which knows them.
* A writer is a process on this node's own host, which has read the secret in a lock file that only
  users who share the host can read. No connection over tcp is ever a writer's, so no certificate
  makes one.
* An operator has an operator's certificate. On the node's own host its user is enough, and root;
  without TLS it is whichever client of the cluster says so: nothing is proven there.
* A page key is a hash: it does not tell its namespace. So a Lookup is answered for every key, and a
  client whose certificate names namespaces is restricted where bytes are: tcp serves pages of its
  spaces only, queue pairs are refused, because one key of a memory region opens all of it, and its
  client maps no memory but its home node's. Memory of its own host that it may open as a user it
  can read without PeerCache; a tenant that is not trusted with that runs as another user.
"""

from __future__ import annotations

from enum import Enum

import attrs

from peercache.errors import Rejected
from peercache.model.ids import incarnation_of
from peercache.model.keys import Namespace, space_of
from peercache.model.member import Member
from peercache.model.records import are_of
from peercache.trust.identity import CertificateRole, Identity
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

ROLE = "role"
"""Refusal: no sender of this role may send the message."""

NOT_ITS_OWN = "not_its_own"
"""Refusal: a node speaks of another one's records, or of another one's entry."""

NAMESPACE = "namespace"
"""Refusal: the message concerns a namespace that is not the sender's."""

INVENTED = "invented"
"""Refusal: the incarnation of a member does not follow from its certificate's name and nonce."""


class Role(Enum):
    """What a connection was admitted as."""

    NODE = "node"
    READER = "reader"
    WRITER = "writer"
    OPERATOR = "operator"


@attrs.frozen
class Session:
    """An admitted connection.

    namespace, geometry: of a client: what it has said about its pages.
    reads:   the space tags of which it may read pages; None for all of the cluster.
    changes: the space tags of which it may write or remove pages; None for all of the cluster.
    name:    the name in the certificate of a node; "" without TLS.
    """

    identity: int
    role: Role
    namespace: str = ""
    geometry: str = ""
    reads: frozenset[int] | None = None
    changes: frozenset[int] | None = frozenset()
    name: str = ""


_NONE: frozenset[Role] = frozenset()
_NODES = frozenset({Role.NODE})
_WRITERS = frozenset({Role.WRITER})
_CLIENTS = frozenset({Role.READER, Role.WRITER})
_CLEARING = frozenset({Role.NODE, Role.WRITER, Role.OPERATOR})
_WATCHING = frozenset({Role.READER, Role.WRITER, Role.OPERATOR})
_EVERY = frozenset(Role)
_OPERATORS = frozenset({Role.OPERATOR})
_OBSERVING = frozenset({Role.NODE, Role.OPERATOR})

SENDERS: dict[type[Message], frozenset[Role]] = {
    # Said before there is a session, and answered by the switchboard.
    Hello: _NONE,
    # What a node says and never takes, but from the nodes that it asked.
    Welcome: _NONE,
    Refused: _NONE,
    SayHello: _NONE,
    Located: _NONE,
    ViewChanges: _NONE,
    Granted: _NONE,
    Committed: _NONE,
    Stats: _NONE,
    StatusTold: _NONE,
    ClusterTold: _NONE,
    Promoted: _NONE,
    ChannelOpened: _NONE,
    Removed: _NODES,
    # The view: of nodes, about themselves; views of others are judged by the membership actor.
    Join: _NODES,
    Heartbeat: _NODES,
    HeartbeatSeen: _NODES,
    ViewShared: _NODES,
    ViewAsked: _EVERY,
    ViewChangesAsked: _EVERY,
    ViewCompared: _NODES,
    # Records: holders publish their own, owners acknowledge.
    Put: _NODES,
    Delete: _NODES,
    StreamSummary: _NODES,
    Repair: _NODES,
    Acknowledged: _NODES,
    SummaryDiffers: _NODES,
    SummaryMatches: _NODES,
    Doubted: _NODES,
    HandedOver: _NODES,
    SummaryWanted: _NODES,
    SummaryAsked: _NODES,
    # Reading. A Disputed deletes nothing: the holder is asked to say what it has.
    Lookup: _CLIENTS,
    Disputed: _CLIENTS,
    Touched: _CLIENTS,
    Promote: _CLIENTS,
    OpenChannel: _CLIENTS,
    ChannelsHeld: _CLIENTS,
    # As a Lookup, and for other nodes too: where pages are, never what is in them.
    OverlapAsked: _EVERY,
    OverlapTold: _NONE,
    # Every page of a node, of all namespaces: not for a client that is restricted to some.
    ChangesAsked: _WATCHING,
    ChangesTold: _NONE,
    # Writing.
    Reserve: _WRITERS,
    ReserveMirror: _WRITERS,
    Commit: _WRITERS,
    Abort: _WRITERS,
    LiveReservations: _WRITERS,
    Counted: _WRITERS,
    # From a node: its own clients' and operators' removals, which it forwards as itself.
    Remove: _CLEARING,
    Clear: _CLEARING,
    # As a removal: it keeps other pages of its namespace from room that they would have had.
    Retain: _CLEARING,
    Retained: _NODES,
    # Draining: operators say so, nodes hand pages over to each other, in the namespaces that the
    # offerer's certificate names.
    DrainNode: _OPERATORS,
    CancelDrain: _OPERATORS,
    # A node asks whether one that offers it pages drains.
    DrainAsked: _OBSERVING,
    DrainTold: _NONE,
    PagesOffered: _NODES,
    PagesTaken: _NODES,
    # State.
    StatsAsked: _WATCHING,
    # It names namespaces, processes and other hosts: not for clients. A node asks for an operator.
    StatusAsked: _OBSERVING,
    ClusterAsked: _OPERATORS,
    # Signed by an authority: a node that lies can only be silent.
    RevocationsTold: _NODES,
}
"""Which roles may send a message to a node: every message of the wire has its row."""


def refusal(session: Session, message: Message) -> str:
    """Return why a sender may not send this very message, or "" if it may."""
    if session.role not in SENDERS.get(type(message), _NONE):
        return ROLE
    match message:
        case Put(records=records) | Repair(records=records):
            return "" if are_of(records, session.identity) else NOT_ITS_OWN
        case PagesOffered(namespace=tag, records=records):
            if not are_of(records, session.identity):
                return NOT_ITS_OWN
            return "" if is_among(tag, session.changes) else NAMESPACE
        case Join(member=member) | Heartbeat(member=member):
            is_own = member.incarnation == session.identity and member.name == session.name
            return "" if is_own else NOT_ITS_OWN
        case (
            Reserve(namespace=tag) | ReserveMirror(namespace=tag)
            | Remove(namespace=tag) | Clear(namespace=tag) | Retain(namespace=tag)
        ):  # fmt: skip
            return "" if is_among(tag, session.changes) else NAMESPACE
        case OpenChannel() | ChangesAsked():
            return "" if session.reads is None else NAMESPACE
    return ""


def is_invented(cluster: str, member: Member) -> bool:
    """Return whether a member's incarnation cannot be that of the name that it states.

    Only where names come from certificates: without TLS every name is "" and nothing is proven.
    """
    return incarnation_of(cluster, member.name, member.nonce) != member.incarnation


def spaces_of(identity: Identity | None) -> frozenset[int] | None:
    """Return the space tags that a certificate names; None where it names none: every space.

    They bound what its owner reads, and, of a node, what it hands over, removes and clears.
    """
    if identity is None or not identity.namespaces:
        return None
    return frozenset(Namespace(name).space_tag() for name in identity.namespaces)


def is_among(tag: int, spaces: frozenset[int] | None) -> bool:
    """Return whether a namespace's tag is of one of these spaces; None: of every one."""
    return spaces is None or space_of(tag) in spaces


def reads_pages(identity: Identity) -> bool:
    """Return whether the data port serves this certificate's owner; its spaces restrict it then.

    A node's certificate is read with as well: engines with an embedded node have no other.
    """
    return identity.role in (CertificateRole.NODE, CertificateRole.CLIENT)


def reads_state(identity: Identity) -> bool:
    """Return whether HTTP shows the state of the node and of the cluster: not to clients."""
    return identity.role in (CertificateRole.NODE, CertificateRole.OPERATOR)


class Watcher(Enum):
    """What a client of the HTTP port has proved to be."""

    OPERATOR = "operator"
    """It has the certificate of an operator or a node."""
    TOKEN = "token"  # noqa: S105 - a name
    """It knows the bearer token."""
    SHARER = "sharer"
    """It is a process of this host, of a uid that shares the node."""
    TRIAL = "trial"
    """Nothing: the cluster is a trial without certificates."""


ALL_PAGES = frozenset(Watcher)
"""Watchers that read every page: each of them may read the state of the cluster elsewhere too."""

OPEN_PAGES = frozenset({"/healthz", "/metrics"})
"""Pages that `http_open` shows to every client: they name no host, no address and no namespace."""


def may_read(path: str, watchers: frozenset[Watcher], *, is_open: bool) -> bool:
    """Return whether a client that has proved to be these watchers may read a page."""
    return bool(watchers & ALL_PAGES) or (is_open and path in OPEN_PAGES)


def watcher_of(identity: Identity) -> Watcher:
    """Return what a certificate proves; raise Rejected for one that opens no page."""
    if reads_state(identity):
        return Watcher.OPERATOR
    raise Rejected("role", f"a {identity.role.value}'s certificate opens no page")
