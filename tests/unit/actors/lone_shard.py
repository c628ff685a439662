"""One directory shard, and what the other nodes report to it."""

from __future__ import annotations

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RingChanged
from peercache.actors.origin import Origin
from peercache.model.hash_ring import HashRing
from peercache.model.records import Content, Records
from peercache.observability.metrics import Metrics
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import (
    Delete,
    HandedOver,
    Located,
    Lookup,
    Put,
    StreamSummary,
)
from tests.record_digests import flip
from tests.unit.actors.record_cluster import drops_of, key_of, records_of, view

ME, A, B, C = 5, 11, 12, 13
RING = HashRing([ME, A, B], virtual_nodes=16, replicas=2)


def shard_of(*members: int) -> DirectoryShard:
    shard = DirectoryShard(incarnation=ME, metrics=Metrics())
    take(shard, ME, view(ME, *members))
    return shard


def shard_in_sync() -> DirectoryShard:
    """Return a shard on RING that lacks nothing of A and B, which have no records."""
    shard = shard_of(A, B)
    hear(shard, ME, RingChanged(RING), 0.0)
    for holder in (A, B):
        hear(shard, holder, HandedOver(0, 0, 0, RING.version), 0.0)
    return shard


def hear(shard: DirectoryShard, sender: int, message: object, now: float) -> list[Effect]:
    effects = shard.on_message(Origin(sender), message, now)
    shard.check()
    return effects


def take(shard: DirectoryShard, sender: int, message: object, now: float = 0.0) -> list[Message]:
    """Give a shard a message; return its answers, all of which go back to the sender."""
    answers = []
    for effect in hear(shard, sender, message, now):
        assert isinstance(effect, Send)
        assert effect.to == Origin(sender)
        answers.append(effect.message)
    return answers


def tick(shard: DirectoryShard, until: float) -> list[tuple[int, object]]:
    """Tick in time until then; return what was sent to whom."""
    sent: list[tuple[int, object]] = []
    while shard.deadline() <= until:
        for effect in shard.on_tick(shard.deadline()):
            assert isinstance(effect, Send)
            assert isinstance(effect.to, int)
            sent.append((effect.to, effect.message))
        shard.check()
    return sent


def has_authority(shard: DirectoryShard, now: float) -> bool:
    """Return what readers of the table see, after checking that answers say the same."""
    (answer,) = take(shard, 77, Lookup(1, key_of(9)), now)
    assert isinstance(answer, Located)
    word = shard.table.authority
    assert answer.behind == (word is None)
    return word is not None


def put(number: int, holder: int, names: list[int], generation: int) -> Put:
    return Put(number, records_of(holder, names, generation).tobytes())


def delete(number: int, names: list[int], generations: list[int]) -> Delete:
    return Delete(number, drops_of(names, generations).tobytes())


def summary_of(number: int, *held: Records, ring: bytes = b"") -> StreamSummary | HandedOver:
    content = Content()
    for records in held:
        flip(content, records)
        content.count += len(records)
    stated = (number, content.count, content.digest())
    return HandedOver(*stated, ring) if ring else StreamSummary(*stated)


def names_and_holders(found: Records, names: list[int]) -> list[tuple[int, int]]:
    by_key = {key_of(name): name for name in names}
    return [(by_key[bytes(r["key"])], int(r["holder"])) for r in found]


def refused(shard: DirectoryShard, reason: str) -> float:
    assert shard.metrics is not None
    name, labels = "peercache_records_refused_total", {"reason": reason}
    return shard.metrics.registry.get_sample_value(name, labels) or 0.0
