"""A story: pages of a namespace with a time to live, of which a client reads some all the time.

What it reads stays, in memory and on disk; all others are gone from both, and from the directory,
soon after their time. Nodes are paused meanwhile, and pages are set again.

What happens is that of production actors; this module sets, reads, pauses and looks.
"""

from __future__ import annotations

import random

import attrs
import trio

from sims.crowd import Crowd, settled
from sims.play import staged
from sims.swarm import GRANULE
from sims.trace import Violation
from sims.watch import held_generation
from sims.world import World

PAGES = 24
ROUNDS = 2
TTL_S, DISK_TTL_S = 20.0, 40.0
LATE_S = 12.0
"""After so long beyond its time no page is left: a look is due every second, and a pool counts what
is touched within five seconds as touched at once. A disk stamps whole seconds."""

PAUSE_MAX_S = 1.5
READ_MAX_S = 0.5


def expire(seed: int) -> str:
    """Return what a checker has found, "" for nothing."""
    options = attrs.evolve(
        Crowd(readers=2, pages=3 * PAGES, seed=seed).options(),
        lengths=(GRANULE,),
        quotas=f"chat=50%,ttl={TTL_S}s/{DISK_TTL_S}s",
        disk_slabs=32,
        disk_on_evict=False,
        disk_queue_bytes=10**6,
        disk_step_s=0.0002,
        disk_full=0.0,
        disk_late=0.0,
        disk_rot=0.0,
        bandwidth=0.0,
    )
    return staged(options, _run)[0]


async def _run(world: World) -> None:
    async with settled(world):
        rng = world.stream("expiring")
        for _ in range(ROUNDS):
            await Round(world, rng).play()


@attrs.define(eq=False)
class Round:
    """Pages are set; some are read until the others must be gone."""

    world: World
    rng: random.Random
    _paused_s: float = 0.0

    async def play(self) -> None:
        """Set, read and look."""
        world, rng = self.world, self.rng
        client = next(c for c in world.clients.values() if c.tenant == 0)
        places = sorted(set(world.calls.own_places(client, list(range(3 * PAGES)))))
        rng.shuffle(places)
        read, left = places[: PAGES // 3], places[PAGES // 3 :]
        for batch in (read, left):
            await world.calls.set(client, batch, rng, 2.0)
        began = trio.current_time()
        while (passed := trio.current_time() - began) < DISK_TTL_S + LATE_S + self._paused_s:
            await trio.sleep(rng.uniform(0.0, READ_MAX_S))
            if rng.random() < 0.05:
                span_s = rng.uniform(0.0, PAUSE_MAX_S)
                node = rng.choice(list(world.nodes.values()))
                node.place.pause(trio.current_time(), span_s)
                await trio.sleep(span_s)
                self._paused_s += span_s
            await world.calls.get(client, read, rng, 2.0)
            if passed > TTL_S + LATE_S + self._paused_s:
                self._judge_memory(left)
        self._judge_disk(read, left)

    def _keys(self, places: list[int]) -> list[bytes]:
        return [self.world.library.keys[[place]].tobytes() for place in places]

    def _judge_memory(self, left: list[int]) -> None:
        """Fail if a page is in memory that nothing has used for its time to live."""
        for node in self.world.nodes.values():
            for key in self._keys(left):
                if node.crew.pool.pages.find(key) is not None:
                    raise Violation("expired", f"{key.hex()} is in memory of {node.place.name}")

    def _judge_disk(self, read: list[int], left: list[int]) -> None:
        """Fail if such a page is on disk or known, or one that was read is not on disk."""
        nodes = list(self.world.nodes.values())
        for key in self._keys(left):
            for node in nodes:
                index = node.crew.disk.index
                if index is not None and index.knows(key).any():
                    raise Violation("expired", f"{key.hex()} is on the disk of {node.place.name}")
                holders = [held_generation(node.crew.directory, n.incarnation, key) for n in nodes]
                if any(holders):
                    raise Violation("expired", f"{node.place.name} names a holder of {key.hex()}")
        for key in self._keys(read):
            places = [node.crew.disk.index for node in nodes]
            if not any(index is not None and index.knows(key).any() for index in places):
                raise Violation("expired-in-use", f"{key.hex()} is on no disk")
