"""The nemesis: faults, at the rates that the swarm has drawn."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from sims.forging import Forger
from sims.impostor import Impostor
from sims.world import World

DOWN_MAX_S = 9.0
"""The longest downtime of a crashed node: longer than it takes to be found dead."""

PAUSE_MAX_S = 12.0
CANCELLED = 0.2
"""The fraction of drains that are cancelled."""
PARTITION_MAX_S = 14.0


class Nemesis:
    """Injects faults until stopped."""

    def __init__(self, world: World, rng: random.Random) -> None:
        """Inject faults into this world."""
        self._world = world
        self._rng = rng

    async def run(self) -> None:
        """Start every kind of fault that this run has."""
        options = self._world.options
        kinds: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (options.crash_rate, self._crash_node),
            (options.leave_rate, self._leave),
            (options.node_pause_rate, self._pause_node),
            (options.client_crash_rate, self._crash_client),
            (options.client_pause_rate, self._pause_client),
            (options.partition_rate, self._partition),
            (options.clog_rate, self._clog),
            (options.disconnect_rate, self._disconnect),
            (options.disk_rot, self._rot),
            (options.forge_rate, Forger(self._world, self._rng).forge),
            (options.drain_rate, self._drain),
            (options.impostor_rate, Impostor(self._world, self._world.stream("impostor")).lie),
        ]
        async with trio.open_nursery() as nursery:
            for rate, harm in kinds:
                if rate:
                    nursery.start_soon(self._again_and_again, rate, harm)

    async def _again_and_again(self, rate: float, harm: Callable[[], Awaitable[None]]) -> None:
        while True:
            await trio.sleep(self._rng.expovariate(rate))
            await harm()

    async def _crash_node(self) -> None:
        node = self._pick_node()
        if node is not None:
            self._world.nursery.start_soon(
                self._world.crash_node, node, self._rng.uniform(0.05, DOWN_MAX_S)
            )

    async def _leave(self) -> None:
        node = self._pick_node()
        if node is not None:
            self._world.nursery.start_soon(
                self._world.leave_node, node, self._rng.uniform(0.5, DOWN_MAX_S)
            )

    async def _drain(self) -> None:
        node = self._pick_node()
        if node is not None:
            drain = partial(self._world.drain_node, is_cancelled=self._rng.random() < CANCELLED)
            self._world.nursery.start_soon(drain, node, self._rng.uniform(0.5, DOWN_MAX_S))

    async def _pause_node(self) -> None:
        node = self._pick_node()
        if node is not None:
            self._pause(node)

    async def _crash_client(self) -> None:
        name = self._pick_client()
        if name is None:
            return
        self._world.nursery.start_soon(self._world.crash_client, name, self._rng.uniform(0.2, 3.0))

    async def _pause_client(self) -> None:
        name = self._pick_client()
        if name is not None:
            self._pause(name)

    def _pause(self, name: str) -> None:
        span_s = min(self._rng.expovariate(0.5), PAUSE_MAX_S)
        place = self._world.places.get(name)
        if place is not None and place.alive:
            self._world.trace.line("fault", "pause", name, f"{span_s:.3f}")
            place.pause(trio.current_time(), span_s)

    async def _partition(self) -> None:
        rng, network = self._rng, self._world.network
        hosts = list(self._world.hosts)
        kind = rng.choice(["split", "alone", "one-way", "pair"])
        until = trio.current_time() + rng.uniform(0.3, PARTITION_MAX_S)
        rng.shuffle(hosts)
        size = rng.randint(1, max(1, len(hosts) - 1)) if kind == "split" else 1
        these, others = hosts[:size], hosts[size:]
        if kind == "pair":
            others = others[:1]
        self._world.trace.line("fault", "partition", kind, these, others, f"{until:.3f}")
        for here in these:
            for there in others:
                network.cut(here, there, until)
                if kind != "one-way":
                    network.cut(there, here, until)

    async def _clog(self) -> None:
        hosts = self._world.hosts
        source, target = self._rng.choice(hosts), self._rng.choice(hosts)
        until = trio.current_time() + self._rng.uniform(0.05, 3.0)
        self._world.trace.line("fault", "clog", source, target, f"{until:.3f}")
        self._world.network.clog(source, target, until)

    async def _disconnect(self) -> None:
        pipes = self._world.network.pipes()
        if pipes:
            pipe = self._rng.choice(pipes)
            self._world.trace.line("fault", "disconnect", pipe.dialler.name, pipe.number)
            self._world.network.break_pipe(pipe)

    async def _rot(self) -> None:
        self._world.disks.rot()

    def _pick_node(self) -> str | None:
        standing = sorted(name for name, node in self._world.nodes.items() if node.place.alive)
        # One process must remain for the next fault.
        return self._rng.choice(standing) if len(standing) > 1 else None

    def _pick_client(self) -> str | None:
        names = sorted(self._world.clients)
        return self._rng.choice(names) if names else None
