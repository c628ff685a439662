"""A rail as a client uses it: its channels to every peer, and the memory it lends to reads.

Owns    the channels over one rail, and its blocks of registered memory.
Keeps   a channel has one user at a time; one that failed is closed before its lease ends.
        A rail whose link is down, or that did not get on while another did, is left out until its
        link is up again and its back-off is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import final

import numpy as np

from peercache.actors.channels.actor import ChannelPool
from peercache.memory.layout import GRANULE_BYTES_MIN
from peercache.rdma.blocks import Blocks
from peercache.rdma.channel import PORTIONS_AT_ONCE, Channel
from peercache.rdma.key_table import KeyTable
from peercache.rdma.plan import (
    PORTION_BYTES,
    PORTION_WORK_MAX,
    WORD_BYTES,
    WORD_GAP_BYTES,
    Published,
)
from peercache.rdma.queue_pair import PSN_MAX, End
from peercache.rdma.rail import Rail
from peercache.wire.messages.rdma import ChannelOpened, OpenChannel

WORDS_BLOCKS_MAX = 64
"""Reads at once over one rail: more than an engine has threads."""

BOUNCE_BLOCKS_MAX = 4
"""Reads at once into memory that is not registered; 32 MiB each, made when they are needed."""

LINK_LOOK_S = 0.01
"""How long a look at the link is believed: it is a system call or three."""

BACKOFF_S = 0.25
"""How long a rail that failed is left out, at least. Its return costs a read one stall at most."""

_WORDS_HALF_BYTES = (PORTION_WORK_MAX + 1) * (WORD_GAP_BYTES + WORD_BYTES)


@final
class Side:
    """One rail of a client. Its `pool` and `channels` are guarded by the fabric's lock."""

    def __init__(
        self,
        rail: Rail,
        index: int,
        *,
        max_channels_per_peer: int,
        rng: random.Random,
        clock: Callable[[], float],
        has_fallback: bool,
    ) -> None:
        """Open nothing yet.

        index:        which rail of the client's it is.
        has_fallback: whether another fabric can read what this one has no memory for.
        """
        self.rail = rail
        self.index = index
        self.pool = ChannelPool(max_channels_per_peer=max_channels_per_peer)
        self.channels: dict[int, Channel] = {}
        self.words = Blocks(
            rail.regions, "words read", clock=clock, blocks_max=WORDS_BLOCKS_MAX,
            block_bytes=PORTIONS_AT_ONCE * _WORDS_HALF_BYTES, has_fallback=has_fallback,
        )  # fmt: skip
        self.bounce = Blocks(
            rail.regions, "bounce", clock=clock, blocks_max=BOUNCE_BLOCKS_MAX,
            block_bytes=PORTIONS_AT_ONCE * PORTION_BYTES, has_fallback=has_fallback,
        )  # fmt: skip
        self._rng = rng
        self._looked_at = float("-inf")
        self._was_up = False
        self._left_out_until = float("-inf")

    def is_usable(self, now: float) -> bool:
        """Return whether to read over this rail now."""
        if now < self._left_out_until:
            return False
        if now - self._looked_at >= LINK_LOOK_S:
            self._looked_at, self._was_up = now, self.rail.is_up()
        return self._was_up

    def leave_out(self, now: float) -> None:
        """Do not use this rail for a while."""
        self._left_out_until = now + BACKOFF_S

    def new_channel(self, number: int) -> Channel:
        """Return a channel that is not connected yet. Raises verbs.Error or OSError."""
        return Channel(self.rail, number, psn=self._rng.randrange(PSN_MAX + 1))

    def question(self, channel: Channel) -> OpenChannel:
        """Return what to ask a node for the other end, or again for its regions."""
        end = channel.end()
        return OpenChannel(
            request=0,
            channel=channel.number,
            rail=self.index,
            link_layer=self.rail.link_layer,
            qp_num=end.qp_num,
            psn=end.psn,
            lid=end.lid,
            gid=end.gid,
            mtu=self.rail.abilities.mtu,
            reads_at_once=self.rail.reads_started,
        )

    def close(self) -> None:
        """Close the rail; every channel is closed already."""
        self.rail.close()


def published_by(answer: ChannelOpened) -> Published:
    """Return the node's memory as its answer describes it; raise ValueError for nonsense."""
    granule = answer.granule
    if granule < GRANULE_BYTES_MIN or granule & (granule - 1):
        raise ValueError(f"a granule of {granule} bytes")
    regions = np.frombuffer(answer.regions, "<u8").reshape(-1, 3)
    return Published(
        pages_address=answer.pages_address,
        page_bytes=answer.page_bytes,
        words_address=answer.words_address,
        granule=answer.granule,
        keys=KeyTable.of([(row[0], row[1], row[2]) for row in regions.tolist()]),
    )


def end_of(answer: ChannelOpened) -> End:
    """Return the node's end of a channel; raise ValueError for nonsense."""
    if len(answer.gid) != 16:
        raise ValueError(f"a GID of {len(answer.gid)} bytes")
    return End(answer.qp_num, answer.psn, answer.lid, answer.gid)
