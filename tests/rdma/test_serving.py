"""The queue pairs of a node over fake devices: their opening, their faults and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DropPair,
    OpenPair,
    PairOpened,
    RdmaAbsent,
    RdmaServes,
    ServeMemory,
)
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.rdma.registrar import RegistrationFailed
from peercache.rdma.serving import DeviceQueuePairs
from peercache.rdma.verbs import Verbs
from peercache.wire.messages.session import ChannelOpened, OpenChannel
from tests.pace import ends_within
from tests.rdma.fake_device import FakeRail, VerbsError, World, rng

GRANULE, PAGE_BYTES = 4096, 2**20
GID = bytes(10) + b"\xff\xff\x0a\0\0\2"
WANTED = OpenChannel(5, 1, 0, "Ethernet", 7, 8, 0, GID, 5, 16)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[PublishedSegment]:
    """A segment of which a half is populated."""
    made = PublishedSegment.create(
        tmp_path, incarnation=Incarnation(3), page_bytes=PAGE_BYTES, granule=GRANULE
    )
    made.populate(PAGE_BYTES // 2)
    yield made
    made.close()


class Rig:
    """The actor, its mailbox, and what it reported."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, segment: PublishedSegment, *rails: FakeRail,
        is_required: bool = False,
    ) -> None:  # fmt: skip
        """Have it find these rails."""
        monkeypatch.setattr(
            "peercache.rdma.serving.open_rails", lambda settings: (rails, ("no more of them",))
        )
        self.reported: list[Any] = []
        self.arrived = trio.Event()
        self.pairs = DeviceQueuePairs(
            Config(), segment, is_required=is_required, notify=self.notify,
            rng=rng(), metrics=Metrics(), log=get_logger(),
        )  # fmt: skip

    def notify(self, fact: object) -> None:
        """Take what the actor emits."""
        self.reported.append(fact)
        self.arrived.set()

    async def next(self) -> Any:
        """Wait for the next fact."""
        with ends_within():
            await self.arrived.wait()
        self.arrived = trio.Event()
        return self.reported[-1]


async def test_channels_are_made_and_dropped_and_all_is_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, segment: PublishedSegment
) -> None:
    """What was populated before the devices were open is served, too."""
    world = World()
    rail = FakeRail(world)
    rig = Rig(monkeypatch, segment, rail)
    async with trio.open_nursery() as nursery:
        await nursery.start(rig.pairs.run)
        assert rig.reported == [RdmaServes()]
        rig.arrived = trio.Event()
        rig.pairs.perform(ServeMemory(PAGE_BYTES // 2))
        rig.pairs.perform(OpenPair(Origin(9, 1), WANTED))

        opened = await rig.next()
        pairs = world.open_pairs()
        rig.pairs.perform(DropPair(9, 1))
        with ends_within():
            while world.open_pairs():
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    assert isinstance(opened, PairOpened)
    assert opened.is_open
    assert isinstance(opened.answer, ChannelOpened)
    assert opened.answer.page_bytes == PAGE_BYTES
    assert pairs == 1
    assert rail.is_closed


def no_memory(rail: FakeRail) -> str:
    """Have a rail refuse to lock memory; return the reason that it gives."""
    why = "the limit is 65536: run `ulimit -l unlimited`"

    def refuse(address: int, length: int, access: int) -> Any:
        raise RegistrationFailed(why)

    rail.registrar.register = refuse  # type: ignore[method-assign]
    return f"{rail.name}: {why}"


def no_queue(rail: FakeRail) -> str:
    """Have a rail's device fail; return what it emits."""
    why = "Failed to create a CQ"

    def fail(*unused: Any) -> Any:
        raise VerbsError(why)

    rail.verbs = Verbs(**vars(rail.verbs) | {"CQ": fail})
    return why


@pytest.mark.parametrize("break_it", [no_memory, no_queue])
async def test_device_that_fails_is_an_absence_with_its_reason_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch, segment: PublishedSegment, break_it: Callable[[FakeRail], str]
) -> None:
    """Whatever verbs say; the devices are closed."""
    rail = FakeRail(World())
    why = break_it(rail)
    rig = Rig(monkeypatch, segment, rail)

    await rig.pairs.run()

    assert rig.reported == [RdmaAbsent(why)]
    assert rail.is_closed


async def test_absence_is_an_error_where_rdma_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, segment: PublishedSegment
) -> None:
    """The node does not start without it."""
    rig = Rig(monkeypatch, segment, is_required=True)

    with pytest.raises(ConfigError, match="rdma is required"):
        await rig.pairs.run()
