"""A run follows from its seed, and what its links do from their faults."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.injection import links_of
from tests.faults.schedule import CALM_S, HOSTS, KINDS, Fault, mechanism, plan
from tests.faults.wire import GOOD, Link, Wire


def test_a_seed_has_one_plan() -> None:
    """And another seed another one."""
    assert plan(3, 60) == plan(3, 60)
    assert plan(3, 60).faults != plan(4, 60).faults


def test_plans_have_every_fault_and_calm_times() -> None:
    """Each has two storms a minute or more, after which everything is undone for a while."""
    seen = set()
    for seed in range(60):
        made = plan(seed, 60)
        seen |= {fault.kind for fault in made.faults}
        busy = sorted((fault.at_s, fault.until_s) for fault in made.faults)
        ends = list(itertools.accumulate((end for _, end in busy), max))
        calm = [begin - end for end, (begin, _) in zip(ends, busy[1:], strict=False)]
        assert sum(time_s > CALM_S - 0.1 for time_s in calm) >= 1
        assert made.seconds - ends[-1] > CALM_S - 0.1

    assert seen == set(KINDS)


@pytest.mark.parametrize("seed", range(20))
def test_each_node_is_upgraded_in_a_storm(seed: int) -> None:
    """One after the other; the calm times stay."""
    made = plan(seed, 60, upgrades=True)
    ends = [fault.until_s for fault in plan(seed, 60).faults]
    stops = [fault for fault in made.faults if fault.kind == "restart_node" and fault.for_s == 0.5]

    assert [fault.to for fault in stops] == [(host,) for host in HOSTS]
    assert max(fault.until_s for fault in made.faults) <= max(*ends, stops[-1].until_s)
    for one, other in itertools.combinations(made.faults, 2):
        if mechanism(one) == mechanism(other) != "network" and one.to == other.to:
            assert one.until_s <= other.at_s or other.until_s <= one.at_s


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_is_undone_by_another_one(seed: int) -> None:
    """Two of one mechanism at one target are apart."""
    for one, other in itertools.combinations(plan(seed, 300).faults, 2):
        if mechanism(one) == mechanism(other) != "network" and one.to == other.to:
            assert one.until_s <= other.at_s


@pytest.mark.parametrize(
    ("kind", "to", "options", "links"),
    [
        ("one_way", HOSTS[:2], {}, {HOSTS[:2]}),
        ("cut", HOSTS[:2], {}, {HOSTS[:2], HOSTS[1::-1]}),
        ("silence", HOSTS[:1], {"way": "out"}, {(HOSTS[0], other) for other in HOSTS[1:]}),
        ("silence", HOSTS[:1], {"way": "in"}, {(other, HOSTS[0]) for other in HOSTS[1:]}),
    ],
)
def test_faults_name_their_links(
    kind: str, to: tuple[str, ...], options: dict[str, str], links: set[tuple[str, ...]]
) -> None:
    """In one direction or both."""
    fault = Fault(kind=kind, at_s=0, for_s=1, to=to, options=options)

    assert set(links_of(fault)) == links


def test_partition_leaves_links_within_each_side() -> None:
    """Two hosts on one side, three on the other."""
    fault = Fault(kind="partition", at_s=0, for_s=1, to=HOSTS[:2])

    assert len(set(links_of(fault))) == 2 * 2 * 3


class _Taps(Wire):
    """A wire without devices."""

    def __init__(self) -> None:
        super().__init__(seed=1, hosts=0)
        self.given: list[bytes] = []

    def _give(self, target: int, frame: bytes) -> None:
        self.given.append(frame)

    def sent(self, link: Link, frames: int, size: int = 100) -> tuple[int, int]:
        """Send frames; return how many have passed at once, and how many are late."""
        self.given.clear()
        self._late.clear()
        self.set_link(0, 1, link)
        for _ in range(frames):
            self.passed(0, 1, bytes(size))
        return len(self.given), len(self._late)


def test_links_do_what_they_are_asked_to() -> None:
    """Of a thousand frames."""
    wire = _Taps()

    assert wire.sent(GOOD, 1000) == (1000, 0)
    assert wire.sent(Link(is_cut=True), 1000) == (0, 0)
    assert 600 < wire.sent(Link(loss=0.3), 1000)[1] < 800
    assert 1200 < wire.sent(Link(duplicated=0.3), 1000)[1] < 1400
    assert wire.sent(Link(delay_s=0.1), 1000) == (0, 1000)
    assert wire.sent(Link(frame_max=600), 1000) == (0, 1000)
    assert wire.sent(Link(frame_max=600), 1000, size=1400) == (0, 0)
    # 125 kB/s for the 0.3 s that frames may queue.
    assert 25 < wire.sent(Link(rate=125_000), 1000, size=1250)[1] < 40
