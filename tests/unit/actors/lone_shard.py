"""One directory shard, and what the other nodes tell it."""

from __future__ import annotations

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Send
from peercache.actors.origin import Origin
from peercache.model.records import Content, Records
from peercache.observability.metrics import Metrics
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Delete, Put, StreamSummary
from tests.record_digests import flip
from tests.unit.actors.record_cluster import drops_of, key_of, records_of, view

ME, A, B, C = 5, 11, 12, 13


def shard_of(*members: int) -> DirectoryShard:
    shard = DirectoryShard(incarnation=ME, metrics=Metrics())
    heard(shard, ME, view(ME, *members))
    return shard


def heard(shard: DirectoryShard, sender: int, message: object, now: float = 0.0) -> list[Message]:
    """Give a shard a message; return its answers, all of which go back to the sender."""
    effects = shard.on_message(Origin(sender), message, now)
    shard.check()
    answers = []
    for effect in effects:
        assert isinstance(effect, Send)
        assert effect.to == Origin(sender)
        answers.append(effect.message)
    return answers


def put(number: int, holder: int, names: list[int], generation: int) -> Put:
    return Put(number, records_of(holder, names, generation).tobytes())


def delete(number: int, names: list[int], generations: list[int]) -> Delete:
    return Delete(number, drops_of(names, generations).tobytes())


def summary_of(number: int, *held: Records) -> StreamSummary:
    content = Content()
    for records in held:
        flip(content, records)
        content.count += len(records)
    return StreamSummary(number, content.count, content.digest())


def names_and_holders(found: Records, names: list[int]) -> list[tuple[int, int]]:
    by_key = {key_of(name): name for name in names}
    return [(by_key[bytes(r["key"])], int(r["holder"])) for r in found]


def refused(shard: DirectoryShard, reason: str) -> float:
    assert shard.metrics is not None
    value: float = shard.metrics.records_refused.labels(reason)._value.get()
    return value
