"""Messages to a pool: writing, touching and removing pages, promoting and retaining them.

A reader asks a holder for pages on its disk. The holder loads them into its pool and answers with
fresh records; then the reader reads them as any page.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.model.keys import Tag
from peercache.wire.messages.declared import (
    CLIENTS,
    NO_ROLE,
    NODES,
    REMOVERS,
    WRITERS,
    Declared,
    Receiver,
    Rule,
)

# The outcome of a page of a Reserve or Commit; one byte each in `states`.
RESERVED = 0
"""Granted: write to the offset given."""
HERE = 1
"""The page is in the pool already, with this very length; nothing to copy."""
COMMITTED = 2
"""Committed by this request."""
REPEATED = 3
"""The same key was earlier in this batch, and has that outcome."""
REFUSED_SIZE = 4
"""The key is held with another length; the first stays."""
REFUSED_TOO_LARGE = 5
"""The page is larger than the pool."""
REFUSED_FULL = 6
"""No room now: everything is reserved, or this client has too much uncommitted."""
ABORTED = 7
"""The reservation ended without this page: aborted, unknown, or of another incarnation."""
REFUSED_DRAINING = 8
"""The node takes no pages any more: an operator drains it."""


@attrs.frozen
class Reserve:
    """Ask for slots. sequence: this client's number of the reservation, rising from 1.

    keys: empty for slots ahead, whose pages the Commit will name.
    """

    declared: ClassVar = Declared(18, Receiver.POOL, WRITERS, rules=(Rule.OWN_NAMESPACE,))

    request: int
    sequence: int
    namespace: Tag
    keys: bytes
    lengths: bytes


@attrs.frozen
class Granted:
    """Answer a Reserve: a state a page, and an offset where the state is RESERVED."""

    declared: ClassVar = Declared(19, Receiver.ASKER, NO_ROLE)

    request: int
    sequence: int
    states: bytes
    offsets: bytes


@attrs.frozen
class Commit:
    """Make the written pages of a reservation readable; the unwritten ones are aborted.

    written:   one byte a page of the Reserve, 1 = its slot holds all its bytes.
    checksums: n × u64, 0 where there is none.
    timeout_s: how long the answer may wait for a directory owner to acknowledge.
    keys:      of the first pages of a reservation made ahead, as many as `written`; else empty.
    ahead:     reserve as many slots under each of these sequences, for pages to be named.
    """

    declared: ClassVar = Declared(20, Receiver.POOL, WRITERS)

    request: int
    sequence: int
    written: bytes
    checksums: bytes
    timeout_s: float
    keys: bytes = b""
    ahead: tuple[int, ...] = ()


@attrs.frozen
class Committed:
    """Answer a Commit: a state a page, the records now valid, and how many are published.

    ahead, offsets: a reservation made ahead that the client does not know yet; 0 and empty: none.
    """

    declared: ClassVar = Declared(21, Receiver.ASKER, NO_ROLE)

    request: int
    sequence: int
    states: bytes
    records: bytes
    published: int
    ahead: int = 0
    offsets: bytes = b""


@attrs.frozen
class Abort:
    """End a reservation without committing anything; its slots may be reused at once."""

    declared: ClassVar = Declared(22, Receiver.POOL, WRITERS)

    sequence: int


@attrs.frozen
class LiveReservations:
    """List, each second, the reservations this client may still write to.

    newest: the highest sequence used; a reservation neither newer nor listed is freed.
    """

    declared: ClassVar = Declared(23, Receiver.POOL, WRITERS)

    newest: int
    sequences: tuple[int, ...]


@attrs.frozen
class Touched:
    """Report to a holder which of its pages were read, for its LRU.

    drops: key and generation; the hottest first: of several calls the last one, and of one call the
    first pages of its prefix.
    """

    declared: ClassVar = Declared(24, Receiver.POOL, CLIENTS)

    drops: bytes


@attrs.frozen
class Remove:
    """Ask a client's home node to drop these pages everywhere, or a holder to drop its own.

    namespace:  the tag of their namespace; pages of another name stay.
    timeout_s: how long the home node may wait for the other members; a holder: how long it does.
    """

    declared: ClassVar = Declared(
        25, Receiver.REMOVAL, REMOVERS, rules=(Rule.OWN_NAMESPACE,), of_node=Receiver.POOL
    )

    request: int
    namespace: Tag
    keys: bytes
    timeout_s: float = 0.0


@attrs.frozen
class Clear:
    """Ask a client's home node to drop a namespace everywhere, or a holder to drop its pages of it.

    namespace:  its tag; a space tag, of 64 bits, is every geometry, rank and weights of a name.
                Pages that came from other nodes are known by their name only, and go with each of
                them.
    timeout_s: how long the home node may wait for the other members; a holder: how long it does.
    """

    declared: ClassVar = Declared(
        26, Receiver.REMOVAL, REMOVERS, rules=(Rule.OWN_NAMESPACE,), of_node=Receiver.POOL
    )

    request: int
    namespace: Tag
    timeout_s: float = 0.0


@attrs.frozen
class Removed:
    """Answer a Remove or Clear: the number of removed pages.

    missed: the members that did not answer in time, and may still hold pages.
    """

    declared: ClassVar = Declared(27, Receiver.REMOVAL, NODES)

    request: int
    count: int
    missed: tuple[int, ...] = ()


@attrs.frozen
class ReserveMirror:
    """Ask for slots for mirrored pages, as Reserve; before they are read from another host.

    The pool refuses them rather than evict what was touched lately, and aborts the Commit of those
    whose namespace was removed from meanwhile.
    """

    declared: ClassVar = Declared(40, Receiver.POOL, WRITERS, rules=(Rule.OWN_NAMESPACE,))

    request: int
    sequence: int
    namespace: Tag
    keys: bytes
    lengths: bytes


PROMOTED = 0
"""The page is in memory now: its record is in the answer."""
LATER = 1
"""On disk and not loaded yet: beyond this answer's portion, or the timeout was over. Ask again."""
LOST = 2
"""Neither in memory nor on disk: removed, damaged, or the disk has failed."""


@attrs.frozen
class Promote:
    """Ask a holder to load pages from its disk into its memory, the first of them first.

    timeout_s: how long the answer may wait for the disk; 0 wants no answer, and the holder loads
                as many as its rate for such wishes allows.
    """

    declared: ClassVar = Declared(32, Receiver.PROMOTE, CLIENTS)

    request: int
    keys: bytes
    timeout_s: float


@attrs.frozen
class Promoted:
    """Answer a Promote: a state a key, and the records, in key order, of pages now in memory."""

    declared: ClassVar = Declared(33, Receiver.ASKER, NO_ROLE)

    request: int
    states: bytes
    records: bytes


# What became of a page of a Retain; one byte each in `states`. The greatest of all members holds.
NOT_HERE = 0
"""No member that answered has the page in memory."""
OVER_QUOTA = 1
"""It is there, and its namespace retains as much as it may."""
RETAINED = 2
"""It is as was asked for: retained, or with 0 seconds no longer."""


@attrs.frozen
class Retain:
    """Ask a client's home node to keep these pages where they are, or a holder to keep its own.

    namespace:  the tag of their namespace; pages of another name are left as they are.
    seconds:    for how long, from when a holder learns of it; 0 lets them go.
    timeout_s: how long the home node may wait for the other members.
    """

    # As a removal: it keeps other pages of its namespace from room that they would have had.
    declared: ClassVar = Declared(
        60, Receiver.REMOVAL, REMOVERS, rules=(Rule.OWN_NAMESPACE,), of_node=Receiver.POOL
    )

    request: int
    namespace: Tag
    keys: bytes
    seconds: float
    timeout_s: float = 0.0


@attrs.frozen
class Retained:
    """Answer a Retain: a state a page.

    missed: the members that did not answer in time, and may retain pages all the same.
    """

    declared: ClassVar = Declared(61, Receiver.REMOVAL, NODES)

    request: int
    states: bytes
    missed: tuple[int, ...] = ()
