"""A start: a thousand nodes and all their engines start within a second. When do all know all?

The actors that decide are real: membership, ring, the use of links, and the ties of the clients.
Processes, connections and the wire are modelled: a process has one loop that is busy according to
`Costs`, and a handshake takes time on the cores of both hosts. Messages are not encoded; their
bytes are counted.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

import attrs
import numpy as np

from peercache.actors.effects import BuildRing, Effect, NotifyRing, Send, SendTo
from peercache.actors.mailboxes import PeerAnswered, RingBuilt
from peercache.actors.membership.actor import Membership
from peercache.actors.membership.gossip import bytes_of
from peercache.actors.origin import Origin
from peercache.actors.ring.actor import RingActor
from peercache.config.settings import Config
from peercache.model.hash_ring import HashRing
from peercache.model.ids import incarnation_of, new_nonce
from peercache.model.keys import KEY
from peercache.model.member import ALIVE, Member
from peercache.net.breaker import Breakers
from peercache.node.switchboard import LINKS_MAX, LinkUse
from peercache.paths.home_tie import BEAT_S, LOST_BEAT_S, Tie
from peercache.paths.read import Touches
from peercache.paths.steps import Ask, Greet, Post
from peercache.wire.envelope import WIRE_VERSION
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    Join,
    ReportViewChanges,
    ShareView,
)
from peercache.wire.messages.session import Welcome
from sims.dying import Death, die

HEADS = 3
CLUSTER = "start"
HOUSEKEEPING_S = 1.0
LOOK_S = 0.1
"""How often all views are checked: the precision of the times."""

HEADER_BYTES = 40
WATCHED_S = 20.0
"""How long a started cluster is watched: its views must not change, and it must be quiet."""

RINGS_KEPT = 8
"""Computed rings that are kept: their time is modelled, and most nodes build the same one."""

REDIAL_S = 0.1
"""How soon a client redials a home node that does not listen yet, like nng."""


@attrs.frozen
class Costs:
    """Costs of operations, in seconds.

    `entry`, `encoded` and `ring` are those of one core of the machine that this was made on; the
    others are rounded figures of what was measured there.

    message:   receive, decode, route and handle a small message, or make and send one.
    entry:     the same for each entry of a view; encoded: to encode one.
    greeting:  admit a connection and answer its Hello, on the loop.
    handshake: of TLS, on one core of each host, in addition to the loops.
    announced: for each member of a view that ring, directory and removal are notified of.
    ring:      for each member of a ring, in a thread.
    """

    message: float = 100e-6
    entry: float = 12e-6
    encoded: float = 1.5e-6
    greeting: float = 300e-6
    handshake: float = 3.5e-3
    announced: float = 0.5e-6
    ring: float = 35e-6
    handshake_cores: int = 4
    latency: float = 0.5e-3


@attrs.frozen
class Report:
    """The cost of a start. Times are virtual seconds from the first node's start.

    admitted_s, ringed_s, served_s: until every node had every member alive, every node the ring of
        all, every client the view and the ring of all.
    messages, kilobytes: sent by a node until then: the median, and the busiest.
    quiet_messages: a second and node afterwards: the median, and the busiest.
    behind_s: how far the loop of a node was behind at worst.
    deaths: the costs of deaths afterwards.
    links: those of a node at a time, the median and the maximum; links_quiet: the median at the
           end.
    """

    nodes: int
    clients: int
    admitted_s: float
    ringed_s: float
    served_s: float
    messages: tuple[int, int]
    kilobytes: tuple[int, int]
    quiet_messages: tuple[float, float]
    quiet_kilobytes: tuple[float, float]
    behind_s: float
    links: tuple[int, int]
    links_quiet: int
    deaths: tuple[Death, ...]
    events: int
    wall_s: float

    def lines(self) -> list[str]:
        """Return readable lines."""
        return (
            f"""\
{self.nodes} nodes, {self.clients} clients; {self.events} events in {self.wall_s:.0f} s
every node has every member after {self.admitted_s:.1f} s, and the ring of all after \
{self.ringed_s:.1f} s
every client has the view and the ring of all after {self.served_s:.1f} s
until then a node sends {self.messages[0]} messages, {self.kilobytes[0]} KB; \
the busiest {self.messages[1]}, {self.kilobytes[1]} KB
then {self.quiet_messages[0]:.1f} messages, {self.quiet_kilobytes[0]:.1f} KB a second; \
the busiest {self.quiet_messages[1]:.1f}, {self.quiet_kilobytes[1]:.1f} KB
a loop was behind by {self.behind_s:.3f} s at most
links of a node: {self.links[1]} at most, {self.links_quiet} at the end""".splitlines()
            + [line for death in self.deaths for line in death.lines()]
        )


class _Node:
    """One node: its actors, its links, and how busy its loop and its host are."""

    def __init__(self, start: Start, number: int, life: int = 0) -> None:
        self.start = start
        self.number, self.life = number, life
        self.rng = random.Random(f"{start.seed}/node/{number}" + (f"/{life}" if life else ""))
        nonce = new_nonce(self.rng)
        self.incarnation = incarnation_of(CLUSTER, "", nonce)
        self.address = f"10.0.{number >> 8}.{number & 255}:31998"
        heads = start.heads
        self.me = Member(
            self.incarnation, 1, ALIVE, heads.index(self.address) if number < HEADS else 255,
            f"host-{number:05d}", self.address, f"10.0.{number >> 8}.{number & 255}:31999",
            f"boot-{number:032d}", f"/segments/peercache-{self.incarnation:016x}", nonce=nonce,
        )  # fmt: skip
        self.bytes_of_me = bytes_of(self.me)
        config = start.config
        self.membership = Membership(
            me=self.me,
            discovery_addr=heads,
            max_masters=config.max_masters,
            heartbeat_s=config.heartbeat_s,
            suspect_s=config.suspect_s,
            dead_s=config.dead_s,
            rng=self.rng,
        )
        self.ring = RingActor(
            virtual_nodes=config.virtual_nodes,
            replicas=config.directory_replicas,
            tokens_at_once_max=51 * config.virtual_nodes,
        )
        self.links = LinkUse(links_max=LINKS_MAX)
        self.ready: dict[str, float] = {}
        self.is_up = False
        self.loop_free_at = 0.0
        self.hands_free_at = 0.0
        self.behind_s = 0.0
        self.links_most = 0
        self.sent = self.sent_bytes = 0
        self.wakes_at = -1.0

    def up(self) -> None:
        self.is_up = True
        self.perform(self.membership.start(self.start.now))
        self.wake()
        self.start.at(self.start.now + HOUSEKEEPING_S, self.keep_house)

    def busy(self, cost_s: float) -> float:
        """Occupy the loop; return the time at which it is done."""
        now = self.start.now
        begun = max(now, self.loop_free_at)
        self.behind_s = max(self.behind_s, begun - now)
        self.loop_free_at = begun + cost_s
        return self.loop_free_at

    def shakes_hands(self) -> float:
        """Occupy the cores of the host, not the loop; return the time at which that is done."""
        costs = self.start.costs
        begun = max(self.start.now, self.hands_free_at)
        self.hands_free_at = begun + costs.handshake / costs.handshake_cores
        return begun + costs.handshake

    def receive(self, sender: Origin, message: Any) -> None:
        """Receive a message: handle it when the loop reaches it."""
        if not self.is_up:
            return
        entries = len(message.view) if isinstance(message, ShareView) else 0
        costs = self.start.costs

        def handle() -> None:
            if not self.is_up:
                return
            self.perform(self.membership.on_message(sender, message, self.start.now))
            self.membership.check()
            self.wake()

        self.start.at(self.busy(costs.message + entries * costs.entry), handle)

    def wake(self) -> None:
        when = self.membership.deadline()
        if when != self.wakes_at:
            self.wakes_at = when
            self.start.at(max(when, self.start.now), lambda: self.tick(when))

    def tick(self, when: float) -> None:
        if self.wakes_at == when and self.is_up:
            self.wakes_at = -1.0
            self.perform(self.membership.on_tick(self.start.now))
            self.wake()

    def perform(self, effects: list[Effect]) -> None:
        costs = self.start.costs
        for effect in effects:
            if isinstance(effect, NotifyRing):
                members = getattr(effect.fact, "members", ())
                self.busy(len(members) * costs.announced)
                self.perform(self.ring.on_message(Origin(0), effect.fact, self.start.now))
                self.ring.check()
            elif isinstance(effect, BuildRing):
                done = self.start.now + len(effect.members) * costs.ring
                self.start.at(done, lambda build=effect: self.ring_built(build))  # type: ignore[misc]
            elif isinstance(effect, SendTo):
                self.send_to(effect.address, effect.message)
            elif isinstance(effect, Send):
                if isinstance(effect.to, Origin) and effect.to.pipe:
                    self.count(effect.message)
                    self.start.answer(self, effect.to, effect.message)
                    continue
                to = effect.to.identity if isinstance(effect.to, Origin) else effect.to
                member = self.membership.member(to)
                if member is not None:
                    self.send_to(member.control, effect.message, to)

    def ring_built(self, build: BuildRing) -> None:
        if self.is_up:
            built = RingBuilt(self.start.ring_of(build))
            self.perform(self.ring.on_message(Origin(0), built, self.start.now))

    def count(self, message: Any) -> None:
        entries = 0
        if isinstance(message, (ShareView, ReportViewChanges)):
            entries = len(message.view)
            size = sum([self.start.size_of(member) for member in message.view])
            size += 40 + 9 * len(message.gone) if isinstance(message, ReportViewChanges) else 0
        elif isinstance(message, (Heartbeat, Join)):
            size = self.bytes_of_me
        else:
            size = len(message.buckets) if isinstance(message, CompareView) else 16
        self.sent += 1
        self.sent_bytes += size + HEADER_BYTES
        self.start.kinds[type(message).__name__] += 1
        self.busy(self.start.costs.message / 4 + entries * self.start.costs.encoded)

    def send_to(self, address: str, message: Any, to: int = 0) -> None:
        """Send over the link to an address; dial if there is no link. to: the incarnation meant."""
        self.count(message)
        self.links.used(address, self.start.now)
        self.links_most = max(self.links_most, len(self.links))
        start, costs = self.start, self.start.costs
        target = start.by_address.get(address)
        is_new = address not in self.ready
        if is_new:
            if target is None or not target.is_up:
                self.links.ended(address)
                return  # Refused: messages that waited for the link are dropped with it.
            self.ready[address] = max(self.shakes_hands(), target.shakes_hands()) + costs.latency
        at = max(self.ready[address], start.now) + costs.latency
        sender = Origin(self.incarnation)
        if is_new or isinstance(message, Join) or self.start.is_dial(message):
            start.at(at, lambda: start.greet(self, address))
        start.at(at, lambda: start.deliver(address, to, sender, message))

    def drop_link(self, address: str) -> None:
        """Notice that the process at an address has ended."""
        if self.ready.pop(address, None) is not None:
            self.links.ended(address)

    def keep_house(self) -> None:
        if not self.is_up:
            return
        kept = {*self.start.heads, *self.membership.dialled()}
        for address in self.links.surplus(self.start.now, kept=kept):
            self.links.ended(address)
            self.ready.pop(address, None)
        self.start.at(self.start.now + HOUSEKEEPING_S, self.keep_house)


class _LaterRing(HashRing):
    """A ring that is computed when a key is looked up: most rings of a start are replaced before.

    The version is the simulation's own: a node compares it with those of its other rings.
    """

    def __init__(self, build: BuildRing, hosts: tuple[str, ...]) -> None:
        self.members, self.hosts = build.members, hosts
        self.version = hash((build.members, hosts)).to_bytes(8, "little", signed=True)
        self._build = build.build

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__ = {**vars(self._build()), **self.__dict__}
        return self.__dict__[name]


class _Client:
    """One engine's client: the tie to its home node, and its requests."""

    def __init__(self, start: Start, home: _Node, number: int) -> None:
        self.start = start
        self.home = home
        self.pipe = 1 + number
        self.tie: Tie[object] = Tie(
            url="home",
            config=start.config,
            boot_id="boot",
            breakers=Breakers(),
            touches=Touches(),
            report=None,
            clock=lambda: start.now,
            open_memory=lambda _: object(),
            on_attached=lambda *_: None,
            on_rejected=lambda _: None,
            on_view=lambda *_: None,
        )
        self.waiting = itertools.count()
        self.expected = -1
        self.then: Callable[[Any], None] = lambda _: None

    def open(self) -> None:
        """As `client.home.Home.open`: attach, then ask until it has a view."""
        self.run(self.tie.attach(self.start.now + 5.0), self.attached)

    def attached(self, is_attached: object) -> None:
        step_s = 0.0 if is_attached else LOST_BEAT_S / 5
        self.start.at(self.start.now + step_s, self.first_view if is_attached else self.open)

    def first_view(self) -> None:
        self.run(self.tie.ask_view(), lambda _: self.beat() if self.tie.cluster.members else
                 self.start.at(self.start.now + LOST_BEAT_S / 5, self.first_view))  # fmt: skip

    def beat(self) -> None:
        def again(is_well: object) -> None:
            self.start.at(self.start.now + (BEAT_S if is_well else LOST_BEAT_S), self.beat)

        self.run(self.tie.beat(), again)

    def run(self, path: Generator[Any, Any, Any], done: Callable[[Any], None]) -> None:
        """Perform the steps of a path, each after the answer of the one before."""

        def go(answer: Any) -> None:
            try:
                step = path.send(answer)
            except StopIteration as ended:
                done(ended.value)
                return
            self.perform(step, go)

        go(None)

    def perform(self, step: Any, go: Callable[[Any], None]) -> None:
        start, costs = self.start, self.start.costs
        if isinstance(step, Post):
            self.home.busy(costs.message * len(step.messages))
            start.at(start.now, lambda: go(None))
            return
        number = self.expected = next(self.waiting)

        def answered(answer: Any) -> None:
            if self.expected == number:
                self.expected = -1
                go(answer)

        start.at(step.until, lambda: answered((None,) if isinstance(step, Ask) else None))
        if isinstance(step, Greet):
            self.greet(step.until, answered)
            return
        assert isinstance(step, Ask)
        ((peer, message),) = step.questions
        self.then = lambda answer: answered((answer,))
        node = start.by_incarnation[peer]
        start.at(
            start.now + costs.latency * (node is not self.home),
            lambda: node.receive(Origin(start.client_id(self), self.pipe), message),
        )

    def greet(self, until: float, answered: Callable[[Any], None]) -> None:
        """Send Hello to the home node, as soon as it listens."""
        start = self.start
        if self.home.is_up:
            welcome = Welcome(0, WIRE_VERSION, self.home.membership.me, 0)
            start.at(self.home.busy(start.costs.greeting), lambda: answered(welcome))
        elif start.now < until:
            start.at(start.now + REDIAL_S, lambda: self.greet(until, answered))


class Start:
    """The simulation: virtual time, and the nodes by address."""

    def __init__(
        self,
        *,
        nodes: int,
        ranks: int,
        seed: int,
        within_s: float = 1.0,
        costs: Costs | None = None,
    ) -> None:
        """Start `nodes` nodes with `ranks` clients each, spread evenly over `within_s`."""
        self.seed = seed
        self.costs = costs or Costs()
        self.now = 0.0
        self.heads = tuple(f"10.0.0.{number}:31998" for number in range(HEADS))
        # One token per node: the rings are correct, and their time is modelled.
        self.config = Config(cluster=CLUSTER, discovery_addr=self.heads, virtual_nodes=1)
        self.kinds: Counter[str] = Counter()
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sizes: dict[int, int] = {}
        self._rings: dict[tuple[int, ...], HashRing] = {}
        self.nodes = [_Node(self, number) for number in range(nodes)]
        self.by_address = {node.address: node for node in self.nodes}
        self.by_incarnation: dict[int, _Node] = {node.incarnation: node for node in self.nodes}
        self.clients = [
            _Client(self, node, at)
            for at, node in enumerate(n for n in self.nodes for _ in range(ranks))
        ]
        rng = random.Random(f"{seed}/start")
        for node in self.nodes:
            self.at(rng.uniform(0.0, within_s), node.up)
        for client in self.clients:
            self.at(rng.uniform(0.0, within_s), client.open)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heappush(self._due, (when, next(self._order), act))

    def run_until(self, when: float) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= when:
            self.now, _, act = heappop(self._due)
            self.events += 1
            act()
        self.now = when

    def ring_of(self, build: BuildRing) -> HashRing:
        """Return a ring; nodes that have the same view build the same one."""
        ring = self._rings.pop(build.members, None)
        if ring is None:
            hosts = tuple(self.by_incarnation[m].me.boot_id for m in build.members)
            ring = _LaterRing(build, hosts)
        self._rings[build.members] = ring
        if len(self._rings) > RINGS_KEPT:
            del self._rings[next(iter(self._rings))]
        return ring

    def deliver(self, address: str, to: int, sender: Origin, message: Any) -> None:
        """Hand a message to the process at an address, unless it is for an earlier one there."""
        node = self.by_address[address]
        if not to or to == node.incarnation:
            node.receive(sender, message)

    def size_of(self, member: Member) -> int:
        """Return how many bytes an entry takes."""
        size = self._sizes.get(member.incarnation)
        if size is None:
            size = self._sizes[member.incarnation] = bytes_of(member)
        return size

    def is_dial(self, message: Any) -> bool:
        """Return whether a message is the one that is sent to a candidate, with a Hello."""
        return isinstance(message, ShareView) and len(message.view) == 1

    def greet(self, dialler: _Node, address: str) -> None:
        """Send Hello at an address; the Welcome shows the dialler which member is there."""
        node = self.by_address[address]
        if not node.is_up:
            return

        def welcome() -> None:
            fact = PeerAnswered(address, node.membership.me)
            self.at(self.now + self.costs.latency, lambda: dialler.receive(Origin(0), fact))

        self.at(node.busy(self.costs.greeting), welcome)

    def client_id(self, client: _Client) -> int:
        """Return the identity of a client."""
        return client.pipe + 2**63

    def answer(self, node: _Node, to: Origin, message: Any) -> None:
        """Carry an answer of a node back to a client."""
        client = self.clients[to.pipe - 1]
        self.at(
            self.now + self.costs.latency * (node is not client.home), lambda: client.then(message)
        )

    def play(self, *, at_most_s: float, deaths: bool = False) -> Report:
        """Run until all know all, and then WATCHED_S; raise AssertionError if that takes too long.

        deaths: then let a node die, and a master.
        """
        began = time.monotonic()
        # A million events create no cycles, and every collection would scan all of them.
        gc.freeze()
        gc.disable()
        try:
            return self._play(began, at_most_s, deaths=deaths)
        finally:
            gc.enable()
            gc.unfreeze()

    def _play(self, began: float, at_most_s: float, *, deaths: bool) -> Report:
        everyone = {node.incarnation for node in self.nodes}
        count = len(everyone)
        members = tuple(sorted(everyone))
        admitted_s = ringed_s = served_s = -1.0
        slow, unringed, blind = deque(self.nodes), deque(self.nodes), deque(self.clients)
        while slow or unringed or blind:
            self.run_until(self.now + LOOK_S)
            _drop(slow, lambda node: len(node.membership.view.live()) == count)
            _drop(unringed, lambda node: node.ring.current.members == members)
            _drop(blind, lambda client: client.tie.cluster.ring.members == members)
            admitted_s = self.now if admitted_s < 0 and not slow else admitted_s
            ringed_s = self.now if ringed_s < 0 and not unringed else ringed_s
            served_s = self.now if served_s < 0 and not blind else served_s
            assert self.now < at_most_s, (
                f"after {self.now:.1f} s {len(slow)} nodes lack members, {len(unringed)} a ring, "
                f"{len(blind)} clients the view"
            )
        sent = [(node.sent, node.sent_bytes) for node in self.nodes]
        self.run_until(self.now + WATCHED_S)
        self._check_all_know_all(members)
        quiet = [(n.sent - s, n.sent_bytes - b) for n, (s, b) in zip(self.nodes, sent, strict=True)]
        links_quiet = _spread([len(node.links) for node in self.nodes])[0]
        victims = (("a node", -1), ("a master", 0)) if deaths else ()
        dead = tuple([self._die(what, at) for what, at in victims])
        return Report(
            nodes=count,
            clients=len(self.clients),
            admitted_s=admitted_s,
            ringed_s=ringed_s,
            served_s=served_s,
            messages=_spread([s for s, _ in sent]),
            kilobytes=_spread([b // 1000 for _, b in sent]),
            quiet_messages=_spread([s / WATCHED_S for s, _ in quiet]),
            quiet_kilobytes=_spread([b / 1000 / WATCHED_S for _, b in quiet]),
            behind_s=max(node.behind_s for node in self.nodes),
            links=_spread([node.links_most for node in self.nodes]),
            links_quiet=links_quiet,
            deaths=dead,
            events=self.events,
            wall_s=time.monotonic() - began,
        )

    def _die(self, what: str, at: int) -> Death:
        return die(
            what,
            self.nodes[at],
            nodes=self.nodes,
            clients=self.clients,
            now=lambda: self.now,
            run_until=self.run_until,
        )

    def _check_all_know_all(self, members: tuple[int, ...]) -> None:
        """Every view is the same, all of it alive, and every client finds the same owners."""
        keys = np.frombuffer(random.Random(self.seed).randbytes(16 * 64), KEY)
        digests = {node.membership.view.digest() for node in self.nodes}
        assert len(digests) == 1, f"{len(digests)} different views"
        for node in self.nodes:
            view = node.membership.view.members()
            assert [m.incarnation for m in view] == list(members), "ended or missing members"
            assert all(member.state == ALIVE for member in view), "suspects"
        owners = {client.tie.cluster.ring.owners(keys).tobytes() for client in self.clients}
        assert len(owners) <= 1, "clients look up at different owners"
        for client in self.clients:
            assert client.tie.attached is not None, "a client without a home"


def _drop(waiting: deque[Any], is_done: Callable[[Any], bool]) -> None:
    """Remove finished items from the front, so that each call is cheap."""
    while waiting and is_done(waiting[0]):
        waiting.popleft()


def _spread(figures: list[Any]) -> tuple[Any, Any]:
    figures = sorted(figures)
    return figures[len(figures) // 2], figures[-1]
