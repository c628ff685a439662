"""How soon a dead rail is left out, in time that passes only where a read waits.

Over the device that moves bytes by hand, one READ chain of a rail takes as long as a test says. So
these are the fabric's own delays, to the millisecond, on any machine; test_faults.py pulls cables.
"""

from __future__ import annotations

import heapq
import itertools
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.reads import Fetched, PeerRead
from peercache.observability.metrics import Metrics
from peercache.rdma.channels import BACKOFF_S, STRIPE_BYTES_MIN, ClientRail
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.reading import RAIL_STALL_S
from peercache.rdma.serving import ChannelServer
from peercache.wire.messages.declared import Message
from tests.contracts.fabric_suite import (
    GRANULE,
    INCARNATION,
    PAGE_MEMORY_BYTES,
    Destination,
    content_of,
    member_of,
)
from tests.rdma.fake_device import FakeRail, Pair, World, channels_over, rng

CLIENT = 7
LEFT_OUT_S = 0.05
"""What is promised."""

PAGES = 128
PAGE_BYTES = 4 * GRANULE
WORK = 24
"""Work requests of a queue pair: two portions of a few pages each, so that a read has many."""


@attrs.define
class Time:
    """Time that stands still while anything can be done, and what is due in it."""

    now: float = 1000.0
    due: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list)
    numbers: Iterator[int] = attrs.field(factory=itertools.count)

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Have something happen; what is due at one time happens in the order of the calls."""
        heapq.heappush(self.due, (when, next(self.numbers), act))

    def poller(self) -> TimedPoller:
        """Return what waits in this time."""
        return TimedPoller(self)


class TimedPoller:
    """select.poll, but for what a wait is."""

    def __init__(self, time: Time) -> None:
        self._time, self._poll = time, select.poll()

    def register(self, fd: int, eventmask: int) -> None:
        self._poll.register(fd, eventmask)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        time = self._time
        until = time.now + timeout_ms / 1000
        while not (ready := self._poll.poll(0)):
            if not time.due or time.due[0][0] > until:
                time.now = until
                return []
            time.now, _, act = heapq.heappop(time.due)
            act()
        return ready


@attrs.define
class Rails:
    """A reader and an owner over two rails.

    chain_s: how long each chain of READs takes, by the reader's rail; None: for ever.
    left_out: (rail, when) whenever one is.
    """

    segment: PublishedSegment
    time: Time = attrs.field(factory=Time)
    world: World = attrs.field(factory=World)
    chain_s: dict[str, float | None] = attrs.field(factory=lambda: {"reader0": 0.0, "reader1": 0.0})
    left_out: list[tuple[str, float]] = attrs.field(factory=list)
    busy_until: dict[str, float] = attrs.field(factory=dict)
    ours: list[FakeRail] = attrs.field(init=False)
    server: ChannelServer = attrs.field(init=False)
    fabric: RdmaFabric = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Open both sides, all registered."""
        theirs: Any = [FakeRail(self.world, f"owner{index}") for index in range(2)]
        self.server = ChannelServer(theirs, self.segment, rng=rng())
        self.server.grew(PAGE_MEMORY_BYTES)
        for rail, regions in zip(theirs, self.server._regions.values(), strict=True):
            assert all(rail.regions.wait(region, 10) for region in regions)
        self.ours = [FakeRail(self.world, f"reader{index}", work=WORK) for index in range(2)]
        rails: Any = self.ours
        self.fabric = RdmaFabric(
            rails=rails, exchange=self.exchange, max_channels_per_peer=2, rng=rng(),
            metrics=Metrics(), clock=self.time.clock, poller=self.time.poller,
        )  # fmt: skip
        self.world.holds, self.world.posted = True, self.posted

    def exchange(self, peer: int, message: Any, until: float) -> Message | None:
        """Carry a question over."""
        return self.server.open(CLIENT, message)

    def posted(self, pair: Pair) -> None:
        """Have a chain be done when its rail has done those before it."""
        takes_s = self.chain_s[pair.rail]
        if takes_s is None:
            return
        done = max(self.time.now, self.busy_until.get(pair.rail, 0.0)) + takes_s
        self.busy_until[pair.rail] = done
        rail, number = pair.rail, pair.qp_num

        def finish() -> None:
            # A rail may have died meanwhile, or the queue pair was destroyed.
            if self.chain_s[rail] is not None and number in self.world.pairs:
                pair.go_on(1)

        self.time.at(done, finish)

    def read(self, pages: int = PAGES) -> tuple[Fetched, Destination]:
        """Read that many pages, all of them right, into registered memory."""
        offsets = [index * 2 * PAGE_BYTES for index in range(pages)]
        contents = [content_of(index, PAGE_BYTES) for index in range(pages)]
        for index, (offset, content) in enumerate(zip(offsets, contents, strict=True)):
            self.segment.pages[offset : offset + PAGE_BYTES] = bytearray(content)
            self.segment.words[offset // GRANULE] = 2 * index + 2
        into = Destination.of([[PAGE_BYTES]] * pages)
        end = self.fabric.register("test", into.memory.ctypes.data, len(into.memory), into.memory)
        for side in self.fabric._sides:
            regions = side.rail.regions
            for region in list(regions._regions):
                assert regions.wait(region, 10)
        wanted = PeerRead(
            member_of(INCARNATION, data="192.0.2.1:1"),
            np.array(offsets, np.uint64),
            into.lengths,
            into.runs,
            2 * np.arange(1, pages + 1, dtype=np.uint64),
        )
        got = self.fabric.read(wanted, self.time.now + 60.0)
        end()
        if not got.failure:
            assert [into.page(index) for index in range(pages)] == contents
            assert got.seals["word"].tolist() == [2 * index + 2 for index in range(pages)]
        return got, into


@pytest.fixture
def rails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rails]:
    """Two rails, connected to the owner."""
    segment = PublishedSegment.create(
        tmp_path, incarnation=Incarnation(INCARNATION), page_bytes=PAGE_MEMORY_BYTES,
        granule=GRANULE,
    )  # fmt: skip
    segment.populate(PAGE_MEMORY_BYTES)
    made = Rails(segment)
    leave_out = ClientRail.leave_out

    def noted(side: ClientRail, now: float) -> None:
        made.left_out.append((side.rail.name, now))
        leave_out(side, now)

    monkeypatch.setattr(ClientRail, "leave_out", noted)
    assert made.read()[0].failure == ""
    assert len(channels_over(made.fabric, 1)) == 1
    yield made
    made.world.holds = False
    made.fabric.close()
    made.server.close_all()
    segment.close()


def test_rail_that_dies_in_silence_is_left_out_within_50_ms(rails: Rails) -> None:
    """Its link says it is up, the other one goes on for long: other reads are kept off it."""
    rails.chain_s = {"reader0": 0.008, "reader1": None}
    began = rails.time.now

    got, _ = rails.read()

    assert got.failure == ""
    name, when = rails.left_out[0]
    assert name == "reader1"
    assert when - began <= LEFT_OUT_S
    # The other one had as much to do still: who waits for its end is late.
    assert rails.time.now - began > 3 * LEFT_OUT_S


def test_rail_that_dies_in_mid_read_is_left_out_within_50_ms(rails: Rails) -> None:
    """Counted from its last completion, to the millisecond: what came over it is not read again."""
    rails.chain_s = {"reader0": 0.015, "reader1": 0.008}
    last_done = rails.time.now + 3 * 0.008
    died = last_done + 0.003

    def die() -> None:
        rails.chain_s["reader1"] = None

    rails.time.at(died, die)

    got, _ = rails.read()

    assert got.failure == ""
    name, when = rails.left_out[0]
    assert name == "reader1"
    assert when - last_done <= RAIL_STALL_S + 0.0011
    assert when - died <= LEFT_OUT_S


def test_link_that_goes_down_is_seen_within_two_looks(rails: Rails) -> None:
    """The other rail is never idle: looks are a matter of time, not of having nothing to do."""
    rails.chain_s = {"reader0": 0.008, "reader1": None}
    down = rails.time.now + 0.015

    def pull() -> None:
        rails.ours[1].link_is_up = False

    rails.time.at(down, pull)

    got, _ = rails.read()

    assert got.failure == ""
    name, when = rails.left_out[0]
    assert name == "reader1"
    assert when - down <= 0.02


def test_small_read_over_a_dead_rail_goes_over_the_other(rails: Rails) -> None:
    """It has one rail, so nothing shows that another gets on; it need not wait for the retries."""
    pages = 8
    assert pages * PAGE_BYTES < STRIPE_BYTES_MIN
    rails.chain_s = {"reader0": 0.001, "reader1": None}
    took = []
    for _ in range(2):
        began = rails.time.now
        got, _ = rails.read(pages)
        assert got.failure == ""
        took.append(rails.time.now - began)

    # Rails take turns: one of the two had the dead one first.
    assert [name for name, _ in rails.left_out] == ["reader1"] * len(rails.left_out)
    assert rails.left_out
    assert max(took) <= LEFT_OUT_S
    assert min(took) <= 0.002


def test_last_rail_is_not_left_out_for_being_slow(rails: Rails) -> None:
    """There is nothing better: it goes on, for as long as the device tries."""
    rails.ours[0].link_is_up = False
    rails.time.now += 0.02
    rails.chain_s = {"reader0": None, "reader1": 0.3}

    got, _ = rails.read(8)

    assert got.failure == ""
    assert "reader1" not in [name for name, _ in rails.left_out]


def test_rails_that_stand_still_together_are_not_left_out(rails: Rails) -> None:
    """The peer was paused, or a switch: none of them is worse than the other, and one stays."""
    rails.chain_s = {"reader0": 0.004, "reader1": 0.004}

    def pause() -> None:
        rails.busy_until = dict.fromkeys(rails.chain_s, rails.time.now + 0.2)
        rails.time.due = [(when + 0.2, order, act) for when, order, act in rails.time.due]

    rails.time.at(rails.time.now + 0.03, pause)

    got, _ = rails.read()

    assert got.failure == ""
    assert len({name for name, _ in rails.left_out}) < 2


def test_slow_rail_is_not_a_dead_one(rails: Rails) -> None:
    """Three times as slow as the other, and slower than the timeout with a fast one."""
    rails.chain_s = {"reader0": 0.02, "reader1": 0.06}

    got, _ = rails.read()

    assert got.failure == ""
    assert rails.left_out == []


def test_rail_that_works_again_is_used_again(rails: Rails) -> None:
    """After its back-off, by itself."""
    rails.chain_s = {"reader0": 0.001, "reader1": None}
    rails.read()
    rails.chain_s["reader1"] = 0.001
    del rails.left_out[:]
    used = rails.busy_until.get("reader1")

    rails.read()
    soon = rails.busy_until.get("reader1")
    rails.time.now += BACKOFF_S
    rails.read()

    assert soon == used
    assert rails.busy_until["reader1"] > (used or 0.0)
    assert rails.left_out == []
