"""A crowd: many hosts read one prompt. How long does it take, and which holders serve it?

A normal world without faults, in which hosts have networks with a limited speed. Every byte of
every hit is checked. One byte here represents SCALE bytes: a page of 256 bytes represents one of a
mebibyte.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import numpy as np
import trio

from sims import determinism
from sims.clock import VirtualClock
from sims.swarm import GRANULE, Options, draw
from sims.trace import Trace
from sims.world import WALL_LIMIT_S, World

SCALE = 2**20 // GRANULE
"""Bytes that one byte of a crowd's page represents."""

NETWORK = 25e9 / 8
"""Bytes a second that the network of a host carries each way: 25 Gb/s."""

SETTLED_S = 5.0
"""Time until all nodes know each other, and mirror."""


@asynccontextmanager
async def settled(world: World) -> AsyncIterator[trio.Nursery]:
    """Run a node on each host, with a client next to it, without faults, until this is left."""
    world.network.heal()
    async with trio.open_nursery() as nursery:
        world.nursery = nursery
        nursery.start_soon(world.network.run)
        for name in world.host_of:
            nursery.start_soon(world.run_node, name, 0.0)
            nursery.start_soon(world.run_reader, f"c-{name}", name)
        await trio.sleep(SETTLED_S)
        yield nursery
        nursery.cancel_scope.cancel()


@attrs.frozen(kw_only=True)
class Crowd:
    """A crowd of `readers` hosts, which each read a prompt of `pages` pages `reads` times.

    pulls:    their setting `mirror_pulls`.
    within_s: the time in which the readers begin, at random; pause_s: between two reads of one
              reader.
    """

    readers: int = 50
    pages: int = 32
    reads: int = 4
    pulls: str = "off"
    within_s: float = 0.5
    pause_s: float = 0.5
    seed: int = 1

    def play(self) -> Report:
        """Read, and return the report; raise what a checker has found."""
        clock = VirtualClock(wall_s=WALL_LIMIT_S)
        trace = Trace(clock.current_time, show=None)
        reports: list[Report] = []

        async def main() -> None:
            reports.append(await self._run(World(self.options(), clock, trace)))

        determinism.run(main, seed=self.seed, clock=clock)
        return reports[0]

    def options(self) -> Options:
        """Return a run without faults."""
        drawn = draw(determinism.stream(self.seed, "crowd"), self.seed)
        faults = [name for name in attrs.asdict(drawn) if name.endswith(("_rate", "_failure"))]
        faults += ["loss", "duplication", "reordering", "skew", "busy", "stop_in_copy"]
        faults += ["successor_delivery", "ring_s"]
        none: dict[str, Any] = dict.fromkeys(faults, 0.0)
        return attrs.evolve(
            drawn,
            **(none | {"republish_rate": 50_000}),
            hosts=self.readers + 1,
            nodes=self.readers + 1,
            clients=0,
            keys=self.pages,
            lengths=(GRANULE,),
            pool_granules=8 * self.pages,
            virtual_nodes=16,
            replicas=2,
            max_masters=3,
            verify="sampled",
            cache_entries=1000,
            uncommitted_granules=0,
            latency_min_s=0.0001,
            latency_mean_s=0.0001,
            wire_slowness=1.0,
            step_s=1e-6,
            steps_a_page=1,
            rdma=False,
            disk_slabs=0,
            outbox_messages=10_000,
            outbox_bytes=2**24,
            mailbox_messages=10_000,
            mirror_pulls=self.pulls,
            mirror_share=0.5,
            bandwidth=NETWORK / SCALE,
        )

    async def _run(self, world: World) -> Report:
        names = list(world.host_of)
        async with settled(world):
            producer, *readers = (world.clients[f"c-{name}"] for name in names)
            prompt = list(range(self.pages))
            rng = world.stream("crowd")
            # The prompt has different bytes at each node: only copies of the producer's pages are
            # read.
            assert all(await world.calls.set(producer, prompt, rng, 2.0)), "the prompt is not set"
            await trio.sleep(0.5)
            took: list[float] = []
            missed: list[str] = []

            async def read(number: int) -> None:
                await trio.sleep(rng.uniform(0.0, self.within_s))
                for _ in range(self.reads):
                    since = trio.current_time()
                    whys = await world.calls.get(readers[number], prompt, rng, 2.0)
                    took.append(trio.current_time() - since)
                    missed.extend(why for why in whys if why)
                    await trio.sleep(self.pause_s)

            async with trio.open_nursery() as crowd:
                for number in range(self.readers):
                    crowd.start_soon(read, number)
        sent = sorted((memory.sent_bytes for memory in world.memories.values()), reverse=True)
        return Report(
            pulls=self.pulls,
            readers=self.readers,
            waited_s=sum(took),
            median_s=float(np.median(took)),
            slowest_s=max(took),
            missed=len(missed),
            mirrored=world.calls.counts.get("mirrored", 0),
            sent=tuple(size * SCALE for size in sent if size),
            served=world.truth.hits,
        )


@attrs.frozen(kw_only=True)
class Report:
    """The result of a crowd. Times in virtual seconds, sizes in represented bytes.

    waited_s: all reads together; median_s, slowest_s: of one read.
    missed, mirrored, served: pages. sent: by holder, the busiest first, to other hosts.
    """

    pulls: str
    readers: int
    waited_s: float
    median_s: float
    slowest_s: float
    missed: int
    mirrored: int
    sent: tuple[int, ...]
    served: int

    @property
    def busiest_part(self) -> float:
        """The fraction of all bytes between hosts that the busiest holder has sent."""
        return self.sent[0] / sum(self.sent)


def table(reports: Sequence[Report]) -> list[str]:
    """Return reports as lines of Markdown."""
    head = (
        "`mirror_pulls`", "all reads together", "median read", "slowest read",
        "sent between hosts", "by the busiest", "holders that sent", "copies",
    )  # fmt: skip
    rows = [
        (
            f"`{one.pulls}`",
            f"{one.waited_s:.1f} s",
            f"{1e3 * one.median_s:.1f} ms",
            f"{1e3 * one.slowest_s:.0f} ms",
            f"{sum(one.sent) / 2**30:.1f} GiB",
            f"{one.sent[0] / 2**30:.2f} GiB ({100 * one.busiest_part:.0f} %)",
            f"{len(one.sent)}",
            f"{one.mirrored}",
        )
        for one in reports
    ]
    lines = [head, ("---", *["--:"] * (len(head) - 1)), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
