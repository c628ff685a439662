"""Which tier a call is counted for: the farthest place that it read, or that answered it."""

from __future__ import annotations

import pytest

from peercache.observability.latency import ASKED, DISK, HOME, HOST, KNOWN, RDMA, TABLE, TCP
from tests.unit.paths.world import World


@pytest.mark.parametrize(
    ("holders", "fabric", "tier"),
    [
        ((1,), "shm", HOME),
        ((2,), "shm", HOST),
        ((1, 2), "shm", HOST),
        ((2,), "rdma", RDMA),
        ((2,), "tcp", TCP),
        # The home node itself, where its memory cannot be mapped.
        ((1,), "tcp", TCP),
    ],
)
def test_a_get_is_counted_for_the_farthest_place(
    holders: tuple[int, ...], fabric: str, tier: str
) -> None:
    """Own memory, another node's, or a network."""
    world = World()
    world.fabric = fabric
    names = [f"of-{holder}" for holder in holders]
    for holder, name in zip(holders, names, strict=True):
        world.publish(world.nodes[holder].hold(name))

    got = world.get(*names)

    assert got.hits == [True] * len(names)
    assert got.tier == tier


def test_a_get_that_waited_for_a_disk_is_counted_for_it() -> None:
    """However near the page lay at last; and a get without a hit has no tier."""
    world = World()
    world.publish(world.nodes[1].keep("a"))

    assert world.get("a").tier == DISK
    assert world.get("absent").tier == ""


def test_an_exists_is_counted_for_what_answered_it() -> None:
    """An owner, the client's memory, the tables of this host."""
    asked, with_table = World(), World()
    for world in (asked, with_table):
        world.publish(world.nodes[2].hold("a"))
    with_table.nodes[1].table = with_table.nodes[2].table = with_table.nodes[3].table = "final"

    assert asked.exists("a") == [True]
    assert asked.answered_by == ASKED
    assert asked.exists("a") == [True]
    assert asked.answered_by == KNOWN
    assert with_table.exists("a") == [True]
    assert with_table.answered_by == TABLE
