"""How soon a dead rail is left out, in time that passes only where a read waits.

Over the device that moves bytes by hand, one READ chain of a rail takes as long as a test sets. So
these are the fabric's own delays, to the millisecond, on any machine; test_faults.py pulls cables.
"""

from __future__ import annotations

import heapq
import itertools
import select
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.memory.published import PublishedSegment
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import U64
from peercache.observability.reasons import DEADLINE
from peercache.rdma.channels import BACKOFF_S, STRIPE_BYTES_MIN, Channels, ClientRail, Reserved
from peercache.rdma.plan import ReadProgress
from peercache.rdma.reading import RAIL_STALL_S
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, member_of
from tests.pace import TIMEOUT_S
from tests.rdma.fake_bench import FakeBench
from tests.rdma.fake_device import Pair

LEFT_OUT_S = 0.05
"""What is promised."""

PAGES = 128
PAGE_BYTES = 4 * GRANULE
WORK = 24
"""Work requests of a queue pair: two portions of a few pages each, so that a read has many."""


@attrs.define
class Time:
    """Time that is paused while anything can be done, and what is due in it."""

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


@attrs.define(kw_only=True)
class Rails(FakeBench):
    """A reader and an owner over two rails.

    chain_s: how long each chain of READs takes, by the reader's rail; None: forever.
    left_out: (rail, when) whenever one is.
    """

    time: Time = attrs.field(factory=Time)
    clock: Callable[[], float] = attrs.field(default=attrs.Factory(lambda s: s.time.clock, True))
    poller: Callable[[], Any] = attrs.field(default=attrs.Factory(lambda s: s.time.poller, True))
    rails: int = 2
    work: int = WORK
    chain_s: dict[str, float | None] = attrs.field(factory=lambda: {"reader0": 0.0, "reader1": 0.0})
    left_out: list[tuple[str, float]] = attrs.field(factory=list)
    busy_until: dict[str, float] = attrs.field(factory=dict)

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

    def read(self, pages: int = PAGES, timeout_s: float = 60.0) -> Fetched:
        """Read that many pages, all of them right, into registered memory."""
        offsets, contents = self.pages(pages, PAGE_BYTES)
        into = Destination.of([[PAGE_BYTES]] * pages)
        end = self.register(into)
        generations: U64 = 2 * np.arange(1, pages + 1, dtype=np.uint64)
        places = np.array(offsets, np.uint64)
        wanted = PeerRead(self.member, places, into.lengths, into.runs, generations)
        got = self.fabric.read(wanted, self.time.now + timeout_s)
        end()
        if not got.failure:
            assert [into.page(index) for index in range(pages)] == contents
            assert got.seals["word"].tolist() == generations.tolist()
        return got


@pytest.fixture
def rails(segment: PublishedSegment, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rails]:
    """Two rails, connected to the owner."""
    made = Rails(segment)
    made.world.holds, made.world.posted = True, made.posted
    leave_out = ClientRail.leave_out

    def noted(side: ClientRail, now: float) -> None:
        made.left_out.append((side.rail.name, now))
        leave_out(side, now)

    monkeypatch.setattr(ClientRail, "leave_out", noted)
    assert made.read().failure == ""
    assert made.world.pairs_over("reader1")
    yield made
    made.world.holds = False
    made.close()


def test_rail_that_dies_in_silence_is_left_out_within_50_ms(rails: Rails) -> None:
    """Its link is reported as up, the other one goes on for long: other reads are kept off it."""
    rails.chain_s = {"reader0": 0.008, "reader1": None}
    began = rails.time.now

    got = rails.read()

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

    got = rails.read()

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

    got = rails.read()

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
        got = rails.read(pages)
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

    got = rails.read(8)

    assert got.failure == ""
    assert "reader1" not in [name for name, _ in rails.left_out]


def test_rails_that_are_paused_together_are_not_left_out(rails: Rails) -> None:
    """The peer was paused, or a switch: none of them is worse than the other, and one stays."""
    rails.chain_s = {"reader0": 0.004, "reader1": 0.004}

    def pause() -> None:
        rails.busy_until = dict.fromkeys(rails.chain_s, rails.time.now + 0.2)
        rails.time.due = [(when + 0.2, order, act) for when, order, act in rails.time.due]

    rails.time.at(rails.time.now + 0.03, pause)

    got = rails.read()

    assert got.failure == ""
    assert len({name for name, _ in rails.left_out}) < 2


def test_slow_rail_is_not_a_dead_one(rails: Rails) -> None:
    """Three times as slow as the other, and slower than the timeout with a fast one."""
    rails.chain_s = {"reader0": 0.02, "reader1": 0.06}

    got = rails.read()

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


def test_deadline_holds_for_a_read_that_always_moves(rails: Rails) -> None:
    """As one of many small pages does: it is bound by posting, and something is always complete."""
    rails.chain_s = {"reader0": 0.02, "reader1": 0.02}
    began = rails.time.now

    got = rails.read(timeout_s=0.2)

    assert got.failure == DEADLINE
    assert rails.time.now - began < 0.25


# --- which channel a read gets --------------------------------------------------------------------


def channels(rails: int) -> Channels:
    """Return the channels of a client, one to a peer over each of its rails."""
    sides: list[Any] = [
        SimpleNamespace(index=index, is_usable=lambda _: True) for index in range(rails)
    ]
    return Channels(sides, max_channels_per_peer=1, clock=time.monotonic)


def small() -> ReadProgress:
    """Return a read of one small page."""
    into = Destination.of([[GRANULE]])
    zero = np.zeros(1, np.uint64)
    read = PeerRead(member_of(INCARNATION), zero, into.lengths, into.runs, zero)
    assert read.lengths.sum() < STRIPE_BYTES_MIN
    return ReadProgress(read, time.monotonic() + TIMEOUT_S)


def reserve(ours: Channels) -> Reserved:
    """Lease what a small read goes over."""
    reserved, why = ours.reserve(small())
    assert why == ""
    (one,) = reserved
    return one


@pytest.mark.parametrize("freed", range(3))
@pytest.mark.parametrize("turns", range(3))
def test_small_read_takes_the_one_rail_that_is_free_out_of_turn(freed: int, turns: int) -> None:
    """Two rails of three are busy, and no read waits for them."""
    ours = channels(3)
    for _ in range(turns):
        ours.driver.end(reserve(ours).lease, None, works=False)
    busy = sorted([reserve(ours) for _ in range(3)], key=lambda each: each.side.index)
    ours.driver.end(busy.pop(freed).lease, None, works=False)

    got = reserve(ours)

    assert got.side.index == freed


def test_small_reads_take_turns_over_rails_that_are_all_free() -> None:
    """Else the first rail would have every small read, and the others none."""
    ours = channels(3)
    used = []
    for _ in range(6):
        reserved = reserve(ours)
        used.append(reserved.side.index)
        ours.driver.end(reserved.lease, None, works=False)

    assert sorted(used) == [0, 0, 1, 1, 2, 2]


def test_small_read_waits_where_every_rail_is_busy() -> None:
    """Until the first of them comes free, whichever that is."""
    ours = channels(2)
    busy = [reserve(ours) for _ in range(2)]
    got: list[Reserved] = []
    waiting = threading.Thread(target=lambda: got.append(reserve(ours)))

    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    ours.driver.end(busy[1].lease, None, works=False)
    waiting.join(TIMEOUT_S)

    assert [each.side for each in got] == [busy[1].side]
