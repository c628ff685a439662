"""An owner and a reader of the rdma fabric in one process, over two devices of the guest.

The exchange of queue pairs goes from call to call instead of over the network; everything else is
what a node and a client run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from peercache.config.settings import Config
from peercache.memory.published import PublishedSegment
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.observability.metrics import Metrics
from peercache.rdma import device
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.rail import Rail
from peercache.rdma.serving import ChannelServer
from peercache.rdma.verbs import Verbs, load
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import NO_PATH, ChannelOpened, OpenChannel, Refused
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, Owner, member_of
from tests.contracts.fakes import words_at

CLIENT = 0xC
SETTINGS = Config()
"""What a configuration has that says nothing. Shorter time-outs find a dead peer sooner, and let a
guest with one busy processor send everything again, in storms that last for seconds."""

REGISTERED_S = 60.0


def open_rail(name: str, settings: Config = SETTINGS) -> Rail:
    """Open one device of the guest."""
    verbs = load()
    assert isinstance(verbs, Verbs), verbs
    choice = device.choose(device.read_ports(), (name,), settings.rdma_gid_index)
    assert choice.ports, choice.problems
    return Rail(verbs, choice.ports[0], settings)


@attrs.define
class RdmaBench:
    """A published segment, its node's ends of channels, and a fabric that reads it.

    answers: what the node's end said, in order; tests may change what comes next with `forge`.
    """

    segment: PublishedSegment
    owner_rails: Sequence[str] = ("rxe2",)
    reader_rails: Sequence[str] = ("rxe1",)
    settings: Config = SETTINGS
    fallback: Any = None
    server: ChannelServer = attrs.field(init=False)
    fabric: RdmaFabric = attrs.field(init=False)
    metrics: Metrics = attrs.field(factory=Metrics, init=False)
    member: Member = attrs.field(
        factory=lambda: member_of(INCARNATION, data="192.0.2.1:1"), init=False
    )
    asked: list[OpenChannel] = attrs.field(factory=list, init=False)
    forge: Callable[[Message], Message | None] = attrs.field(default=lambda answer: answer)
    is_away: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        """Open both sides, and wait until all is registered."""
        self.server = self.new_server()
        self.fabric = RdmaFabric(
            rails=[open_rail(name, self.settings) for name in self.reader_rails],
            exchange=self.exchange,
            max_channels_per_peer=4,
            rng=random.Random(2),
            metrics=self.metrics,
            fallback=self.fallback,
        )

    def new_server(self) -> ChannelServer:
        """Open the owner's side, all of its memory registered."""
        rails = [open_rail(name, self.settings) for name in self.owner_rails]
        server = ChannelServer(rails, self.segment, rng=random.Random(1))
        server.grew(self.segment.layout.page_bytes)
        until = time.monotonic() + REGISTERED_S
        while server.registered_bytes() < self.segment.layout.page_bytes:
            assert time.monotonic() < until, "not registered in time"
            time.sleep(0.001)
        return server

    def restart_server(self) -> None:
        """End every channel and registration of the owner, and begin again."""
        self.server.close_all()
        self.server = self.new_server()

    def exchange(self, peer: int, message: Message, until: float) -> Message | None:
        """Carry a question to the owner's side, as the control plane does."""
        assert isinstance(message, OpenChannel)
        self.asked.append(message)
        if self.is_away or peer != INCARNATION:
            return None
        # As the actor of a node does, before it connects.
        rail = self.server.rail_for(message)
        if not rail.finds(message.gid, until):
            return Refused(message.request, NO_PATH, f"no answer at {rail.name}")
        return self.forge(self.server.open(CLIENT, message))

    @property
    def owner(self) -> Owner:
        """Return who changes the published memory."""
        return Owner(self.segment)

    @property
    def between(self) -> Callable[[], None] | None:
        """What happens between bytes and word."""
        return self.fabric.between

    @between.setter
    def between(self, act: Callable[[], None]) -> None:
        self.fabric.between = act

    def fill(self, page_bytes: int, seed: int = 3) -> None:
        """Fill the page memory with noise, and give slot i the word 2 (i + 1)."""
        rng = np.random.default_rng(seed)
        self.segment.pages[:] = rng.integers(0, 256, len(self.segment.pages), np.uint8)
        count = self.segment.layout.page_bytes // page_bytes
        starts = np.arange(count) * (page_bytes // GRANULE)
        self.segment.store_words(starts, 2 * (np.arange(count, dtype=np.uint64) + np.uint64(1)))

    def register(self, into: Destination) -> None:
        """Register a destination, so that READs write to it directly."""
        self.fabric.register("test", into.memory.ctypes.data, len(into.memory), into.memory)
        for side in self.fabric._sides:
            regions = side.rail.regions
            until = time.monotonic() + REGISTERED_S
            while not regions.find(into.memory.ctypes.data, len(into.memory)):
                assert time.monotonic() < until, "not registered in time"
                time.sleep(0.001)

    def read(self, offsets: Sequence[int], into: Destination, timeout_s: float = 60.0) -> Fetched:
        """Read slots into a destination."""
        asked = np.array(offsets, np.uint64)
        generations = words_at(self.segment, asked, GRANULE)
        wanted = PeerRead(self.member, asked, into.lengths, into.runs, generations)
        return self.fabric.read(wanted, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Close both sides."""
        self.fabric.close()
        self.server.close_all()


def forged(answer: Message | None, **changes: Any) -> Message | None:
    """Return a node's answer with some facts changed."""
    return attrs.evolve(answer, **changes) if isinstance(answer, ChannelOpened) else answer
