"""A story: slots that are given to other pages all the time, and readers of their earlier pages.

A pool has room for half of the pages, and its clients set all of them, one after another. Readers
on its host and on another one use old records, and forged ones.
"""

from __future__ import annotations

import random

import attrs
import trio

from sims.client import SimClient
from sims.crowd import Crowd, settled
from sims.forging import Forger
from sims.play import staged
from sims.swarm import GRANULE
from sims.world import World

PAGES = 16
WRITERS, READERS = 3, 5
STEP_S = 0.001
"""How long a part of a page is copied or read; a page has four."""

LIE_S = 0.05
READ_S = 0.002
REWRITTEN_S = 1.5


def rewrite(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    options = attrs.evolve(
        Crowd(readers=1, pages=PAGES, seed=seed).options(),
        pool_granules=PAGES // 2,
        lengths=(GRANULE,),
        step_s=STEP_S,
        steps_a_page=4,
        rdma=seed % 2 == 0,
        bandwidth=0.0,
    )
    return staged(options, _run)[0]


async def _run(world: World) -> None:
    async with settled(world) as nursery:
        writer, away = world.clients["c-n0"], world.clients["c-n1"]
        for number in range(WRITERS):
            nursery.start_soon(_write, world, writer, world.stream(f"write/{number}"))
        for number in range(READERS):
            reader = away if number else writer
            nursery.start_soon(_read, world, reader, world.stream(f"read/{number}"))
        nursery.start_soon(_lie, world, world.stream("lie"))
        await trio.sleep(REWRITTEN_S)
        assert world.truth.hits > 10, "nothing was read: no slot was rewritten under a reader"


async def _write(world: World, writer: SimClient, rng: random.Random) -> None:
    while True:
        await world.calls.set(writer, [rng.randrange(PAGES)], rng, 2.0)
        await trio.sleep(rng.uniform(0.0, STEP_S))


async def _read(world: World, reader: SimClient, rng: random.Random) -> None:
    while True:
        await world.calls.get(reader, [rng.randrange(PAGES)], rng, 2.0)
        await trio.sleep(rng.uniform(0.0, READ_S))


async def _lie(world: World, rng: random.Random) -> None:
    forger = Forger(world, rng)
    while True:
        await forger.forge()
        await trio.sleep(rng.uniform(0.0, LIE_S))
