"""The world of one run: places, nodes, clients, and their processes."""

from __future__ import annotations

import random

import trio

from sims import determinism
from sims.client import SimClient
from sims.clock import VirtualClock
from sims.disk import Disks
from sims.fabric import Fabrics
from sims.locks import Locks
from sims.memory import Buffers, NodeMemory, Truth
from sims.network import Network
from sims.node import SimNode, config_of
from sims.places import Place
from sims.swarm import Options
from sims.trace import Trace
from sims.workload import Calls, Library

WALL_LIMIT_S = 600.0
"""Real time of one run; the largest swarm takes a twentieth of it."""

HEADS_MAX = 3


class World:
    """All parts of one run."""

    nursery: trio.Nursery
    """Set when the run begins."""

    def __init__(self, options: Options, clock: VirtualClock, trace: Trace) -> None:
        """Create the world; `sims.play` starts it."""
        seed = options.seed
        self.options = options
        self.clock = clock
        self.trace = trace
        self.hosts = [f"h{number}" for number in range(options.hosts)]
        self.locks = Locks()
        self.truth = Truth()
        self.buffers = Buffers()
        self.network = Network(options=options, rng=self.stream("network"), trace=trace)
        self.places: dict[str, Place] = {}
        self.nodes: dict[str, SimNode] = {}
        self.clients: dict[str, SimClient] = {}
        self.memories: dict[int, NodeMemory] = {}
        self.disks = Disks(options, self.stream("disks"), trace)
        self.library = Library.of(options, self.stream("library"))
        self.calls = Calls(options, self.library, self.buffers, self.truth, trace)
        self.wires: dict[tuple[str, str], float] = {}
        self.is_safety = True
        self._boots: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        self._rng = determinism.stream(seed, "world")
        names = [f"n{number}" for number in range(options.nodes)]
        self.host_of = {name: self.hosts[i % options.hosts] for i, name in enumerate(names)}
        heads = names[: self._rng.randint(1, HEADS_MAX)]
        self.heads = tuple(address_of(name) for name in heads)

    def stream(self, part: str) -> random.Random:
        """Return the random numbers of one part of this run."""
        return determinism.stream(self.options.seed, part)

    # --- start ------------------------------------------------------------------------------------

    async def people(self) -> None:
        """Start nodes, not all at once, and clients next to some of them."""
        for name in self.host_of:
            self.nursery.start_soon(self.run_node, name, self._rng.uniform(0.0, 2.0))
        names = list(self.host_of)
        for number in range(self.options.clients):
            name = f"c{number}"
            self._homes[name] = self._rng.choice(names)
            self.nursery.start_soon(self.run_client, name, self._rng.uniform(0.5, 3.0))

    # --- processes --------------------------------------------------------------------------------

    async def run_node(self, name: str, delay_s: float) -> None:
        """Start a node after a while, and run it until it ends."""
        await trio.sleep(delay_s)
        boot = self._boots[name] = self._boots.get(name, 0) + 1
        rng = self.stream(f"node/{name}/{boot}")
        place = self._place(name, self.host_of[name], rng)
        for memory in self.memories.values():
            # A starting node removes the leftovers of dead nodes on its host.
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
            disk_rng=self.stream(f"disk/{name}/{boot}"),
            reads=Fabrics(
                place=place,
                options=self.options,
                rng=self.stream(f"pull/{name}/{boot}"),
                network=self.network,
                buffers=self.buffers,
                serving=self.serving,
                linked=self.linked,
                nursery=lambda: self.nursery,
                wires=self.wires,
            ),
        )
        self.trace.line("start", name, f"{node.incarnation:016x}")
        self.nodes[name] = node
        self.truth.nodes.add(node.incarnation)
        self.memories[node.incarnation] = node.memory
        await node.run()

    def _place(self, name: str, host: str, rng: random.Random) -> Place:
        """Return a new process, with a clock that has an offset and its own rate."""
        skew = self.options.skew
        rate = 1.0 + rng.uniform(-skew, skew)
        return Place(name, host, rate=rate, offset_s=rng.uniform(0.0, 1e5) if skew else 0.0)

    def _lives(self, memory: NodeMemory) -> bool:
        return any(n.memory is memory and n.place.alive for n in self.nodes.values())

    async def run_reader(self, name: str, home: str) -> None:
        """Run a client that makes no calls of its own, next to this node."""
        self._homes[name] = home
        await self.run_client(name, 0.5, works=False)

    async def run_client(self, name: str, delay_s: float, *, works: bool = True) -> None:
        """Start a client after a while, and run it until its process ends."""
        await trio.sleep(delay_s)
        boot = self._boots[name] = self._boots.get(name, 0) + 1
        home = self._homes[name]
        clock = self.stream(f"client-clock/{name}/{boot}")
        place = self.places[name] = self._place(name, self.host_of[home], clock)
        rng = self.stream(f"client/{name}/{boot}")
        fabrics = Fabrics(
            place=place,
            options=self.options,
            rng=rng,
            network=self.network,
            buffers=self.buffers,
            serving=self.serving,
            linked=self.linked,
            nursery=lambda: client.nursery(),  # noqa: PLW0108 - there is no client yet
            wires=self.wires,
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
            truth=self.truth,
            trace=self.trace,
            tenant=list(self._homes).index(name) % self.options.tenants,
        )
        self.locks.hold(client.lock, place)
        self.trace.line("start", name, f"{client.identity:016x}")
        self.clients[name] = client
        await client.run(self._work if works else _no_work)

    async def _work(self, client: SimClient) -> None:
        for number in range(self.options.workers):
            rng = self.stream(f"work/{client.place.name}/{client.identity}/{number}")
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

    async def drain_node(self, name: str, away_s: float, *, is_cancelled: bool) -> None:
        """Drain a node, and start it again later; or cancel the drain."""
        node = self.nodes[name]
        if not node.place.alive or node.is_leaving:
            return
        ended = await node.drained(lambda: self.is_safety and not is_cancelled)
        if ended:
            await self.leave_node(name, away_s)

    async def crash_client(self, name: str, away_s: float) -> None:
        """Kill an engine; another one replaces it."""
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
            # When the faults stop, every process that is down starts again.
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


async def _no_work(client: SimClient) -> None:
    del client


def address_of(name: str) -> str:
    """Return the address at which a node listens."""
    return f"{name}:1"


def name_at(address: str) -> str:
    """Return the name of the node at an address."""
    return address.partition(":")[0]
