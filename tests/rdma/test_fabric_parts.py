"""The rdma fabric over a device that moves bytes within this process: its contract, and the faults
that a real device shows seldom. test_fabric.py and test_faults.py do it with real verbs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.model.reads import PeerRead
from peercache.model.seal import ODD, SEAL_BYTES
from peercache.observability.reasons import DEADLINE, INTERNAL, PEER_UNREACHABLE, REFUSED
from peercache.rdma import channels
from peercache.rdma.fabric import REFUSED_S
from peercache.rdma.memory import Block, Blocks
from peercache.rdma.plan import PORTION_BYTES
from peercache.rdma.queue_pair import QueuePair
from peercache.wire.messages.session import ChannelOpened, ChannelsHeld, Refused
from tests.contracts.fabric_suite import (
    GRANULE,
    INCARNATION,
    PAGE_MEMORY_BYTES,
    Destination,
    FabricSuite,
    content_of,
)
from tests.pace import TIMEOUT_S
from tests.rdma.fake_bench import CLIENT, FakeBench
from tests.rdma.fake_device import ACCESS, FENCE, RETRY, SIGNALED


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
    assert set(into.runs.addresses.tolist()) <= set(bench.world.written)


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


@pytest.mark.parametrize("warm", [False, True])
def test_read_that_the_device_forgot_goes_over_another_channel(
    bench: FakeBench, warm: bool
) -> None:
    """Soft-RoCE does that: no completion and no error, whatever the time-out."""
    offsets, contents = bench.pages(4)
    into = Destination.of([[GRANULE]] * 4)
    bench.register(into)
    if warm:
        assert bench.get(offsets, into).failure == ""
    bench.ours[0].gives_up_s = 0.2
    bench.world.forgets = 1

    got = bench.get(offsets, into, timeout_s=TIMEOUT_S)

    assert (got.failure, got.seals["word"].tolist()) == ("", [2, 4, 6, 8])
    assert [into.page(page) for page in range(4)] == contents
    assert len(bench.asked) == 2, "the channel that forgot is not used again"


def test_device_that_forgets_all_is_a_miss_before_the_deadline(bench: FakeBench) -> None:
    """Three channels, and no more: a read does not last forever."""
    offsets, _ = bench.pages(4)
    into = Destination.of([[GRANULE]] * 4)
    bench.register(into)
    bench.ours[0].gives_up_s = 0.2
    bench.world.forgets = 100

    got = bench.get(offsets, into, timeout_s=TIMEOUT_S)

    assert got.failure == PEER_UNREACHABLE
    assert (got.seals["word"] == ODD).all()
    assert 100 - bench.world.forgets == 3


@pytest.mark.parametrize(
    ("part", "status", "failure"), [("seals", ACCESS, REFUSED), ("pages", RETRY, PEER_UNREACHABLE)]
)
def test_words_count_only_after_the_success_of_every_read(
    bench: FakeBench, part: str, status: int, failure: str
) -> None:
    """A READ that failed flushes those behind it, whatever their buffers hold: no page is there."""
    offsets, _ = bench.pages(2)
    first = getattr(bench.segment, part)
    fails = range(first.ctypes.data, first.ctypes.data + first.nbytes)
    bench.world.fails = lambda address: status if address in fails else 0

    got = bench.get(offsets, Destination.of([[GRANULE]] * 2))

    assert got.failure == failure
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
    wanted = PeerRead(
        bench.member, np.zeros(1, np.uint64), into.lengths, into.runs, np.array([4], np.uint64)
    )
    second = bench.segment.pages.ctypes.data + PORTION_BYTES
    assert size > PORTION_BYTES

    def commit(address: int) -> None:
        if address >= second:
            bench.segment.words[0] = 4

    into_honest = Destination.of([[size]])
    honest = bench.get([0], into_honest)
    bench.world.before = commit
    got = bench.fabric.read(wanted, time.monotonic() + TIMEOUT_S)

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


@pytest.fixture
def skipping(make_bench: Callable[..., FakeBench]) -> tuple[FakeBench, Callable[[], None]]:
    """One rail a side, and what lets pass the time in which a peer that failed is skipped."""
    skipped = [0.0]

    def skip() -> None:
        skipped[0] += REFUSED_S

    return make_bench(clock=lambda: time.monotonic() + skipped[0]), skip


def test_channel_that_failed_is_never_used_again(
    skipping: tuple[FakeBench, Callable[[], None]],
) -> None:
    """A remote access error kills both ends: the next read has a fresh pair of them."""
    bench, skip = skipping
    offsets, contents = bench.pages(1)
    bench.get(offsets, Destination.of([[GRANULE]]))
    bench.world.fails = lambda address: ACCESS

    refused = bench.get(offsets, Destination.of([[GRANULE]]))
    bench.world.fails = lambda address: 0
    skip()
    into = Destination.of([[GRANULE]])
    again = bench.get(offsets, into)

    assert (refused.failure, again.failure) == (REFUSED, "")
    assert into.page(0) == contents[0]
    numbers = [asked.qp_num for asked in bench.asked]
    # One that was idle, a second try in the same read, and the last one.
    assert len(numbers) == len(set(numbers)) == 3


def test_channel_that_cannot_be_destroyed_blocks_no_other(
    skipping: tuple[FakeBench, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its read is a miss, and its place is another channel's, however often that happens."""
    bench, skip = skipping
    offsets, contents = bench.pages(1)
    destroy = QueuePair.destroy

    def fails(pair: QueuePair) -> None:
        destroy(pair)
        raise OSError("the device refuses")

    bench.world.fails = lambda address: ACCESS
    with monkeypatch.context() as patched:
        patched.setattr(QueuePair, "destroy", fails)
        for _ in range(bench.channels_max + 1):
            assert bench.get(offsets, Destination.of([[GRANULE]])).failure == INTERNAL
            skip()
    bench.world.fails = lambda address: 0
    into = Destination.of([[GRANULE]])

    assert bench.get(offsets, into).failure == ""
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


def test_nodes_are_notified_of_which_channels_are_held(bench: FakeBench) -> None:
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
