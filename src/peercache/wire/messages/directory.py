"""Messages about location records: between holders and owners, and from readers."""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.wire.messages.declared import CLIENTS, NO_ROLE, NODES, Declared, Receiver, Rule


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
class Disputed:
    """Tell a directory owner that these very records failed verification: a hint to ask about."""

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
    """Tell the holder that message `number` of its stream has been applied."""

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
class Doubted:
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
class SummaryWanted:
    """Ask a holder for a summary: this owner may lack records of it."""

    declared: ClassVar = Declared(44, Receiver.PUBLISHER, NODES)


@attrs.frozen
class SummaryAsked:
    """Ask a holder for a summary that it makes after it has heard this: this owner stood still.

    number: the least number that the summary may have; the stream goes on from there.
    """

    declared: ClassVar = Declared(57, Receiver.PUBLISHER, NODES)

    number: int


@attrs.frozen
class SummaryMatches:
    """Answer a summary that matches: all earlier messages are in force, too."""

    declared: ClassVar = Declared(30, Receiver.PUBLISHER, NODES)

    number: int
