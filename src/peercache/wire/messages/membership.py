"""Messages between members, and of operators: views, draining, status.

A drained node hands its pages over: it offers pages to a target, which reads them from the node's
memory, like any reader.

A status is sent as one byte string (`model.status.encoded`): it gains fields with every version,
and nodes of different versions read the fields that both know.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.model.keys import Tag
from peercache.model.member import Member
from peercache.wire.messages.declared import (
    EVERYONE,
    NO_ROLE,
    NODES,
    OPERATORS,
    OPERATORS_AND_NODES,
    Declared,
    Receiver,
    Rule,
)


@attrs.frozen
class Join:
    """Ask the node at a discovery address to add the sender to its view."""

    declared: ClassVar = Declared(4, Receiver.MEMBERSHIP, NODES, rules=(Rule.OWN_ENTRY,))

    member: Member


@attrs.frozen
class Heartbeat:
    """Report to a master that the sender is alive. view: the digest of the sender's view."""

    declared: ClassVar = Declared(5, Receiver.MEMBERSHIP, NODES, rules=(Rule.OWN_ENTRY,))

    member: Member
    view: bytes


@attrs.frozen
class HeartbeatSeen:
    """Answer a heartbeat, or a Join. view: the digest of the answering node's view."""

    declared: ClassVar = Declared(6, Receiver.MEMBERSHIP, NODES)

    view: bytes


@attrs.frozen
class ShareView:
    """Share entries of a view; the receiver merges. request: that of the RequestView it answers, or
    0.

    more: the view has further entries: ask for those after the last one here.
    """

    declared: ClassVar = Declared(7, Receiver.MEMBERSHIP, NODES)

    request: int
    view: tuple[Member, ...]
    more: bool = False


@attrs.frozen
class RequestView:
    """Ask for the live members, unless the view's digest is the one given (the answer is empty).

    after: the last incarnation of the previous part, to get the next part; 0 for the first one.
    """

    declared: ClassVar = Declared(8, Receiver.MEMBERSHIP, EVERYONE)

    request: int
    digest: bytes
    after: int = 0


@attrs.frozen
class CompareView:
    """Ask a member for the entries in which its view differs from the sender's.

    buckets: digests of the sender's view, 8 bytes each (`model.view.View.bucket_digests`).
    """

    declared: ClassVar = Declared(39, Receiver.MEMBERSHIP, NODES)

    buckets: bytes


@attrs.frozen
class RequestViewChanges:
    """Ask for what has changed in the view of live members since it had this digest."""

    declared: ClassVar = Declared(41, Receiver.MEMBERSHIP, EVERYONE)

    request: int
    digest: bytes


@attrs.frozen
class ReportViewChanges:
    """Answer a RequestViewChanges: the changes from a view with digest `base` to one with `digest`.

    view: the live entries that are new or changed. gone: the incarnations that are no longer live.
          base: empty if the node does not know the changes: then request the whole view.
    """

    declared: ClassVar = Declared(42, Receiver.ASKER, NO_ROLE)

    request: int
    base: bytes
    digest: bytes
    view: tuple[Member, ...]
    gone: tuple[int, ...]


@attrs.frozen
class DrainNode:
    """Ask a node to accept no more pages, hand over its own, and leave; repeated: to get the
    progress.

    within_s: the most time; 0 for the node's own `drain_s`.
    """

    declared: ClassVar = Declared(49, Receiver.NODE, OPERATORS)

    request: int
    within_s: float


@attrs.frozen
class CancelDrain:
    """Ask a draining node to continue to serve."""

    declared: ClassVar = Declared(50, Receiver.NODE, OPERATORS)

    request: int


@attrs.frozen
class RequestDrainState:
    """Ask a node for the progress of its drain."""

    # A node asks whether another node that offers pages is draining.
    declared: ClassVar = Declared(51, Receiver.NODE, OPERATORS_AND_NODES)

    request: int


@attrs.frozen
class ReportDrainState:
    """Answer a DrainNode, a CancelDrain or a RequestDrainState: named figures."""

    declared: ClassVar = Declared(52, Receiver.ASKER, NO_ROLE)

    request: int
    figures: dict[str, int | float | str]


@attrs.frozen
class OfferPages:
    """Offer pages of the sender to a node: it may read them, and keep those for which it has room.

    records: those of the sender's own pages in memory, all of one namespace.
    """

    declared: ClassVar = Declared(
        53,
        Receiver.PLACEMENT,
        NODES,
        rules=(
            Rule.OWN_RECORDS,
            Rule.OWN_NAMESPACE,
        ),
    )

    number: int
    namespace: Tag
    records: bytes


@attrs.frozen
class OfferSpill:
    """Offer a node pages that the sender is about to evict; else as OfferPages.

    ages: n × f64, seconds since each page was touched. The receiver may evict pages that it touched
    longer ago; for a page with a negative age, whose absolute value counts, it may evict nothing.
    is_copy: the sender keeps its pages; each of the two reports when it evicts one.
    """

    declared: ClassVar = Declared(
        62, Receiver.PLACEMENT, NODES, rules=(Rule.OWN_RECORDS, Rule.OWN_NAMESPACE)
    )

    number: int
    namespace: Tag
    records: bytes
    ages: bytes
    is_copy: bool = False


@attrs.frozen
class RequestRoom:
    """Ask a node how much room its pool has, before pages are offered to it.

    is_copy: for second copies. Else a node that stores pages itself reports less than it has.
    """

    declared: ClassVar = Declared(63, Receiver.POOL, NODES)

    number: int
    is_copy: bool = False


@attrs.frozen
class ReportRoom:
    """Answer a RequestRoom.

    free_bytes: that no page has. coldest_age_s: seconds since the page that is evicted next was
    touched; 0 where there is none.
    """

    declared: ClassVar = Declared(64, Receiver.PLACEMENT, NODES)

    number: int
    free_bytes: int
    coldest_age_s: float


@attrs.frozen
class CopiesEvicted:
    """Report to a node, which has copies of the sender's pages, that the sender has these no more.

    number: of the reports to this node, from 1; a report without keys repeats the last number, so
            that the node notices a lost one.
    """

    declared: ClassVar = Declared(65, Receiver.PLACEMENT, NODES)

    number: int
    keys: bytes


@attrs.frozen
class PagesTaken:
    """Answer an OfferPages or an OfferSpill: one state per page (`wire.messages.pool`).

    COMMITTED and HERE: the node holds it. REFUSED_FULL: no free room. ABORTED: not read in time, or
    removed since.
    """

    declared: ClassVar = Declared(54, Receiver.PLACEMENT, NODES)

    number: int
    states: bytes


@attrs.frozen
class RequestStatus:
    """Ask a node for its status. detail: with its threads, environment and settings."""

    # It names namespaces, processes and other hosts: not for clients. A node asks on behalf of an
    # operator.
    declared: ClassVar = Declared(45, Receiver.NODE, OPERATORS_AND_NODES)

    request: int
    detail: bool


@attrs.frozen
class ReportStatus:
    """Answer a RequestStatus: a `model.status.Status`, encoded."""

    declared: ClassVar = Declared(46, Receiver.ASKER, NO_ROLE)

    request: int
    status: bytes


@attrs.frozen
class RequestCluster:
    """Ask a node for the status of all members after the incarnation `after`; it asks each."""

    declared: ClassVar = Declared(47, Receiver.NODE, OPERATORS)

    request: int
    detail: bool
    after: int


@attrs.frozen
class ReportCluster:
    """Answer a RequestCluster: some `model.status.MemberStatus`, encoded; `more` follow."""

    declared: ClassVar = Declared(48, Receiver.ASKER, NO_ROLE)

    request: int
    statuses: bytes
    more: bool
