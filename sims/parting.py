"""A story: a node is cut off until the others hold it dead, and meanwhile they remove its pages.

It has its pages still when it is back, and their copies were lost to it with the others. It must
not hand any of them to another node: what was removed would come back there. What is stored later
gets its copy as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations

import attrs
import numpy as np
import trio

from peercache.model.member import ALIVE, DEAD
from peercache.wire.messages.pool import Remove
from sims.crowd import SETTLED_S, Crowd, settled
from sims.node import SimNode
from sims.play import staged
from sims.trace import Violation
from sims.world import World

PAGES = 8
"""Pages that are set before the node is cut off; as many are set later."""

STEPS_S = 60.0
"""Longest wait for a step: a copy of each page, or an end that all have noticed."""

LONGEST_S = 20.0
"""The node is away for up to so long once all hold each other dead."""

OFFERS_S = 10.0
"""So long after the last step each page has been offered several times."""


def part(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    options = attrs.evolve(
        Crowd(readers=2, pages=2 * PAGES, seed=seed).options(),
        step_s=0.001,
        steps_a_page=4,
        latency_mean_s=0.0005,
        copies=2,
    )
    return staged(options, _run)[0]


async def _run(world: World) -> None:
    async with settled(world):
        rng, pages = world.stream("parting"), list(range(PAGES))
        nodes = [world.nodes[name] for name in world.host_of]
        away, remover = nodes[0], world.clients["c-n1"]
        await _set(world, pages)
        await _cut_off(world, away)
        await trio.sleep(rng.uniform(0.0, LONGEST_S))
        removal = Remove(0, remover.namespace.tag(), _keys(world, pages), 0.0)
        await world.calls.ask_all(remover, removal)
        for one, other in permutations(world.host_of.values(), 2):
            world.network.restore(one, other)
        await _until(partial(_is_seen_by_all, nodes, nodes, ALIVE))
        await trio.sleep(SETTLED_S)
        await _set(world, list(range(PAGES, 2 * PAGES)))
        await trio.sleep(OFFERS_S)
        for node in nodes[1:]:
            back = node.crew.pool.records_of(_keys(world, pages))
            if len(back):
                raise Violation("missed-removal", f"{node.place.name} has {len(back)} pages again")


async def _cut_off(world: World, away: SimNode) -> None:
    """Cut a node off until it and the others hold each other dead."""
    nodes = list(world.nodes.values())
    others = [node for node in nodes if node is not away]
    for other in others:
        world.network.cut(away.place.host, other.place.host, np.inf)
        world.network.cut(other.place.host, away.place.host, np.inf)
    await _until(partial(_is_seen_by_all, others, [away], DEAD))
    await _until(partial(_is_seen_by_all, [away], others, DEAD))


async def _set(world: World, pages: list[int]) -> None:
    """Set pages at the first node, and wait until it knows a copy of each."""
    client, pool = world.clients["c-n0"], world.nodes["n0"].crew.pool
    assert all(await world.calls.set(client, pages, world.stream("parting"), 2.0)), "not stored"
    keys = [_keys(world, [page]) for page in pages]

    def are_copied() -> bool:
        found = [pool.pages.find(key) for key in keys]
        return all(page is not None and page.slot.copy_at for page in found)

    await _until(are_copied)


def _keys(world: World, pages: list[int]) -> bytes:
    return world.library.keys[pages].tobytes()


def _is_seen_by_all(nodes: list[SimNode], others: list[SimNode], state: int) -> bool:
    views = [(node, node.crew.membership) for node in nodes]
    seen = [
        membership.member(other.incarnation)
        for node, membership in views
        for other in others
        if other is not node
    ]
    return all(member is not None and member.state == state for member in seen)


async def _until(is_reached: Callable[[], bool]) -> None:
    with trio.fail_after(STEPS_S):
        while not is_reached():
            await trio.sleep(0.1)
