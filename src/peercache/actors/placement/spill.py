"""The spill of a node: the pages that it evicts next are offered to nodes with room."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, Send, TellPool
from peercache.actors.mailboxes import (
    ColdPages,
    PagesGiven,
    RequestSpill,
)
from peercache.actors.placement.drain import (
    OFFER_S,
    bytes_of,
)
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.records import DROP, Records
from peercache.wire.messages.membership import (
    OfferSpill,
    PagesTaken,
    ReportRoom,
    RequestRoom,
)
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    REFUSED_FULL,
)

COLDER_FACTOR: Final = 4.0
"""How many times as old as the coldest page here another node's coldest one must be: where all
nodes evict at about the same age, to move pages helps none of them."""

LOOK_S: Final = 0.1
"""How often the pool is asked which pages it will evict next."""

ROOM_S: Final = 0.5
"""How long the nodes are waited for that were asked how much room they have."""

ASKED: Final = 2
"""Nodes that are asked, chosen at random: the better of two is nearly as good as the best of all
(Mitzenmacher, 2001)."""

REFUSED_S: Final = 1.0
"""How long nothing is offered once no node has room or colder pages."""

SILENT_S: Final = 60.0
"""How long a node is not asked again that did not answer an offer."""

HALT_S: Final = 0.25
"""A node that does nothing for so long was paused: removals may be waiting in its sockets. It
offers nothing for SETTLE_S, in which they are done."""

SETTLE_S: Final = 1.0

LOST_S: Final = 2.0
"""After such a pause removals may have been given up that this node has never seen."""

SPILL_NUMBERS: Final = 2**32
"""Offers of spilled pages are numbered from here: those of a drain have smaller numbers."""


@attrs.define
class SpillProgress:
    """What came of pages that this node offered ahead of their eviction, each time they were.

    moved: another node took them. there: it had them. refused: no node that was asked had room or
    colder pages. failed: no answer, or the page was not read in time, or changed meanwhile.
    """

    moved: int = 0
    there: int = 0
    refused: int = 0
    failed: int = 0
    moved_bytes: int = 0


@final
@attrs.define(eq=False)
class Spilling:
    """The pages that this node will evict next: to whom they are offered, and how fast.

    One offer is under way at a time, so OFFER_BYTES at most. Eviction never waits for one.

    rate: bytes a second; 0: nothing is offered. min_age_s: younger pages are evicted for no offer.
    """

    rate: int = 0
    min_age_s: float = 0.0
    rng: random.Random = attrs.field(factory=random.Random)
    may_give: Callable[[int], bool] = lambda _: True
    """Whether this node may hand over pages of a namespace, given its tag."""
    progress: SpillProgress = attrs.field(factory=SpillProgress)
    _targets: tuple[int, ...] = ()
    _suspects: frozenset[int] = frozenset()
    _silent_until: dict[int, float] = attrs.field(factory=dict)
    _queue: deque[tuple[int, Records, npt.NDArray[np.float64]]] = attrs.field(factory=deque)
    """Namespace, records and ages: the first is the next offer, or the one that is under way."""
    _rooms: dict[int, ReportRoom | None] = attrs.field(factory=dict)
    """What the nodes that were asked have answered."""
    _offered_to: int = 0
    _until: float = inf
    """When what is waited for is given up."""
    _last: int = SPILL_NUMBERS
    _is_asking_pool: bool = False
    _coldest_age_s: float = 0.0
    """Of the pages of this node, when it named what is offered."""
    _only_new: bool = False
    _is_serving: bool = True
    _seen_at: float = inf
    _begins_at: float = -inf
    _began_at: float = -inf
    _due: float = inf

    def follow(self, members: Sequence[Member], own: int, now: float) -> None:
        """Offer to the live members, but to this node."""
        others = [member for member in members if member.incarnation != own]
        self._targets = tuple(m.incarnation for m in others if m.state == ALIVE)
        # A member that is heard again may have asked for removals that this node has not seen.
        self._only_new |= not self._suspects.isdisjoint(self._targets)
        self._suspects = frozenset(m.incarnation for m in others if m.state == SUSPECT)
        for gone in self._silent_until.keys() - set(self._targets):
            del self._silent_until[gone]
        if self._offered_to and self._offered_to not in self._targets:
            self._until = now
        if not self.rate or not self._targets:
            self._due = self._seen_at = inf
        elif self._due == inf:
            self._due, self._seen_at = now + LOOK_S, now

    def serve(self, *, is_serving: bool) -> None:
        """Stop offering while this node is drained, and go on afterwards."""
        self._is_serving = is_serving

    def on_tick(self, now: float) -> list[Effect]:
        """Give up who is silent, or go on."""
        if now < self._due:
            return []
        paused_s = now - self._seen_at
        self._seen_at, self._due = now, now + LOOK_S
        if paused_s >= HALT_S:
            self._begins_at = max(self._begins_at, now + SETTLE_S)
            self._only_new |= paused_s >= LOST_S
        if self._until <= now:
            if self._rooms:
                return self._choose(now)
            self._silent_until[self._offered_to] = now + SILENT_S
            self.progress.failed += len(self._queue.popleft()[1])
            return self._end(now)
        return self._go_on(now)

    def deadline(self) -> float:
        """Return when something is due."""
        return self._due

    def named(self, cold: ColdPages, now: float) -> list[Effect]:
        """Take from the pool the pages that it will evict next."""
        self._is_asking_pool = False
        self._coldest_age_s = cold.coldest_age_s
        self._queue += [group for group in cold.groups if self.may_give(group[0])]
        return self._go_on(now) if self._queue else []

    def reported(self, sender: int, room: ReportRoom, now: float) -> list[Effect]:
        """Take how much room a node has; offer to the best one when all have answered."""
        if room.number != self._last or sender not in self._rooms:
            return []
        self._rooms[sender] = room
        return [] if None in self._rooms.values() else self._choose(now)

    def taken(self, sender: int, message: PagesTaken, now: float) -> list[Effect]:
        """Note what a node has taken; this one evicts it."""
        if message.number != self._last or sender != self._offered_to:
            return []  # Late, or not asked for.
        _, records, _ = self._queue.popleft()
        states = np.frombuffer(message.states, np.uint8)
        if len(states) != len(records):
            self._silent_until[sender] = now + SILENT_S
            self.progress.failed += len(records)
            return self._end(now)
        is_new, is_there = states == COMMITTED, states == HERE
        refused = int(np.count_nonzero(states == REFUSED_FULL))
        size = bytes_of(records[is_new])
        self.progress.moved += int(is_new.sum())
        self.progress.there += int(is_there.sum())
        self.progress.refused += refused
        self.progress.failed += len(states) - refused - int((is_new | is_there).sum())
        self.progress.moved_bytes += size
        given = records[is_new | is_there]
        drops = np.empty(len(given), DROP)
        drops["key"], drops["generation"] = given["key"], given["generation"]
        is_vain = not (is_new | is_there).any()
        pause_s = REFUSED_S if is_vain else self._began_at + size / self.rate - now
        return [TellPool(PagesGiven(drops)), *self._end(now, pause_s)]

    def check(self) -> None:
        """Assert the bounds."""
        assert not (self._rooms and self._offered_to), "asks and offers at once"
        assert len(self._rooms) <= ASKED, f"{len(self._rooms)} nodes were asked"
        assert len(self._silent_until) <= len(self._targets), "nodes that left are remembered"

    def _go_on(self, now: float) -> list[Effect]:
        """Ask the pool or the nodes for the next offer, if this node may make one now."""
        if self._rooms or self._offered_to or self._is_asking_pool:
            return []
        if not self._is_serving or self._suspects or self._only_new:
            self._queue.clear()
        if not self._is_serving or self._suspects or not self._targets:
            return []
        if now < self._begins_at:
            self._due = min(self._due, self._begins_at)
            return []
        if self._queue:
            return self._ask(now)
        self._is_asking_pool = True
        only_new, self._only_new = self._only_new, False
        return [TellPool(RequestSpill(only_new))]

    def _ask(self, now: float) -> list[Effect]:
        willing = [one for one in self._targets if self._silent_until.get(one, now) <= now]
        asked = self.rng.sample(willing, min(ASKED, len(willing)))
        if not asked:
            return self._refuse(now)
        self._last += 1
        self._rooms, self._until = dict.fromkeys(asked), now + ROOM_S
        return [Send(node, RequestRoom(self._last)) for node in asked]

    def _choose(self, now: float) -> list[Effect]:
        """Offer to the node with the most room, or else to the one with the coldest pages."""
        namespace, records, ages = self._queue[0]
        colder_than = max(self._coldest_age_s * COLDER_FACTOR, self.min_age_s)
        if (ages < 0).all():
            colder_than = inf
        rooms = [(node, room) for node, room in self._rooms.items() if room is not None]
        self._rooms, self._until = {}, inf
        size = bytes_of(records)
        best = max(
            rooms,
            key=lambda each: (min(each[1].free_bytes, size), each[1].coldest_age_s),
            default=None,
        )
        if best is None or (not best[1].free_bytes and best[1].coldest_age_s <= colder_than):
            return self._refuse(now)
        self._offered_to, self._until, self._began_at = best[0], now + OFFER_S, now
        packed = records.tobytes(), ages.astype("<f8").tobytes()
        return [Send(self._offered_to, OfferSpill(self._last, namespace, *packed))]

    def _refuse(self, now: float) -> list[Effect]:
        self.progress.refused += len(self._queue[0][1])
        self._queue.clear()
        self._begins_at = now + REFUSED_S
        return []

    def _end(self, now: float, pause_s: float = 0.0) -> list[Effect]:
        """End the offer; go on after a pause."""
        self._offered_to, self._until = 0, inf
        if pause_s >= REFUSED_S:
            self._queue.clear()
        self._begins_at = max(self._begins_at, now + pause_s)
        return self._go_on(now)
