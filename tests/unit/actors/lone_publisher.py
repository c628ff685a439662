"""One publisher, and what it sends."""

from __future__ import annotations

import random

from peercache.actors.effects import Effect, Send, TellDirectory
from peercache.actors.mailboxes import CommitAnswered, PagesCommitted, RingChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher.actor import Publisher
from peercache.model.hash_ring import HashRing
from peercache.model.records import Records, from_bytes
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
from tests.unit.actors.record_cluster import NO_RECORDS, Cluster, key_of, records_of

ME, A, B, C = 5, 11, 12, 13
CLIENT = Origin(99, 7)
SUMMARIES = (StreamSummary, HandedOver)


def ring_of(*members: int, replicas: int = 2) -> HashRing:
    return HashRing(members, virtual_nodes=16, replicas=replicas)


def publisher_in(
    ring: HashRing, *, rate: float = 50_000.0, summary_s: float = 2.0, former_s: float = 0.0
) -> Publisher:
    made = Publisher(
        incarnation=ME,
        republish_rate=rate,
        summary_s=summary_s,
        rng=random.Random(1),
        metrics=Metrics(),
        former_s=former_s,
    )
    heard(made, ME, RingChanged(ring), 0.0)
    return made


def heard(made: Publisher, sender: int, message: object, now: float) -> list[Effect]:
    effects = made.on_message(Origin(sender), message, now)
    made.check()
    return effects


def ticked(made: Publisher, now: float) -> list[Effect]:
    effects = made.on_tick(now)
    made.check()
    assert made.deadline() > now
    return effects


def commit_of(records: Records, *, request: int = 1, timeout_s: float = 1.0) -> PagesCommitted:
    return PagesCommitted(CLIENT, request, 3, b"s", records, NO_RECORDS, timeout_s)


def sent(
    effects: list[Effect], kind: type[Message] | tuple[type[Message], ...]
) -> list[tuple[int, Message]]:
    """Return (target, message) of the messages of a kind, in order."""
    found = []
    for told in effects:
        effect = told
        if isinstance(told, TellDirectory) and isinstance(told.fact, CommitAnswered):
            effect = Send(told.fact.origin, told.fact.committed)
        assert isinstance(effect, Send)
        target = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        if isinstance(effect.message, kind):
            found.append((target, effect.message))
    return found


def answers(effects: list[Effect]) -> list[Committed]:
    return [m for _, m in sent(effects, Committed) if isinstance(m, Committed)]


def puts(effects: list[Effect]) -> dict[int, list[bytes]]:
    """Return the keys put to each owner, in order of sending."""
    told: dict[int, list[bytes]] = {}
    for owner, message in sent(effects, Put):
        assert isinstance(message, Put)
        records = from_bytes(message.records)
        told.setdefault(owner, []).extend(bytes(record["key"]) for record in records)
    return told


def acknowledge(made: Publisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge every put, delete and repair of these effects; return what follows."""
    more: list[Effect] = []
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Put | Delete | Repair):
            assert isinstance(effect.to, int)
            more += heard(made, effect.to, Acknowledged(effect.message.number), now)
    return more


def keys(*names: int) -> list[bytes]:
    return [key_of(name) for name in names]


def owned_by(ring: HashRing, owner: int, names: range) -> list[int]:
    owners = ring.owners(records_of(1, list(names), 2)["key"])
    return [name for name, mine in zip(names, owners.tolist(), strict=True) if owner in mine]


def two_nodes() -> Cluster:
    cluster = Cluster()
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.run(0.1)
    return cluster
