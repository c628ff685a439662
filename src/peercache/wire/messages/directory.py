"""Messages about held pages: location records, changes for followers, scans, overlap of prompts.

A follower sends requests again and again, and the node keeps no state of it between two requests:
the request contains the last known change, and the position in the list of earlier pages. So a
follower that is slow, was paused or has lost its connection costs the node nothing, and the next
answer shows whether it has missed something. A scan of a namespace works alike.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs
import numpy as np

from peercache.model.keys import Tag
from peercache.model.prefix import HOLDERS_MAX, Overlap
from peercache.wire.messages.declared import (
    CLIENTS,
    CLIENTS_AND_OPERATORS,
    EVERYONE,
    NO_ROLE,
    NODES,
    OPERATORS_AND_NODES,
    Declared,
    Receiver,
    Rule,
)


@attrs.frozen
class Lookup:
    """Ask a node which holders of these pages it knows."""

    declared: ClassVar = Declared(9, Receiver.DIRECTORY, CLIENTS)

    request: int
    keys: bytes


@attrs.frozen
class Located:
    """Answer a Lookup: the known records, in key order; absent keys have none, some have several.

    behind: this owner knows that it lacks records: the next owner may know keys that are absent
            here.
    """

    declared: ClassVar = Declared(10, Receiver.ASKER, NO_ROLE)

    request: int
    records: bytes
    behind: bool = False


@attrs.frozen
class ReportStale:
    """Report to a directory owner records that failed verification: a hint to verify them."""

    # It deletes nothing: the holder is asked to report what it has.
    declared: ClassVar = Declared(11, Receiver.DIRECTORY, CLIENTS)

    records: bytes


@attrs.frozen
class Put:
    """Publish records, as message `number` of the stream from this holder to this owner."""

    declared: ClassVar = Declared(12, Receiver.DIRECTORY, NODES, rules=(Rule.OWN_RECORDS,))

    number: int
    records: bytes


@attrs.frozen
class Delete:
    """Withdraw records, as message `number` of the same stream."""

    declared: ClassVar = Declared(13, Receiver.DIRECTORY, NODES)

    number: int
    drops: bytes


@attrs.frozen
class Acknowledged:
    """Report to the holder that message `number` of its stream has been applied."""

    declared: ClassVar = Declared(14, Receiver.PUBLISHER, NODES)

    number: int


@attrs.frozen
class StreamSummary:
    """State what the owner should hold of the sender after message `number`: count and digest."""

    declared: ClassVar = Declared(15, Receiver.DIRECTORY, NODES)

    number: int
    count: int
    digest: int


@attrs.frozen
class SummaryDiffers:
    """Answer a summary that differs: the owner's digests by bucket (256 × u64), by key byte 0."""

    declared: ClassVar = Declared(16, Receiver.PUBLISHER, NODES)

    number: int
    buckets: bytes


@attrs.frozen
class Repair:
    """Send all records of these buckets again (one byte per bucket).

    Applied as message `number` of the stream: other records of those buckets are removed.
    """

    declared: ClassVar = Declared(17, Receiver.DIRECTORY, NODES, rules=(Rule.OWN_RECORDS,))

    number: int
    buckets: bytes
    records: bytes


@attrs.frozen
class VerifyRecords:
    """Ask a holder to verify records that readers have disputed: it withdraws stale ones."""

    declared: ClassVar = Declared(37, Receiver.PUBLISHER, NODES)

    records: bytes


@attrs.frozen
class HandedOver:
    """A StreamSummary which also states that this is all that the owner owns of the sender on a
    ring.

    ring: the version of that ring, 8 bytes.
    """

    declared: ClassVar = Declared(43, Receiver.DIRECTORY, NODES)

    number: int
    count: int
    digest: int
    ring: bytes


@attrs.frozen
class RequestSummary:
    """Ask a holder for a summary: this owner may lack some of the holder's records."""

    declared: ClassVar = Declared(44, Receiver.PUBLISHER, NODES)


@attrs.frozen
class RequestFreshSummary:
    """Ask a holder for a summary that it makes after receiving this: this owner was paused.

    number: the least number that the summary may have; the stream continues from there.
    """

    declared: ClassVar = Declared(57, Receiver.PUBLISHER, NODES)

    number: int


@attrs.frozen
class SummaryMatches:
    """Answer a summary that matches: all earlier messages have been applied, too."""

    declared: ClassVar = Declared(30, Receiver.PUBLISHER, NODES)

    number: int


CHANGES_A_MESSAGE_MAX: Final = 4096
"""Changes of one ReportChanges, and as many rows of held pages: 192 KiB of the 256 accepted."""

ALL_ROWS: Final = 2**32
"""The row of a follower that has read all pages from before its start."""


@attrs.frozen
class RequestChanges:
    """Ask a node for the changes of its held pages, after those that the follower knows.

    incarnation: that of the node that numbered `after`; any other node starts again.
    after:       the number of the last known change; 0: none, start again.
    row:         as in the last answer: the position in the list of held pages.
    timeout_s:  how long the node may wait for a change if there is none yet.
    """

    # It shows pages of all namespaces: not for a client that is restricted to some.
    declared: ClassVar = Declared(
        58, Receiver.PUBLISHER, CLIENTS_AND_OPERATORS, rules=(Rule.ALL_NAMESPACES,)
    )

    request: int
    incarnation: int
    after: int
    row: int
    timeout_s: float


@attrs.frozen
class ReportChanges:
    """Answer a RequestChanges: apply `changes` in their order, then `held`.

    again:    what this follower has received before is void: only this answer counts.
    after:   the number of the last of these changes.
    changes: n × CHANGE (`model.records`).
    held:    n × CHANGE: pages that are held as of change `after`, in no order.
    row:     the row for the next request; ALL_ROWS: all held pages have been sent.
    """

    declared: ClassVar = Declared(59, Receiver.ASKER, NO_ROLE)

    request: int
    incarnation: int
    again: bool
    after: int
    changes: bytes
    held: bytes
    row: int


SCANNED: Final = 2**64 - 1
"""The row after a scan's last one."""


@attrs.frozen
class RequestKeys:
    """Ask which pages of a namespace a member holds, some at a time.

    namespace: its tag; all geometries, ranks and weights of its name are listed.
    member:    the incarnation of the holder, which the receiver asks if it is another node.
    row, newest: as in the last answer; 0 for the first request.
    count:     return no more than this many pages.
    """

    # A node asks on behalf of an operator. It shows keys and lengths, never content.
    declared: ClassVar = Declared(
        66, Receiver.NODE, OPERATORS_AND_NODES, rules=(Rule.READABLE_NAMESPACE,)
    )

    request: int
    namespace: Tag
    member: int
    row: int
    newest: int
    count: int


@attrs.frozen
class ReportKeys:
    """Answer a RequestKeys. There may be more pages although it lists none.

    held:   n × CHANGE (`model.records`).
    row:    the row for the next request; SCANNED: there are no more.
    newest: the number of the member's last record when its scan began.
    """

    declared: ClassVar = Declared(67, Receiver.ASKER, NO_ROLE)

    request: int
    held: bytes
    row: int
    newest: int


OVERLAP_KEYS_MAX = 2048
"""Keys of one RequestOverlap: 128k tokens in pages of 64. A longer one is refused."""


@attrs.frozen
class RequestOverlap:
    """Ask a node which members hold these pages, and on which tier.

    shard_only: only according to its own shard: this is how nodes ask each other.
    """

    # Like a Lookup, and also for other nodes: it shows where pages are, never their content.
    declared: ClassVar = Declared(55, Receiver.NODE, EVERYONE)

    request: int
    keys: bytes
    shard_only: bool


@attrs.frozen
class ReportOverlap:
    """Answer a RequestOverlap.

    holders: the incarnations that hold any of the pages.
    flags: RESIDENT and ON_DISK of each page, one byte each: first those of the first holder.
    whole: whether pages without a flag are absent. Otherwise a node that has not answered may know
           them.
    """

    declared: ClassVar = Declared(56, Receiver.ASKER, NO_ROLE)

    request: int
    holders: tuple[int, ...]
    flags: bytes
    whole: bool


def overlap_of(answer: object, pages: int) -> Overlap:
    """Return the overlap in an answer about `pages` pages; an unknown overlap for anything else."""
    if (
        not isinstance(answer, ReportOverlap)
        or len(answer.holders) > HOLDERS_MAX
        or len(answer.flags) != len(answer.holders) * pages
    ):
        return Overlap.unknown(pages)
    flags = np.frombuffer(answer.flags, np.uint8).reshape(len(answer.holders), pages)
    return Overlap(answer.holders, flags, answer.whole)
