"""Stories in which pages are copied from one host to another while a third one removes them.

Readers mirror them, or their node is drained, spills them or has them copied. A page that was
removed at every member must never come back by a copy that was read before.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import trio

from peercache.actors.mailboxes import ColdPages, DrainCancelled, PagesToCopy
from peercache.actors.placement.offers import Offers
from peercache.actors.runtime import SELF
from peercache.wire.messages.pool import Remove
from sims.crowd import Crowd, settled
from sims.play import staged
from sims.world import World

ROUNDS = 24
STEP_S = 0.002
"""How long a part of a page is copied; a page has four."""

LATEST_S = 0.04
"""A removal begins at most this long after the read that it races, before copies are committed."""


Copies: TypeAlias = Callable[[World, int, random.Random], Awaitable[None]]
"""Makes a page be copied from the first host to another one."""


def race(seed: int) -> str:
    """Return what a checker has found while readers mirror, "" for nothing."""
    return _raced(seed, _mirror)


def race_drains(seed: int) -> str:
    """Return what a checker has found while a node is drained, "" for nothing."""
    return _raced(seed, _drain)


def race_spills(seed: int) -> str:
    """Return what a checker has found while a node spills its pages, "" for nothing."""
    return _raced(seed, _spill)


def race_copies(seed: int) -> str:
    """Return what a checker has found while a node has its pages copied, "" for nothing."""
    return _raced(seed, _copy)


def _raced(seed: int, copy: Copies) -> str:
    crowd = Crowd(readers=2, pages=ROUNDS, pulls="all" if copy is _mirror else "off", seed=seed)
    options = attrs.evolve(
        crowd.options(),
        step_s=STEP_S,
        steps_a_page=4,
        latency_mean_s=0.0005,
        spill=copy is _spill,
        copies=2 if copy is _copy else 1,
    )
    return staged(options, partial(_run, copy=copy))[0]


async def _mirror(world: World, page: int, rng: random.Random) -> None:
    await world.calls.get(world.clients["c-n1"], [page], rng, 2.0)


async def _drain(world: World, page: int, rng: random.Random) -> None:
    del page, rng
    node, counts = world.nodes["n0"], world.calls.counts
    await node.drained(lambda: True)
    given = node.crew.placement.giving.progress.given
    counts["mirrored"] = counts.get("mirrored", 0) + given
    node.crew.mailboxes.placement.put(SELF, DrainCancelled())


async def _spill(world: World, page: int, rng: random.Random) -> None:
    """Let the first node offer the page, as if its full pool had named it."""
    del rng
    await _offer(
        world,
        page,
        world.nodes["n0"].crew.placement.spilling,
        partial(ColdPages, coldest_age_s=1.0),
    )


async def _copy(world: World, page: int, rng: random.Random) -> None:
    """Let the first node offer the page for a second copy, as if its pool had named it."""
    del rng
    await _offer(world, page, world.nodes["n0"].crew.placement.copying, PagesToCopy)


async def _offer(
    world: World,
    page: int,
    offers: Offers,
    named: Callable[..., ColdPages | PagesToCopy],
) -> None:
    crew, counts = world.nodes["n0"].crew, world.calls.counts
    before = offers.progress.moved
    record = crew.pool.records_of(world.library.keys[[page]].tobytes())
    tag = world.clients["c-n0"].namespace.tag()
    groups = ((tag, record, np.array([1.0])),)
    crew.mailboxes.placement.put(SELF, named(groups))
    await trio.sleep(LATEST_S)
    counts["mirrored"] = counts.get("mirrored", 0) + offers.progress.moved - before


async def _run(world: World, copy: Copies) -> None:
    names = list(world.host_of)
    async with settled(world):
        producer, _, remover = (world.clients[f"c-{name}"] for name in names)
        rng = world.stream("race")
        for page in range(ROUNDS):
            await world.calls.set(producer, [page], rng, 2.0)
            key = world.library.keys[[page]].tobytes()
            async with trio.open_nursery() as racing:
                racing.start_soon(copy, world, page, rng)
                await trio.sleep(LATEST_S * page / ROUNDS)
                removal = Remove(0, remover.namespace.tag(), key, 0.0)
                racing.start_soon(world.calls.ask_all, remover, removal)
            # Until a removal's deadline no page of its namespace is mirrored.
            await trio.sleep(remover.config.op_timeout_s + 0.5)
        assert world.calls.counts["mirrored"], "no page was copied: there was no race"
