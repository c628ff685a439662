"""Watched actors: production actors with a place's clock, and checkers of each step.

Wraps a state actor for `run_actor`. The actor itself is unchanged and knows nothing of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.disk.actor import DiskTier
from peercache.actors.effects import Effect, Send, StateActor
from peercache.actors.mailboxes import PeerAnswered
from peercache.actors.membership.actor import Membership
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import Placement
from peercache.actors.pool.actor import Pool
from peercache.actors.publisher.actor import Publisher
from peercache.actors.removal.actor import Remover
from peercache.actors.runtime import MAILBOX_MESSAGES_MAX, Mailbox
from peercache.model import records
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.records import DROP
from peercache.model.view import View, is_live
from peercache.wire.messages.directory import Delete, Located, Put, Repair, ReportStale
from sims import stored
from sims.followed import note_changes
from sims.memory import Truth
from sims.network import Network
from sims.placed import Given, note_offers
from sims.places import Place
from sims.tenants import Shares, WatchedQueues
from sims.trace import Trace, Violation

FACTS_WAITING_MAX = 4 * MAILBOX_MESSAGES_MAX
"""Messages from inside the node are never dropped, so they only have to stay in proportion."""

BUSY_MEAN_S = 0.3
"""How long an actor that is busy finds no time for its mailbox."""

LATE_MAX_S = 0.3
"""How late a tick may be: the loop stalls as long for a collection of garbage, a thread that holds
the GIL, or a short pause of the process."""

Generations: TypeAlias = dict[tuple[int, bytes], int]


@attrs.frozen(eq=False)
class BusyMailbox:
    """A mailbox of an actor that is kept from it by other work from time to time.

    kept_until: returns until when the actor takes no message. chance: of being kept, each time that
    it would wait for a message.
    """

    mailbox: Mailbox[Any]
    kept_until: Callable[[float], float]
    chance: float
    network: Network
    rng: random.Random

    async def wait(self, handle: Callable[[], bool]) -> None:
        """Wait like the mailbox, possibly a while longer."""
        while (until := self.kept_until(trio.current_time())) > trio.current_time():
            await trio.sleep_until(until)
        if self.chance and self.network.faults_on and self.rng.random() < self.chance:
            await trio.sleep(self.rng.expovariate(1 / BUSY_MEAN_S))
        await self.mailbox.wait(handle)

    def take(self) -> tuple[Origin, Any] | None:
        """Return the oldest message, or None."""
        now = trio.current_time()
        return None if self.kept_until(now) > now else self.mailbox.take()


@attrs.define(eq=False)
class WatchedActor:
    """One actor of one node, with that node's clock, its pauses and its checks."""

    name: str
    actor: StateActor[Any]
    mailbox: Mailbox[Any]
    place: Place
    trace: Trace
    truth: Truth
    look: Callable[[list[Effect]], None]
    """Called with all effects of a step, before any is performed."""
    next_late_s: Callable[[], float]
    """Returns how late a tick is. Meanwhile the actor does not take messages either."""
    steps: int = 0
    _late_s: float = 0.0
    _ticked_at: float = -inf

    def on_message(self, sender: Origin, message: Any, now: float) -> list[Effect]:
        """Pass a message on; check what the directory does with it."""
        self.steps += 1
        check_bounds(self.mailbox, self.name)
        actor = self.actor
        stored.note_message(actor, sender.identity, message, self.truth)
        if isinstance(actor, Membership):
            view, masters = actor.view, actor.masters()
            effects = actor.on_message(sender, message, self.place.local(now))
            speaker = message.member if isinstance(message, PeerAnswered) else None
            identity = sender.identity if speaker is None else speaker.incarnation
            _check_view(actor, identity, view, masters, self.truth)
        elif isinstance(actor, Pool):
            shares, given = Shares.of(actor, message), Given.of(actor, message)
            effects = actor.on_message(sender, message, self.place.local(now))
            check_shares(actor)
            shares.judge(actor)
            given.judge(actor, self.truth)
        elif isinstance(actor, DiskTier):
            effects = actor.on_message(sender, message, self.place.local(now))
            if actor.index is not None:
                WatchedQueues.watch(actor.index)
        elif isinstance(actor, Remover):
            pending = dict(actor._pending)
            effects = actor.on_message(sender, message, self.place.local(now))
            self.truth.removals.look(sender, message, pending, actor._pending, now)
        elif not isinstance(actor, DirectoryShard):
            effects = actor.on_message(sender, message, self.place.local(now))
        else:
            before = _named_newer(actor, sender, message)
            effects = actor.on_message(sender, message, self.place.local(now))
            _check_kept(actor, before, type(message).__name__)
            _check_answers(actor, effects)
            stored.check_absent(actor, message, effects, self.truth)
            stored.check_authority(actor, self.truth)
            if isinstance(message, (Put, Repair)):
                _note_held(actor, sender.identity, message.records, self.truth)
        self._note(type(message).__name__, effects)
        return effects

    def on_tick(self, now: float) -> list[Effect]:
        """Let time pass, by this place's clock."""
        # Two conversions may lose the last bit, and then nothing would be due.
        local = max(self.place.local(now), self.actor.deadline())
        effects = self.actor.on_tick(local)
        if isinstance(self.actor, Pool):
            check_shares(self.actor)
        self._note("tick", effects)
        self._ticked_at, self._late_s = now, self.next_late_s()
        return effects

    def deadline(self) -> float:
        """Return when to tick: not while the process is paused, or its loop stalls."""
        due = self._due()
        # A tick that was due before the last one is a bug, and the runtime must notice it.
        return due if due <= self._ticked_at else due + self._late_s

    def kept_until(self, now: float) -> float:
        """Return until when the process is paused, or its loop stalls; the past if neither."""
        return self.deadline() if self._due() <= now else self.place.paused_until

    def check(self) -> None:
        """Assert the actor's own invariants."""
        self.actor.check()

    def _due(self) -> float:
        return max(self.place.world(self.actor.deadline()), self.place.paused_until)

    def _note(self, cause: str, effects: list[Effect]) -> None:
        self.look(effects)
        stored.note_effects(self.actor, effects, self.truth)
        if isinstance(self.actor, Placement):
            note_offers(self.actor.incarnation, effects, self.truth)
        if isinstance(self.actor, Publisher):
            _check_hand_over(self.actor, effects, self.truth)
            note_changes(self.actor, effects, self.truth)
        kinds = [_kind(effect) for effect in effects]
        if kinds:
            self.trace.line("act", self.place.name, self.name, cause, *kinds)


def check_bounds(mailbox: Mailbox[Any], name: str) -> None:
    """Messages from the network stay within the bound, and internal ones stay in proportion."""
    if len(mailbox) > mailbox.messages_max:
        offered = sum(size_bytes > 0 for _, _, size_bytes in mailbox.waiting)
        if offered > mailbox.messages_max or len(mailbox) > FACTS_WAITING_MAX:
            detail = f"{len(mailbox)} wait for {name}, {offered} of them from the network"
            raise Violation("mailbox-bound", detail)


def _check_view(
    actor: Membership, speaker: int, before: View, masters: tuple[Member, ...], truth: Truth
) -> None:
    """A view names only nodes that existed, and trusts only masters about others."""
    after = actor.view
    if after is before:
        return
    own = after.get(speaker)
    is_master = any(master.incarnation == speaker for master in masters)
    for member in after.members():
        if member.incarnation not in truth.nodes:
            detail = f"a view names {member.incarnation:016x}, which never was"
            raise Violation("invented-member", detail)
        known = before.get(member.incarnation)
        if is_master or known == member:
            continue
        if known is not None and not is_live(known) and not is_live(member):
            continue  # A master ends a member with a counter that another node knows.
        is_displaced = own is not None and member.control == own.control
        if member.incarnation not in (speaker, actor.me.incarnation) and not is_displaced:
            detail = f"{speaker:016x}, no master, is believed about {member.incarnation:016x}"
            raise Violation("hearsay", detail)


def check_shares(pool: Pool) -> None:
    """Uncommitted pages of writers must leave the others their part of the pool."""
    each_max, named, pages = pool._shares.each_max, 0, 0
    together_max = max(pool._page_bytes // pool._granule // 2, each_max)
    for client, known in pool._reservations._clients.items():
        own = known.granules - known.ahead_granules
        count = sum(
            slot is not None for r in known.open.values() if not r.is_ahead for slot in r.slots
        )
        if each_max and own > each_max and count > 1:
            detail = f"{client:016x} holds {own} granules of {each_max} uncommitted"
            raise Violation("writer-share", detail)
        named, pages = named + own, pages + count
    # A page of more than half of the pool is stored alone, or never.
    if named > together_max and pages > 1:
        detail = f"writers hold {named} granules of {together_max} uncommitted"
        raise Violation("pool-share", detail)


def _kind(effect: Effect) -> str:
    inner = getattr(effect, "message", None) or getattr(effect, "fact", None)
    return type(effect if inner is None else inner).__name__


def _named_newer(shard: DirectoryShard, sender: Origin, message: object) -> Generations:
    """Return what must stay: records newer than a delete, and all that a dispute names."""
    named: list[tuple[int, bytes, int]] = []
    is_hint = isinstance(message, ReportStale)
    if isinstance(message, Delete):
        drops = records.from_bytes(b"") if not message.drops else _drops(message.drops)
        named = [
            (sender.identity, key, generation)
            for key, generation in zip(
                records.keys_of(drops), drops["generation"].tolist(), strict=True
            )
        ]
    elif isinstance(message, ReportStale):
        disputed = records.from_bytes(message.records)
        named = [
            (int(record["holder"]), record["key"].tobytes(), int(record["generation"]))
            for record in disputed
        ]
    newer: Generations = {}
    for holder, key, generation in named:
        held = held_generation(shard, holder, key)
        if held is not None and (is_hint or held > generation):
            newer[holder, key] = held
    return newer


def _drops(packed: bytes) -> records.Records:
    return np.frombuffer(packed, DROP)


def held_generation(shard: DirectoryShard, holder: int, key: bytes) -> int | None:
    """Return the generation with which a shard holds a page of a holder."""
    holdings = shard._held.get(holder)
    if holdings is None:
        return None
    in_bucket = records.from_bytes(holdings.records(key[0]))
    found = in_bucket["generation"][in_bucket["key"] == np.void(key)].tolist()
    return found[0] if found else None


def _check_kept(shard: DirectoryShard, before: Generations, cause: str) -> None:
    for (holder, key), generation in before.items():
        if held_generation(shard, holder, key) != generation:
            detail = f"{cause} took a newer record of {key.hex()} away"
            raise Violation("directory-order", detail)


def _note_held(shard: DirectoryShard, holder: int, packed: bytes, truth: Truth) -> None:
    for key in records.keys_of(records.from_bytes(packed)):
        generation = held_generation(shard, holder, key)
        if generation is not None:
            truth.arrived[shard.incarnation, holder, key] = generation


def _check_hand_over(publisher: Publisher, effects: list[Effect], truth: Truth) -> None:
    """A valid record is withdrawn from a former owner only after it has arrived at the new ones."""
    own, table = publisher.incarnation, publisher._table
    for effect in effects:
        if not isinstance(effect, Send) or not isinstance(effect.message, Delete):
            continue
        drops = _drops(effect.message.drops)
        keys = records.keys_of(drops)
        for at, row in enumerate(table.find(keys).tolist()):
            generation = int(drops["generation"][at])
            if row < 0 or int(table.records["generation"][row]) != generation:
                continue
            for owner in publisher._ring.owners(drops["key"][[at]])[0].tolist():
                if owner != own and truth.arrived.get((owner, own, keys[at]), 0) < generation:
                    detail = f"{keys[at].hex()} was withdrawn before {owner:016x} had it"
                    raise Violation("hand-over-order", detail)


def _check_answers(shard: DirectoryShard, effects: list[Effect]) -> None:
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Located):
            reported = records.from_bytes(effect.message.records)
            for holder in dict.fromkeys(reported["holder"].tolist()):
                lives = shard._states.get(holder) in (ALIVE, SUSPECT)
                if holder != shard.incarnation and not lives:
                    raise Violation("dead-holder", f"an answer names {holder:016x}, which is dead")
