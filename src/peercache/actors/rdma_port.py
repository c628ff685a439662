"""The port of the rdma actor: what it asks of the queue pairs of a node, and what they answer.

Effects are values; an adapter of the port performs them: `rdma.serving` over real devices, a fake
in tests. Answers are facts, and the rdma actor hears them.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import attrs

from peercache.actors.origin import Origin
from peercache.wire.messages.session import ChannelOpened, OpenChannel, Refused

# --- effects: rdma → queue pairs ------------------------------------------------------------------


@attrs.frozen
class OpenPair:
    """Connect a queue pair to the client's end, or describe the one that the channel has.

    A repeated question keeps the queue pair. A question with another end of the client replaces it.
    """

    origin: Origin
    wanted: OpenChannel


@attrs.frozen
class DropPair:
    """Destroy the queue pair of a channel, if there is one. Has no answer."""

    client: int
    channel: int


@attrs.frozen
class ServeMemory:
    """Register the first `usable_bytes` of the page memory, in the background. Has no answer."""

    usable_bytes: int


RdmaEffect: TypeAlias = OpenPair | DropPair | ServeMemory


# --- facts: queue pairs → rdma --------------------------------------------------------------------


@attrs.frozen
class RdmaServes:
    """The devices are open, and the seals are registered."""


@attrs.frozen
class RdmaAbsent:
    """There are no queue pairs from now on. reason: a sentence for clients and people."""

    reason: str


@attrs.frozen
class PairOpened:
    """The answer to OpenPair. is_open: the channel has a queue pair. answer: for the client."""

    origin: Origin
    channel: int
    is_open: bool
    answer: ChannelOpened | Refused


RdmaFact: TypeAlias = RdmaServes | RdmaAbsent | PairOpened


class QueuePairs(Protocol):
    """The queue pairs of a node, as the rdma actor sees them.

    To make a queue pair may take long, so the port is asynchronous. The first fact is RdmaServes
    or RdmaAbsent. After RdmaServes each OpenPair has exactly one PairOpened, in the order of the
    effects; after RdmaAbsent there are no facts, and effects do nothing.
    """

    def perform(self, effect: RdmaEffect) -> None:
        """Take an effect and return at once, before its fact."""
