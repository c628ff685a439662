"""Every message of the control plane.

A command is an imperative (`Reserve`), its answer a participle or noun (`Granted`), a fact a past
participle (`Touched`). Batches travel packed: `keys` is n × 16 bytes, `records` n × 56
(`records.RECORD`), `drops` n × 24 (`records.DROP`), lengths and offsets n × 8 little-endian.
A class's place in `Message` is its tag on the wire: append only, never reorder.

Nothing may depend on a message having arrived, or on its arriving once: every request carries a
correlation number that its answer repeats, and whatever must not be lost is repaired by a summary.
Wire version 1 is the first.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

import attrs

from peercache.channel_exchange import ChannelOpened, ChannelsHeld, OpenChannel
from peercache.promotion import Promote, Promoted

WIRE_VERSION = WIRE_VERSION_OLDEST = 1

# What a page of a Reserve or Commit came to; one byte each in `states`.
RESERVED = 0
"""Granted: write to the offset given."""
HERE = 1
"""The page is in the pool already, with this very length; nothing to copy."""
COMMITTED = 2
"""Committed by this request."""
REPEATED = 3
"""The same key stood earlier in this batch; its outcome is that one's."""
REFUSED_SIZE = 4
"""The key is held with another length; the first stays."""
REFUSED_TOO_LARGE = 5
"""The page is larger than the pool."""
REFUSED_FULL = 6
"""No room now: everything is reserved, or this client has too much uncommitted."""
ABORTED = 7
"""The reservation ended without this page: aborted, unknown, or of another incarnation."""

ALIVE, SUSPECT, DEAD, LEFT = 0, 1, 2, 3
"""States of a member, from better to worse; on equal counters the worse one wins."""


@attrs.frozen
class Member:
    """One entry of a view: a node, how to reach it, and how it is.

    counter:   raised only by the member itself, to refute.
    head_rank: its place in `discovery_addr` if it is a configured head, else 255.
    control:   HOST:PORT for others; data likewise, for the tcp fabric.
    segment:   path of the published shared-memory file; boot_id tells whether it is our host's.
    """

    incarnation: int
    counter: int
    state: int
    head_rank: int
    host_name: str
    control: str
    data: str
    boot_id: str
    segment: str


# --- who is who -------------------------------------------------------------------------------


@attrs.frozen
class Hello:
    """Say who is talking, before anything else on a connection.

    lock: basename of the client's lock file in the home folder; "" from a node, from a client in
          the node's own process, and from a client that only reads.
    """

    request: int
    wire_oldest: int
    wire_newest: int
    cluster: str
    is_node: bool
    granule: int
    credentials: str
    namespace: str
    geometry: str
    lock: str


@attrs.frozen
class Welcome:
    """Answer a Hello that fits: the node as a member, and the facts of its segment."""

    request: int
    wire: int
    member: Member
    segment_bytes: int


@attrs.frozen
class Refused:
    """Answer what will not be served. reason: a word; detail: a sentence for a person."""

    request: int
    reason: str
    detail: str


@attrs.frozen
class SayHello:
    """Tell a stranger, or one who means a dead incarnation, to introduce itself again."""

    incarnation: int


# --- membership -------------------------------------------------------------------------------


@attrs.frozen
class Join:
    """Ask whoever listens at a discovery address to take us into its view."""

    member: Member


@attrs.frozen
class Heartbeat:
    """Tell a master that we live. view: the digest of our view."""

    member: Member
    view: bytes


@attrs.frozen
class HeartbeatSeen:
    """Answer a heartbeat. view: the digest of the answerer's view."""

    view: bytes


@attrs.frozen
class ViewShared:
    """Share a whole view; the receiver merges. request: of the ViewAsked it answers, or 0."""

    request: int
    view: tuple[Member, ...]


@attrs.frozen
class ViewAsked:
    """Ask for the view, unless its digest is the one given (then the answer is empty)."""

    request: int
    digest: bytes


# --- directory --------------------------------------------------------------------------------


@attrs.frozen
class Lookup:
    """Ask a node which holders of these pages it knows."""

    request: int
    keys: bytes


@attrs.frozen
class Located:
    """Answer a Lookup: the records known, in key order; absent keys have none, some several."""

    request: int
    records: bytes


@attrs.frozen
class Disputed:
    """Tell a directory owner that these very records failed verification."""

    records: bytes


@attrs.frozen
class Put:
    """Publish records, as message `number` of the stream from this holder to this owner."""

    number: int
    records: bytes


@attrs.frozen
class Delete:
    """Withdraw records, as message `number` of the same stream."""

    number: int
    drops: bytes


@attrs.frozen
class Acknowledged:
    """Tell the holder that message `number` of its stream has been applied."""

    number: int


@attrs.frozen
class StreamSummary:
    """State what the owner should hold of us after message `number`: count and xor digest."""

    number: int
    count: int
    digest: int


@attrs.frozen
class SummaryDiffers:
    """Answer a summary that does not match: our digests by bucket (256 × u64), key byte 0."""

    number: int
    buckets: bytes


@attrs.frozen
class Repair:
    """Send anew all that the owner should hold of us in these buckets (one byte a bucket).

    Applied as message `number` of the stream: what it does not name in those buckets goes.
    """

    number: int
    buckets: bytes
    records: bytes


# --- writing and the pool ---------------------------------------------------------------------


@attrs.frozen
class Reserve:
    """Ask for slots. sequence: this client's number of the reservation, rising from 1.

    keys: empty for slots ahead, whose pages the Commit will name.
    """

    request: int
    sequence: int
    namespace: int
    keys: bytes
    lengths: bytes


@attrs.frozen
class Granted:
    """Answer a Reserve: a state a page, and an offset where the state is RESERVED."""

    request: int
    sequence: int
    states: bytes
    offsets: bytes


@attrs.frozen
class Commit:
    """Make the written pages of a reservation readable; the unwritten ones are aborted.

    written:   one byte a page of the Reserve, 1 = its slot holds all its bytes.
    checksums: n × u64, 0 where there is none.
    patience_s: how long the answer may wait for a directory owner to acknowledge.
    keys:      of the first pages of a reservation made ahead, as many as `written`; else empty.
    ahead:     reserve as many slots under each of these sequences, for pages to be named.
    """

    request: int
    sequence: int
    written: bytes
    checksums: bytes
    patience_s: float
    keys: bytes = b""
    ahead: tuple[int, ...] = ()


@attrs.frozen
class Committed:
    """Answer a Commit: a state a page, the records now valid, and how many are published.

    ahead, offsets: a reservation made ahead that the client was not told of; 0 and empty: none.
    """

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

    sequence: int


@attrs.frozen
class LiveReservations:
    """List, each second, the reservations this client may still write to.

    newest: the highest sequence it has used; what is not newer and not listed is freed.
    """

    newest: int
    sequences: tuple[int, ...]


@attrs.frozen
class Touched:
    """Tell a holder which of its pages were read (drops: key and generation), for its LRU."""

    drops: bytes


@attrs.frozen
class Remove:
    """Ask a holder to drop these pages."""

    request: int
    keys: bytes


@attrs.frozen
class Clear:
    """Ask a holder to drop every page of a namespace."""

    request: int
    namespace: int


@attrs.frozen
class Removed:
    """Answer a Remove or Clear: how many pages went."""

    request: int
    count: int


@attrs.frozen
class StatsAsked:
    """Ask a node how it is."""

    request: int


@attrs.frozen
class Stats:
    """Answer: named figures."""

    request: int
    figures: dict[str, int | float | str]


@attrs.frozen
class SummaryMatches:
    """Answer a summary that matches: unlike an Acknowledged, all before it is in force too."""

    number: int


@attrs.frozen
class Counted:
    """Tell the home node what a client has counted since it last told, so that one scrape sees all.

    counts:  increases by "metric" or "metric/label value".
    calls:   how long batch calls took, n × 5 bytes (`reporting.CALL`).
    """

    counts: dict[str, int | float | str]
    calls: bytes


Message: TypeAlias = (
    Hello | Welcome | Refused | SayHello
    | Join | Heartbeat | HeartbeatSeen | ViewShared | ViewAsked
    | Lookup | Located | Disputed | Put | Delete | Acknowledged
    | StreamSummary | SummaryDiffers | Repair
    | Reserve | Granted | Commit | Committed | Abort | LiveReservations
    | Touched | Remove | Clear | Removed | StatsAsked | Stats
    | SummaryMatches | Counted | Promote | Promoted | OpenChannel | ChannelOpened | ChannelsHeld
)  # fmt: skip

MESSAGES: tuple[type[Message], ...] = get_args(Message)


@attrs.frozen
class Envelope:
    """A message on its way: who sent it, and which incarnation it is meant for (0: whoever)."""

    sender: int
    target: int
    message: Message
