"""Offers of pages that stay here for now: those evicted next (spill), and those without a copy."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, NotifyPool, Send
from peercache.actors.mailboxes import (
    ColdPages,
    CopiesMade,
    PagesGiven,
    PagesToCopy,
    RequestCopies,
    RequestSpill,
)
from peercache.actors.placement.drain import (
    OFFER_S,
    bytes_of,
)
from peercache.actors.placement.figures import reasons_of
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.records import DROP, Records
from peercache.observability.reasons import MALFORMED, NO_ANSWER, NO_NODE, NO_ROOM
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

COLDER_FACTOR: Final = 2.0
"""How many times as old as the coldest page here another node's coldest one must be: where all
nodes evict at about the same age, to move pages helps none of them."""

COPY_COLDER_FACTOR: Final = 2.0
"""How many times as old as a page what is evicted for its copy must be: else what goes in one place
is copied to another one, without end."""

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

VAIN_S: Final = 3.0
"""How long a node is not asked again that reported room, and then took nothing: the next offer goes
to another one. Longer than a node takes nothing after its start, or while a page is removed."""

HALT_S: Final = 0.25
"""A node that does nothing for so long was paused: removals may be waiting in its sockets. It
offers nothing for SETTLE_S, in which they are done."""

SETTLE_S: Final = 1.0

LOST_S: Final = 2.0
"""After such a pause removals may have been given up that this node has never seen."""

SPILL_NUMBERS: Final = 2**32
"""Offers of spilled pages are numbered from here: those of a drain have smaller numbers."""

COPY_NUMBERS: Final = 2**48
"""Offers of pages without a copy are numbered from here."""


@attrs.define
class OfferProgress:
    """What came of pages that this node offered ahead of their eviction, each time they were.

    moved: another node took them. there: it had them. refused: no node that was asked had room or
    colder pages. failed: no answer, or the page was not read in time, or changed meanwhile.
    """

    moved: int = 0
    there: int = 0
    refused: int = 0
    failed: int = 0
    moved_bytes: int = 0


@attrs.define(eq=False)
class Pace:
    """How fast a node offers pages, for whatever reason: the next offer waits for the last one."""

    free_at: float = -inf

    def spend(self, seconds: float, since: float) -> None:
        """Take the time that an offer's bytes are worth."""
        self.free_at = max(self.free_at, since) + seconds


@final
@attrs.define(eq=False)
class Offers:
    """Pages that this node offers while it keeps serving: to whom, and how fast.

    Either those that it evicts next, or (`is_copying`) those of which no other node has a copy.
    One offer is under way at a time, so OFFER_BYTES at most. Neither eviction nor a set waits for
    one.

    rate: bytes a second; 0: nothing is offered. min_age_s: younger pages are evicted for no offer.
    """

    rate: int = 0
    min_age_s: float = 0.0
    rng: random.Random = attrs.field(factory=random.Random)
    is_copying: bool = False
    pace: Pace = attrs.field(factory=Pace)
    may_give: Callable[[int], bool] = lambda _: True
    """Whether this node may hand over pages of a namespace, given its tag."""
    progress: OfferProgress = attrs.field(factory=OfferProgress)
    not_moved: Callable[[str, int], None] = lambda _, __: None
    """Counts pages that were refused or failed, by reason."""
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
    _near: int = 0
    """The node that may have copies of all that is queued; 0: none may."""
    _last: int = attrs.field(init=False)
    _is_asking_pool: bool = False
    _coldest_age_s: float = 0.0
    """Of the pages of this node, when it named what is offered."""
    _only_new: bool = False
    _is_serving: bool = True
    _seen_at: float = inf
    _begins_at: float = -inf
    _began_at: float = -inf
    _again_at: float = -inf
    """When pages are offered for a copy that no node took."""
    _due: float = inf

    @_last.default
    def _last_before_any(self) -> int:
        return COPY_NUMBERS if self.is_copying else SPILL_NUMBERS

    def follow(self, members: Sequence[Member], own: int, now: float) -> None:
        """Offer to the live members, but to this node."""
        others = [member for member in members if member.incarnation != own]
        alive = [m for m in others if m.state == ALIVE]
        if self.is_copying:
            # A copy is for the death of a host, not of a process alone.
            hosts = {m.boot_id for m in members if m.incarnation == own}
            alive = [m for m in alive if m.boot_id not in hosts] or alive
        self._targets = tuple(m.incarnation for m in alive)
        # A member that is reachable again may have asked for removals that this node has not seen.
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
            self._avoid(self._offered_to, now)
            _, records, _ = self._queue.popleft()
            self.progress.failed += len(records)
            self.not_moved(NO_ANSWER, len(records))
            made = self._made(records, self._offered_to, is_sure=False) if self.is_copying else []
            return [*made, *self._end(now)]
        return self._go_on(now)

    def deadline(self) -> float:
        """Return when something is due."""
        return self._due

    def named(self, pages: ColdPages | PagesToCopy, now: float) -> list[Effect]:
        """Take from the pool the pages to offer."""
        self._is_asking_pool = False
        self._queue += [group for group in pages.groups if self.may_give(group[0])]
        if isinstance(pages, ColdPages):
            self._coldest_age_s = pages.coldest_age_s
        else:
            self._near = pages.node
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
            self._avoid(sender, now)
            self.progress.failed += len(records)
            self.not_moved(MALFORMED, len(records))
            return self._end(now)
        is_new, is_there = states == COMMITTED, states == HERE
        refused = int(np.count_nonzero(states == REFUSED_FULL))
        size = bytes_of(records[is_new])
        self.progress.moved += int(is_new.sum())
        self.progress.there += int(is_there.sum())
        self.progress.refused += refused
        self.progress.failed += len(states) - refused - int((is_new | is_there).sum())
        self.progress.moved_bytes += size
        for reason, pages in reasons_of(message.states):
            self.not_moved(reason, pages)
        given = records[is_new | is_there]
        self.pace.spend(size / self.rate, self._began_at)
        is_vain = not len(given) and not self._near
        if is_vain and refused:
            self._avoid(sender, now, VAIN_S)
        fact = (
            self._made(given, sender)
            if self.is_copying
            else [NotifyPool(PagesGiven(drops_of(given)))]
        )
        return [*fact, *self._end(now, is_vain=is_vain)]

    def check(self) -> None:
        """Assert the bounds."""
        assert not (self._rooms and self._offered_to), "asks and offers at once"
        assert len(self._rooms) <= ASKED, f"{len(self._rooms)} nodes were asked"
        assert len(self._silent_until) <= len(self._targets), "nodes that left are remembered"

    def _avoid(self, node: int, now: float, seconds: float = SILENT_S) -> None:
        """Do not ask a node for a while; one that has left is not asked anyway."""
        if node in self._targets:
            self._silent_until[node] = now + seconds

    def _go_on(self, now: float) -> list[Effect]:
        """Ask the pool or the nodes for the next offer, if this node may make one now."""
        if self._rooms or self._offered_to or self._is_asking_pool:
            return []
        if not self._is_serving or self._suspects or self._only_new:
            self._queue.clear()
        if not self._is_serving or self._suspects or not self._targets:
            return []
        begins_at = max(self._begins_at, self.pace.free_at)
        if now < begins_at:
            self._due = min(self._due, begins_at)
            return []
        if self._queue:
            return self._ask(now)
        self._is_asking_pool = True
        only_new, self._only_new = self._only_new, False
        if self.is_copying:
            return [NotifyPool(RequestCopies(only_new, again=self._again_at <= now))]
        return [NotifyPool(RequestSpill(only_new))]

    def _ask(self, now: float) -> list[Effect]:
        willing = [one for one in self._targets if self._silent_until.get(one, now) <= now]
        if self._near in willing:
            # Most likely it has them: no other node is asked for room.
            self._last += 1
            return self._offer(self._near, now)
        asked = self.rng.sample(willing, min(ASKED, len(willing)))
        if not asked:
            return self._refuse(now, NO_NODE)
        self._last += 1
        self._rooms, self._until = dict.fromkeys(asked), now + ROOM_S
        return [Send(node, RequestRoom(self._last, self.is_copying)) for node in asked]

    def _choose(self, now: float) -> list[Effect]:
        """Offer to the node with the most room, or else to the one with the coldest pages."""
        _, records, ages = self._queue[0]
        rooms = [(node, room) for node, room in self._rooms.items() if room is not None]
        self._rooms, self._until = {}, inf
        size = bytes_of(records)
        colder_than = self._coldest_age_s * COLDER_FACTOR
        if self.is_copying:
            colder_than = float(ages.min()) * COPY_COLDER_FACTOR
        elif (ages < 0).all():
            colder_than = inf
        colder_than = max(colder_than, self.min_age_s)
        best = max(rooms, key=lambda each: _usefulness(each[1], size), default=None)
        if best is None or (not best[1].free_bytes and best[1].coldest_age_s <= colder_than):
            return self._refuse(now, NO_ROOM)
        return self._offer(best[0], now)

    def _offer(self, node: int, now: float) -> list[Effect]:
        namespace, records, ages = self._queue[0]
        self._offered_to, self._until, self._began_at = node, now + OFFER_S, now
        packed = records.tobytes(), ages.astype("<f8").tobytes()
        return [Send(node, OfferSpill(self._last, namespace, *packed, self.is_copying))]

    def _made(self, records: Records, node: int, *, is_sure: bool = True) -> list[Effect]:
        return [NotifyPool(CopiesMade(drops_of(records), node, is_sure))]

    def _refuse(self, now: float, reason: str) -> list[Effect]:
        pages = len(self._queue[0][1])
        self.progress.refused += pages
        self.not_moved(reason, pages)
        return self._end(now, is_vain=True)

    def _end(self, now: float, *, is_vain: bool = False) -> list[Effect]:
        """End the offer, and go on; after a vain one with other pages, or after a pause."""
        self._offered_to, self._until = 0, inf
        if is_vain:
            self._queue.clear()
            if self.is_copying:
                self._again_at = now + REFUSED_S
            else:
                self._begins_at = max(self._begins_at, now + REFUSED_S)
        return self._go_on(now)


def _usefulness(room: ReportRoom, size: int) -> tuple[float, ...]:
    """Return what to choose a node by: free room, then how old what it evicts for the rest is."""
    if room.free_bytes >= size:
        return inf, room.free_bytes
    return room.free_bytes, room.coldest_age_s


def drops_of(records: Records) -> Records:
    """Return the drops of these records."""
    drops = np.empty(len(records), DROP)
    drops["key"], drops["generation"] = records["key"], records["generation"]
    return drops
