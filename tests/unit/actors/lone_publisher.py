"""One publisher, what it sends, and what its owners hold if every message arrives."""

from __future__ import annotations

import random

import attrs
import numpy as np

from peercache.actors.effects import Effect, NotifyDirectory, Send
from peercache.actors.mailboxes import CommitAnswered, PagesCommitted, Republish, RingChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher.actor import Publisher
from peercache.model.hash_ring import HashRing
from peercache.model.records import DROP, RECORD_BYTES, Content, Records, from_bytes
from peercache.observability.metrics import Metrics
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Put,
    Repair,
    StreamSummary,
)
from peercache.wire.messages.pool import Committed
from tests.record_digests import flip
from tests.unit.actors.record_cluster import NO_RECORDS, Cluster, cluster_of, key_of, records_of

ME, A, B, C = 5, 11, 12, 13
CLIENT = Origin(99, 7)
SUMMARIES = (StreamSummary, HandedOver)


def ring_of(*members: int, replicas: int = 2) -> HashRing:
    return HashRing(members, virtual_nodes=16, replicas=replicas)


@attrs.define(eq=False)
class LonePublisher:
    """A publisher and its owners, of which each applies what it is sent at once.

    held: packed records by owner and key; numbers: that of the last message to each owner;
    handed_over: the owners that were notified on this ring that they have everything.
    """

    actor: Publisher
    ring: HashRing
    held: dict[int, dict[bytes, bytes]] = attrs.field(factory=dict)
    numbers: dict[int, int] = attrs.field(factory=dict)
    handed_over: set[int] = attrs.field(factory=set)

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        if isinstance(message, RingChanged):
            assert isinstance(message.ring, HashRing)
            self.ring = message.ring
            self.held = {owner: self.held.get(owner, {}) for owner in self.owners()}
            self.handed_over.clear()
        return self._applied(self.actor.on_message(sender, message, now))

    def on_tick(self, now: float) -> list[Effect]:
        return self._applied(self.actor.on_tick(now))

    def deadline(self) -> float:
        return self.actor.deadline()

    def check(self) -> None:
        self.actor.check()

    def owners(self) -> list[int]:
        return [member for member in self.ring.members if member != ME]

    def figure(self, name: str, **labels: str) -> float | None:
        assert self.actor.metrics is not None
        return self.actor.metrics.registry.get_sample_value(f"peercache_{name}", labels)

    def _applied(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.to, int):
                self._apply(effect.to, effect.message)
        return effects

    def _apply(self, owner: int, message: Message) -> None:
        held = self.held[owner]
        if isinstance(message, Delete):
            for drop in np.frombuffer(message.drops, DROP):
                record = held.get(bytes(drop["key"]))
                if record is not None and from_bytes(record)["generation"][0] <= drop["generation"]:
                    del held[bytes(drop["key"])]
        if isinstance(message, Repair):
            for key in [key for key in held if key[0] in message.buckets]:
                del held[key]
        if isinstance(message, (Put, Repair)):
            packed = message.records
            rows = [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]
            held.update((row[:16], row) for row in rows)
        if isinstance(message, HandedOver):
            self.handed_over.add(owner)
        if isinstance(message, (Put, Delete, Repair, *SUMMARIES)):
            self.numbers[owner] = message.number


def publisher_in(
    ring: HashRing, *, rate: float = 50_000.0, summary_s: float = 2.0, former_s: float = 0.0
) -> LonePublisher:
    actor = Publisher(
        incarnation=ME,
        republish_rate=rate,
        summary_s=summary_s,
        rng=random.Random(1),
        metrics=Metrics(),
        former_s=former_s,
    )
    made = LonePublisher(actor, ring)
    take(made, ME, RingChanged(ring), 0.0)
    return made


def take(made: LonePublisher, sender: int, message: object, now: float) -> list[Effect]:
    effects = made.on_message(Origin(sender), message, now)
    made.check()
    return effects


def ticked(made: LonePublisher, now: float) -> list[Effect]:
    effects = made.on_tick(now)
    made.check()
    assert made.deadline() > now
    return effects


def summary_to(made: LonePublisher, owner: int, now: float) -> StreamSummary | HandedOver:
    """Tick; return the summary that an owner is asked about."""
    (summary,) = [message for to, message in sent(ticked(made, now), SUMMARIES) if to == owner]
    assert isinstance(summary, SUMMARIES)
    return summary


def check_books(made: LonePublisher, now: float) -> None:
    """Fail unless each owner is asked about exactly what it was sent and not asked to drop."""
    take(made, ME, Republish(), now)
    asked = dict(sent(ticked(made, now), SUMMARIES))
    assert list(asked) == made.owners()
    for owner, summary in asked.items():
        content, held = Content(), from_bytes(b"".join(made.held[owner].values()))
        flip(content, held)
        assert isinstance(summary, SUMMARIES)
        assert (summary.count, summary.digest) == (len(held), content.digest())


def held_by(made: LonePublisher, owner: int) -> set[bytes]:
    """Return the keys that an owner was sent and not asked to drop."""
    return set(made.held[owner])


def commit_of(records: Records, *, request: int = 1, timeout_s: float = 1.0) -> PagesCommitted:
    return PagesCommitted(CLIENT, request, 3, b"s", records, NO_RECORDS, timeout_s)


def sent(
    effects: list[Effect], kind: type[Message] | tuple[type[Message], ...]
) -> list[tuple[int, Message]]:
    """Return (target, message) of the messages of a kind, in order."""
    found = []
    for reported in effects:
        effect = reported
        if isinstance(reported, NotifyDirectory) and isinstance(reported.fact, CommitAnswered):
            effect = Send(reported.fact.origin, reported.fact.committed)
        assert isinstance(effect, Send)
        target = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        if isinstance(effect.message, kind):
            found.append((target, effect.message))
    return found


def answers(effects: list[Effect]) -> list[Committed]:
    return [m for _, m in sent(effects, Committed) if isinstance(m, Committed)]


def put_records(effects: list[Effect]) -> Records:
    """Return all records that are put, in order of sending."""
    return from_bytes(b"".join(m.records for _, m in sent(effects, Put) if isinstance(m, Put)))


def puts(effects: list[Effect]) -> dict[int, list[bytes]]:
    """Return the keys put to each owner, in order of sending."""
    reported: dict[int, list[bytes]] = {}
    for owner, message in sent(effects, Put):
        assert isinstance(message, Put)
        records = from_bytes(message.records)
        reported.setdefault(owner, []).extend(bytes(record["key"]) for record in records)
    return reported


def acknowledge(made: LonePublisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge every put, delete and repair of these effects; return what follows."""
    more: list[Effect] = []
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Put | Delete | Repair):
            assert isinstance(effect.to, int)
            more += take(made, effect.to, Acknowledged(effect.message.number), now)
    return more


def acknowledged(made: LonePublisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge all, and what follows from it; return what followed."""
    followed: list[Effect] = []
    while effects := acknowledge(made, effects, now):
        followed += effects
    return followed


def keys(*names: int) -> list[bytes]:
    return [key_of(name) for name in names]


def owned_by(ring: HashRing, owner: int, names: range) -> list[int]:
    owners = ring.owners(records_of(1, list(names), 2)["key"])
    return [name for name, mine in zip(names, owners.tolist(), strict=True) if owner in mine]


def two_nodes() -> Cluster:
    cluster = cluster_of(ME, A)
    cluster.run(0.1)
    return cluster
