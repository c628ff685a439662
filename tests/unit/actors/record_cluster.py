"""A cluster in memory: dictionaries for pools, real rings, shards and publishers, a bad network.

Every message goes through the codec; what is in flight is in a list, and the test chooses what
arrives, what arrives twice, and what never does.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPublisher,
    NotifyRing,
    Send,
    StateActor,
)
from peercache.actors.mailboxes import PagesCommitted, RecordsChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher.actor import Publisher
from peercache.actors.ring.actor import RingActor
from peercache.model.keys import KEY_BYTES
from peercache.model.member import ALIVE, DEAD, Member
from peercache.model.records import DROP, RECORD, RECORD_BYTES, RESIDENT, Records, from_bytes
from peercache.observability.metrics import Metrics
from peercache.wire import codec
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Located,
    Lookup,
    Put,
    Repair,
    ReportStale,
    RequestFreshSummary,
    RequestSummary,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)
from peercache.wire.messages.pool import Committed

TO_DIRECTORY = (Put, Delete, Repair, StreamSummary, HandedOver, Lookup, ReportStale)
TO_PUBLISHER = (Acknowledged, SummaryMatches, SummaryDiffers, RequestSummary, RequestFreshSummary)
NO_DROPS = np.zeros(0, DROP)
NO_RECORDS = np.zeros(0, RECORD)


def key_of(name: int) -> bytes:
    """Return a page key that looks random and depends on nothing but its name."""
    return hashlib.blake2b(name.to_bytes(8, "little"), digest_size=16).digest()


def records_of(holder: int, names: Sequence[int], generations: Sequence[int] | int) -> Records:
    """Return records of a holder; one number stands for a run of generations from there."""
    made = np.zeros(len(names), RECORD)
    made["key"] = np.frombuffer(b"".join(key_of(name) for name in names), "V16")
    made["holder"] = holder
    if isinstance(generations, int):
        generations = [generations + 2 * at for at in range(len(names))]
    made["generation"] = generations
    made["length"] = 4096
    made["flags"] = RESIDENT
    return made


def distinguished(holder: int, names: Sequence[int], generations: Sequence[int]) -> Records:
    """Return records of which no field but key and holder stays when a page is reported again."""
    made = records_of(holder, names, generations)
    for field, factor in (("offset", 4096), ("length", 64), ("checksum", 2**40)):
        made[field] = made["generation"] * factor
    return made


def drops_of(names: Sequence[int], generations: Sequence[int]) -> Records:
    """Return drops."""
    made = np.zeros(len(names), DROP)
    made["key"] = np.frombuffer(b"".join(key_of(name) for name in names), "V16")
    made["generation"] = generations
    return made


def member(incarnation: int, state: int = ALIVE, counter: int = 0) -> Member:
    """Return an entry of a view."""
    return Member(incarnation, counter, state, 255, "host", "h:1", "h:2", "boot", "/segment")


def view(*members: int | Member) -> ViewChanged:
    """Return a view of these members; a number is one that is alive."""
    return ViewChanged(tuple(m if isinstance(m, Member) else member(m) for m in members))


def located(shard: DirectoryShard, names: Sequence[int], asker: int = 10**6) -> Records:
    """Ask a shard for pages by name."""
    keys = b"".join(key_of(name) for name in names)
    (effect,) = shard.on_message(Origin(asker), Lookup(1, keys), 0.0)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Located)
    return from_bytes(effect.message.records)


def holdings_of(shard: DirectoryShard) -> dict[int, Any]:
    """Return the books of a shard by holder, those included that are not served."""
    return shard._held


def held_of(shard: DirectoryShard, holder: int) -> dict[bytes, bytes]:
    """Return the packed records that a shard keeps of a holder, by key."""
    held = holdings_of(shard).get(holder)
    packed = b"" if held is None else held.records()
    rows = [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]
    return {row[:KEY_BYTES]: row for row in rows}


@attrs.define(eq=False)
class Node:
    """One node: its pool is a dictionary of packed records."""

    incarnation: int
    ring: RingActor
    shard: DirectoryShard
    publisher: Publisher
    metrics: Metrics
    pool: dict[bytes, bytes] = attrs.field(factory=dict)
    generation: int = 2


@attrs.define(eq=False)
class Cluster:
    """Some nodes and what is in flight between them."""

    replicas: int | str = 2
    summary_s: float = 2.0
    republish_rate: float = 50_000.0
    former_s: float = 0.0
    now: float = 0.0
    nodes: dict[int, Node] = attrs.field(factory=dict)
    flying: list[Envelope] = attrs.field(factory=list)
    answers: list[tuple[int, Committed]] = attrs.field(factory=list)
    requests: int = 0
    dead: list[int] = attrs.field(factory=list)

    def add(self, incarnation: int) -> Node:
        """Start a node; it is in no view yet."""
        metrics = Metrics()
        node = Node(
            incarnation,
            RingActor(virtual_nodes=16, replicas=self.replicas),
            DirectoryShard(incarnation=incarnation, metrics=metrics),
            Publisher(
                incarnation=incarnation,
                republish_rate=self.republish_rate,
                summary_s=self.summary_s,
                rng=random.Random(incarnation),
                metrics=metrics,
                former_s=self.former_s,
            ),
            metrics,
        )
        self.nodes[incarnation] = node
        return node

    def kill(self, incarnation: int) -> None:
        """End a node without a goodbye."""
        del self.nodes[incarnation]
        self.dead.append(incarnation)

    def truth(self) -> ViewChanged:
        """Return the view in which exactly the running nodes live."""
        return view(*sorted(self.nodes), *[member(dead, DEAD) for dead in self.dead])

    def show(self, incarnation: int, shown: ViewChanged) -> None:
        """Give a node a view, as its membership would."""
        for actor in ("ring", "directory"):
            self.notify(incarnation, actor, shown)

    def show_all(self) -> None:
        """Give every node the true view."""
        for incarnation in list(self.nodes):
            self.show(incarnation, self.truth())

    def commit(self, incarnation: int, names: Sequence[int], timeout_s: float = 1.0) -> int:
        """Commit pages at a node, and wait for their publication; return the request."""
        node = self.nodes[incarnation]
        made = records_of(incarnation, names, node.generation)
        node.generation += 2 * len(names)
        node.pool.update({bytes(r["key"]): r.tobytes() for r in made})
        self.requests += 1
        committed = PagesCommitted(
            Origin(99), self.requests, 1, bytes(len(names)), made, NO_RECORDS, timeout_s
        )
        self.notify(incarnation, "directory", RecordsChanged(made, NO_DROPS))
        self.notify(incarnation, "publisher", committed)
        return self.requests

    def drop(self, incarnation: int, names: Sequence[int]) -> None:
        """Drop pages that a node holds."""
        node = self.nodes[incarnation]
        held = [name for name in names if key_of(name) in node.pool]
        generations = [
            int(from_bytes(node.pool.pop(key_of(name)))["generation"][0]) for name in held
        ]
        changed = RecordsChanged(NO_RECORDS, drops_of(held, generations))
        self.notify(incarnation, "directory", changed)
        self.notify(incarnation, "publisher", changed)

    def notify(self, incarnation: int, actor: str, fact: Any) -> None:
        """Hand a fact to an actor of a node, and do what it emits."""
        node = self.nodes[incarnation]
        actors: dict[str, StateActor[Any]] = {
            "ring": node.ring,
            "directory": node.shard,
            "publisher": node.publisher,
        }
        self._perform(node, actors[actor].on_message(Origin(incarnation), fact, self.now))

    def deliver(self, index: int = 0, *, twice: bool = False) -> None:
        """Let one message arrive, and perhaps once more later."""
        envelope = self.flying[index] if twice else self.flying.pop(index)
        self.arrive(envelope)

    def arrive(self, envelope: Envelope) -> None:
        """Hand a message to the actor of its target, if that still runs."""
        node = self.nodes.get(envelope.target)
        if node is None:
            return
        origin = Origin(envelope.sender)
        if isinstance(envelope.message, TO_DIRECTORY):
            self._perform(node, node.shard.on_message(origin, envelope.message, self.now))
        else:
            assert isinstance(envelope.message, TO_PUBLISHER)
            self._perform(node, node.publisher.on_message(origin, envelope.message, self.now))

    def tick(self) -> None:
        """Tick whatever is due now."""
        for node in list(self.nodes.values()):
            for actor in (node.shard, node.publisher):
                if actor.deadline() <= self.now:
                    self._perform(node, actor.on_tick(self.now))
                    assert actor.deadline() > self.now, "the clock would are paused"

    def run(self, seconds: float) -> list[Message]:
        """Let time pass on a good network; return what was sent in it."""
        seen: list[Message] = []
        until = self.now + seconds
        while True:
            while self.flying:
                seen.append(self.flying[0].message)
                self.deliver()
            deadlines = [a.deadline() for n in self.nodes.values() for a in (n.shard, n.publisher)]
            soonest = max(self.now, min(deadlines, default=math.inf))
            if soonest > until:
                self.now = until
                return seen
            self.now = soonest
            self.tick()

    def expected(self, owner: int, holder: int) -> dict[bytes, bytes]:
        """Return what an owner should keep of a holder, the slow way: key by key."""
        node = self.nodes[holder]
        if owner == holder:
            return dict(node.pool)
        ring = node.ring.current
        return {
            key: record
            for key, record in node.pool.items()
            if owner in ring.owners(np.frombuffer(key, "V16"))[0].tolist()
        }

    def assert_whole(self) -> None:
        """Assert that every shard keeps exactly what the running holders have for it."""
        for owner, node in self.nodes.items():
            for holder in self.nodes:
                assert held_of(node.shard, holder) == self.expected(owner, holder)
            assert set(holdings_of(node.shard)) <= set(self.nodes)

    def _perform(self, node: Node, effects: list[Effect]) -> None:
        node.shard.check()
        node.publisher.check()
        for effect in effects:
            match effect:
                case NotifyRing(fact):
                    self.notify(node.incarnation, "ring", fact)
                case NotifyDirectory(fact):
                    self.notify(node.incarnation, "directory", fact)
                case NotifyPublisher(fact):
                    self.notify(node.incarnation, "publisher", fact)
                case _:
                    self._send(node, effect)

    def _send(self, node: Node, effect: Effect) -> None:
        assert isinstance(effect, Send)
        target = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        if isinstance(effect.message, Committed):
            self.answers.append((target, effect.message))
            return
        envelope = Envelope(node.incarnation, target, effect.message)
        self.flying.append(codec.decode(codec.encode(envelope, cluster="c"), cluster="c"))


def cluster_of(*incarnations: int, **options: Any) -> Cluster:
    """Return a cluster in which every node knows all."""
    cluster = Cluster(**options)
    for incarnation in incarnations:
        cluster.add(incarnation)
    cluster.show_all()
    return cluster
