"""The rdma fabric over a device that moves bytes within this process: its contract, and the faults
that a real device shows seldom. test_fabric.py and test_faults.py do it with real verbs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.memory.published import PublishedSegment
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.seal import ODD, SEAL_BYTES
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import DEADLINE, INTERNAL, NO_MEMORY, PEER_UNREACHABLE, REFUSED
from peercache.rdma import channels
from peercache.rdma.channels import Channel
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.memory import Block, Blocks
from peercache.rdma.registrar import Registered
from peercache.rdma.serving import ChannelServer
from peercache.wire.envelope import Message
from peercache.wire.messages.rdma import ChannelOpened, ChannelsHeld, OpenChannel
from peercache.wire.messages.session import Refused
from tests.contracts.fabric_suite import (
    GRANULE,
    INCARNATION,
    PAGE_MEMORY_BYTES,
    Destination,
    FabricSuite,
    Owner,
    content_of,
    member_of,
    published_segment,
    read,
)
from tests.contracts.fakes import FakeFabric
from tests.pace import PATIENCE_S, PROMPT_S
from tests.rdma.fake_device import (
    ACCESS,
    FENCE,
    RETRY,
    SIGNALED,
    FakeRail,
    World,
    channels_over,
    rng,
)

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


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[PublishedSegment]:
    """A published segment, all of it usable."""
    with published_segment(tmp_path) as published:
        yield published


@pytest.fixture
def make_bench(segment: PublishedSegment) -> Iterator[Callable[..., FakeBench]]:
    """Make benches, and see that each leaves nothing behind."""
    made: list[FakeBench] = []

    def make(**facts: Any) -> FakeBench:
        made.append(FakeBench(segment, **facts))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., FakeBench]) -> FakeBench:
    """One rail a side."""
    return make_bench()


class TestRdmaFabricWithoutADevice(FabricSuite):
    """The contract, by way of the device that moves bytes by hand."""


class TestOverTwoRails(FabricSuite):
    """The contract, with batches striped over two rails."""

    @pytest.fixture
    def bench(self, make_bench: Callable[..., FakeBench]) -> FakeBench:
        """Two rails a side."""
        return make_bench(rails=2)


def test_registered_destination_is_filled_without_a_copy_of_ours(bench: FakeBench) -> None:
    """One doorbell: seals, fence, bytes, fence, seals, and only the last one signaled."""
    offsets, contents = bench.pages(3)
    into = Destination.of([[GRANULE]] * 3)
    bench.register(into)

    got = bench.get(offsets, into)

    assert (got.failure, got.seals["word"].tolist()) == ("", [2, 4, 6])
    assert [into.page(page) for page in range(3)] == contents
    assert bench.world.doorbells == 1
    assert [(size, flags) for _, size, flags in bench.world.reads] == [
        (5 * SEAL_BYTES, 0),
        (GRANULE, FENCE), (GRANULE, 0), (GRANULE, 0),
        (5 * SEAL_BYTES, FENCE | SIGNALED),
    ]  # fmt: skip
    assert not bench.ours[0].regions._regions or all(
        region.name != "bounce" for region in bench.ours[0].regions._regions
    )


def test_nothing_arrives_after_a_deadline(bench: FakeBench) -> None:
    """The queue pair is destroyed before the call returns: what was posted writes nowhere."""
    offsets, _ = bench.pages(4)
    into = Destination.of([[GRANULE]] * 4)
    bench.register(into)
    bench.world.holds = True

    got = bench.get(offsets, into, timeout_s=0.05)
    hanging = [pair for pair in bench.world.pairs.values() if pair.waiting]

    assert got.failure == DEADLINE
    assert (got.seals["word"] == ODD).all()
    assert not hanging
    assert into.gaps_are_untouched()


def test_words_count_only_after_the_success_of_their_own_read(bench: FakeBench) -> None:
    """The bytes are there and the words are not: no page is."""
    offsets, _ = bench.pages(2)
    into = Destination.of([[GRANULE]] * 2)
    first = bench.segment.seals.ctypes.data
    words = range(first, first + bench.segment.seals.nbytes)
    bench.world.fails = lambda address: ACCESS if address in words else 0

    got = bench.get(offsets, into)

    assert got.failure == REFUSED
    assert (got.seals["word"] == ODD).all()


def test_words_count_only_after_the_success_of_every_read_of_the_page(bench: FakeBench) -> None:
    """A READ that failed flushes the words behind it, whatever their buffer holds."""
    offsets, _ = bench.pages(2)
    into = Destination.of([[GRANULE]] * 2)
    first = bench.segment.pages.ctypes.data
    bench.world.fails = lambda address: RETRY if address == first else 0

    got = bench.get(offsets, into)

    assert got.failure == PEER_UNREACHABLE
    assert (got.seals["word"] == ODD).all()


def test_word_that_did_not_arrive_is_odd_whatever_was_there_before(bench: FakeBench) -> None:
    """The buffer is filled before anything is posted: the last read's words are in it."""
    offsets, _ = bench.pages(2)
    bench.get(offsets, Destination.of([[GRANULE]] * 2))
    first = bench.segment.seals.ctypes.data
    words = range(first, first + bench.segment.seals.nbytes)
    bench.world.loses = lambda address: address in words

    got = bench.get(offsets, Destination.of([[GRANULE]] * 2))

    assert (got.seals["word"] == ODD).all()


def test_seal_that_changes_between_the_looks_is_no_hit_though_its_word_fits(
    bench: FakeBench,
) -> None:
    """Within one READ the device promises no order of key and word: both seals agree in whole."""
    offsets, _ = bench.pages(2)
    seals, looked = bench.segment.seals, list[int]()
    seals["length"] = GRANULE

    def rename(address: int) -> None:
        if address == bench.segment.pages.ctypes.data:
            looked.append(address)
            seals["length"][0] = GRANULE + 1

    bench.world.before = rename

    got = bench.get(offsets, Destination.of([[GRANULE]] * 2))

    assert looked
    assert got.failure == ""
    assert got.seals["word"].tolist() == [2 + 1, 4]


def test_long_page_is_looked_at_before_the_first_of_its_portions(bench: FakeBench) -> None:
    """The owner commits another page there while the second portion is read: no hit."""
    size = PAGE_MEMORY_BYTES - 2 * GRANULE
    content = content_of(1, size)
    bench.owner.store(0, content, 2)
    into = Destination.of([[size]])
    portion = channels.PORTION_BYTES // 4
    wanted = PeerRead(
        bench.member, np.zeros(1, np.uint64), into.lengths, into.runs, np.array([4], np.uint64)
    )
    limits = bench.fabric._sides[0].new_channel
    assert size > 2 * portion

    def narrow(number: int) -> Channel:
        channel = limits(number)
        channel.limits = attrs.evolve(channel.limits, portion_bytes=portion)
        return channel

    bench.fabric._sides[0].new_channel = narrow  # type: ignore[method-assign]
    second = bench.segment.pages.ctypes.data + portion

    def commit(address: int) -> None:
        if address >= second:
            bench.segment.words[0] = 4

    into_honest = Destination.of([[size]])
    honest = bench.get([0], into_honest)
    bench.world.before = commit
    got = bench.fabric.read(wanted, time.monotonic() + PATIENCE_S)

    assert (honest.seals["word"].tolist(), into_honest.page(0)) == ([2], content)
    assert bench.world.doorbells > 2
    assert got.failure == ""
    assert got.seals["word"].tolist() == [4 + 1]


def test_memory_is_lent_again_only_after_its_queue_pair_is_destroyed(
    bench: FakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next read's bytes and words could be overwritten by the last one's."""
    offsets, _ = bench.pages(2)
    bench.get(offsets, Destination.of([[GRANULE]] * 2))
    bench.world.holds = True
    waiting: list[int] = []
    give_back = Blocks.give_back

    def look(blocks: Blocks, block: Block) -> None:
        waiting.append(sum(len(pair.waiting) for pair in bench.world.pairs.values()))
        give_back(blocks, block)

    monkeypatch.setattr(Blocks, "give_back", look)

    got = bench.get(offsets, Destination.of([[GRANULE]] * 2), timeout_s=2.0)

    assert got.failure == DEADLINE
    assert waiting == [0, 0]


def test_channel_that_failed_is_never_used_again(bench: FakeBench) -> None:
    """A remote access error kills both ends: the next read has a fresh pair of them."""
    offsets, contents = bench.pages(1)
    bench.get(offsets, Destination.of([[GRANULE]]))
    bench.world.fails = lambda address: ACCESS

    refused = bench.get(offsets, Destination.of([[GRANULE]]))
    bench.world.fails = lambda address: 0
    bench.fabric._unreachable.clear()
    into = Destination.of([[GRANULE]])
    again = bench.get(offsets, into)

    assert (refused.failure, again.failure) == (REFUSED, "")
    assert into.page(0) == contents[0]
    numbers = [asked.qp_num for asked in bench.asked]
    # One that was idle, a second try in the same read, and the last one.
    assert len(numbers) == len(set(numbers)) == 3


def test_channel_that_cannot_be_destroyed_blocks_no_other(bench: FakeBench) -> None:
    """The read is a miss, its lease is over, what was lent is not lent again; the next is whole."""
    offsets, contents = bench.pages(1)
    bench.get(offsets, Destination.of([[GRANULE]]))
    pair = channels_over(bench.fabric, 0)[0]._pair
    destroy, called = pair.destroy, list[bool]()

    def fails() -> None:
        destroy()
        called.append(True)
        raise OSError("the device refuses")

    pair.destroy = fails  # type: ignore[method-assign]
    bench.world.fails = lambda address: ACCESS

    missed = bench.get(offsets, Destination.of([[GRANULE]]))
    left = bench.fabric._channels._driver.list_channels()[1]
    bench.world.fails = lambda address: 0
    bench.fabric._unreachable.clear()
    into = Destination.of([[GRANULE]])
    again = bench.get(offsets, into)

    assert called
    assert (missed.failure, left, again.failure) == (INTERNAL, [], "")
    assert into.page(0) == contents[0]


def test_stale_idle_channel_costs_no_page(bench: FakeBench) -> None:
    """The node has ended it while it was idle: the read opens another, and is complete."""
    offsets, contents = bench.pages(1)
    bench.get(offsets, Destination.of([[GRANULE]]))
    bench.server.close(CLIENT, bench.asked[0].channel)
    into = Destination.of([[GRANULE]])

    got = bench.get(offsets, into)

    assert got.failure == ""
    assert into.page(0) == contents[0]


def test_rail_that_is_down_is_left_out_and_comes_back(make_bench: Callable[..., FakeBench]) -> None:
    """Every page comes over the other one; later both are used."""
    bench = make_bench(rails=2)
    offsets, contents = bench.pages(8, 2**18)
    bench.get(offsets, Destination.of([[2**18]] * 8))
    bench.ours[1].link_is_up = False
    time.sleep(0.02)
    into = Destination.of([[2**18]] * 8)

    alone = bench.get(offsets, into)
    used = [len(channels_over(bench.fabric, rail)) for rail in range(2)]
    bench.ours[1].link_is_up = True
    time.sleep(0.02)
    before = bench.world.doorbells
    together = bench.get(offsets, Destination.of([[2**18]] * 8))

    assert (alone.failure, together.failure) == ("", "")
    assert [into.page(page) for page in range(8)] == contents
    assert used == [1, 1]
    assert bench.world.doorbells == before + 2


def test_rail_that_hangs_while_the_other_goes_on_is_left_out(
    make_bench: Callable[..., FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link says it is up: what tells is that it alone makes no progress."""
    monkeypatch.setattr(channels, "BACKOFF_S", 3.0)
    bench = make_bench(rails=2)
    offsets, contents = bench.pages(8, 2**18)
    into = Destination.of([[2**18]] * 8)
    bench.get(offsets, Destination.of([[2**18]] * 8))
    channel = channels_over(bench.fabric, 1)[0]
    hanging = bench.world.pairs[channel._pair.number]
    hanging.go_on = lambda chains=None: None  # type: ignore[method-assign]
    begun = time.monotonic()

    got = bench.get(offsets, into)

    took_s = time.monotonic() - begun
    before = bench.world.doorbells
    soon = bench.get(offsets, Destination.of([[2**18]] * 8))
    alone = bench.world.doorbells - before
    time.sleep(channels.BACKOFF_S)
    later = bench.get(offsets, Destination.of([[2**18]] * 8))

    assert (got.failure, soon.failure, later.failure) == ("", "", "")
    assert took_s < PROMPT_S
    assert alone == 1
    assert bench.world.doorbells - before - alone == 2
    assert [into.page(page) for page in range(8)] == contents


def fallbacks(bench: FakeBench, reason: str) -> float | None:
    """Return how many pages another fabric read for a reason."""
    return bench.metrics.registry.get_sample_value(
        "peercache_rdma_fallbacks_total", {"reason": reason}
    )


def test_what_rdma_cannot_read_is_read_by_the_other_fabric(
    make_bench: Callable[..., FakeBench], segment: PublishedSegment
) -> None:
    """The pages arrive, under the other's name, and it is counted."""
    other = FakeFabric(granule=GRANULE)
    other.peers[INCARNATION] = segment
    bench = make_bench(fallback=other)
    offsets, contents = bench.pages(2)
    bench.answer = lambda asked: Refused(asked.request, "no_rdma", "it has no device")
    into = Destination.of([[GRANULE]] * 2)

    got = bench.get(offsets, into)

    assert (got.failure, got.fabric) == ("", "fake")
    assert [into.page(page) for page in range(2)] == contents
    assert not bench.fabric.reaches(bench.member)
    assert fallbacks(bench, REFUSED) == 2


def test_read_whose_memory_is_not_registered_soon_is_the_other_fabrics_within_its_deadline(
    make_bench: Callable[..., FakeBench],
    segment: PublishedSegment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while an engine's memory is being registered; when that is over, rdma reads again."""
    other = FakeFabric(granule=GRANULE)
    other.peers[INCARNATION] = segment
    bench = make_bench(fallback=other)
    offsets, contents = bench.pages(2)
    bench.get(offsets, Destination.of([[GRANULE]] * 2))
    monkeypatch.setattr("peercache.rdma.memory.REGISTER_S", 0.01)
    regions, side = bench.ours[0].regions, bench.fabric._sides[0]
    side.bounce._idle.clear()
    register, gate = regions._registrar.register, threading.Event()

    def later(*facts: Any) -> Registered:
        assert gate.wait(PATIENCE_S)
        return register(*facts)

    monkeypatch.setattr(regions._registrar, "register", later)
    # Less than a registration was once waited for, and time enough for all else.
    into = Destination.of([[GRANULE]] * 2)
    late = bench.get(offsets, into, timeout_s=4.0)
    gate.set()
    assert regions.wait(side.bounce._late[0], PATIENCE_S)
    again = bench.get(offsets, Destination.of([[GRANULE]] * 2))

    assert (late.failure, late.fabric) == ("", "fake")
    assert [into.page(page) for page in range(2)] == contents
    assert (again.failure, again.fabric) == ("", "rdma")
    assert fallbacks(bench, NO_MEMORY) == 2


def test_client_that_finds_no_peer_never_connects_and_reads_elsewhere(
    make_bench: Callable[..., FakeBench],
    segment: PublishedSegment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting would look for the node's end for a second, and all of the engine would wait."""
    other = FakeFabric(granule=GRANULE)
    other.peers[INCARNATION] = segment
    bench = make_bench(fallback=other)
    offsets, contents = bench.pages(2)
    bench.ours[0].finds_others = False
    connected: list[object] = []
    monkeypatch.setattr("peercache.rdma.channels.Channel.connect", connected.append)
    into = Destination.of([[GRANULE]] * 2)

    got = bench.get(offsets, into)

    assert (got.failure, got.fabric) == ("", "fake")
    assert [into.page(page) for page in range(2)] == contents
    assert connected == []
    assert len(bench.asked) == 1
    assert not bench.fabric.reaches(bench.member)
    # The node hears that its end is not needed.
    assert bench.fabric.held() == []
    assert bench.world.open_pairs() == 1


@pytest.mark.parametrize("who", ["client", "node"])
@pytest.mark.parametrize("pages", [1, 8])
def test_peer_without_a_path_over_one_rail_is_read_over_the_other(
    make_bench: Callable[..., FakeBench], who: str, pages: int
) -> None:
    """Either end finds no peer; it is tried once, and the peer is not given up."""
    bench = make_bench(rails=2)
    offsets, contents = bench.pages(pages, 2**18)

    def refuse(asked: OpenChannel) -> Message:
        if asked.rail == 1:
            return Refused(asked.request, "no_path", "no answer for your GID")
        return bench.server.open(CLIENT, asked)

    if who == "client":
        bench.ours[1].finds_others = False
    else:
        bench.answer = refuse
    for _ in range(3):
        into = Destination.of([[2**18]] * pages)
        got = bench.get(offsets, into)
        assert got.failure == ""
        assert [into.page(page) for page in range(pages)] == contents

    assert bench.fabric.reaches(bench.member)
    assert len([asked for asked in bench.asked if asked.rail == 1]) == 1
    bench.fabric.forget(INCARNATION)
    bench.ours[1].finds_others, bench.answer = True, None
    for _ in range(2):
        assert bench.get(offsets, Destination.of([[2**18]] * pages)).failure == ""
    assert len(channels_over(bench.fabric, 1)) == 1


def test_peer_without_rdma_is_asked_once_and_not_by_every_read(bench: FakeBench) -> None:
    """It is remembered; a node that restarts is another incarnation."""
    offsets, _ = bench.pages(1)
    bench.answer = lambda asked: Refused(asked.request, "no_rdma", "it has no device")

    got = bench.get(offsets, Destination.of([[GRANULE]]))
    reached = bench.fabric.reaches(bench.member)
    bench.fabric.forget(INCARNATION)

    assert got.failure == REFUSED
    assert (reached, bench.fabric.reaches(bench.member)) == (False, True)
    assert len(bench.asked) == 1


def test_memory_that_is_registered_later_is_asked_for_again(
    make_bench: Callable[..., FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel stays; only what it opens is told anew."""
    monkeypatch.setattr("peercache.rdma.fabric.REFRESH_S", 0.0)
    bench = make_bench(registers=False)
    offsets, contents = bench.pages(1)
    early = bench.get(offsets, Destination.of([[GRANULE]]))
    bench.serve_all()
    into = Destination.of([[GRANULE]])

    late = bench.get(offsets, into)

    assert (early.failure, late.failure) == (REFUSED, "")
    assert into.page(0) == contents[0]
    assert len({asked.qp_num for asked in bench.asked}) == 1


@pytest.mark.parametrize(
    "lies",
    [
        {"regions": np.array([(0, 2**64 - 1, 9999)], "<u8").tobytes(), "page_bytes": 2**62},
        {"regions": b""},
        {"granule": 0},
        {"granule": 3 * 4096},
        {"gid": b""},
        {"reads_at_once": 0, "regions": b""},
        {"pages_address": 2**64 - 1},
    ],
    ids=str,
)
def test_node_that_lies_about_its_memory_does_no_harm(
    bench: FakeBench, lies: dict[str, Any]
) -> None:
    """Keys that open nothing, and memory of absurd shapes, are refusals or misses."""
    offsets, _ = bench.pages(1)
    honest = bench.server.open

    def lie(asked: OpenChannel) -> Message:
        answer = honest(CLIENT, asked)
        assert isinstance(answer, ChannelOpened)
        return attrs.evolve(answer, **lies)

    bench.answer = lie

    got = bench.get(offsets, Destination.of([[GRANULE]]))

    assert got.failure in (REFUSED, PEER_UNREACHABLE)
    assert (got.seals["word"] == ODD).all()


def test_nodes_are_told_which_channels_are_held(bench: FakeBench) -> None:
    """A list once, no more while nothing changes, an empty one when the last is closed."""
    offsets, _ = bench.pages(1)
    bench.get(offsets, Destination.of([[GRANULE]]))

    first, second = bench.fabric.held(), bench.fabric.held()
    bench.fabric.forget(INCARNATION)
    third, fourth = bench.fabric.held(), bench.fabric.held()

    assert first == [(INCARNATION, ChannelsHeld(1, (1,)))]
    assert third == [(INCARNATION, ChannelsHeld(1, ()))]
    assert (second, fourth) == ([], [])


def test_list_of_channels_is_repeated_because_messages_get_lost(
    bench: FakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node ends channels that are not listed for a while."""
    bench.get(bench.pages(1)[0], Destination.of([[GRANULE]]))
    monkeypatch.setattr(channels, "HELD_S", 0.0)

    assert bench.fabric.held() == bench.fabric.held() != []


def test_destination_that_is_no_memory_is_our_own_fault_and_a_miss(bench: FakeBench) -> None:
    """A bounced page goes nowhere; the process lives, and so does the channel's peer."""
    offsets, _ = bench.pages(1)
    into = Destination.of([[GRANULE]])
    nowhere = attrs.evolve(into.runs, addresses=np.array([4096], np.uint64))
    asked = np.array(offsets, np.uint64)

    got = bench.fabric.read(
        PeerRead(bench.member, asked, into.lengths, nowhere, np.array([2], np.uint64)),
        time.monotonic() + 60,
    )

    assert got.failure == "internal"
    assert (got.seals["word"] == ODD).all()


def test_reader_sleeps_until_the_device_is_done(bench: FakeBench) -> None:
    """It waits on a descriptor; every event is acknowledged, or the end would wait for it."""
    offsets, contents = bench.pages(2)
    bench.get(offsets, Destination.of([[GRANULE]] * 2))
    bench.world.holds = True

    def later() -> None:
        while not any(pair.waiting for pair in list(bench.world.pairs.values())):
            time.sleep(0)
        for pair in list(bench.world.pairs.values()):
            pair.go_on()

    device = threading.Thread(target=later)
    device.start()
    into = Destination.of([[GRANULE]] * 2)
    got = bench.get(offsets, into)
    device.join()
    bench.world.holds = False
    again = bench.get(offsets, Destination.of([[GRANULE]] * 2))

    assert (got.failure, again.failure) == ("", "")
    assert [into.page(page) for page in range(2)] == contents


def test_channel_asked_for_again_keeps_its_pair_unless_the_other_end_is_new(
    bench: FakeBench,
) -> None:
    """The old one is destroyed first: its client has forgotten it."""
    bench.get(bench.pages(1)[0], Destination.of([[GRANULE]]))
    asked = bench.asked[0]
    pairs = bench.world.open_pairs()

    same = bench.server.open(CLIENT, attrs.evolve(asked, request=9))
    other = bench.server.open(CLIENT, attrs.evolve(asked, qp_num=asked.qp_num + 50))

    assert isinstance(same, ChannelOpened)
    assert isinstance(other, ChannelOpened)
    assert same.request == 9
    assert same.qp_num != other.qp_num
    assert bench.world.open_pairs() == pairs


@pytest.mark.parametrize(
    "nonsense",
    [{"gid": b"short"}, {"mtu": 0}, {"mtu": 9}, {"psn": 2**24}, {"link_layer": "Token Ring"}],
    ids=str,
)
def test_node_refuses_ends_that_no_queue_pair_has(
    bench: FakeBench, nonsense: dict[str, Any]
) -> None:
    """Nothing is made for them."""
    bench.get(bench.pages(1)[0], Destination.of([[GRANULE]]))
    asked = attrs.evolve(bench.asked[0], channel=99, **nonsense)
    pairs = bench.world.open_pairs()

    answer = bench.server.open(CLIENT, asked)

    assert isinstance(answer, Refused)
    assert bench.world.open_pairs() == pairs


def test_reads_beyond_the_cap_wait_for_a_channel(bench: FakeBench) -> None:
    """Two channels serve six threads; none is refused."""
    offsets, _ = bench.pages(2)
    failures: list[str] = []

    def go() -> None:
        failures.extend(
            bench.get(offsets, Destination.of([[GRANULE]] * 2)).failure for _ in range(20)
        )

    threads = [threading.Thread(target=go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == [""] * 120
    assert len(bench.asked) <= 2
