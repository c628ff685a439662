"""Stored is found: what all owners have acknowledged no owner with authority calls absent.

Follows each commit from the publisher's first look at it to its answer, and looks at every answer
of a shard that has authority. The actors know nothing of it.
"""

from __future__ import annotations

from typing import Any

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send, TellDirectory
from peercache.actors.mailboxes import CommitAnswered, PagesCommitted, RecordsChanged, RingChanged
from peercache.actors.publisher.actor import Publisher
from peercache.model import records
from peercache.model.keys import from_bytes, split_keys
from peercache.wire.messages.directory import Located, Lookup
from sims.memory import Truth
from sims.trace import Violation


def note_heard(actor: Any, message: object, truth: Truth) -> None:
    """Note what an actor is about to hear."""
    match message:
        case PagesCommitted(origin, _, sequence, _, made) if isinstance(actor, Publisher):
            truth.waiting[actor.incarnation, origin.identity, sequence] = made
        case RecordsChanged(_, drops) if isinstance(actor, Publisher):
            for key, generation in zip(
                records.keys_of(drops), drops["generation"].tolist(), strict=True
            ):
                held = truth.known.get(key, {})
                if held.get(actor.incarnation, generation + 1) <= generation:
                    del held[actor.incarnation]
        case RingChanged(ring) if isinstance(actor, DirectoryShard):
            truth.rings[actor.incarnation] = ring


def note_said(actor: Any, effects: list[Effect], truth: Truth) -> None:
    """Note the commits that a publisher answers as known to all owners."""
    if not isinstance(actor, Publisher):
        return
    for effect in effects:
        if not isinstance(effect, TellDirectory) or not isinstance(effect.fact, CommitAnswered):
            continue
        answer = effect.fact.committed
        key = (actor.incarnation, effect.fact.origin.identity, answer.sequence)
        made = truth.waiting.pop(key, None)
        if made is None or answer.published * records.RECORD_BYTES < len(answer.records):
            continue
        table = actor._table
        for name, generation in zip(
            records.keys_of(made), made["generation"].tolist(), strict=True
        ):
            row = table.rows.get(name)
            if row is not None and int(table.records["generation"][row]) == generation:
                truth.known.setdefault(name, {})[actor.incarnation] = generation


def check_absent(
    shard: DirectoryShard, message: object, effects: list[Effect], truth: Truth, living: set[int]
) -> None:
    """What a shard with authority does not know is held by no living node that has published it."""
    ring = truth.rings.get(shard.incarnation)
    if not isinstance(message, Lookup) or ring is None or shard.authority.ring != ring.version:
        return
    told: set[bytes] = set()
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Located):
            told.update(records.keys_of(records.from_bytes(effect.message.records)))
    for key in split_keys(message.keys):
        holders = truth.known.get(key)
        if not holders or key in told:
            continue
        if shard.incarnation not in ring.owners(from_bytes(key))[0].tolist():
            continue
        for holder in holders:
            # A node that the holder's view has dead is no owner, and may not know it yet. The
            # holder's own shard hears of a commit just before its client does.
            seen = truth.rings.get(holder)
            is_owner = seen is not None and shard.incarnation in seen.members
            if holder == shard.incarnation or not is_owner:
                continue
            if holder in living and holder in ring.members:
                detail = f"{key.hex()} of {holder:016x} is unknown to {shard.incarnation:016x}"
                raise Violation("stored-found", detail)
