"""The contract of the rdma actor's port: a table, fake devices and real devices keep it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DropPair,
    OpenPair,
    PairOpened,
    QueuePairs,
    RdmaAbsent,
    RdmaFact,
    RdmaServes,
    ServeMemory,
)
from peercache.config.settings import Config
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.rdma.channels import Channel, ClientRail
from peercache.rdma.rail import open_rails
from peercache.rdma.serving import DeviceQueuePairs
from peercache.wire.messages.session import ChannelOpened, OpenChannel, Refused
from tests.contracts.fake_queue_pairs import FakeQueuePairs
from tests.pace import ends_within
from tests.rdma.fake_device import FakeRail, World, rng

GRANULE, PAGE_BYTES = 4096, 2**20
CLIENT = Origin(9, 1)
GID = bytes(10) + b"\xff\xff\x0a\0\0\2"

Ask = Callable[[int], OpenChannel]
"""Makes a client's end of a channel and returns its question."""


class Port:
    """A port with the facts that it reports."""

    def __init__(self, ask: Ask) -> None:
        """Hear nothing yet."""
        self.ask = ask
        self.pairs: QueuePairs
        self.live: Callable[[], float | None]
        self.facts: list[RdmaFact] = []
        self._has_facts = trio.Event()

    def notify(self, fact: RdmaFact) -> None:
        """Take a fact."""
        self.facts.append(fact)
        self._has_facts.set()

    async def hear(self, count: int) -> list[RdmaFact]:
        """Wait for the next facts."""
        with ends_within():
            while len(self.facts) < count:
                self._has_facts = trio.Event()
                await self._has_facts.wait()
        taken, self.facts = self.facts[:count], self.facts[count:]
        return taken

    async def open(self, wanted: OpenChannel) -> PairOpened:
        """Ask for a channel and wait for the answer."""
        self.pairs.perform(OpenPair(CLIENT, wanted))
        (fact,) = await self.hear(1)
        assert isinstance(fact, PairOpened)
        return fact

    async def until_live(self, count: int) -> None:
        """Wait until there are so many queue pairs."""
        with ends_within():
            while self.live() != count:  # noqa: ASYNC110 - the port reports no fact of a drop
                await trio.sleep(0.001)


OpenPort = Callable[[], Any]


@asynccontextmanager
async def serving(run: Any, *, is_step: bool) -> AsyncIterator[None]:
    """Run the port in the background."""

    async def step() -> None:
        while True:
            run()
            await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(step if is_step else run)
        yield
        nursery.cancel_scope.cancel()


_numbers = itertools.count(1)


def made_up(channel: int) -> OpenChannel:
    """Return the question of an end that is on no device."""
    return OpenChannel(5, channel, 0, "Ethernet", next(_numbers), 8, 0, GID, 5, 16)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[PublishedSegment]:
    """A segment whose memory is populated."""
    made = PublishedSegment.create(
        tmp_path, incarnation=Incarnation(3), page_bytes=PAGE_BYTES, granule=GRANULE
    )
    made.populate(PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture(params=["table", "fake device", pytest.param("device", marks=pytest.mark.rdma)])
def open_port(
    request: pytest.FixtureRequest, segment: PublishedSegment, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenPort]:
    """Open a port that serves; the same contract for each kind."""
    ends: list[Channel] = []
    client: ClientRail | None = None
    settings = Config(rdma_device_names=("rxe2",))
    if request.param == "device":
        (rail,), _ = open_rails(Config(rdma_device_names=("rxe1",)))
        client = ClientRail(rail, 0, rng=rng(), clock=trio.current_time, has_fallback=False)
    if request.param == "fake device":
        rails = (FakeRail(World()),)
        monkeypatch.setattr("peercache.rdma.serving.open_rails", lambda _: (rails, ()))

    def ask(channel: int) -> OpenChannel:
        if client is None:
            return made_up(channel)
        ends.append(client.new_channel(channel))
        return client.question(ends[-1])

    @asynccontextmanager
    async def opened() -> AsyncIterator[Port]:
        port = Port(ask)
        if request.param == "table":
            fake = FakeQueuePairs(port.notify)
            port.pairs, port.live = fake, lambda: len(fake.live)
            running = serving(fake.step, is_step=True)
        else:
            metrics = Metrics()
            real = DeviceQueuePairs(
                settings, segment, is_required=False, notify=port.notify, rng=rng(),
                metrics=metrics, log=get_logger(),
            )  # fmt: skip
            port.pairs = real
            port.live = lambda: metrics.registry.get_sample_value("peercache_rdma_channels")
            running = serving(real.run, is_step=False)
        async with running:
            assert await port.hear(1) == [RdmaServes()]
            yield port

    yield opened
    for end in ends:
        end.close()
    if client is not None:
        client.close()


async def test_effects_are_taken_at_once_and_answered_later_in_their_order(
    open_port: OpenPort,
) -> None:
    """The caller is the loop of the node: a slow device must not stop it."""
    async with open_port() as port:
        for channel in (3, 1, 2):
            port.pairs.perform(OpenPair(CLIENT, port.ask(channel)))
        at_once = list(port.facts)

        answers = await port.hear(3)

    assert at_once == []
    assert [fact.channel for fact in answers] == [3, 1, 2]
    assert all(fact.is_open and fact.origin == CLIENT for fact in answers)


async def test_repeated_question_keeps_the_queue_pair(open_port: OpenPort) -> None:
    """A client repeats it to learn of newly registered memory."""
    async with open_port() as port:
        question = port.ask(1)

        first, second = await port.open(question), await port.open(question)
        live = port.live()

    assert isinstance(first.answer, ChannelOpened)
    assert isinstance(second.answer, ChannelOpened)
    assert (first.answer.qp_num, first.answer.psn) == (second.answer.qp_num, second.answer.psn)
    assert live == 1


async def test_another_end_of_the_client_replaces_the_queue_pair(open_port: OpenPort) -> None:
    """A queue pair has one other end for its whole life."""
    async with open_port() as port:
        first, second = await port.open(port.ask(1)), await port.open(port.ask(1))
        live = port.live()

    assert first.is_open
    assert second.is_open
    assert live == 1


async def test_dropped_queue_pair_is_gone_and_a_second_drop_does_nothing(
    open_port: OpenPort,
) -> None:
    """Other channels of the client stay."""
    async with open_port() as port:
        await port.open(port.ask(1))
        await port.open(port.ask(2))

        for channel in (1, 1, 7):
            port.pairs.perform(DropPair(CLIENT.identity, channel))
        await port.until_live(1)
        answer = await port.open(port.ask(3))

    assert answer.is_open


async def test_end_that_no_queue_pair_has_is_refused_and_ends_the_old_queue_pair(
    open_port: OpenPort,
) -> None:
    """The actor forgets a refused channel, so the port must not keep a queue pair of it."""
    async with open_port() as port:
        question = port.ask(1)
        await port.open(question)

        refused = await port.open(attrs.evolve(question, mtu=9))
        await port.until_live(0)

    assert not refused.is_open
    assert isinstance(refused.answer, Refused)
    assert refused.answer.request == question.request


async def test_memory_that_is_served_is_in_a_later_answer(open_port: OpenPort) -> None:
    """Registration goes on in the background."""

    def page_regions(fact: PairOpened) -> list[list[int]]:
        assert isinstance(fact.answer, ChannelOpened)
        rows = np.frombuffer(fact.answer.regions, "<u8").reshape(-1, 3).tolist()
        return [row for row in rows if row[0] == fact.answer.pages_address]

    async with open_port() as port:
        question = port.ask(1)
        before = page_regions(await port.open(question))
        port.pairs.perform(ServeMemory(PAGE_BYTES))
        with ends_within():
            while not (after := page_regions(await port.open(question))):  # noqa: ASYNC110 - no fact
                await trio.sleep(0.001)

    assert before == []
    assert [row[1] for row in after] == [PAGE_BYTES]


@pytest.mark.parametrize("kind", ["table", "no device"])
async def test_port_without_devices_reports_why_once_and_then_nothing(
    kind: str, segment: PublishedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Effects that come later do nothing, and do not pile up."""
    port = Port(made_up)
    if kind == "table":
        fake = FakeQueuePairs(port.notify, absent_because="no more of them")
        fake.step()
        port.pairs = fake
    else:
        monkeypatch.setattr(
            "peercache.rdma.serving.open_rails", lambda _: ((), ("no more of them",))
        )
        real = DeviceQueuePairs(
            Config(), segment, is_required=False, notify=port.notify, rng=rng(), metrics=Metrics(),
            log=get_logger(),
        )  # fmt: skip
        await real.run()
        port.pairs = real

    port.pairs.perform(OpenPair(CLIENT, made_up(1)))
    port.pairs.perform(ServeMemory(PAGE_BYTES))
    await trio.sleep(0.01)

    assert port.facts == [RdmaAbsent("no more of them")]
