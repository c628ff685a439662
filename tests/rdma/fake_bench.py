"""An owner and a reader of the rdma fabric in one process, over rails that a test chooses.

`FakeBench` has rails that move bytes within this process. `fabric_bench.py` has devices.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs

from peercache.memory.published import PublishedSegment
from peercache.model.member import Member
from peercache.model.reads import Fetched
from peercache.observability.metrics import Metrics
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.serving import ChannelServer
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import OpenChannel
from tests.contracts.fabric_suite import (
    GRANULE,
    INCARNATION,
    Destination,
    Owner,
    content_of,
    member_of,
    read,
)
from tests.pace import wait_until
from tests.rdma.fake_device import FakeRail, World, rng

CLIENT = 7


@attrs.define(kw_only=True)
class Bench:
    """A published segment, its node's ends of channels, and a fabric that reads it.

    The exchange of queue pairs goes from call to call instead of over the network.

    asked: what the reader has asked the owner.
    answer: in place of what the owner's end answers.
    """

    channels_max: ClassVar[int]

    segment: PublishedSegment = attrs.field(kw_only=False)
    fallback: Any = None
    registers: bool = True
    clock: Callable[[], float] = time.monotonic
    poller: Callable[[], Any] = select.poll
    answer: Callable[[OpenChannel], Message | None] | None = None
    metrics: Metrics = attrs.field(factory=Metrics, init=False)
    member: Member = attrs.field(
        factory=lambda: member_of(INCARNATION, data="192.0.2.1:1"), init=False
    )
    asked: list[OpenChannel] = attrs.field(factory=list, init=False)
    ours: list[Any] = attrs.field(init=False)
    server: ChannelServer = attrs.field(init=False)
    fabric: RdmaFabric = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Open both sides."""
        self.server = self.new_server()
        self.ours = self.rails_of_reader()
        self.fabric = RdmaFabric(
            rails=self.ours, exchange=self.exchange, max_channels_per_peer=self.channels_max,
            rng=rng(), metrics=self.metrics, fallback=self.fallback, clock=self.clock,
            poller=self.poller,
        )  # fmt: skip

    def rails_of_owner(self) -> list[Any]:
        """Open the rails of the node."""
        raise NotImplementedError

    def rails_of_reader(self) -> list[Any]:
        """Open the rails of the client."""
        raise NotImplementedError

    def new_server(self) -> ChannelServer:
        """Open the owner's side, all of its memory registered unless the test does that."""
        server = ChannelServer(self.rails_of_owner(), self.segment, rng=rng())
        if self.registers:
            self.serve_all(server)
        return server

    def serve_all(self, server: ChannelServer | None = None) -> None:
        """Register all of the page memory, and the seals."""
        serving = server or self.server
        size = self.segment.layout.page_bytes
        serving.grew(size)
        assert serving.failures() == []
        wait_until(lambda: serving.registered_bytes() == size)

    def exchange(self, peer: int, message: Message, until: float) -> Message | None:
        """Carry a question over, as the control plane does."""
        assert isinstance(message, OpenChannel)
        if peer != INCARNATION:
            return None
        self.asked.append(message)
        return self.answer(message) if self.answer else self.server.open(CLIENT, message)

    @property
    def owner(self) -> Owner:
        """Return who changes the memory."""
        return Owner(self.segment)

    @property
    def between(self) -> Callable[[], None] | None:
        """What happens between bytes and word."""
        return self.fabric.between

    @between.setter
    def between(self, act: Callable[[], None]) -> None:
        self.fabric.between = act

    def register(self, into: Destination) -> Callable[[], None]:
        """Register a destination, so that READs write to it directly; return what ends it."""
        address, length = into.memory.ctypes.data, len(into.memory)
        end = self.fabric.register("test", address, length, into.memory)
        wait_until(lambda: all(rail.regions.find(address, length) for rail in self.ours))
        return end

    def get(self, offsets: Sequence[int], into: Destination, timeout_s: float = 60.0) -> Fetched:
        """Read slots into a destination."""
        return read(self, offsets, into, timeout_s=timeout_s)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close both sides."""
        self.fabric.close()
        self.server.close_all()


@attrs.define(kw_only=True)
class FakeBench(Bench):
    """An owner and a reader over fake rails. work: requests that a queue pair has room for."""

    channels_max = 2

    rails: int = 1
    work: int = 4096
    world: World = attrs.field(factory=World)

    def rails_of_owner(self) -> list[Any]:
        """Make so many rails."""
        return [FakeRail(self.world, f"owner{index}") for index in range(self.rails)]

    def rails_of_reader(self) -> list[Any]:
        """Make as many."""
        return [
            FakeRail(self.world, f"reader{index}", work=self.work) for index in range(self.rails)
        ]

    def pages(self, count: int, size: int = GRANULE) -> tuple[list[int], list[bytes]]:
        """Store some pages; return where, and what."""
        offsets = [index * 2 * size for index in range(count)]
        contents = [content_of(index, size) for index in range(count)]
        for index, (offset, content) in enumerate(zip(offsets, contents, strict=True)):
            self.owner.store(offset, content, 2 * index + 2)
        return offsets, contents

    def close(self) -> None:
        """Close both sides; nothing may be left of either."""
        super().close()
        assert self.world.open_pairs() == 0
        assert self.world.entries_alive == 0
        assert all(rail.is_closed for rail in self.ours)
