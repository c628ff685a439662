"""Taking: pages that a node which is drained offers to this one, from the offer to the commit.

An offer waits twice: until its offerer has said that it drains, and until one of the places is
free. Each offerer has one place, and one more offer that waits: however many it sends, the others
have their turn. A read must come at a minimum rate, so no place is kept for long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.effects import Effect, Pull, Send, TellPool
from peercache.actors.handover.giving import HANDING_OVER
from peercache.actors.mailboxes import PullDone, TakenOver, TakeOver
from peercache.actors.origin import Origin
from peercache.model.keys import space_of
from peercache.model.member import Member
from peercache.model.records import HAS_CHECKSUM, RECORD, RESIDENT, Records
from peercache.wire.messages.draining import DrainAsked, DrainTold, PagesOffered, PagesTaken
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Reserve,
)

TAKINGS_MAX: Final = 4
"""Offers that are taken at once, each read by a thread of its own: few nodes are drained at a time,
and the others wait."""

OFFERED_MAX: Final = 256
"""Pages of an offer that are looked at."""

PULL_BASE_S: Final = 1.0
"""How long the reading of an offer may take whatever its size: a connection is made for it."""

PULL_RATE: Final = 2**23
"""Bytes a second, at least: a tenth of what a network of 1 Gbit/s carries. So the largest offer of
an honest node (`giving.OFFER_BYTES`) is given up after 5 s."""

PULL_MAX_S: Final = 5.0
"""The most, for one page that is larger than that: shorter than `giving.OFFER_S`."""


def pull_s(records: Records) -> float:
    """Return how long the reading of these pages may take."""
    size = int(records["length"].sum(dtype=np.uint64))
    return min(PULL_BASE_S + size / PULL_RATE, PULL_MAX_S)


@attrs.define(eq=False)
class Taking:
    """An offer, waiting or being taken.

    drains: whether its offerer has said that it does. states: of its pages, as granted.
    """

    origin: Origin
    number: int
    namespace: int
    records: Records
    member: Member
    drains: bool = False
    states: bytes = b""


@final
@attrs.define(eq=False)
class Takings:
    """The offers that wait and those that are being taken; each has a number of this node's.

    That number is also that of the question to its offerer, and of its reservation.
    """

    count: Callable[[int], None] | None = None
    """Counts pages that were taken over."""
    _open: dict[int, Taking] = attrs.field(factory=dict)
    _waiting: dict[int, Taking] = attrs.field(factory=dict)
    """By number, the one that has waited for longest first; one an offerer, all of them members."""
    _last: int = 0

    def offered(
        self, origin: Origin, message: PagesOffered, member: Member | None, *, has_room: bool
    ) -> list[Effect]:
        """Ask the offerer whether it drains. member: who offers; has_room: False takes nothing."""
        records = np.frombuffer(message.records, RECORD)
        if member is None or not has_room:
            return [_full(origin, message.number, len(records))]
        if not 0 < len(records) <= OFFERED_MAX or (records["flags"] & RESIDENT == 0).any():
            return [Send(origin, PagesTaken(message.number, bytes((ABORTED,)) * len(records)))]
        # An honest node sends its next offer when it has no answer to hope for.
        self._drop({origin.identity})
        self._last += 1
        namespace = space_of(message.namespace)
        taking = Taking(origin, message.number, namespace, records, member)
        self._waiting[self._last] = taking
        return [Send(origin, DrainAsked(self._last))]

    def told(self, sender: int, told: DrainTold) -> list[Effect]:
        """Take the answer of an offerer: only who drains hands pages over."""
        taking = self._waiting.get(told.request)
        if taking is None or taking.origin.identity != sender:
            return []
        if told.figures.get("state") != HANDING_OVER:
            del self._waiting[told.request]
            return [_full(taking.origin, taking.number, len(taking.records))]
        taking.drains = True
        return self._begin()

    def follow(self, members: Collection[int]) -> None:
        """Forget what waits of offerers that are no members any more."""
        self._drop({t.origin.identity for t in self._waiting.values()} - set(members))

    def turn_away(self) -> list[Effect]:
        """Take nothing more: this node is drained itself."""
        refused, self._waiting = self._waiting, {}
        return [_full(t.origin, t.number, len(t.records)) for t in refused.values()]

    def granted(self, granted: Granted) -> list[Effect]:
        """Read what has room."""
        taking = self._open[granted.sequence]
        taking.states = granted.states
        chosen = np.frombuffer(granted.states, np.uint8) == RESERVED
        if not chosen.any():
            return self._answer(granted.sequence, granted.states)
        offsets = np.frombuffer(granted.offsets, "<u8")[chosen].astype(np.uint64)
        records = taking.records[chosen]
        within_s = pull_s(records)
        return [Pull(granted.sequence, taking.member, taking.namespace, records, offsets, within_s)]

    def pulled(self, done: PullDone) -> list[Effect]:
        """Commit what has arrived, with the checksums that its records had."""
        taking = self._open[done.job]
        chosen = np.frombuffer(taking.states, np.uint8) == RESERVED
        written = np.zeros(len(chosen), np.uint8)
        written[chosen] = np.frombuffer(done.arrived, np.uint8)
        has = (taking.records["flags"] & HAS_CHECKSUM) != 0
        checksums = np.where(has & (written == 1), taking.records["checksum"], np.uint64(0))
        commit = Commit(0, done.job, written.tobytes(), checksums.astype("<u8").tobytes(), 0.0)
        return [TellPool(TakenOver(commit))]

    def committed(self, committed: Committed) -> list[Effect]:
        """Tell the offerer what this node holds now."""
        if self.count is not None:
            self.count(committed.states.count(COMMITTED))
        return self._answer(committed.sequence, committed.states)

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self._open) <= TAKINGS_MAX, f"{len(self._open)} offers are being taken"
        for several in (self._open, self._waiting):
            offerers = {taking.origin.identity for taking in several.values()}
            assert len(offerers) == len(several), "two offers of one node"

    def _begin(self) -> list[Effect]:
        """Ask the pool for free room for the offers whose turn it is."""
        effects: list[Effect] = []
        busy = {taking.origin.identity for taking in self._open.values()}
        for number, taking in list(self._waiting.items()):
            if len(self._open) >= TAKINGS_MAX:
                break
            if taking.drains and taking.origin.identity not in busy:
                self._open[number] = self._waiting.pop(number)
                keys = taking.records["key"].tobytes()
                lengths = taking.records["length"].astype("<u8").tobytes()
                reserve = Reserve(0, number, taking.namespace, keys, lengths)
                effects.append(TellPool(TakeOver(reserve)))
        return effects

    def _answer(self, sequence: int, states: bytes) -> list[Effect]:
        taking = self._open.pop(sequence)
        return [Send(taking.origin, PagesTaken(taking.number, states)), *self._begin()]

    def _drop(self, offerers: set[int]) -> None:
        for number, taking in list(self._waiting.items()):
            if taking.origin.identity in offerers:
                del self._waiting[number]


def _full(origin: Origin, number: int, pages: int) -> Effect:
    """Return the answer with which the offerer goes to another node at once."""
    return Send(origin, PagesTaken(number, bytes((REFUSED_FULL,)) * pages))
