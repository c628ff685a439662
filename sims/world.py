"""The world of one run: places, nodes, clients, and its two phases."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import attrs
import trio

from sims import determinism
from sims.client import SimClient
from sims.clock import Deadlock, TooSlow, VirtualClock
from sims.disk import Disks
from sims.fabric import Fabrics
from sims.liveness import Liveness
from sims.locks import Locks
from sims.memory import Buffers, NodeMemory, Truth
from sims.nemesis import Nemesis
from sims.network import Network
from sims.node import SimNode, config_of
from sims.places import Place
from sims.swarm import Options, draw
from sims.trace import Trace, Violation
from sims.workload import Calls, Library

VIRTUAL_LIMIT_S = 300.0
"""Longest run: its phases take less than half of it."""

WALL_LIMIT_S = 600.0
"""Real time of one run; the largest swarm takes a twentieth of it."""

HEADS_MAX = 3

QUIET_S = 25.0
"""How long calls may take to end after the last one began: a stopped client's call is as long."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run came to. checker: "" if nothing was found."""

    seed: int
    checker: str
    detail: str
    digest: str
    messages: int
    steps: int
    virtual_s: float
    wall_s: float
    healed_s: float
    counts: dict[str, int]
    last_lines: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.checker


class World:
    """Everything there is in one run."""

    def __init__(self, options: Options, clock: VirtualClock, trace: Trace) -> None:
        """Make the world; `run` begins it."""
        seed = options.seed
        self.options = options
        self.clock = clock
        self.trace = trace
        self.hosts = [f"h{number}" for number in range(options.hosts)]
        self.locks = Locks()
        self.truth = Truth()
        self.buffers = Buffers()
        self.network = Network(options=options, rng=self._stream("network"), trace=trace)
        self.places: dict[str, Place] = {}
        self.nodes: dict[str, SimNode] = {}
        self.clients: dict[str, SimClient] = {}
        self.memories: dict[int, NodeMemory] = {}
        self.disks = Disks(options, self._stream("disks"), trace)
        self.library = Library.of(options, self._stream("library"))
        self.calls = Calls(options, self.library, self.buffers, self.truth, trace)
        self.is_safety = True
        self._boots: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        self._rng = determinism.stream(seed, "world")
        names = [f"n{number}" for number in range(options.nodes)]
        self.host_of = {name: self.hosts[i % options.hosts] for i, name in enumerate(names)}
        heads = names[: self._rng.randint(1, HEADS_MAX)]
        self.heads = tuple(address_of(name) for name in heads)
        self.healed_s = 0.0

    def _stream(self, part: str) -> random.Random:
        return determinism.stream(self.options.seed, part)

    # --- the run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Do harm, then demand that everything heals."""
        with trio.fail_after(VIRTUAL_LIMIT_S):
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                nursery.start_soon(self.network.run)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._people)
                harm = trio.CancelScope()
                nursery.start_soon(self._harm, harm)
                await trio.sleep(self.options.safety_s)
                harm.cancel()
                await self._calm_down()
                self.trace.line("phase", "liveness")
                liveness = Liveness(self, self._stream("liveness"))
                self.healed_s = await liveness.demand()
                nursery.cancel_scope.cancel()

    async def _harm(self, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(1.0)
            await Nemesis(self, self._stream("nemesis")).run()

    async def _people(self) -> None:
        """Start nodes, not all at once, and clients beside some of them."""
        for name in self.host_of:
            self.nursery.start_soon(self.run_node, name, self._rng.uniform(0.0, 2.0))
        names = list(self.host_of)
        for number in range(self.options.clients):
            name = f"c{number}"
            self._homes[name] = self._rng.choice(names)
            self.nursery.start_soon(self.run_client, name, self._rng.uniform(0.5, 3.0))

    async def _watch(self) -> None:
        while True:
            await trio.sleep(1.0)
            if self.clock.overrun:
                raise TooSlow(f"more than {WALL_LIMIT_S} s of real time")
            if self.clock.deadlocked:
                raise Deadlock("nobody waits for any time")

    async def _calm_down(self) -> None:
        """End every fault, and let the calls under way end."""
        self.is_safety = False
        self.network.heal()
        await trio.sleep_until(max(place.paused_until for place in self.places.values()))
        with trio.move_on_after(QUIET_S):
            while self.calls.now_in_flight:
                await trio.sleep(0.1)
        if self.calls.now_in_flight:
            raise Violation("deadline", f"{self.calls.now_in_flight} calls never ended")

    # --- processes --------------------------------------------------------------------------------

    async def run_node(self, name: str, delay_s: float) -> None:
        """Start a node after a while, and run it until it ends."""
        await trio.sleep(delay_s)
        boot = self._boots[name] = self._boots.get(name, 0) + 1
        rng = self._stream(f"node/{name}/{boot}")
        place = self._place(name, self.host_of[name], rng)
        for memory in self.memories.values():
            # What dead nodes have left is out of the way when one starts on their host.
            if memory.host == place.host and not self._lives(memory):
                memory.is_linked = False
        self.places[name] = place
        node = SimNode(
            place=place,
            address=address_of(name),
            heads=self.heads,
            options=self.options,
            rng=rng,
            network=self.network,
            truth=self.truth,
            locks=self.locks,
            trace=self.trace,
            image=self.disks.image_of(name),
            disk_rng=self._stream(f"disk/{name}/{boot}"),
        )
        self.trace.line("start", name, f"{node.incarnation:016x}")
        self.nodes[name] = node
        self.memories[node.incarnation] = node.memory
        await node.run()

    def _place(self, name: str, host: str, rng: random.Random) -> Place:
        """Return a new process, with a clock that began some day and goes at its own rate."""
        skew = self.options.skew
        rate = 1.0 + rng.uniform(-skew, skew)
        return Place(name, host, rate=rate, offset_s=rng.uniform(0.0, 1e5) if skew else 0.0)

    def _lives(self, memory: NodeMemory) -> bool:
        return any(n.memory is memory and n.place.alive for n in self.nodes.values())

    async def run_client(self, name: str, delay_s: float) -> None:
        """Start a client after a while, and run it until its process ends."""
        await trio.sleep(delay_s)
        boot = self._boots[name] = self._boots.get(name, 0) + 1
        home = self._homes[name]
        clock = self._stream(f"client-clock/{name}/{boot}")
        place = self.places[name] = self._place(name, self.host_of[home], clock)
        rng = self._stream(f"client/{name}/{boot}")
        fabrics = Fabrics(
            place=place,
            options=self.options,
            rng=rng,
            network=self.network,
            buffers=self.buffers,
            serving=self.serving,
            linked=self.linked,
            nursery=lambda: client.nursery(),  # noqa: PLW0108 - there is no client yet
        )
        client = SimClient(
            place=place,
            home=f"home/{home}",
            config=config_of(self.options, self.heads),
            rng=rng,
            network=self.network,
            buffers=self.buffers,
            fabrics=fabrics,
            linked=self.linked,
            trace=self.trace,
        )
        self.locks.hold(client.lock, place)
        self.trace.line("start", name, f"{client.identity:016x}")
        self.clients[name] = client
        await client.run(self._work)

    async def _work(self, client: SimClient) -> None:
        for number in range(self.options.workers):
            rng = self._stream(f"work/{client.place.name}/{client.identity}/{number}")
            client.nursery().start_soon(self.calls.work, client, rng, lambda: not self.is_safety)

    async def crash_node(self, name: str, away_s: float) -> None:
        """Kill a node; its supervisor starts it again."""
        node = self.nodes[name]
        if node.place.alive:
            node.crash()
            await self._start_again(name, away_s)

    async def leave_node(self, name: str, away_s: float) -> None:
        """Stop a node gracefully; it is started again later."""
        node = self.nodes[name]
        if node.place.alive and not node.is_leaving and await node.leave():
            await self._start_again(name, away_s)

    async def crash_client(self, name: str, away_s: float) -> None:
        """Kill an engine; another one comes in its place."""
        client = self.clients[name]
        if not client.place.alive:
            return
        self.trace.line("fault", "crash", name)
        client.place.alive = False
        client.scope.cancel()
        self.network.process_ended(client.place)
        await self.run_client(name, away_s)

    async def _start_again(self, name: str, away_s: float) -> None:
        with trio.move_on_after(away_s):
            # When the faults stop, whoever is down comes up.
            while self.is_safety:
                await trio.sleep(0.25)
        await self.run_node(name, 0.0)

    # --- what processes see of each other ---------------------------------------------------------

    def serving(self, address: str) -> SimNode | None:
        """Return the node that listens at an address."""
        node = self.nodes.get(name_at(address))
        return node if node is not None and node.place.alive else None

    def linked(self, incarnation: int) -> NodeMemory | None:
        """Return a segment by its file's name, while there is one."""
        memory = self.memories.get(incarnation)
        return memory if memory is not None and memory.is_linked else None


def address_of(name: str) -> str:
    """Return where a node listens."""
    return f"{name}:1"


def name_at(address: str) -> str:
    """Return who listens at an address."""
    return address.partition(":")[0]


def run(
    seed: int,
    *,
    show: Callable[[str], None] | None = None,
    change: Callable[[Options], Options] | None = None,
) -> Outcome:
    """Run a seed. show: takes each line of the trace; change: alters the drawn options."""
    options = draw(determinism.stream(seed, "swarm"), seed)
    if change is not None:
        options = change(options)
    clock = VirtualClock(wall_s=WALL_LIMIT_S)
    trace = Trace(clock.current_time, show=show)
    for line in options.lines():
        trace.line("option", line.strip())
    world: list[World] = []

    async def main() -> None:
        world.append(World(options, clock, trace))
        await world[0].run()

    started = time.monotonic()
    checker = detail = ""
    try:
        determinism.run(main, seed=seed, clock=clock)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        checker, detail = explained(error)
        trace.line("failed", checker, detail)
    made = world[0]
    return Outcome(
        seed=seed,
        checker=checker,
        detail=detail,
        digest=trace.digest(),
        messages=made.network.delivered_count,
        steps=sum(w.steps for node in made.nodes.values() for w in node.watched.values()),
        virtual_s=clock.current_time(),
        wall_s=time.monotonic() - started,
        healed_s=made.healed_s,
        counts=made.calls.counts,
        last_lines=tuple(trace.last),
    )


def explained(error: BaseException) -> tuple[str, str]:
    """Return the checker and the sentence of what ended a run."""
    leaves = list(_leaves(error))
    found = [leaf for leaf in leaves if isinstance(leaf, Violation)]
    if found:
        return found[0].checker, found[0].detail
    leaf = leaves[0]
    place = leaf.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
    kind = "assertion" if isinstance(leaf, AssertionError) else type(leaf).__name__
    return kind, f"{leaf} ({where})"


def _leaves(error: BaseException) -> list[BaseException]:
    inner = getattr(error, "exceptions", None)
    return [error] if inner is None else [leaf for one in inner for leaf in _leaves(one)]
