"""A story: readers mirror pages of another host while a third one removes them, at every moment.

A page that a removal has ended at every member must not come back by a copy that was read before.
"""

from __future__ import annotations

import attrs
import trio

from peercache.wire.messages.pool import Remove
from sims import determinism
from sims.clock import VirtualClock
from sims.crowd import SETTLED_S, Crowd
from sims.play import explained
from sims.trace import Trace
from sims.world import WALL_LIMIT_S, World

ROUNDS = 24
STEP_S = 0.002
"""How long a part of a page is copied; a page has four."""

LATEST_S = 0.04
"""A removal begins at most so long after the read that it races: then its copies are committed."""


def race(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    clock = VirtualClock(wall_s=WALL_LIMIT_S)
    crowd = Crowd(readers=2, pages=ROUNDS, pulls="all", seed=seed)
    options = attrs.evolve(crowd.options(), step_s=STEP_S, steps_a_page=4, latency_mean_s=0.0005)

    async def main() -> None:
        await _run(World(options, clock, Trace(clock.current_time, show=None)))

    try:
        determinism.run(main, seed=seed, clock=clock)
    except Exception as error:
        return explained(error)[0]
    return ""


async def _run(world: World) -> None:
    names = list(world.host_of)
    world.network.heal()
    async with trio.open_nursery() as nursery:
        world.nursery = nursery
        nursery.start_soon(world.network.run)
        for name in names:
            nursery.start_soon(world.run_node, name, 0.0)
            nursery.start_soon(world.run_reader, f"c-{name}", name)
        await trio.sleep(SETTLED_S)
        producer, reader, remover = (world.clients[f"c-{name}"] for name in names)
        rng = world.stream("race")
        for page in range(ROUNDS):
            await world.calls.set(producer, [page], rng, 2.0)
            key = world.library.keys[[page]].tobytes()
            async with trio.open_nursery() as racing:
                racing.start_soon(world.calls.get, reader, [page], rng, 2.0)
                await trio.sleep(LATEST_S * page / ROUNDS)
                removal = Remove(0, remover.namespace.tag(), key, 0.0)
                racing.start_soon(world.calls.tell_all, remover, removal)
            # Until a removal's deadline nothing of its namespace is mirrored.
            await trio.sleep(remover.config.op_timeout_s + 0.5)
        assert world.calls.counts["mirrored"], "no page was mirrored: there was no race"
        nursery.cancel_scope.cancel()
