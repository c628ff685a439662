"""A story: an owner that cannot know a page, and a client that reads its table at that moment.

Without other faults, and each cause separately, again and again:

    lost      a message of a stream is lost, and the next one comes;
    stopped   the owner's process is paused for longer than sets wait, and its messages are lost;
    backlog   the owner is paused again before the requested summary has arrived: that summary waits
              in its socket, and does not cover what is set in the meantime;
    repeated  the home node is paused, and the client sends its Commit again; the messages to the
              owner are lost;
    newcomer  an owner has just joined, and former owners take a second to hand over.

In all cases the owner's table must not report a stored page as certainly absent.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
import trio

from peercache.model.hash_ring import AUTO
from peercache.net.breaker import STALL_S
from peercache.paths.write import PUBLISH_TIMEOUT_S, RESEND_FRACTION
from sims.client import SimClient
from sims.crowd import SETTLED_S, Crowd
from sims.play import staged
from sims.world import World

ROUNDS = 8
LOOK_S = 0.0007
"""Pause between two lookups in a table."""

LOST_S = 0.004
"""How long messages are lost: a summary asks for a lost one 0.02 s after it was sent."""

STOPPED_S = PUBLISH_TIMEOUT_S + 0.1
"""How long an owner is paused: sets stop to wait for it."""

CUT_S = STOPPED_S + 0.2

REPEATED_S = RESEND_FRACTION * STALL_S + PUBLISH_TIMEOUT_S + 0.05
"""How long a home node is paused: a Commit is sent to it twice."""

ASKED_S = 0.0004
ANSWERED_S = 0.05
"""How long after an owner's request no answer has arrived yet, and how long until all have."""

SENT_A_SECOND = 40
"""Records that a holder hands over per second: the hand-over must take a second here."""

HANDED_OVER_S = 4.0

RING_S = 0.3
"""How long a thread takes to build a ring: nodes and clients follow a view at different times."""


def doubt(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    for act in (_lost, _stopped, _backlog, _repeated, _newcomer):
        options = _options(seed, ring_s=RING_S if act is _newcomer else 0.0)
        if found := staged(options, partial(_run, act=act))[0]:
            return found
    return ""


def _options(seed: int, *, ring_s: float) -> Any:
    """Return three hosts with a node each, without faults of their own."""
    return attrs.evolve(
        Crowd(readers=2, pages=64, seed=seed).options(),
        replicas=AUTO,
        cache_entries=0,
        republish_rate=SENT_A_SECOND,
        summary_s=2.0,
        ring_s=ring_s,
        partition_holds=False,
        latency_mean_s=0.0002,
    )


async def _run(world: World, act: Callable[[World, random.Random], Awaitable[None]]) -> None:
    world.network.heal()
    async with trio.open_nursery() as nursery:
        world.nursery = nursery
        nursery.start_soon(world.network.run)
        for name in [*world.host_of][:2] if act is _newcomer else world.host_of:
            _start(world, name)
        await trio.sleep(SETTLED_S)
        await act(world, world.stream("doubting"))
        nursery.cancel_scope.cancel()


def _start(world: World, name: str) -> None:
    """Start a node, and a client next to it."""
    world.nursery.start_soon(world.run_node, name, 0.0)
    world.nursery.start_soon(world.run_reader, f"c-{name}", name)


async def _look(world: World, reader: SimClient, pages: list[int], span_s: float) -> None:
    """Look up pages again and again, like a client with an empty cache."""
    until = trio.current_time() + span_s
    while trio.current_time() < until:
        await world.calls.exists(reader, pages)
        await trio.sleep(LOOK_S)


async def _lost(world: World, rng: random.Random) -> None:
    producer, owner = world.clients["c-n0"], world.clients["c-n1"]
    for page in range(0, 2 * ROUNDS, 2):
        world.network.cut("h0", "h1", trio.current_time() + LOST_S)
        async with trio.open_nursery() as setting:
            setting.start_soon(world.calls.set, producer, [page], rng, 2.0)
            await trio.sleep(LOST_S + 0.001)
            setting.start_soon(world.calls.set, producer, [page + 1], rng, 2.0)
            setting.start_soon(_look, world, owner, [page], 0.03)
        await trio.sleep(0.2)


async def _stopped(world: World, rng: random.Random) -> None:
    producer, owner = world.clients["c-n0"], world.clients["c-n1"]
    for page in range(ROUNDS):
        now = trio.current_time()
        world.places["n1"].pause(now, STOPPED_S)
        world.network.cut("h0", "h1", now + CUT_S)
        await world.calls.set(producer, [page], rng, 2.0)
        await _look(world, owner, [page], now + CUT_S - trio.current_time())
        await trio.sleep(3.0)  # Until a summary has matched: sets do not wait for a lagging owner.


async def _backlog(world: World, rng: random.Random) -> None:
    producer, owner, place = world.clients["c-n0"], world.clients["c-n1"], world.places["n1"]
    for page in range(2 * ROUNDS):
        place.pause(trio.current_time(), STOPPED_S)
        # It asks as soon as it continues.
        await trio.sleep(STOPPED_S + rng.uniform(0.0, ASKED_S))
        now = trio.current_time()
        place.pause(now, ANSWERED_S + STOPPED_S)
        await trio.sleep(ANSWERED_S)
        world.network.cut("h0", "h1", now + ANSWERED_S + CUT_S)
        await world.calls.set(producer, [page], rng, 2.0)
        await _look(world, owner, [page], now + ANSWERED_S + CUT_S - trio.current_time())
        await trio.sleep(3.0)  # Until a summary has matched: sets do not wait for a lagging owner.


async def _repeated(world: World, rng: random.Random) -> None:
    producer, owner = world.clients["c-n0"], world.clients["c-n1"]
    for page in range(0, 3 * ROUNDS, 3):
        # Two sets in a row leave slots ahead: the next one begins with its Commit.
        for before in (page, page + 1):
            await world.calls.set(producer, [before], rng, 2.0)
        await trio.sleep(0.05)
        now = trio.current_time()
        world.places["n0"].pause(now, REPEATED_S)
        world.network.cut("h0", "h1", now + REPEATED_S + CUT_S)
        await world.calls.set(producer, [page + 2], rng, 2.0)
        await _look(world, owner, [page + 2], now + REPEATED_S + CUT_S - trio.current_time())
        await trio.sleep(3.0)  # Until a summary has matched: sets do not wait for a lagging owner.


async def _newcomer(world: World, rng: random.Random) -> None:
    pages = list(range(64))
    producer = world.clients["c-n0"]
    for begin in range(0, len(pages), 8):
        await world.calls.set(producer, pages[begin : begin + 8], rng, 2.0)
    world.nursery.start_soon(world.run_reader, "c-n2", "n2")
    await trio.sleep(0.6)
    world.nursery.start_soon(world.run_node, "n2", 0.0)
    until = trio.current_time() + HANDED_OVER_S
    while trio.current_time() < until:
        await world.calls.exists(world.clients["c-n2"], rng.sample(pages, 8))
        await trio.sleep(0.005)
