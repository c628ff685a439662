"""How much of a found prefix is worth reading, and how sources are measured for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, cast

import attrs
import pytest

from peercache.client.bridge import Bridge
from peercache.client.decline import LATE_S, PROBE_PAGES, Decliner
from peercache.model.member import Member
from peercache.observability.metrics import Metrics, totals_of
from peercache.paths.costs import MEASURED_S
from peercache.paths.steps import Fetch, Step
from tests.pace import wait_until
from tests.unit.paths.pages import named
from tests.unit.paths.world import World

NAMES = "abcdefghijkl"


@attrs.define(eq=False)
class Gate:
    """The bridge to a scripted world; reads pass while it is open."""

    world: World
    is_open: threading.Event = attrs.field(factory=threading.Event)
    passed: int = 0
    closes_after: int = 0

    def shares_memory(self, member: Member) -> bool:
        return member.boot_id == "here"

    def run(self, path: Generator[Step, Any, Any]) -> Any:
        assert self.is_open.wait(30.0)
        self.passed += 1
        if self.passed == self.closes_after:
            self.is_open.clear()
        return self.world.run(path)


class Rig:
    """A client with pages on another host, that takes a second to compute a page."""

    def __init__(self, *, get_s: float = 60.0) -> None:
        self.now = 0.0
        self.world = World(remote=frozenset({2, 3}))
        self.world.publish(*[self.world.nodes[3].hold(name) for name in NAMES])
        self.gate = Gate(self.world)
        self.gate.is_open.set()
        self.metrics = Metrics()
        self.decliner = Decliner(
            compute_s=1.0,
            get_s=get_s,
            cache=self.world.cache,
            costs=self.world.costs,
            reader=self.world.reader,
            bridge=cast("Bridge", self.gate),
            # Of the caller, who waits in real time while a probe takes time of the world.
            clock=lambda: self.now,
            cluster=lambda: self.world.cluster,
            call=self.call,
            metrics=self.metrics,
        )

    def call(self, read: Callable[[float], None]) -> None:
        read(self.world.now + 10.0)

    def worth(
        self, names: str = NAMES, *, compute_s: Any = None, within_s: float = 60.0
    ) -> tuple[int, str]:
        """Ask for the pages, as an exists that finds them does."""
        assert all(self.world.exists(*names))
        return self.decliner.worth(named(*names), self.now + within_s, compute_s)

    @property
    def fetched(self) -> list[int]:
        """How many pages each read was for."""
        return [
            len(read.offsets)
            for step in self.world.steps
            if isinstance(step, Fetch)
            for read in step.reads
        ]

    @property
    def counted(self) -> dict[str, float]:
        return {why: n for why, n in totals_of(self.metrics.exists_declined).items() if n}


@pytest.fixture
def rig() -> Rig:
    """Nothing is known yet."""
    return Rig()


def test_an_unknown_source_is_measured_with_a_page_and_a_few_more(rig: Rig) -> None:
    """Its pages are worth it if they take less time than to compute them."""
    rig.world.page_s = 0.5

    assert rig.worth() == (len(NAMES), "")
    assert rig.fetched == [1, 2]
    assert rig.counted == {}


def test_a_slow_source_is_declined_until_it_has_recovered(rig: Rig) -> None:
    """It is measured again, in the background, once that is too long ago."""
    rig.world.page_s = 2.0
    assert rig.worth() == (0, "slow_fabric")
    assert rig.worth() == (0, "slow_fabric")
    assert rig.fetched == [1, 2]
    assert rig.counted == {"slow_fabric": 2 * len(NAMES)}

    rig.world.now += MEASURED_S
    rig.world.page_s = 0.1
    assert rig.worth() == (len(NAMES), "")
    assert rig.fetched == [1, 2, 1, 2]


def test_a_caller_may_state_what_its_pages_cost(rig: Rig) -> None:
    """One time for all, or a time for each."""
    rig.world.page_s = 2.0

    assert rig.worth(compute_s=3.0) == (len(NAMES), "")
    assert rig.worth(compute_s=[9.0, 9.0] + [0.5] * 10) == (2, "slow_fabric")
    assert rig.worth(compute_s=3.0) == (len(NAMES), "")


def test_what_cannot_be_read_by_the_deadline_of_a_get_is_declined() -> None:
    """However long it takes to compute: twelve pages would take longer than they may."""
    rig = Rig(get_s=10.0)
    rig.world.page_s = 1.0

    assert rig.worth(compute_s=1000.0) == (8, "slow_fabric")
    assert rig.worth(NAMES[:8], compute_s=1000.0) == (8, "")


def test_a_long_prefix_has_a_longer_probe(rig: Rig) -> None:
    """It has the time for it, and at most so many."""
    names = [f"page-{i}" for i in range(400)]
    rig.world.publish(*[rig.world.nodes[3].hold(name) for name in names])
    rig.world.exists(*names)

    assert rig.decliner.worth(named(*names), rig.now + 60.0, None) == (400, "")
    assert rig.fetched == [1, PROBE_PAGES - 1]


def test_a_probe_that_does_not_return_declines_only_what_follows(rig: Rig) -> None:
    """Pages in the memory of this host come before it, and no call waits for it again."""
    rig.world.publish(*[rig.world.nodes[1].hold(name) for name in "xyz"])
    rig.gate.is_open.clear()

    assert rig.worth("xyz" + NAMES, within_s=0.01) == (3, "unmeasured")
    rig.now += 1.0
    assert rig.worth("xyz" + NAMES) == (3, "unmeasured")
    assert rig.worth("xyz") == (3, "")

    rig.world.page_s = 0.1
    rig.gate.is_open.set()
    wait_until(lambda: rig.fetched == [1, 2])
    wait_until(lambda: rig.worth("xyz" + NAMES) == (15, ""))
    assert rig.fetched == [1, 2]
    assert set(rig.counted) == {"unmeasured"}


def test_earlier_measurements_count_until_a_probe_is_late_by_them(rig: Rig) -> None:
    """A distant source answers later than a call can wait for."""
    rig.world.page_s = 0.5
    assert rig.worth() == (len(NAMES), "")
    rig.world.now += 3 * MEASURED_S
    rig.gate.is_open.clear()

    assert rig.worth(within_s=0.01) == (len(NAMES), "")
    rig.now += 3 * 2.0 + LATE_S
    assert rig.worth(within_s=0.01) == (0, "unmeasured")
    rig.gate.is_open.set()


@pytest.mark.parametrize(("page_s", "found"), [(0.5, 12), (2.0, 0)])
def test_a_first_page_shows_the_cost_while_the_others_are_not_late_by_it(
    rig: Rig, page_s: float, found: int
) -> None:
    """An exists with a short deadline cannot wait for all of a probe."""
    rig.world.page_s, rig.gate.closes_after = page_s, 1

    assert rig.worth(within_s=0.2) == (found, "" if found else "slow_fabric")
    rig.now += 3 * 2 * page_s + LATE_S
    assert rig.worth(within_s=0.01) == (0, "unmeasured")
    rig.gate.is_open.set()


def test_memory_of_this_host_is_read_without_a_probe(rig: Rig) -> None:
    """And so are pages of which nothing is known any more."""
    rig.world.publish(*[rig.world.nodes[1].hold(name) for name in "xyz"])

    assert rig.worth("xyz") == (3, "")
    rig.world.cache.clear()
    assert rig.decliner.worth(named(*NAMES), rig.now + 1.0, None) == (len(NAMES), "")
    assert rig.fetched == []


def test_a_slow_disk_is_declined(rig: Rig) -> None:
    """Also one of this host: its memory is not the disk."""
    rig.world.publish(*[rig.world.nodes[1].keep(name) for name in "xyz"])
    rig.world.nodes[1].latency_s, rig.world.nodes[1].portion = 0.1, 0

    assert rig.worth("xyz", compute_s=4.0) == (0, "slow_disk")


def test_a_process_without_threads_declines_nothing_unmeasured(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with decline off."""

    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)

    assert rig.worth() == (len(NAMES), "")
    assert rig.worth() == (len(NAMES), "")
    assert rig.fetched == []
