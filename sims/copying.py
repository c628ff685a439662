"""A story: each page has two copies, and hosts die, networks lose messages, pools are full.

After each round the network is well again, and no node relies on a copy that is gone; pages that
both nodes knew to have two copies outlive the kill of one of them.

What happens is that of production actors; this module sets, kills, cuts and looks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import attrs
import trio

from sims.crowd import Crowd, settled
from sims.node import SimNode
from sims.play import staged
from sims.trace import Violation
from sims.world import World

ROUNDS = 4
PAGES = 4
"""Pages of a round that must outlive a kill; each round has its own."""

OLD = 60
"""Pages that are set before and between, more than fit twice."""

POOL_PAGES = 30
FAULTS = ("kill", "cut", "pause", "lossy", "none")
LOSS = 0.5
"""The fraction of messages that a lossy network loses."""

FAULT_MAX_S = 6.0
AWAY_MAX_S = 8.0
BUSY_S = 2.0
AGE_S = 30.0
ENDS_S = 120.0
"""After this time no node relies on a copy that is gone: a report was repeated by then."""


def copy(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    return copied(seed)[0]


def copy_while(fault: str, seed: int) -> str:
    """Return what a checker has found while one fault happens in each round, "" for nothing."""
    return copied(seed, (fault,))[0]


def copied(seed: int, faults: Sequence[str] = FAULTS) -> tuple[str, str]:
    """Return the checker that has found something, "" for none, and a sentence."""
    options = attrs.evolve(
        Crowd(readers=3, pages=OLD + ROUNDS * PAGES, seed=seed).options(),
        step_s=0.001,
        steps_a_page=4,
        latency_mean_s=0.0005,
        copies=2,
        loss=LOSS,
        placement_min_age_s=0.0,
        pool_granules=POOL_PAGES,
        verify="full",
    )
    return staged(options, partial(_run, faults=faults))


@final
@attrs.define(eq=False)
class Round:
    """A fault while pages are stored and evicted, then a kill that no page with a copy minds."""

    world: World
    rng: random.Random
    number: int
    fault: str

    async def play(self) -> None:
        """Set more than the pools hold, let the fault happen, and look."""
        self.world.trace.line("round", self.fault)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._set_old)
            await trio.sleep(self.rng.uniform(0.0, BUSY_S))
            await self._happens(self.fault)
        await self._ends(self._problem)
        await self._outlive()

    async def _set_old(self) -> None:
        until = trio.current_time() + BUSY_S + FAULT_MAX_S
        while trio.current_time() < until:
            name = self.rng.choice(list(self.world.host_of))
            places = self.rng.sample(range(OLD), 8)
            await self.world.calls.set(self.world.clients[f"c-{name}"], places, self.rng, 2.0)
            await trio.sleep(self.rng.uniform(0.0, 0.5))

    async def _happens(self, fault: str) -> None:
        world, rng = self.world, self.rng
        name, other = rng.sample(list(world.host_of), 2)
        span_s = rng.uniform(0.1, FAULT_MAX_S)
        match fault:
            case "kill":
                world.nodes[name].crash()
                world.nursery.start_soon(world.run_node, name, rng.uniform(0.1, AWAY_MAX_S))
            case "cut":
                for pair in ((name, other), (other, name)):
                    hosts = [world.host_of[each] for each in pair]
                    world.network.cut(hosts[0], hosts[1], trio.current_time() + span_s)
            case "pause":
                world.nodes[name].place.pause(trio.current_time(), span_s)
            case "lossy":
                world.network.faults_on = True
        await trio.sleep(span_s)
        world.network.faults_on = False

    async def _outlive(self) -> None:
        """Kill a node whose pages all have a copy: a client elsewhere finds them."""
        world, rng = self.world, self.rng
        giver = rng.choice(list(world.host_of))
        reader = next(name for name in world.host_of if name != giver)
        first = OLD + self.number * PAGES
        places = list(range(first, first + PAGES))
        # What is there before is much colder then: it makes room.
        await trio.sleep(AGE_S)
        assert all(await world.calls.set(world.clients[f"c-{giver}"], places, rng, 2.0))
        keys = [world.library.keys[[place]].tobytes() for place in places]
        await self._ends(lambda: self._single(giver, keys))
        world.nodes[giver].crash()
        world.nursery.start_soon(world.run_node, giver, rng.uniform(0.1, AWAY_MAX_S))
        counts = world.calls.counts
        counts["kills"] = counts.get("kills", 0) + 1
        for _ in range(2):
            reasons = await world.calls.get(world.clients[f"c-{reader}"], places, rng, 2.0)
            await trio.sleep(1.0)
        for key, reason in zip(keys, reasons, strict=True):
            if reason and not self._holders(key):
                raise Violation("lost-with-a-host", f"{key.hex()} had a copy, and is {reason}")
        await self._ends(self._problem)

    def _single(self, name: str, keys: list[bytes]) -> str:
        pages = [self.world.nodes[name].crew.pool.pages.find(key) for key in keys]
        return "" if all(page is None or page.slot.copy_at for page in pages) else "single: no copy"

    def _holders(self, key: bytes) -> list[SimNode]:
        nodes = self.world.nodes.values()
        return [n for n in nodes if n.place.alive and n.crew.pool.pages.find(key) is not None]

    def _problem(self) -> str:
        """Return which node relies on a copy that is gone; "" for none."""
        living = [node for node in self.world.nodes.values() if node.place.alive]
        nodes = {int(node.incarnation): node for node in living}
        if len(nodes) < len(self.world.host_of):
            return "start: some process is not up again"
        for node in nodes.values():
            for page in node.crew.pool.pages.all():
                other = nodes.get(page.slot.copy_at)
                if page.slot.copy_at and (
                    other is None or not other.crew.pool.pages.find(page.key)
                ):
                    return f"copies: {node.place.name} relies on a copy of {page.key.hex()}"
        return ""

    async def _ends(self, problem_of: Callable[[], str]) -> None:
        until = trio.current_time() + ENDS_S
        while problem := problem_of():
            if trio.current_time() > until:
                checker, _, detail = problem.partition(": ")
                raise Violation(f"liveness-{checker}", detail)
            await trio.sleep(0.25)


async def _run(world: World, faults: Sequence[str]) -> None:
    async with settled(world):
        rng = world.stream("copies")
        for number in range(ROUNDS):
            await Round(world, rng, number, rng.choice(faults)).play()
        assert world.calls.counts["kills"] == ROUNDS
