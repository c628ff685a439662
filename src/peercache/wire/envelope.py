"""Every message of the control plane.

A command is an imperative (`Reserve`), its answer a participle or noun (`Granted`), a fact a past
participle (`Touched`). Batches travel packed: `keys` is n × 16 bytes, `records` n × 56
(`model.records.RECORD`), `drops` n × 24 (`model.records.DROP`), lengths and offsets n × 8
little-endian.
A class's place in `Message` is its tag on the wire: append only, never reorder.

No promise depends on a message arriving, or arriving only once: every request carries a number
that its answer repeats, and summaries repair messages that must not be lost.
Wire version 1 was the first. Version 2: a Hello proves its sender instead of carrying a shared
secret, members have names and nonces, and removals go through the home node.
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
    SummaryDiffers,
    SummaryMatches,
    SummaryWanted,
)
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

WIRE_VERSION = WIRE_VERSION_OLDEST = 2


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
)  # fmt: skip

MESSAGES: tuple[type[Message], ...] = get_args(Message)


@attrs.frozen
class Envelope:
    """A message with its sender, and the incarnation that it is for (0: any)."""

    sender: int
    target: int
    message: Message
