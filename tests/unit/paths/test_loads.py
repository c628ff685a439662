"""Which of several holders is read: the one with the least to do, else each client its own."""

from __future__ import annotations

from collections import Counter

from peercache.paths.read import MEASURED_BYTES, MEASURED_MAX, MEASURED_S, HolderLoad
from tests.unit.paths.world import PAGE, World

MIB = 2**20


class Clock:
    """A time that is set."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


def read(
    loads: HolderLoad, clock: Clock, holder: int, took_s: float, *, is_whole: bool = True
) -> None:
    began = loads.begin(holder, MIB)
    clock.now += took_s
    loads.end(holder, MIB, began, is_whole=is_whole)


def test_a_holder_that_was_slow_lately_is_read_less() -> None:
    """Until that is too long ago."""
    clock = Clock()
    loads = HolderLoad(salt=3, clock=clock)
    order = sorted((1, 2), key=loads.cost_of)
    read(loads, clock, order[0], 0.1)

    assert sorted((1, 2), key=loads.cost_of) == order[::-1]
    clock.now += MEASURED_S
    assert sorted((1, 2), key=loads.cost_of) == order


def test_what_is_in_flight_counts() -> None:
    """Another call of this client reads from the holder."""
    clock = Clock()
    loads = HolderLoad(salt=3, clock=clock)
    order = sorted((1, 2), key=loads.cost_of)
    began = loads.begin(order[0], 64 * MIB)

    assert sorted((1, 2), key=loads.cost_of) == order[::-1]
    loads.end(order[0], 64 * MIB, began, is_whole=False)
    assert sorted((1, 2), key=loads.cost_of) == order
    assert loads._in_flight == {}


def test_only_whole_reads_of_some_size_are_measured() -> None:
    """What was shared among holders, broken off or small tells no holder's speed."""
    clock = Clock()
    loads = HolderLoad(salt=3, clock=clock)
    read(loads, clock, 1, 1.0, is_whole=False)
    began = loads.begin(1, MEASURED_BYTES - 1)
    clock.now += 1.0
    loads.end(1, MEASURED_BYTES - 1, began, is_whole=True)

    assert loads._served == {}


def test_the_holders_that_are_remembered_are_bounded() -> None:
    """The ones that were not read for longest go."""
    clock = Clock()
    loads = HolderLoad(salt=3, clock=clock)
    for holder in range(MEASURED_MAX + 10):
        read(loads, clock, holder, 0.001)

    assert len(loads._served) == MEASURED_MAX
    assert 0 not in loads._served


def test_clients_that_know_nothing_spread_over_the_holders() -> None:
    """Each has an order of its own: 200 clients, 4 holders."""
    holders = [0x1111111111111111, 0x2222222222222222, 0xABCDEF0123456789, 0x7777777777777777]
    first = Counter(
        min(holders, key=HolderLoad(salt=salt * 0x9E3779B97F4A7C15, clock=Clock()).cost_of)
        for salt in range(1, 201)
    )

    assert len(first) == 4
    assert max(first.values()) < 100


def test_the_nearest_holder_is_read_whatever_it_costs() -> None:
    """And of two on other hosts the one that costs less."""
    world = World(5, remote=frozenset({3, 4, 5}))
    cost = {2: (9, 9), 3: (2, 0), 4: (1, 0), 5: (2, 0)}
    world.locator._cost_of = cost.__getitem__
    for holder in (3, 4, 5):
        world.publish(world.nodes[holder].hold("a"))
    world.get("a")
    assert world.fetched_from() == [[4]]
    world.cache.clear()
    world.publish(world.nodes[2].hold("a"))
    world.steps.clear()

    assert world.get("a", size=PAGE).hits == [True]

    assert world.fetched_from() == [[2]]


def test_a_read_notes_what_it_reads_and_forgets_it() -> None:
    """Whether it succeeds or not."""
    world = World(remote=frozenset({3}))
    world.publish(world.nodes[3].hold("a"))
    world.before = lambda _node, _page: seen.append(dict(world.reader._loads._in_flight))
    seen: list[dict[int, int]] = []

    world.get("a")
    world.nodes[3].data_mood = "refusing"
    world.get("a")

    assert seen == [{3: PAGE}]
    assert world.reader._loads._in_flight == {}
