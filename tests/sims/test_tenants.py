"""Namespaces with quotas in simulated clusters, and the checkers of what quotas promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peercache.config.entries import parse_quotas
from peercache.model.keys import Namespace
from peercache.wire.messages.pool import Reserve
from sims.canaries import hunt
from sims.play import play
from sims.swarm import Options, with_tenants, with_tenants_on_disk
from sims.tenants import Shares
from sims.trace import Violation
from tests.unit.actors.pool_world import GRANULE, World, key, packed

HIGH, LOW = Namespace("high").tag(), Namespace("low").tag()


def shared(*, high: int, low: int) -> World:
    """Return a pool in which both are guaranteed 16 granules, and have so many pages."""
    world = World(granules=64, units_about=64, quotas=parse_quotas("high=25%,priority=1;low=25%"))
    for client, (tag, count) in enumerate(((HIGH, high), (LOW, low)), 1):
        numbers = range(100 * client, 100 * client + count)
        for begin in range(0, count, 8):
            some = numbers[begin : begin + 8]
            world.reserve(client, some, GRANULE, namespace=tag)
            world.commit(client)
    return world


def wanting(tag: int) -> Reserve:
    return Reserve(0, 900, tag, key(999), packed([GRANULE]))


@pytest.mark.parametrize(
    ("high", "low", "wants", "gone", "checker"),
    [
        pytest.param(16, 0, LOW, range(100, 101), "quota", id="within its quota"),
        pytest.param(24, 0, LOW, range(100, 114), "quota", id="far into its quota"),
        pytest.param(24, 24, LOW, range(100, 102), "priority", id="over it, for a lower priority"),
        pytest.param(24, 24, HIGH, range(200, 202), "", id="over it, for a higher priority"),
        pytest.param(24, 8, LOW, range(100, 102), "", id="over it, for one within its own"),
        pytest.param(16, 24, HIGH, range(100, 102), "", id="its own pages"),
    ],
)
def test_who_gave_pages_is_judged(
    high: int, low: int, wants: int, gone: range, checker: str
) -> None:
    """Whatever took them: they are gone after a step in which another one wanted room."""
    world = shared(high=high, low=low)
    shares = Shares.of(world.pool, wanting(wants))

    loser = LOW if gone.start == 200 else HIGH
    taken = world.pool.tenants.of(loser).taken
    world.remove(*gone, namespace=loser)
    world.pool.tenants.of(loser).taken = taken - len(gone)

    if checker:
        with pytest.raises(Violation) as found:
            shares.judge(world.pool)
        assert found.value.checker == checker
    else:
        shares.judge(world.pool)


@pytest.mark.slow
@pytest.mark.parametrize("change", [with_tenants, with_tenants_on_disk])
@pytest.mark.parametrize("seed", [200, 201])
def test_a_cluster_of_tenants_keeps_what_quotas_promise(
    seed: int, change: Callable[[Options], Options]
) -> None:
    """Three namespaces write through every node, and want more than there is."""
    outcome = play(seed, change=change)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("canary", "checker"),
    [
        ("quota-ignored", "quota"),
        ("priority-ignored", "priority"),
        ("disk-quota-ignored", "disk-quota"),
        ("disk-priority-ignored", "disk-priority"),
    ],
)
def test_a_bug_of_quotas_is_found(canary: str, checker: str) -> None:
    """By the checker that is there for it."""
    assert hunt(canary).checker == checker
