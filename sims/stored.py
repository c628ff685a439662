"""Stored is found: what an owner knows, or must know that it lacks, it does not call absent.

Follows each commit from the publisher's first look at it to its answer, and looks at what a shard
or its table calls absent for certain. Three things a shard with authority never lacks:

    what all owners have acknowledged;
    what a set has returned with while the shard's process was stopped;
    what a holder has told it by an earlier message than one that it has heard since.

The actors know nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send, TellDirectory
from peercache.actors.mailboxes import (
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


def note_heard(actor: Any, sender: int, message: object, truth: Truth) -> None:
    """Note what an actor is about to hear."""
    if isinstance(actor, DirectoryShard):
        stream = sender, actor.incarnation
        match message:
            case Put(number) | Delete(number) | Repair(number):
                if number > truth.sent.get(stream, 0):
                    # It may have removed what the holder has told, until they compare.
                    truth.forged.add(stream)
                    truth.ended[stream] = truth.ended.get(stream, 0) + 1
                truth.heard[stream] = max(truth.heard.get(stream, 0), number)
            case StreamSummary(number) | HandedOver(number):
                # It speaks of all messages up to this one; a higher number before was forged.
                truth.heard[stream] = number + 1
                truth.forged.discard(stream)
    match message:
        case PagesCommitted(origin, request, _, _, made, here) if isinstance(actor, Publisher):
            # A Commit may be sent again, and a set may find its pages here.
            spoken_of = np.concatenate([made, here])
            truth.waiting[actor.incarnation, origin.identity, request] = spoken_of
        case RecordsChanged(_, drops) if isinstance(actor, Publisher):
            for key, generation in zip(
                records.keys_of(drops), drops["generation"].tolist(), strict=True
            ):
                for noted in (truth.known, truth.unheard, truth.told):
                    _let_go(noted, key, actor.incarnation, generation)
        case RingChanged(ring) if isinstance(actor, DirectoryShard):
            truth.rings[actor.incarnation] = ring
        case ViewChanged(members) if isinstance(actor, DirectoryShard):
            owner = actor.incarnation
            suspects = {member.incarnation for member in members if member.state == SUSPECT}
            truth.suspects[owner] = suspects
            live = {member.incarnation for member in members if is_live(member)}
            for gone in truth.live.get(owner, set()) - live:
                # Its records are not served any more, though it may be alive.
                truth.ended[gone, owner] = truth.ended.get((gone, owner), 0) + 1
            truth.live[owner] = live


def _let_go(noted: dict[bytes, dict[int, Noted]], key: bytes, holder: int, generation: int) -> None:
    """Forget what is noted of a holder's page, unless it is newer."""
    by_holder = noted.get(key, {})
    if holder in by_holder and by_holder[holder].generation <= generation:
        del by_holder[holder]


def note_said(actor: Any, effects: list[Effect], truth: Truth) -> None:
    """Note what a publisher tells owners, and the commits that it answers."""
    if not isinstance(actor, Publisher):
        return
    for effect in effects:
        if isinstance(effect, Send):
            _note_told(actor.incarnation, effect.to, effect.message, truth)
        if not isinstance(effect, TellDirectory) or not isinstance(effect.fact, CommitAnswered):
            continue
        answer = effect.fact.committed
        key = (actor.incarnation, effect.fact.origin.identity, answer.request)
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
                truth.unheard.setdefault(name, {})[actor.incarnation] = noted


def _note_told(holder: int, owner: Any, message: object, truth: Truth) -> None:
    match message:
        case Put(number) | Delete(number) | Repair(number):
            truth.sent[holder, owner] = number
    match message:
        case Delete(_, drops):
            for key in records.keys_of(np.frombuffer(drops, records.DROP)):
                if holder in truth.told.get(key, {}):
                    truth.told[key][holder].owners.pop(owner, None)
        case Put(number, packed) | Repair(number, _, packed):
            told = records.from_bytes(packed)
            for key, generation in zip(
                records.keys_of(told), told["generation"].tolist(), strict=True
            ):
                by_holder = truth.told.setdefault(key, {})
                noted = by_holder.get(holder)
                if noted is None or noted.generation != generation:
                    noted = by_holder[holder] = Noted(generation)
                noted.owners[owner] = number


def lacking(owner: int, key: bytes, ring: HashRing, truth: Truth) -> dict[int, tuple[int, int]]:
    """Return the living holders of a page that this owner may not call absent.

    With the page's generation, and how often the owner has let go of the holder's records.
    ring: that of the process to which the owner's word counts.
    """
    noted = [each.get(key) for each in (truth.known, truth.unheard, truth.told)]
    if not any(noted) or owner not in ring.owners(from_bytes(key))[0].tolist():
        return {}
    found: dict[int, tuple[int, int]] = {}
    for holder in sorted({holder for each in noted for holder in each or ()}):
        # A node that the holder's view has dead is no owner, and may not know it yet. The
        # holder's own shard learns of a commit just before its client does.
        seen = truth.rings.get(holder)
        is_owner = seen is not None and owner in seen.members
        if holder == owner or not is_owner or (holder, owner) in truth.forged:
            continue
        if holder not in truth.living or holder not in ring.members:
            continue
        if holder not in truth.live.get(owner, set()):
            continue
        heard = truth.heard.get((holder, owner), 0)
        for each in noted:
            of = (each or {}).get(holder)
            if of is None:
                continue
            number = of.owners.get(owner, -1)
            if each is noted[0] or number == 0 or 0 < number < heard:
                found[holder] = of.generation, truth.ended.get((holder, owner), 0)
                break
    return found


def check_absent(
    shard: DirectoryShard, message: object, effects: list[Effect], truth: Truth
) -> None:
    """What a shard with authority does not know is held by no living node that has told of it."""
    ring = truth.rings.get(shard.incarnation)
    if not isinstance(message, Lookup) or ring is None or shard.authority.ring != ring.version:
        return
    told: set[bytes] = set()
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Located):
            told.update(records.keys_of(records.from_bytes(effect.message.records)))
    for key in split_keys(message.keys):
        if key in told:
            continue
        for holder in lacking(shard.incarnation, key, ring, truth):
            detail = f"{key.hex()} of {holder:016x} is unknown to {shard.incarnation:016x}"
            raise Violation("stored-found", detail)


def check_authority(shard: DirectoryShard, truth: Truth) -> None:
    """A shard has no authority while a holder of its ring is suspected: it may store unheard."""
    ring = truth.rings.get(shard.incarnation)
    if ring is None or shard.table.authority != ring.version:
        return
    for holder in truth.suspects.get(shard.incarnation, set()) & set(ring.members):
        detail = f"{shard.incarnation:016x} has it, and suspects {holder:016x}"
        raise Violation("authority", detail)


def check_table(
    owner: int,
    told: set[bytes],
    before: dict[bytes, dict[int, tuple[int, int]]],
    ring: HashRing,
    truth: Truth,
) -> None:
    """What a table with authority lacks was not `lacking` when the look began, or is gone."""
    for key, holders in before.items():
        if key in told:
            continue
        now = lacking(owner, key, ring, truth)
        for holder, since in holders.items():
            if now.get(holder) == since:
                detail = f"{key.hex()} of {holder:016x} is not in the table of {owner:016x}"
                raise Violation("stored-found", detail)
