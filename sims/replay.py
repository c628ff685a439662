"""A replay: a request trace drives a cluster, deterministically, with or without faults.

The trace is one that `peercache bench replay` takes, and requests are given to nodes in the same
way: each at its time, divided by a factor, to one of the prefill nodes, whose client reads the
leading run of blocks that the cluster has and stores the rest; the other nodes lend their memory.
A block has one granule, and every byte of every hit is checked. With faults, nodes are killed,
paused and partitioned meanwhile, and afterwards everything must heal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import attrs
import trio

from peercache.cli.bench.replay import (
    Answer,
    Outcome,
    Plan,
    ideal_hits,
    ideal_hits_by_node,
    keys_of,
    leading,
)
from peercache.cli.traces import Prompt
from sims import determinism
from sims.client import SimClient
from sims.clock import VirtualClock
from sims.crowd import Crowd, settled
from sims.liveness import Liveness
from sims.nemesis import Nemesis
from sims.play import calm_down, explained
from sims.swarm import GRANULE, Options
from sims.trace import Trace
from sims.workload import Library
from sims.world import WALL_LIMIT_S, World

VERSION: Final = 1
"""Of every block: its bytes follow from its id, as those of an engine do."""

TIMEOUT_S: Final = 2.0
"""Of each call: readers of tables are descheduled here all the time, which must make no misses."""


@attrs.frozen(eq=False)
class Report:
    """The result of a replay.

    outcome: as of `peercache bench replay`. checker, detail: what was found; "" for nothing.
    sent_bytes: that nodes have read from other hosts' memory; taken_bytes: of pages that nodes have
    taken ahead of their eviction elsewhere. events: faults by kind. healed_s: how long it took.
    """

    outcome: Outcome
    checker: str
    detail: str
    sent_bytes: int
    taken_bytes: int
    events: dict[str, int]
    healed_s: float
    digest: str

    def figures(self) -> dict[str, Any]:
        """Return the figures by name."""
        plan, counted = self.outcome.plan, self.outcome.figures()
        names = ("hit_rate", "lru_hit_rate", "of_lru", "node_lru_hit_rate")
        return {
            **plan.figures(),
            "room_blocks": self.outcome.blocks,
            **{name: counted[name] for name in names},
            "misses": self.outcome.misses(),
            "bytes_between_hosts": self.sent_bytes,
            "bytes_spilled": self.taken_bytes,
            "faults": self.events,
            "healed_s": round(self.healed_s, 1),
            "found": self.checker,
            "digest": self.digest,
        }

    def lines(self) -> list[str]:
        """Return the figures as readable lines."""
        return [f"{name:>20}: {value}" for name, value in self.figures().items()]


@final
@attrs.frozen(eq=False, kw_only=True)
class Replay:
    """What is replayed, and with which faults.

    blocks: the room of all nodes. kills, pauses, partitions: events a virtual second, in the whole
    cluster.
    """

    plan: Plan
    blocks: int
    spill: bool = False
    min_age_s: float = 0.0
    kills: float = 0.0
    pauses: float = 0.0
    partitions: float = 0.0

    @property
    def has_faults(self) -> bool:
        """Whether anything is killed, paused or partitioned."""
        return bool(self.kills or self.pauses or self.partitions)

    def play(self, show: Callable[[str], None] | None = None) -> Report:
        """Replay. show: is called with each line of the trace of events."""
        clock = VirtualClock(wall_s=WALL_LIMIT_S)
        trace = Trace(clock.current_time, show=show)
        world = World(self.options(), clock, trace)
        blocks = list(dict.fromkeys(b for one in self.plan.requests for b in one.blocks))
        library = Library(keys_of(blocks), (GRANULE,) * len(blocks))
        world.library = world.calls.library = library
        run = _Run(self, world, {block: place for place, block in enumerate(blocks)})
        checker = detail = ""
        try:
            determinism.run(run.play, seed=self.plan.seed, clock=clock)
        except Exception as error:
            checker, detail = explained(error)
            trace.line("failed", checker, detail)
        return run.report(checker, detail)

    def options(self) -> Options:
        """Return a run without faults but those that were chosen."""
        whole = Crowd(readers=self.plan.nodes - 1, pages=1, seed=self.plan.seed).options()
        return attrs.evolve(
            whole,
            pool_granules=self.blocks // self.plan.nodes,
            latency_mean_s=0.0005,
            wire_slowness=1.0,
            bandwidth=0.0,
            verify="full",
            spill=self.spill,
            placement_min_age_s=self.min_age_s,
            crash_rate=self.kills,
            node_pause_rate=self.pauses,
            partition_rate=self.partitions,
        )


@final
@attrs.define(eq=False)
class _Run:
    """One replay under way. places: of blocks in the library."""

    replay: Replay
    world: World
    places: dict[int, int]
    answers: list[Answer] = attrs.field(factory=list)
    began: float = 0.0
    ended: float = 0.0
    healed_s: float = 0.0

    async def play(self) -> None:
        """Serve all requests, and let everything heal."""
        world, plan = self.world, self.replay.plan
        self.answers = [Answer(0)] * len(plan.requests)
        async with settled(world):
            self.began = trio.current_time()
            with trio.CancelScope() as harm:
                async with trio.open_nursery() as nursery:
                    if self.replay.has_faults:
                        nursery.start_soon(Nemesis(world, world.stream("nemesis")).run)
                    async with trio.open_nursery() as engines:
                        for node in range(plan.prefill):
                            engines.start_soon(self._serve, node)
                    harm.cancel()
            self.ended = trio.current_time()
            if self.replay.has_faults:
                await calm_down(world)
                self.healed_s = await Liveness(world, world.stream("liveness")).demand()

    async def _serve(self, node: int) -> None:
        """Serve the requests of a node, one after the other, each at its time or later."""
        plan = self.replay.plan
        for number, (request, home) in enumerate(zip(plan.requests, plan.routed(), strict=True)):
            if home != node:
                continue
            due = self.began + request.at / plan.speed
            await trio.sleep_until(due)
            late_s = trio.current_time() - due
            client = self.world.clients[f"c-n{node}"]
            self.world.calls.now_in_flight += 1
            answer = await self._answer(client, request)
            self.world.calls.now_in_flight -= 1
            self.answers[number] = attrs.evolve(answer, late_s=late_s)

    async def _answer(self, client: SimClient, request: Prompt) -> Answer:
        """Read the leading run of a prompt that the cluster has, and store the rest."""
        calls, rng = self.world.calls, self.world.stream(f"request/{request.at}")
        places = [self.places[block] for block in request.blocks]
        batch, hits, reason = self.replay.plan.batch(self.replay.blocks), 0, ""
        started = trio.current_time()
        while hits < len(places) and not reason:
            some = places[hits : hits + batch]
            known = await calls.exists(client, some, TIMEOUT_S)
            run = leading([not one for one in known])
            read = await calls.get(client, some[:run], rng, TIMEOUT_S) if run else []
            found = leading([not one for one in read])
            hits += found
            if found < len(some):
                reason = read[found] if found < run else known[run]
        waited_s = trio.current_time() - started
        for begin in range(hits, len(places), batch):
            some = places[begin : begin + batch]
            await calls.set(client, some, rng, TIMEOUT_S, version=VERSION)
        return Answer(hits, waited_s, reason)

    def report(self, checker: str, detail: str) -> Report:
        """Return what came of it."""
        world, plan, blocks = self.world, self.replay.plan, self.replay.blocks
        requests = plan.requests
        by_node = ideal_hits_by_node(requests, plan.routed(), plan.rooms(blocks))
        outcome = Outcome(
            plan,
            blocks,
            self.answers,
            ideal_hits(requests, blocks),
            by_node,
            {},
            self.ended - self.began,
        )
        return Report(
            outcome,
            checker,
            detail,
            sum(memory.sent_bytes for memory in world.memories.values()),
            world.truth.taken_bytes,
            dict(world.trace.faults),
            self.healed_s,
            world.trace.digest(),
        )


def whole_blocks(blocks: int, nodes: int) -> int:
    """Return the greatest room, not above `blocks`, of which all nodes have the same part."""
    return blocks // nodes * nodes
