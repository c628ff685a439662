"""A story: a node ends, and its pages are removed while clients can still read them.

Clients of its host have its memory mapped, and all clients and nodes follow the view in their own
time. Once a removal is reported complete, without a member that missed it, no client finds its
pages: neither the memory nor a record of the ended node counts any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from peercache.wire.messages.pool import Remove, Removed
from sims.client import SimClient
from sims.crowd import Crowd, settled
from sims.play import staged
from sims.trace import Violation
from sims.world import World

PAGES = 256
STEP_S = 0.05
"""Pause between two removals: far less than a client takes to follow the view."""

COMPLETE = 10
"""Complete removals after which all have followed."""

BACK_S = 0.5
AWAY_S = 60.0
"""How long the node is away: before and after it is noticed to be dead."""

End = Callable[[World, str], Awaitable[None]]


def outlive(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    options = attrs.evolve(
        Crowd(readers=3, pages=PAGES, seed=seed).options(), hosts=2, latency_mean_s=0.001
    )
    ends: tuple[End, ...] = (
        partial(World.crash_node, away_s=AWAY_S),
        partial(World.crash_node, away_s=BACK_S),
        partial(World.leave_node, away_s=AWAY_S),
    )
    for end in ends:
        if found := staged(options, partial(_run, end=end))[0]:
            return found
    return ""


async def _run(world: World, end: End) -> None:
    ended, remover, neighbour, _ = (f"c-{name}" for name in world.host_of)
    async with settled(world) as nursery:
        rng, pages = world.stream("outliving"), list(range(PAGES))
        clients = [world.clients[name] for name in (remover, ended, neighbour)]
        assert all(await world.calls.set(world.clients[ended], pages, rng, 2.0)), "not stored"
        for client in clients:
            assert not any(await world.calls.get(client, pages, rng, 2.0)), "not read"
        await trio.sleep(rng.random())
        nursery.start_soon(end, world, ended.removeprefix("c-"))
        complete = 0
        for page in pages:
            if await _remove(world, clients[0], page):
                complete += 1
                for client in clients:
                    await _look(world, client, page)
            if complete == COMPLETE:
                return
            await trio.sleep(STEP_S)
        raise Violation("never-complete", f"{complete} of {PAGES} removals missed no member")


async def _remove(world: World, client: SimClient, page: int) -> bool:
    """Remove a page; return whether no member missed it."""
    keys = world.library.keys[[page]].tobytes()
    answer = await world.calls.ask_all(client, Remove(0, client.namespace.tag(), keys, 0.0))
    return isinstance(answer, Removed) and not answer.missed


async def _look(world: World, client: SimClient, page: int) -> None:
    rng = world.stream("looks")
    is_missed = (await world.calls.get(client, [page], rng, 2.0))[0]
    is_absent = (await world.calls.exists(client, [page]))[0]
    if not (is_missed and is_absent):
        by = " and ".join(["get"] * (not is_missed) + ["exists"] * (not is_absent))
        raise Violation("removed-found", f"{client.place.name} finds page {page} by {by}")
