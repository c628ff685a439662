"""A holder that has joined since the client's last view: its pages are found all the same."""

from __future__ import annotations

from typing import Any

import pytest

from peercache.observability import reasons
from peercache.paths.cluster import STRANGER_S, STRANGERS_MAX, Cluster, Strangers
from peercache.paths.steps import Renew, Step
from tests.unit.paths import world as worlds
from tests.unit.paths.world import content_of


class World(worlds.World):
    """A world whose view is one of now if it is asked for."""

    renewed = 0
    cluster_of_now: Cluster | None = None

    def _do(self, step: Step) -> Any:
        if not isinstance(step, Renew):
            return super()._do(step)
        self.renewed += 1
        return self.cluster_of_now


def newcomer_with(world: World, *names: str, is_in_view: bool = True) -> None:
    """Let node 4 hold pages that the owners of before know, and the view of now name it."""
    for name in names:
        record = world.nodes[4].hold(name)
        for node in (1, 2, 3):
            world.nodes[node].know(record)
    whole = {node.number: node.member for node in world.nodes.values()}
    world.cluster = world.seen({number: whole[number] for number in (1, 2, 3)})
    world.cluster_of_now = world.seen(whole) if is_in_view else world.cluster


def test_get_asks_for_the_view_once_when_a_holder_is_new() -> None:
    """Its pages are hits; those of others are read as ever, by one call."""
    world = World(4)
    world.publish(world.nodes[2].hold("old"))
    newcomer_with(world, "a", "b")

    got = world.get("a", "old", "b")

    assert got.hits == [True, True, True]
    assert got.content(0) == content_of("a").tobytes()
    assert world.renewed == 1


def test_exists_asks_for_the_view_when_a_holder_is_new() -> None:
    """What it reports is there to be read."""
    world = World(4)
    newcomer_with(world, "a")

    assert world.exists("a", "absent") == [True, False]
    assert world.renewed == 1


def test_view_is_not_asked_for_again_because_of_a_holder_that_it_does_not_name() -> None:
    """An owner may invent holders, or know one earlier than the home node does."""
    world = World(4)
    newcomer_with(world, "a", is_in_view=False)

    first, second = world.get("a"), world.get("a")
    asked = world.renewed
    world.now += STRANGER_S
    world.get("a")

    assert first.reasons == second.reasons == [reasons.PEER_UNREACHABLE]
    assert (asked, world.renewed) == (1, 2)


def test_holders_that_left_before_the_view_of_now_are_misses() -> None:
    """They were found in the view of before, and another page's holder is in neither."""
    world = World(4)
    world.publish(world.nodes[2].hold("old"))
    newcomer_with(world, "a", is_in_view=False)
    left = {node.number: node.member for node in world.nodes.values() if node.number in (1, 3)}
    world.cluster_of_now = world.seen(left)

    got = world.get("old", "a")

    assert got.hits == [True, False]
    assert world.renewed == 1


def test_view_is_not_asked_for_if_every_page_has_a_holder_that_is_known() -> None:
    """A copy at a node that has just joined is no reason to wait."""
    world = World(4)
    world.publish(world.nodes[2].hold("a"))
    newcomer_with(world, "a")

    assert world.get("a").hits == [True]
    assert world.renewed == 0


def test_unknown_holders_that_are_remembered_are_bounded() -> None:
    """Each answer may name others."""
    strangers = Strangers()

    for holder in range(2 * STRANGERS_MAX):
        assert strangers.are_new(frozenset([holder]), 0.0)

    assert len(strangers._asked) == STRANGERS_MAX
    assert not strangers.are_new(frozenset([2 * STRANGERS_MAX - 1]), 0.0)


@pytest.mark.parametrize("holders", [frozenset(), frozenset([1])])
def test_no_holder_is_new_twice(holders: frozenset[int]) -> None:
    """Nor is none."""
    strangers = Strangers()

    assert strangers.are_new(holders, 0.0) == bool(holders)
    assert not strangers.are_new(holders, 0.1)
