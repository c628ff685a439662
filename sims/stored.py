"""Stored pages are found: an owner must not report a page as absent that it knows or must know to
lack.

Tracks each commit from the publisher to its answer, and checks what a shard or its table reports as
certainly absent. A shard with authority must never lack three things:

    records that all owners have acknowledged; records of a set that returned while the shard's
    process was paused; records that a holder has sent to it in an earlier message than one that has
    arrived since.

The actors know nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, NotifyDirectory, Send
from peercache.actors.mailboxes import (
    TAKER,
    CommitAnswered,
    PagesCommitted,
    RecordsChanged,
    RingChanged,
    ViewChanged,
)
from peercache.actors.publisher.actor import Publisher
from peercache.model import records
from peercache.model.hash_ring import HashRing
from peercache.model.keys import from_bytes, split_keys
from peercache.model.member import SUSPECT
from peercache.model.view import is_live
from peercache.paths.write import PUBLISH_TIMEOUT_S
from peercache.wire.messages.directory import (
    Delete,
    HandedOver,
    Located,
    Lookup,
    Put,
    Repair,
    StreamSummary,
)
from sims.memory import Noted, Truth
from sims.trace import Violation


def note_message(actor: Any, sender: int, message: object, truth: Truth) -> None:
    """Record the message that an actor is about to handle."""
    if isinstance(actor, DirectoryShard):
        stream = sender, actor.incarnation
        match message:
            case Put(number) | Delete(number) | Repair(number):
                if number > truth.sent.get(stream, 0):
                    # It may have removed what the holder has sent, until they compare.
                    truth.forged.add(stream)
                    truth.ended[stream] = truth.ended.get(stream, 0) + 1
                truth.received[stream] = max(truth.received.get(stream, 0), number)
            case StreamSummary(number) | HandedOver(number):
                # It covers all messages up to this one; a higher number before was forged.
                truth.received[stream] = number + 1
                truth.forged.discard(stream)
    match message:
        case PagesCommitted(origin, request, sequence, _, made, here) if isinstance(
            actor, Publisher
        ):
            if origin == TAKER:
                truth.taken_bytes += int(made["length"].sum())
            # A Commit may be sent again, and a set may find its pages here.
            spoken_of = np.concatenate([made, here])
            truth.waiting[actor.incarnation, origin.identity, request, sequence] = spoken_of
        case RecordsChanged(_, drops) if isinstance(actor, Publisher):
            for key, generation in zip(
                records.keys_of(drops), drops["generation"].tolist(), strict=True
            ):
                for noted in (truth.known, truth.unanswered, truth.announced):
                    _let_go(noted, key, actor.incarnation, generation)
        case RingChanged(ring) if isinstance(actor, DirectoryShard):
            truth.rings[actor.incarnation] = ring
        case ViewChanged(members) if isinstance(actor, DirectoryShard):
            owner = actor.incarnation
            suspects = {member.incarnation for member in members if member.state == SUSPECT}
            truth.suspects[owner] = suspects
            live = {member.incarnation for member in members if is_live(member)}
            for gone in truth.live.get(owner, set()) - live:
                # Its records are no longer served, although it may be alive.
                truth.ended[gone, owner] = truth.ended.get((gone, owner), 0) + 1
            truth.live[owner] = live


def _let_go(noted: dict[bytes, dict[int, Noted]], key: bytes, holder: int, generation: int) -> None:
    """Forget the recorded page of a holder, unless it is newer."""
    by_holder = noted.get(key, {})
    if holder in by_holder and by_holder[holder].generation <= generation:
        del by_holder[holder]


def note_effects(actor: Any, effects: list[Effect], truth: Truth) -> None:
    """Record what a publisher sends to owners, and the commits that it answers."""
    if not isinstance(actor, Publisher):
        return
    for effect in effects:
        if isinstance(effect, Send):
            _note_sent(actor.incarnation, effect.to, effect.message, truth)
        if not isinstance(effect, NotifyDirectory) or not isinstance(effect.fact, CommitAnswered):
            continue
        answer = effect.fact.committed
        client = effect.fact.origin.identity
        key = (actor.incarnation, client, answer.request, answer.sequence)
        spoken_of = truth.waiting.pop(key, None)
        if spoken_of is None:
            continue
        is_known = answer.published * records.RECORD_BYTES >= len(answer.records)
        stopped = [] if is_known else truth.stopped_for(PUBLISH_TIMEOUT_S)
        table = actor._table
        for name, generation in zip(
            records.keys_of(spoken_of), spoken_of["generation"].tolist(), strict=True
        ):
            row = table.rows.get(name)
            if row is None or int(table.records["generation"][row]) != generation:
                continue
            if is_known:
                truth.known.setdefault(name, {})[actor.incarnation] = Noted(generation)
            else:
                noted = Noted(generation, dict.fromkeys(stopped, 0))
                truth.unanswered.setdefault(name, {})[actor.incarnation] = noted


def _note_sent(holder: int, owner: Any, message: object, truth: Truth) -> None:
    match message:
        case Put(number) | Delete(number) | Repair(number):
            truth.sent[holder, owner] = number
    match message:
        case Delete(_, drops):
            for key in records.keys_of(np.frombuffer(drops, records.DROP)):
                if holder in truth.announced.get(key, {}):
                    truth.announced[key][holder].owners.pop(owner, None)
        case Put(number, packed) | Repair(number, _, packed):
            located = records.from_bytes(packed)
            for key, generation in zip(
                records.keys_of(located), located["generation"].tolist(), strict=True
            ):
                by_holder = truth.announced.setdefault(key, {})
                noted = by_holder.get(holder)
                if noted is None or noted.generation != generation:
                    noted = by_holder[holder] = Noted(generation)
                noted.owners[owner] = number


def lacking(owner: int, key: bytes, ring: HashRing, truth: Truth) -> dict[int, tuple[int, int]]:
    """Return the live holders of a page that this owner must not report as absent.

    With the page's generation, and how often the owner has dropped the holder's records. ring: that
    of the process that trusts the owner.
    """
    noted = [each.get(key) for each in (truth.known, truth.unanswered, truth.announced)]
    if not any(noted) or owner not in ring.owners(from_bytes(key))[0].tolist():
        return {}
    found: dict[int, tuple[int, int]] = {}
    for holder in sorted({holder for each in noted for holder in each or ()}):
        # A node that is dead in the holder's view is not an owner, and may not know it yet. The
        # holder's own shard is notified of a commit just before its client.
        seen = truth.rings.get(holder)
        is_owner = seen is not None and owner in seen.members
        if holder == owner or not is_owner or (holder, owner) in truth.forged:
            continue
        if holder not in truth.living or holder not in ring.members:
            continue
        if holder not in truth.live.get(owner, set()):
            continue
        received = truth.received.get((holder, owner), 0)
        for each in noted:
            of = (each or {}).get(holder)
            if of is None:
                continue
            number = of.owners.get(owner, -1)
            if each is noted[0] or number == 0 or 0 < number < received:
                found[holder] = of.generation, truth.ended.get((holder, owner), 0)
                break
    return found


def check_absent(
    shard: DirectoryShard, message: object, effects: list[Effect], truth: Truth
) -> None:
    """A page unknown to a shard with authority must not be held by a live node that sent it."""
    ring = truth.rings.get(shard.incarnation)
    if not isinstance(message, Lookup) or ring is None or shard.authority.ring != ring.version:
        return
    located: set[bytes] = set()
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Located):
            located.update(records.keys_of(records.from_bytes(effect.message.records)))
    for key in split_keys(message.keys):
        if key in located:
            continue
        for holder in lacking(shard.incarnation, key, ring, truth):
            detail = f"{key.hex()} of {holder:016x} is unknown to {shard.incarnation:016x}"
            raise Violation("stored-found", detail)


def check_authority(shard: DirectoryShard, truth: Truth) -> None:
    """A shard has no authority while a holder of its ring is suspected."""
    ring = truth.rings.get(shard.incarnation)
    if ring is None or shard.table.authority != ring.version:
        return
    for holder in truth.suspects.get(shard.incarnation, set()) & set(ring.members):
        detail = f"{shard.incarnation:016x} has it, and suspects {holder:016x}"
        raise Violation("authority", detail)


def check_table(
    owner: int,
    located: set[bytes],
    before: dict[bytes, dict[int, tuple[int, int]]],
    ring: HashRing,
    truth: Truth,
) -> None:
    """A page that a table with authority lacks must not be `lacking` at the lookup's begin."""
    for key, holders in before.items():
        if key in located:
            continue
        now = lacking(owner, key, ring, truth)
        for holder, since in holders.items():
            if now.get(holder) == since:
                detail = f"{key.hex()} of {holder:016x} is not in the table of {owner:016x}"
                raise Violation("stored-found", detail)
