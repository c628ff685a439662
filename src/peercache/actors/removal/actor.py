"""Removal: removes, retains and demotes pages on every member, for clients.

Owns    the removals that are under way: the client that asked, and the members still to answer.
Takes   Remove, Clear, Retain and Demote, from this node's clients; Removed and Retained, from
        members; ViewChanged, from membership.
Sends   Remove, Clear, Retain and Demote to every live member, this node included; Retained or
        Refused to the client; RemovalDone to the directory, which answers the client of a removal.
Keeps   the count is the sum of the members' answers, each member counted once; a page is retained
        or demoted if one member does so. A member that did not answer in time is named. A member
        that has died or left is not waited for, but a removal names it for `dead_s + FOLLOWS_S`:
        until then others may still read its pages.
Limits  PENDING_MAX removals at once, and TIMEOUT_MAX_S for each.
"""

from __future__ import annotations

import math
from typing import Final, final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.effects import Effect, NotifyDirectory, Send
from peercache.actors.mailboxes import RemovalDone, RemovalMessage, ViewChanged
from peercache.actors.origin import Origin
from peercache.model.keys import KEY_BYTES
from peercache.model.member import ALIVE, SUSPECT
from peercache.wire.messages.pool import (
    NOT_HERE,
    Clear,
    Demote,
    Remove,
    Removed,
    Retain,
    Retained,
)
from peercache.wire.messages.session import Refused

PENDING_MAX: Final = 256
"""Removals under way; each is small, and a client has one or a few."""

TIMEOUT_MAX_S: Final = 10.0
"""Longest wait for the members, whatever timeout a client has."""

FOLLOWS_S: Final = 2.0
"""How long clients may use a view that their node has replaced: they request the changes once a
second, and once more if an answer is lost. Until then they read the memory of a dead node of their
host, which they have mapped, and `exists` finds its pages on every host."""


@final
@attrs.define(eq=False)
class Removal:
    """One removal under way, or one Retain or Demote.

    waiting: the members that have not answered, in order.
    states:  for these two: the best state that was reported for each page; None for a removal.
    missed:  members that may still name pages that others have removed, or whose pages may still be
             read though they are gone.
    """

    origin: Origin
    request: int
    until: float
    waiting: dict[int, None]
    states: bytes | None
    count: int = 0
    missed: dict[int, None] = attrs.field(factory=dict)

    def take(self, reply: Removed | Retained) -> bool:
        """Apply the answer of a member; return False if it answers another request."""
        if isinstance(reply, Removed):
            self.count += reply.count if self.states is None else 0
            return self.states is None
        if self.states is None or len(reply.states) != len(self.states):
            return False
        both = [np.frombuffer(states, np.uint8) for states in (self.states, reply.states)]
        self.states = np.maximum(*both).tobytes()
        return True

    def answer(self) -> Effect:
        """Report to the client what was done, and which members did not answer."""
        if self.states is not None:
            return Send(self.origin, Retained(self.request, self.states, tuple(self.waiting)))
        missed = tuple(sorted(self.waiting | self.missed))
        return NotifyDirectory(RemovalDone(self.origin, Removed(self.request, self.count, missed)))


@final
@attrs.define
class Remover:
    """Forwards removals to every member, on behalf of clients, and sums the answers.

    dead_s: that of the cluster. A node that no master has notified of an end for so long holds the
            masters dead, and judges by itself.
    """

    _dead_s: float
    _live: tuple[int, ...] = ()
    _ended_at: dict[int, float] = attrs.field(factory=dict)
    """When each dead or left member of the view was first seen so."""
    _pending: dict[int, Removal] = attrs.field(factory=dict)
    _last_number: int = 0

    def on_message(self, sender: Origin, message: RemovalMessage, now: float) -> list[Effect]:
        """Start a removal, or handle an answer or a view."""
        match message:
            case Remove() | Clear() | Retain() | Demote():
                return self._begin(sender, message, now)
            case Removed() | Retained():
                return self._count(sender.identity, message)
            case ViewChanged():
                return self._follow(message, now)
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Answer the clients whose timeout has passed."""
        over = [number for number, removal in self._pending.items() if removal.until <= now]
        return [self._pending.pop(number).answer() for number in over]

    def deadline(self) -> float:
        """Return when the first timeout passes."""
        return min((removal.until for removal in self._pending.values()), default=math.inf)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._pending) <= PENDING_MAX, f"{len(self._pending)} removals"

    def _begin(
        self, sender: Origin, message: Remove | Clear | Retain | Demote, now: float
    ) -> list[Effect]:
        if len(self._pending) >= PENDING_MAX:
            detail = f"this node has {PENDING_MAX} removals under way: try again"
            return [Send(sender, Refused(message.request, "busy", detail))]
        self._last_number += 1
        number = self._last_number
        timeout_s = min(max(message.timeout_s, 0.0), TIMEOUT_MAX_S)
        states = None
        if isinstance(message, Retain | Demote):
            states = bytes((NOT_HERE,)) * (len(message.keys) // KEY_BYTES)
        waiting = dict.fromkeys(self._live)
        missed = dict.fromkeys(self._just_ended(now))
        removal = Removal(sender, message.request, now + timeout_s, waiting, states, missed=missed)
        if not self._live:
            return [removal.answer()]
        self._pending[number] = removal
        # Until then a member may still have what another one has removed; it must not be mirrored.
        forwarded = attrs.evolve(message, request=number, timeout_s=timeout_s)
        return [Send(member, forwarded) for member in self._live]

    def _count(self, member: int, reply: Removed | Retained) -> list[Effect]:
        removal = self._pending.get(reply.request)
        if removal is None or member not in removal.waiting or not removal.take(reply):
            # Late, repeated, or not asked for.
            return []
        del removal.waiting[member]
        if isinstance(reply, Removed):
            removal.missed.update(dict.fromkeys(set(reply.missed) & set(self._live)))
        return self._end_if_answered(reply.request)

    def _follow(self, view: ViewChanged, now: float) -> list[Effect]:
        live = {m.incarnation for m in view.members if m.state in (ALIVE, SUSPECT)}
        ended = {m.incarnation for m in view.members} - live
        self._live = tuple(sorted(live))
        self._ended_at = {member: self._ended_at.get(member, now) for member in ended}
        effects: list[Effect] = []
        for number, removal in list(self._pending.items()):
            for gone in [member for member in removal.waiting if member not in live]:
                del removal.waiting[gone]
                removal.missed[gone] = None
            effects += self._end_if_answered(number)
        return effects

    def _just_ended(self, now: float) -> list[int]:
        """Return the members that other nodes or their clients may still hold alive."""
        since = now - self._dead_s - FOLLOWS_S
        return [member for member, at in self._ended_at.items() if at > since]

    def _end_if_answered(self, number: int) -> list[Effect]:
        return [] if self._pending[number].waiting else [self._pending.pop(number).answer()]
