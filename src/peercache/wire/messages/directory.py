"""Messages about what nodes hold: location records, changes for followers, overlap of prompts.

A follower asks again and again, and the node keeps nothing about it between two questions: it names
the last change that it knows, and how far it has read what was there before. So a follower that is
slow, was stopped or has lost its connection costs the node nothing, and sees in the next answer
whether it has missed something.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs
import numpy as np

from peercache.model.prefix import HOLDERS_MAX, Overlap
from peercache.wire.messages.declared import (
    CLIENTS,
    CLIENTS_AND_OPERATORS,
    EVERYONE,
    NO_ROLE,
    NODES,
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
    """Answer a Lookup: the records known, in key order; absent keys have none, some several.

    behind: this owner knows that it lacks records: what is absent here may be known to the next.
    """

    declared: ClassVar = Declared(10, Receiver.ASKER, NO_ROLE)

    request: int
    records: bytes
    behind: bool = False


@attrs.frozen
class ReportStale:
    """Report to a directory owner records that failed verification: a hint to verify them."""

    # It deletes nothing: the holder is asked to say what it has.
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
    """State what the owner should hold of the sender after message `number`: count, XOR digest."""

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
    """Send again all records of these buckets (one byte a bucket).

    Applied as message `number` of the stream: other records in those buckets are removed.
    """

    declared: ClassVar = Declared(17, Receiver.DIRECTORY, NODES, rules=(Rule.OWN_RECORDS,))

    number: int
    buckets: bytes
    records: bytes


@attrs.frozen
class VerifyRecords:
    """Ask a holder about records of its own that readers have disputed: it withdraws stale ones."""

    declared: ClassVar = Declared(37, Receiver.PUBLISHER, NODES)

    records: bytes


@attrs.frozen
class HandedOver:
    """State as a StreamSummary, and that this is all that the owner owns of the sender on a ring.

    ring: the version of that ring, 8 bytes.
    """

    declared: ClassVar = Declared(43, Receiver.DIRECTORY, NODES)

    number: int
    count: int
    digest: int
    ring: bytes


@attrs.frozen
class RequestSummary:
    """Ask a holder for a summary: this owner may lack records of it."""

    declared: ClassVar = Declared(44, Receiver.PUBLISHER, NODES)


@attrs.frozen
class RequestFreshSummary:
    """Ask a holder for a summary that it makes after it has received this: this owner was paused.

    number: the least number that the summary may have; the stream goes on from there.
    """

    declared: ClassVar = Declared(57, Receiver.PUBLISHER, NODES)

    number: int


@attrs.frozen
class SummaryMatches:
    """Answer a summary that matches: all earlier messages are in force, too."""

    declared: ClassVar = Declared(30, Receiver.PUBLISHER, NODES)

    number: int


CHANGES_A_MESSAGE_MAX: Final = 4096
"""Changes of one ReportChanges, and as many rows of what is held: 192 KiB of the 256 accepted."""

ALL_ROWS: Final = 2**32
"""The row of a follower that has read everything that was there when it began."""


@attrs.frozen
class RequestChanges:
    """Ask a node for the changes of what it holds, behind those that the follower knows.

    incarnation: of the node that numbered `after`; any other one begins again.
    after:       the number of the last change known; 0: none, begin again.
    row:         as in the last answer: how far what is held has been told.
    timeout_s:  how long the node may wait for a change where there is nothing to tell.
    """

    # Every page of a node, of all namespaces: not for a client that is restricted to some.
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

    again:    what this follower has received before is void: it knows nothing but this answer.
    after:   the number of the last of these changes.
    changes: n × CHANGE (`model.records`).
    held:    n × CHANGE: pages that are there as of change `after`, in no order.
    row:     what to ask with next; ALL_ROWS: everything that was there has been told.
    """

    declared: ClassVar = Declared(59, Receiver.ASKER, NO_ROLE)

    request: int
    incarnation: int
    again: bool
    after: int
    changes: bytes
    held: bytes
    row: int


OVERLAP_KEYS_MAX = 2048
"""Keys of one RequestOverlap: 128k tokens in pages of 64. A longer one is refused."""


@attrs.frozen
class RequestOverlap:
    """Ask a node which members hold these pages, and on which tier.

    shard_only: as far as its own shard knows: one node asks another one so.
    """

    # As a Lookup, and for other nodes too: where pages are, never what is in them.
    declared: ClassVar = Declared(55, Receiver.NODE, EVERYONE)

    request: int
    keys: bytes
    shard_only: bool


@attrs.frozen
class ReportOverlap:
    """Answer a RequestOverlap.

    holders: the incarnations that hold any of the pages.
    flags: RESIDENT and ON_DISK of each page, a byte each: those of the first holder, then the next.
    whole: that a page without a flag is absent. Otherwise it may be known to a node that has not
           answered.
    """

    declared: ClassVar = Declared(56, Receiver.ASKER, NO_ROLE)

    request: int
    holders: tuple[int, ...]
    flags: bytes
    whole: bool


def overlap_of(answer: object, pages: int) -> Overlap:
    """Return what was told about so many pages; of anything else than that: nothing is known."""
    if (
        not isinstance(answer, ReportOverlap)
        or len(answer.holders) > HOLDERS_MAX
        or len(answer.flags) != len(answer.holders) * pages
    ):
        return Overlap.unknown(pages)
    flags = np.frombuffer(answer.flags, np.uint8).reshape(len(answer.holders), pages)
    return Overlap(answer.holders, flags, answer.whole)
