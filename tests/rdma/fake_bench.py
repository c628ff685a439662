"""An owner and a reader of the rdma fabric over rails that move bytes within this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

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
    PAGE_MEMORY_BYTES,
    Destination,
    Owner,
    content_of,
    member_of,
    read,
)
from tests.rdma.fake_device import FakeRail, World, rng

CLIENT = 7


@attrs.define
class FakeBench:
    """An owner and a reader over fake rails."""

    segment: PublishedSegment
    rails: int = 1
    fallback: Any = None
    registers: bool = True
    world: World = attrs.field(factory=World)
    member: Member = attrs.field(factory=lambda: member_of(INCARNATION, data="192.0.2.1:1"))
    metrics: Metrics = attrs.field(factory=Metrics)
    asked: list[OpenChannel] = attrs.field(factory=list)
    answer: Callable[[OpenChannel], Message | None] | None = None
    ours: list[FakeRail] = attrs.field(init=False)
    server: ChannelServer = attrs.field(init=False)
    fabric: RdmaFabric = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Open both sides."""
        theirs: Any = [FakeRail(self.world, f"owner{index}") for index in range(self.rails)]
        self.server = ChannelServer(theirs, self.segment, rng=rng())
        if self.registers:
            self.serve_all()
        self.ours = [FakeRail(self.world, f"reader{index}") for index in range(self.rails)]
        rails: Any = self.ours
        self.fabric = RdmaFabric(
            rails=rails, exchange=self.exchange, max_channels_per_peer=2, rng=rng(),
            metrics=self.metrics, fallback=self.fallback,
        )  # fmt: skip

    def serve_all(self) -> None:
        """Register all of the page memory."""
        self.server.grew(PAGE_MEMORY_BYTES)
        for rail, (words, pages) in zip(
            self.server.rails, self.server._regions.values(), strict=True
        ):
            assert rail.regions.wait(words, 60)
            assert rail.regions.wait(pages, 60)

    def exchange(self, peer: int, message: Message, until: float) -> Message | None:
        """Carry a question over."""
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

    def register(self, into: Destination) -> None:
        """Register a destination."""
        self.fabric.register("test", into.memory.ctypes.data, len(into.memory), into.memory)
        for rail in self.ours:
            while not rail.regions.find(into.memory.ctypes.data, len(into.memory)):
                time.sleep(0)

    def pages(self, count: int, size: int = GRANULE) -> tuple[list[int], list[bytes]]:
        """Store some pages; return where, and what."""
        offsets = [index * 2 * size for index in range(count)]
        contents = [content_of(index, size) for index in range(count)]
        for index, (offset, content) in enumerate(zip(offsets, contents, strict=True)):
            self.owner.store(offset, content, 2 * index + 2)
        return offsets, contents

    def get(self, offsets: Sequence[int], into: Destination, timeout_s: float = 60.0) -> Fetched:
        """Read slots."""
        return read(self, offsets, into, timeout_s=timeout_s)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close both sides; nothing may be left of either."""
        self.fabric.close()
        self.server.close_all()
        assert self.world.open_pairs() == 0
        assert self.world.entries_alive == 0
        assert all(rail.is_closed for rail in self.ours)
