"""A story: prompts wait in an engine's queue and are asked for again, while others store them.

Each batch is asked for again and again (`Reader.leading`). Its missing page decides only what is
asked first: a page that has been stored when a call begins must be found by that call, and a page
may be called absent only if its owners were asked in that call. A node joins in the middle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from peercache.model.hash_ring import AUTO
from sims.crowd import SETTLED_S, Crowd
from sims.play import staged
from sims.trace import Violation
from sims.world import World

ROUNDS = 12
PAGES = 8
AGAIN_S = 0.004
"""Pause between two calls of a batch: shorter than SGLang's, so that many fall next to a set."""

SET_LATEST_S = 0.03
JOINS_IN_ROUND = ROUNDS // 2


def queue(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    for replicas in (2, AUTO):
        if found := staged(_options(seed, replicas), _run)[0]:
            return found
    return ""


def _options(seed: int, replicas: int | str) -> Any:
    """Return four hosts with a node each; with 2 replicas most owners are on other hosts."""
    crowd = Crowd(readers=3, pages=PAGES * ROUNDS, seed=seed)
    return attrs.evolve(crowd.options(), replicas=replicas, latency_mean_s=0.0005)


async def _run(world: World) -> None:
    world.network.heal()
    async with trio.open_nursery() as nursery:
        world.nursery = nursery
        nursery.start_soon(world.network.run)
        *names, last = world.host_of
        for name in names:
            nursery.start_soon(world.run_node, name, 0.0)
            nursery.start_soon(world.run_reader, f"c-{name}", name)
        await trio.sleep(SETTLED_S)
        rng = world.stream("queueing")
        for number in range(ROUNDS):
            if number == JOINS_IN_ROUND:
                nursery.start_soon(world.run_node, last, 0.0)
            await _round(world, range(number * PAGES, (number + 1) * PAGES), rng)
        nursery.cancel_scope.cancel()


async def _round(world: World, pages: Sequence[int], rng: random.Random) -> None:
    """Ask for a batch again and again, and meanwhile set first a part of it, then the rest."""
    producer = world.clients["c-n0"]
    known = 0
    for part in (pages[: rng.randrange(1, PAGES)], pages):
        async with trio.open_nursery() as asking:
            asking.start_soon(_ask_again, world, pages, known)
            await trio.sleep(rng.uniform(0.0, SET_LATEST_S))
            stored = await world.calls.set(producer, part, rng, 2.0)
            asking.cancel_scope.cancel()
        if not all(stored):
            raise Violation("lost-set", f"{stored} of {list(part)} in a cluster without faults")
        known = len(part)
        await _ask(world, pages, known)


async def _ask_again(world: World, pages: Sequence[int], known: int) -> None:
    while True:
        await _ask(world, pages, known)
        await trio.sleep(AGAIN_S)


async def _ask(world: World, pages: Sequence[int], known: int) -> None:
    """Ask at another host for a batch of which so many leading pages are known to be stored."""
    await world.calls.leading(world.clients["c-n1"], pages, known)
