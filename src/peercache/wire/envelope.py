"""Every message of the control plane.

A command is an imperative (`Reserve`), its answer a participle or noun (`Granted`), a fact a past
participle (`Touched`). Batches travel packed: `keys` is n × 16 bytes, `records` n × 56
(`model.records.RECORD`), `drops` n × 24 (`model.records.DROP`), lengths and offsets n × 8
little-endian.
A class's place in `Message` is its tag on the wire: append only, never reorder.

No promise depends on a message arriving, or arriving only once: every request carries a number
that its answer repeats, and summaries repair messages that must not be lost.

A build speaks WIRE_VERSION and the version before it. A version is a set of messages: a later one
only appends, so what both ends know has the same bytes. Hello and Welcome tell which versions the
ends speak, and a node sends no message to a peer whose version lacks it. A message that changes
gets a new name, and a place at the end.

Wire version 1 was the first. Version 2: a Hello proves its sender instead of carrying a shared
secret, members have names and nonces, and removals go through the home node. Version 3: messages
for operators, pages are handed over by a node that leaves, which members hold a prompt's pages, the
changes of what a node holds, and pages that are retained.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

import attrs

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

WIRE_VERSION = 3
WIRE_VERSION_OLDEST = 2
"""The versions that this build speaks: its own, and that of the build that came before."""

ENVELOPE_VERSION = 2
"""The first number of an envelope: the version of its shape, which both ends must share to read a
Hello at all. Wire version 2 brought this shape."""

FIRST_TAGS = {2: 0, 3: 45}
"""By wire version: the tag of the first message that it brought."""


Message: TypeAlias = (
    Hello | Welcome | Refused | SayHello
    | Join | Heartbeat | HeartbeatSeen | ViewShared | ViewAsked
    | Lookup | Located | Disputed | Put | Delete | Acknowledged
    | StreamSummary | SummaryDiffers | Repair
    | Reserve | Granted | Commit | Committed | Abort | LiveReservations
    | Touched | Remove | Clear | Removed | StatsAsked | Stats
    | SummaryMatches | Counted | Promote | Promoted | OpenChannel | ChannelOpened | ChannelsHeld
    | Doubted | RevocationsTold | ViewCompared | ReserveMirror
    | ViewChangesAsked | ViewChanges | HandedOver | SummaryWanted
    | StatusAsked | StatusTold | ClusterAsked | ClusterTold
    | DrainNode | CancelDrain | DrainAsked | DrainTold | PagesOffered | PagesTaken
    | OverlapAsked | OverlapTold | SummaryAsked
    | ChangesAsked | ChangesTold | Retain | Retained
)  # fmt: skip

MESSAGES: tuple[type[Message], ...] = get_args(Message)

WIRE_VERSIONS: dict[type[Message], int] = {
    kind: max(version for version, first in FIRST_TAGS.items() if first <= tag)
    for tag, kind in enumerate(MESSAGES)
}
"""By message: the wire version that brought it."""


def versions_spoken() -> str:
    """Return the wire versions of this build, for a sentence."""
    return f"{WIRE_VERSION_OLDEST} to {WIRE_VERSION}"


@attrs.frozen
class Envelope:
    """A message with its sender, and the incarnation that it is for (0: any)."""

    sender: int
    target: int
    message: Message
