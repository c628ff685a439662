"""A story: a node spills pages, and at each step of it something happens.

The giver, the taker or both are killed or paused; they are partitioned; a third host removes,
clears, reads or sets the pages; one of them is drained; the giver's certificate is revoked; or two
holders of one page offer it to each other. After each round the pages are where they must be, every
client finds them, and no offer, reservation or read is left.

The steps of a spill are those of production actors. This module names the pages, as a full pool
does, and waits for a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TypeAlias, final

import attrs
import numpy as np
import trio

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPlacement,
    NotifyPool,
    NotifyPublisher,
    Pull,
    Send,
)
from peercache.actors.mailboxes import (
    TAKER,
    ColdPages,
    CommitAnswered,
    DrainCancelled,
    PagesCommitted,
    PagesGiven,
    TakenOver,
)
from peercache.actors.runtime import SELF
from peercache.model.keys import COPIES
from peercache.model.member import ALIVE
from peercache.node.revocations import VOID_S
from peercache.wire.messages.membership import OfferSpill, PagesTaken, RequestRoom
from peercache.wire.messages.pool import Clear, Granted, Remove
from sims.client import SimClient
from sims.crowd import Crowd, settled
from sims.node import SimNode
from sims.play import staged
from sims.trace import Violation
from sims.world import World

ROUNDS = 9
PAGES = 4
"""Pages of a round; each round has its own."""

COLD_S = 6.5
"""After this time pages are no longer among those that were touched just now."""

AGE_S = 100.0
LATEST_S = 0.03
"""A fault begins at most this long after its step: a page is read for about as long."""

OFFERS_MAX = 10
"""How often pages are named: a node that was paused, or suspects another one, offers nothing yet,
and after a revocation none takes them for a while."""

PAUSE_MAX_S = 9.0
CUT_MAX_S = 6.0
AWAY_MAX_S = 8.0
ENDS_S = 40.0
"""After this time nothing of a spill is left, and all nodes know each other."""

STEPS = (
    "asked", "offered", "reserved", "read", "arrived", "committed", "published", "answered",
    "evicted",
)  # fmt: skip
"""Room is asked for, the pages are offered, have slots, are being read, have been read, have words,
are known to their owners; the taker answers, and the giver evicts."""

GONE = ("kill", "remove", "clear", "revoke")
"""Parts of faults after which the pages may be nowhere."""

FAULTS = (
    "kill-giver", "kill-taker", "kill-both", "pause-giver", "pause-taker", "cut", "cut-giver",
    "cut-taker", "cut-to-taker", "cut-to-giver", "remove", "clear", "revoke", "read", "set",
    "drain-giver", "drain-taker", "mutual", "pause-giver+remove", "pause-taker+remove",
    "cut-giver+remove", "cut+clear", "pause-giver+kill-taker", "pause-taker+set",
)  # fmt: skip

CASES = tuple(product(FAULTS, STEPS))
SEEDS_OF_ALL = len(CASES) // ROUNDS
"""So many consecutive seeds have every fault at every step."""

Cut: TypeAlias = tuple[str, str]


def spill(seed: int) -> str:
    """Return what a checker has found while anything happens, "" for nothing."""
    return spilled(seed)[0]


def spill_while(fault: str, seed: int) -> str:
    """Return what a checker has found while one fault happens at each step, "" for nothing."""
    return spilled(seed, tuple(product((fault,), STEPS)))[0]


def spilled(
    seed: int,
    chosen: Sequence[tuple[str, str]] = (),
    show: Callable[[str], None] | None = None,
) -> tuple[str, str]:
    """Return the checker that has found something, "" for none, and a sentence.

    chosen: the fault and the step of each round; empty: those of the seed. show: is called with
    each line of the trace.
    """
    chosen = chosen or cases(seed)
    options = attrs.evolve(
        Crowd(readers=3, pages=ROUNDS * PAGES, seed=seed).options(),
        step_s=0.001,
        steps_a_page=4,
        latency_mean_s=0.0005,
        spill=True,
        placement_min_age_s=0.0,
        rdma=bool(seed % 2),
        verify="full",
    )
    return staged(options, partial(_run, chosen=chosen), show=show)


def cases(seed: int) -> tuple[tuple[str, str], ...]:
    """Return the fault and the step of each round: consecutive seeds have all of them."""
    order = list(CASES)
    random.Random(0).shuffle(order)
    return tuple(order[(seed * ROUNDS + number) % len(order)] for number in range(ROUNDS))


def _step_of(effect: Effect) -> str:
    """Return the step of a spill that an effect is; "" for another one."""
    match effect:
        case Send(message=RequestRoom()):
            return "asked"
        case Send(message=OfferSpill()):
            return "offered"
        case NotifyPlacement(Granted()):
            return "reserved"
        case Pull():
            return "read"
        case NotifyPool(TakenOver()):
            return "arrived"
        case NotifyPublisher(PagesCommitted(origin)) if origin == TAKER:
            return "committed"
        case NotifyDirectory(CommitAnswered(origin)) if origin == TAKER:
            return "published"
        case Send(message=PagesTaken()):
            return "answered"
        case NotifyPool(PagesGiven()):
            return "evicted"
    return ""


@final
@attrs.define(eq=False)
class Round:
    """One spill, and what happens at one of its steps.

    taker: the name of the node that pages are offered to; "" before the offer.
    """

    world: World
    rng: random.Random
    fault: str
    step: str
    places: list[int]
    taker: str = ""
    seen: list[str] = attrs.field(factory=list)
    reached: trio.Event = attrs.field(factory=trio.Event)

    async def play(self) -> None:
        """Spill, let the fault happen, and check what is left."""
        world = self.world
        self._watch()
        assert all(await world.calls.set(self._client("n0"), self.places, self.rng, 2.0))
        if self.fault == "mutual":
            await self._store_again("n1")
        await trio.sleep(COLD_S)
        for _ in range(OFFERS_MAX):
            if self.fault == "mutual":
                self._offer("n0", "n1")
                self._offer("n1", "n0")
            else:
                self._offer("n0")
            with trio.move_on_after(COLD_S):
                await self.reached.wait()
            if self.reached.is_set() or "committed" in self.seen:
                break
        await trio.sleep(self.rng.choice([0.0, self.rng.uniform(0.0, LATEST_S)]))
        self.taker = self.taker or "n1"
        counts = world.calls.counts
        if self.reached.is_set():
            counts["faults"] = counts.get("faults", 0) + 1
        world.trace.line("round", self.fault, self.step, self.taker, *self.seen)
        await self._happens()
        await self._ends()
        await self._check()

    # --- a spill ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Note the steps of all actors from now on."""
        for node in self.world.nodes.values():
            for watched in node.watched.values():
                watched.look = partial(self._look, node._check_sent)

    def _look(self, check: Callable[[list[Effect]], None], effects: list[Effect]) -> None:
        check(effects)
        for effect in effects:
            step = _step_of(effect)
            if step:
                self.seen.append(step)
            if isinstance(effect, Send) and isinstance(effect.message, (RequestRoom, OfferSpill)):
                self.taker = self._name_of(effect.to) or self.taker
            if step == self.step:
                self.reached.set()

    def _name_of(self, incarnation: object) -> str:
        """Return the name of a node; "" for one that is gone, which its peers may not know yet."""
        nodes = self.world.nodes.items()
        return next((name for name, node in nodes if node.incarnation == incarnation), "")

    def _offer(self, name: str, only_to: str = "") -> None:
        """Let a node offer the pages, as if its pool had named them."""
        crew = self.world.nodes[name].crew
        for page in crew.pool.pages.of_keys(self._keys()):
            page.named_touched = page.slot.touched
        records = crew.pool.records_of(b"".join(self._keys()))
        if only_to:
            others = [n for n in self.world.nodes.values() if n.place.name not in (name, only_to)]
            until = self.world.nodes[name].place.now() + AGE_S
            for node in others:
                crew.placement.spilling._silent_until[node.incarnation] = until
        tag = self._client("n0").namespace.tag()
        ages = np.full(len(records), AGE_S)
        crew.mailboxes.placement.put(SELF, ColdPages(((tag, records, ages),), AGE_S))

    async def _store_again(self, name: str) -> None:
        """Store the same versions at another node."""
        for place in self.places:
            (stay, *_) = self.world.truth.stays[self.world.library.keys[place].tobytes()]
            client = self._client(name)
            stored = self.world.calls.set(client, [place], self.rng, 2.0, version=stay.version)
            assert all(await stored)

    def _keys(self) -> list[bytes]:
        return [key.tobytes() for key in self.world.library.keys[self.places]]

    def _client(self, name: str) -> SimClient:
        return self.world.clients[f"c-{name}"]

    # --- faults -----------------------------------------------------------------------------------

    async def _happens(self) -> None:
        """Let all parts of the fault begin together, and wait for them."""
        async with trio.open_nursery() as parts:
            for part in self.fault.split("+"):
                parts.start_soon(self._part_happens, part)

    async def _part_happens(self, part: str) -> None:
        world, rng, remover = self.world, self.rng, self._client(self._third())
        names = {"giver": ["n0"], "taker": [self.taker], "both": ["n0", self.taker]}
        kind, _, who = part.partition("-")
        named = names.get(who, [])
        match kind:
            case "kill":
                for name in named:
                    world.nodes[name].crash()
                    world.nursery.start_soon(world.run_node, name, rng.uniform(0.1, AWAY_MAX_S))
            case "pause":
                span_s = rng.uniform(0.1, PAUSE_MAX_S)
                world.nodes[named[0]].place.pause(trio.current_time(), span_s)
                await trio.sleep(span_s)
            case "cut":
                span_s = rng.uniform(0.1, CUT_MAX_S)
                for pair in self._cuts(who):
                    world.network.cut(*pair, trio.current_time() + span_s)
                await trio.sleep(span_s)
            case "remove":
                tag, keys = remover.namespace.tag(), b"".join(self._keys())
                await world.calls.ask_all(remover, Remove(0, tag, keys, 0.0))
            case "clear":
                await world.calls.ask_all(remover, Clear(0, remover.namespace.tag(), 0.0))
            case "revoke":
                await self._revoke(world.nodes["n0"])
            case "read":
                await world.calls.get(remover, self.places, rng, 2.0)
            case "set":
                await world.calls.set(remover, self.places, rng, 2.0)
            case "drain":
                node = world.nodes[named[0]]
                await node.drained(lambda: True)
                node.crew.mailboxes.placement.put(SELF, DrainCancelled())
            case "mutual":
                # The answers are under way when each holder counts its page as cold again.
                until = trio.current_time() + rng.choice([0.0, 2 * COLD_S])
                for here, there in (("n0", "n1"), ("n1", "n0")):
                    world.network.clog(world.host_of[here], world.host_of[there], until)

    def _third(self) -> str:
        return next(name for name in ("n3", "n2", "n1") if name != self.taker)

    def _cuts(self, who: str) -> list[Cut]:
        host_of = self.world.host_of
        giver, taker = host_of["n0"], host_of[self.taker]
        match who:
            case "to-taker":
                return [(giver, taker)]
            case "to-giver":
                return [(taker, giver)]
            case "":
                return [(giver, taker), (taker, giver)]
        one = giver if who == "giver" else taker
        others = [host for host in host_of.values() if host != one]
        return [pair for other in others for pair in ((one, other), (other, one))]

    async def _revoke(self, giver: SimNode) -> None:
        """Revoke the giver's certificate: no other node accepts or reads anything of it.

        Each drops what it has from other nodes, as `RevocationSpread` lets it. Then the giver
        ends.
        """
        world = self.world
        for node in world.nodes.values():
            if node is not giver:
                world.network.cut(giver.place.host, node.place.host, np.inf)
                world.network.cut(node.place.host, giver.place.host, np.inf)
                node.perform(Send(node.incarnation, Clear(0, COPIES, VOID_S)))
        await trio.sleep(0.5)
        world.truth.revoked[giver.incarnation] = trio.current_time()
        for _ in range(3):
            await world.calls.get(self._client(self._third()), self.places, self.rng, 2.0)
            await trio.sleep(1.0)
        giver.crash()
        for node in world.nodes.values():
            world.network.restore(giver.place.host, node.place.host)
        world.nursery.start_soon(world.run_node, giver.place.name, 0.1)

    # --- what is left -----------------------------------------------------------------------------

    async def _ends(self) -> None:
        """Wait until all nodes know each other again, and nothing of a spill is left."""
        until = trio.current_time() + ENDS_S
        problem = "nothing was looked at"
        while trio.current_time() < until:
            problem = self._problem() or await self._reading_problem()
            if not problem:
                return
            await trio.sleep(0.25)
        checker, _, detail = problem.partition(": ")
        raise Violation(f"liveness-{checker}", f"{self.fault} at {self.step}: {detail}")

    def _problem(self) -> str:
        nodes = [node for node in self.world.nodes.values() if node.place.alive]
        if len(nodes) < len(self.world.host_of):
            return "start: some process is not up again"
        living = sorted(node.incarnation for node in nodes)
        for node in nodes:
            members = node.crew.membership.view.live()
            if [m.incarnation for m in members if m.state == ALIVE] != living:
                return f"views: {node.place.name} does not know all others"
            placement, name = node.crew.placement, node.place.name
            takings, spilling = placement.takings, placement.spilling
            if takings.begun or takings.waiting:
                return f"placement: an offer to {name} never ended"
            if spilling._offered_to or spilling._rooms or spilling._queue:
                return f"placement: an offer of {name} never ended"
            if node.crew.pool.figures()["pool_reservations"]:
                return f"reservations: those of {name} never ended"
        for name, node in self.world.nodes.items():
            attached = self._client(name).attached
            if attached is None or attached.incarnation != node.incarnation:
                return f"home: the client of {name} has none"
        return ""

    def _holders(self, key: bytes) -> list[SimNode]:
        nodes = self.world.nodes.values()
        return [n for n in nodes if n.place.alive and n.crew.pool.pages.find(key) is not None]

    async def _reading_problem(self) -> str:
        """Let a client read the pages; it must find all that some node holds."""
        client = self._client(self._third())
        held = [bool(self._holders(key)) for key in self._keys()]
        reasons = await self.world.calls.get(client, self.places, self.rng, 2.0)
        for place, reason, is_held in zip(self.places, reasons, held, strict=True):
            key = self.world.library.keys[place].tobytes()
            if reason and is_held and self._holders(key):
                return f"reading: {client.place.name} misses {key.hex()}: {reason}"
        return ""

    async def _check(self) -> None:
        """Fail if pages are lost that no fault may lose."""
        if any(part in self.fault for part in GONE):
            return
        for key in self._keys():
            if not self._holders(key):
                detail = f"{key.hex()} after {self.fault} at {self.step}"
                raise Violation("spilled-lost", detail)


async def _run(world: World, chosen: Sequence[tuple[str, str]]) -> None:
    async with settled(world):
        rng = world.stream("spill")
        for number, (fault, step) in enumerate(chosen):
            places = list(range(number * PAGES, (number + 1) * PAGES))
            await Round(world, rng, fault, step, places).play()
        assert world.calls.counts["faults"] > len(chosen) // 4 * 3, "hardly any step was reached"
