"""Messages to a pool: writing, touching and removing pages, promoting, retaining and demoting them.

A reader asks a holder for pages on its disk. The holder loads them into its pool and answers with
fresh records; then the reader reads them like any page.
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
"""The page is in the pool already, with this length; nothing to copy."""
COMMITTED = 2
"""Committed by this request."""
REPEATED = 3
"""The same key was earlier in this batch; that result applies."""
REFUSED_SIZE = 4
"""The key is held with another length; the first page stays."""
REFUSED_TOO_LARGE = 5
"""The page is larger than the pool."""
REFUSED_FULL = 6
"""No room now: everything is reserved, or this client has too much uncommitted."""
ABORTED = 7
"""The reservation ended without this page: aborted, unknown, or of another incarnation."""
REFUSED_DRAINING = 8
"""The node accepts no more pages: an operator is draining it."""


@attrs.frozen
class Reserve:
    """Ask for slots. sequence: this client's number of the reservation, increasing from 1.

    keys: empty for slots ahead: the Commit will name their pages.
    """

    declared: ClassVar = Declared(18, Receiver.POOL, WRITERS, rules=(Rule.OWN_NAMESPACE,))

    request: int
    sequence: int
    namespace: Tag
    keys: bytes
    lengths: bytes


@attrs.frozen
class Granted:
    """Answer a Reserve: one state per page, and an offset if the state is RESERVED."""

    declared: ClassVar = Declared(19, Receiver.ASKER, NO_ROLE)

    request: int
    sequence: int
    states: bytes
    offsets: bytes


@attrs.frozen
class Commit:
    """Make the written pages of a reservation readable; the unwritten ones are aborted.

    written:   one byte per page of the Reserve, 1 = its slot holds all its bytes.
    checksums: n × u64, 0 for a page without one.
    timeout_s: how long the answer may wait for a directory owner to acknowledge.
    keys:      those of the first pages of a reservation made ahead, as many as `written`; else
               empty.
    ahead:     reserve as many slots under each of these sequences, for pages that are named later.
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
    """Answer a Commit: one state per page, the records now valid, and how many are published.

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
    """List, every second, the reservations to which this client may still write.

    newest: the highest sequence used; a reservation neither newer nor listed is freed.
    """

    declared: ClassVar = Declared(23, Receiver.POOL, WRITERS)

    newest: int
    sequences: tuple[int, ...]


@attrs.frozen
class Touched:
    """Report to a holder which of its pages were read, for its LRU.

    drops: key and generation; the hottest first: the last call first, and within a call the first
           pages of its prefix first.
    """

    declared: ClassVar = Declared(24, Receiver.POOL, CLIENTS)

    drops: bytes


@attrs.frozen
class Remove:
    """Ask a client's home node to drop these pages everywhere, or a holder to drop its own.

    namespace:  the tag of their namespace; pages of another name stay.
    timeout_s: how long the home node may wait for the other members, or a holder for its disk.
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

    namespace:  its tag; a space tag, of 64 bits, means every geometry, rank and weights of a name.
                Pages that came from other nodes have only a space tag, and are removed with any of
                them.
    timeout_s: how long the home node may wait for the other members, or a holder for its disk.
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

    missed: the members that did not answer in time, and may still hold pages, and those that have
            just died or left, whose pages may still be read.
    """

    declared: ClassVar = Declared(27, Receiver.REMOVAL, NODES)

    request: int
    count: int
    missed: tuple[int, ...] = ()


@attrs.frozen
class ReserveMirror:
    """Ask for slots for mirrored pages, like Reserve, before they are read from another host.

    The pool refuses them rather than evict recently touched pages, and aborts the Commit of pages
    if their namespace had a removal in the meantime.
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
"""On disk and not loaded yet: beyond this answer's portion, or too late. Ask again."""
LOST = 2
"""Neither in memory nor on disk: removed, damaged, or the disk has failed."""


@attrs.frozen
class Promote:
    """Ask a holder to load pages from its disk into its memory, in this order.

    timeout_s: how long the answer may wait for the disk; 0 requests no answer, and the holder loads
               as many as its rate for such wishes allows.
    """

    declared: ClassVar = Declared(32, Receiver.PROMOTE, CLIENTS)

    request: int
    keys: bytes
    timeout_s: float


@attrs.frozen
class Promoted:
    """Answer a Promote: a state for each key, and records, in key order, of pages in memory."""

    declared: ClassVar = Declared(33, Receiver.ASKER, NO_ROLE)

    request: int
    states: bytes
    records: bytes


# The result for a page of a Retain or Demote; one byte each in `states`. The maximum over all
# members counts.
NOT_HERE = 0
"""No member that answered has the page in memory."""
OVER_QUOTA = 1
"""The page exists, but its namespace retains as much as it may."""
RETAINED = 2
"""Done as requested: the page is retained, or, with 0 seconds, no longer retained."""
RETAIN_MAX_S = 30 * 86_400.0
"""Longest time that a page is retained for by one message; it may be renewed."""
STAYS = OVER_QUOTA
"""Of a Demote: the page is retained, and stays so."""
DEMOTED = RETAINED
"""Of a Demote: the page is among the next to be evicted."""


@attrs.frozen
class Retain:
    """Ask a client's home node to retain these pages on all nodes, or a holder to retain its own.

    namespace:  the tag of their namespace; pages of another name are not changed.
    seconds:    for how long, from the time when a holder receives it; 0 ends it.
    timeout_s: how long the home node may wait for the other members.
    """

    # Restricted like a removal: it takes room from other pages of its namespace.
    declared: ClassVar = Declared(
        60, Receiver.REMOVAL, REMOVERS, rules=(Rule.OWN_NAMESPACE,), of_node=Receiver.POOL
    )

    request: int
    namespace: Tag
    keys: bytes
    seconds: float
    timeout_s: float = 0.0


@attrs.frozen
class Demote:
    """Ask a client's home node to demote these pages on all nodes, or a holder to demote its own.

    They are evicted before others of their namespace and size, to its disk where the holder has
    one, unless they are used again before that. Retained pages stay.

    namespace:  the tag of their namespace; pages of another name are not changed.
    timeout_s: how long the home node may wait for the other members.
    """

    # Restricted like a removal, to which it leads when memory is short.
    declared: ClassVar = Declared(
        68, Receiver.REMOVAL, REMOVERS, rules=(Rule.OWN_NAMESPACE,), of_node=Receiver.POOL
    )

    request: int
    namespace: Tag
    keys: bytes
    timeout_s: float = 0.0


@attrs.frozen
class Retained:
    """Answer a Retain or a Demote: one state per page.

    missed: the members that did not answer in time, and may still do what was asked.
    """

    declared: ClassVar = Declared(61, Receiver.REMOVAL, NODES)

    request: int
    states: bytes
    missed: tuple[int, ...] = ()
