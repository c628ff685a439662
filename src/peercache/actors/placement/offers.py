"""What a node offers: all its pages in a drain, hottest first, to the nodes that stay; and pages
that stay here for now: those evicted next (spill), and those without a copy.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, NotifyPool, Send
from peercache.actors.mailboxes import (
    ColdPages,
    CopiesMade,
    DrainChanged,
    PagesGiven,
    PagesToCopy,
    PagesToGive,
    RequestCopies,
    RequestGive,
    RequestSpill,
)
from peercache.model.member import ALIVE, DEAD, SUSPECT, Member
from peercache.model.records import DROP, Records
from peercache.observability.reasons import (
    DRAINING,
    FULL,
    MALFORMED,
    NO_ANSWER,
    NO_NODE,
    NO_ROOM,
    NOT_READ,
    OTHER_BYTES,
    TOO_LARGE,
)
from peercache.wire.messages.membership import (
    OfferPages,
    OfferSpill,
    PagesTaken,
    ReportRoom,
    RequestRoom,
)
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_DRAINING,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
)

OFFER_PAGES: Final = 256
"""Pages of one offer: 14 KiB of records."""

OFFER_BYTES: Final = 32 * 2**20
"""Their bytes, unless one page has more: a quarter of a second of a slow network."""

OFFER_S: Final = 8.0
"""Silence after which a target is given up: longer than it may read (PULL_MAX_S). It has
died, or it is of the build before, which knows no offers."""

FULL_S: Final = 1.0
"""How soon a target without free room is asked again: it may have started just now, and not all of
its memory be there."""

FULL_MAX: Final = 4
"""How often in turn it may have no room, before it is given up."""

TRIES_MAX: Final = 2
"""How often a page is offered that was not read in time."""

UNFINISHED_S: Final = 2.5
"""How long sets that began before the drain are waited for: the deadline of a call."""

AGAIN_S: Final = 0.1

SERVING, HANDING_OVER, HANDED_OVER = "serving", "handing_over", "handed_over"

_REASONS: Final = {
    REFUSED_FULL: FULL,
    REFUSED_DRAINING: DRAINING,
    REFUSED_SIZE: OTHER_BYTES,
    REFUSED_TOO_LARGE: TOO_LARGE,
    REPEATED: MALFORMED,
    ABORTED: NOT_READ,
}


@attrs.frozen(eq=False)
class Batch:
    """Pages of one namespace that are offered together. tries: how often they were before."""

    namespace: int
    records: Records
    tries: int = 0


@attrs.define(eq=False)
class Recipient:
    """A node that may take pages. offer: the number of the one it has; 0 for none."""

    offer: int = 0
    rests_until: float = -inf
    times_full: int = 0
    is_given_up: bool = False

    def is_ready(self, now: float) -> bool:
        """Return whether it may have an offer now."""
        return not self.offer and not self.is_given_up and self.rests_until <= now


@attrs.define
class Progress:
    """How far a drain is, in pages and bytes.

    given: read by another node; there: it had them before. lost: not given, for want of free room
    or of time. left: still to be offered; of pages that the pool has not named yet the bytes of
    their slots are counted, which are a little more.
    """

    given: int = 0
    there: int = 0
    lost: int = 0
    left: int = 0
    given_bytes: int = 0
    there_bytes: int = 0
    lost_bytes: int = 0
    left_bytes: int = 0


@final
@attrs.define(eq=False)
class Giving:
    """The drain of one node: the pages to offer, the targets, and the offers that are under way."""

    may_give: Callable[[int], bool] = lambda _: True
    """Whether this node may hand over pages of a namespace, given its tag."""
    state: str = SERVING
    progress: Progress = attrs.field(factory=Progress)
    _until: float = inf
    _settle_until: float = -inf
    _ask_at: float = inf
    _targets: dict[int, Recipient] = attrs.field(factory=dict)
    _queue: deque[Batch] = attrs.field(factory=deque)
    _offers: dict[int, tuple[int, Batch, float]] = attrs.field(factory=dict)
    _is_asking: bool = False
    _is_dry: bool = False
    _behind: int = 0
    _behind_bytes: int = 0
    _last: int = 0

    @property
    def targets(self) -> int:
        """Return how many nodes may still take pages."""
        return sum(not target.is_given_up for target in self._targets.values())

    def follow(self, members: Iterable[Member], own: int, now: float) -> list[Effect]:
        """Offer to the live members, but to this node."""
        live = _others_alive(members, own)
        for gone in [target for target in self._targets if target not in live]:
            self._retake(self._targets.pop(gone).offer)
        for target in live:
            self._targets.setdefault(target, Recipient())
        return self.go_on(now)

    def begin(self, members: Iterable[Member], own: int, until: float, now: float) -> list[Effect]:
        """Refuse new pages, and hand over those that are here; once it has begun, go on."""
        if self.state != SERVING:
            return []
        self.state, self.progress = HANDING_OVER, Progress()
        self._until, self._settle_until = until, now + UNFINISHED_S
        self._is_dry, self._is_asking = False, True
        self._behind = self._behind_bytes = 0
        self._targets = {target: Recipient() for target in _others_alive(members, own)}
        return [NotifyPool(DrainChanged(is_draining=True)), NotifyPool(RequestGive(again=True))]

    def cancel(self) -> list[Effect]:
        """Take new pages again; what other nodes have taken they keep."""
        if self.state == SERVING:
            return []
        self.state = SERVING
        self._forget()
        return [NotifyPool(DrainChanged(is_draining=False))]

    def offered(self, portion: PagesToGive, now: float) -> list[Effect]:
        """Take the next pages from the pool."""
        if self.state != HANDING_OVER or not self._is_asking:
            return []
        self._is_asking = False
        if portion.unfinished and now < self._settle_until:
            # Their pages are the hottest ones: begin again when they are there.
            self._ask_at = now + AGAIN_S
            return []
        self._settle_until = -inf
        self._is_dry = not portion.groups
        self._behind, self._behind_bytes = portion.left, portion.left_bytes
        for group in portion.groups:
            if self.may_give(group.namespace):
                self._queue += cut(Batch(group.namespace, group.records))
            else:
                # Every target would refuse the offer, and be given up for its silence.
                self.progress.lost += len(group.records)
                self.progress.lost_bytes += bytes_of(group.records)
        return self.go_on(now)

    def taken(self, target: int, message: PagesTaken, now: float) -> list[Effect]:
        """Note what a target has taken; offer the rest to another one."""
        offer = self._offers.get(message.number)
        if offer is None or offer[0] != target:
            return []  # Late, or not asked for.
        del self._offers[message.number]
        batch, node = offer[1], self._targets[target]
        node.offer = 0
        states = np.frombuffer(message.states, np.uint8)
        if len(states) != len(batch.records):
            node.is_given_up = True
            self._queue.appendleft(batch)
            return self.go_on(now)
        is_new, is_full, is_there = states == COMMITTED, states == REFUSED_FULL, states == HERE
        self.progress.given += int(is_new.sum())
        self.progress.there += int(is_there.sum())
        self.progress.given_bytes += bytes_of(batch.records[is_new])
        self.progress.there_bytes += bytes_of(batch.records[is_there])
        if is_full.any():
            node.times_full = 0 if is_new.any() else node.times_full + 1
            node.rests_until = now + FULL_S
            node.is_given_up = node.times_full >= FULL_MAX
            self._queue.appendleft(attrs.evolve(batch, records=batch.records[is_full]))
        again = states == ABORTED
        tries = batch.tries + 1
        if again.any() and tries < TRIES_MAX:
            self._queue.append(Batch(batch.namespace, batch.records[again], tries))
        else:
            self.progress.lost += int(again.sum())
            self.progress.lost_bytes += bytes_of(batch.records[again])
        return self.go_on(now)

    def on_tick(self, now: float) -> list[Effect]:
        """Give up the targets that are silent, and all of it when the time is over."""
        effects: list[Effect] = []
        if self._ask_at <= now:
            self._ask_at, self._is_asking = inf, True
            effects.append(NotifyPool(RequestGive(again=True)))
        late = [number for number, (_, _, until) in self._offers.items() if until <= now]
        for number in late:
            self._targets[self._offers[number][0]].is_given_up = True
            self._retake(number)
        # The time may be over at the same moment: what is due at a tick is done in it.
        return [*effects, *self.go_on(now)]

    def deadline(self, now: float) -> float:
        """Return when something is due."""
        due = [self._until, self._ask_at, *(until for _, _, until in self._offers.values())]
        if self._queue:
            due += [
                t.rests_until
                for t in self._targets.values()
                if not t.offer and not t.is_given_up and t.rests_until > now
            ]
        return min(due)

    def go_on(self, now: float) -> list[Effect]:
        """Offer what there is to the targets that are ready; end when nothing more can be done."""
        if self.state != HANDING_OVER:
            return []
        effects: list[Effect] = []
        for name, target in self._targets.items():
            if self._queue and target.is_ready(now) and now < self._until:
                batch = self._queue.popleft()
                self._last += 1
                target.offer = self._last
                self._offers[self._last] = (name, batch, now + OFFER_S)
                records = batch.records.tobytes()
                effects.append(Send(name, OfferPages(self._last, batch.namespace, records)))
        is_waiting = self._is_asking or self._ask_at < inf
        if not self._queue and not self._is_dry and not is_waiting and self.targets:
            self._is_asking = True
            effects.append(NotifyPool(RequestGive(again=False)))
        waits_for_pages = self._is_asking or self._ask_at < inf or self._offers
        is_over = not self._queue and self._is_dry and not self._offers
        if is_over or now >= self._until or (not self.targets and not waits_for_pages):
            self.state = HANDED_OVER
            pages, size = self._waiting()
            self.progress.lost += pages
            self.progress.lost_bytes += size
            self._forget()
        self.progress.left, self.progress.left_bytes = self._waiting()
        return effects

    def check(self) -> None:
        """Assert the bound of the offers."""
        assert len(self._offers) <= len(self._targets), f"{len(self._offers)} offers"

    def _waiting(self) -> tuple[int, int]:
        """Return how many pages are still to be given, and their bytes."""
        waiting = [*self._queue, *(batch for _, batch, _ in self._offers.values())]
        pages = self._behind + sum(len(batch.records) for batch in waiting)
        return pages, self._behind_bytes + sum(bytes_of(batch.records) for batch in waiting)

    def _retake(self, number: int) -> None:
        """Have the pages of an offer without an answer offered to another target."""
        offer = self._offers.pop(number, None)
        if offer is None:
            return
        name, batch, _ = offer
        if name in self._targets:
            self._targets[name].offer = 0
        self._queue.appendleft(batch)

    def _forget(self) -> None:
        self._queue.clear()
        self._offers.clear()
        self._behind = self._behind_bytes = 0
        self._ask_at, self._is_asking = inf, False


def _others_alive(members: Iterable[Member], own: int) -> list[int]:
    return [m.incarnation for m in members if m.state == ALIVE and m.incarnation != own]


def bytes_of(records: Records) -> int:
    """Return the bytes of the pages of these records."""
    return int(records["length"].sum(dtype=np.uint64))


def cut(batch: Batch) -> list[Batch]:
    """Cut a batch into offers, in its order."""
    parts: list[Batch] = []
    begin = size = 0
    lengths: list[int] = batch.records["length"].tolist()
    for at, length in enumerate(lengths):
        if at > begin and (at - begin >= OFFER_PAGES or size + length > OFFER_BYTES):
            parts.append(Batch(batch.namespace, batch.records[begin:at]))
            begin, size = at, 0
        size += length
    parts.append(Batch(batch.namespace, batch.records[begin:]))
    return parts


# --- spill and copies ----------------------------------------------------------------------------

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

AWAY_MAX: Final = 1024
"""Members that are remembered as suspect or dead, also once they have left the view. Few come back:
a node that is started again has a new incarnation."""

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
    is_serving: bool = True
    """Whether it may offer: a node that is drained does not."""
    progress: OfferProgress = attrs.field(factory=OfferProgress)
    not_moved: Callable[[str, int], None] = lambda _, __: None
    """Counts pages that were refused or failed, by reason."""
    _targets: tuple[int, ...] = ()
    _away: dict[int, None] = attrs.field(factory=dict)
    """Members that were suspect or dead when they were last in a view, the first ones first."""
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
    _seen_at: float = inf
    _begins_at: float = -inf
    _began_at: float = -inf
    _again_at: float = -inf
    """When pages are offered for a copy that no node took."""
    _due: float = inf

    @_last.default
    def _last_before_any(self) -> int:
        return COPY_NUMBERS if self.is_copying else SPILL_NUMBERS

    def follow(self, members: Sequence[Member], own: int, now: float) -> list[Effect]:
        """Offer to the live members, but to this node."""
        others = [member for member in members if member.incarnation != own]
        alive = [m for m in others if m.state == ALIVE]
        if self.is_copying:
            # A copy is for the death of a host, not of a process alone.
            hosts = {m.boot_id for m in members if m.incarnation == own}
            alive = [m for m in alive if m.boot_id not in hosts] or alive
        self._targets = tuple(m.incarnation for m in alive)
        self._note_returns(others)
        self._suspects = frozenset(m.incarnation for m in others if m.state == SUSPECT)
        for gone in self._silent_until.keys() - set(self._targets):
            del self._silent_until[gone]
        if self._offered_to and self._offered_to not in self._targets:
            self._until = now
        if not self._targets:
            self._due = self._seen_at = inf
        elif self._due == inf:
            self._due, self._seen_at = now + LOOK_S, now
        return []

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

    def deadline(self, now: float) -> float:  # noqa: ARG002 - as that of a drain
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
        # The pool is notified of each lost node once: an answer may come after that.
        is_lost = sender not in self._targets and sender not in self._suspects
        fact = (
            self._made(given, 0 if is_lost else sender)
            if self.is_copying
            else [NotifyPool(PagesGiven(drops_of(given)))]
        )
        return [*fact, *self._end(now, is_vain=is_vain)]

    def check(self) -> None:
        """Assert the bounds."""
        assert not (self._rooms and self._offered_to), "asks and offers at once"
        assert len(self._rooms) <= ASKED, f"{len(self._rooms)} nodes were asked"
        assert len(self._away) <= AWAY_MAX, f"{len(self._away)} members that are away"
        assert len(self._silent_until) <= len(self._targets), "nodes that left are remembered"

    def _note_returns(self, others: Sequence[Member]) -> None:
        """Note whether a member is alive again that was suspect or dead.

        Meanwhile it may have asked for removals that this node has not seen.
        """
        for member in others:
            if member.state in (SUSPECT, DEAD):
                self._away[member.incarnation] = None
            elif member.incarnation in self._away:
                del self._away[member.incarnation]
                self._only_new |= member.state == ALIVE
        for oldest in list(self._away)[:-AWAY_MAX]:
            del self._away[oldest]

    def _avoid(self, node: int, now: float, seconds: float = SILENT_S) -> None:
        """Do not ask a node for a while; one that has left is not asked anyway."""
        if node in self._targets:
            self._silent_until[node] = now + seconds

    def _go_on(self, now: float) -> list[Effect]:
        """Ask the pool or the nodes for the next offer, if this node may make one now."""
        if self._rooms or self._offered_to or self._is_asking_pool:
            return []
        if not self.is_serving or self._suspects or self._only_new:
            self._queue.clear()
        if not self.is_serving or self._suspects or not self._targets:
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


def reasons_of(states: bytes) -> Iterator[tuple[str, int]]:
    """Yield why pages of an offer were not taken, and how many, from the states in its answer."""
    counts = np.bincount(np.frombuffer(states, np.uint8), minlength=256)
    for state, reason in _REASONS.items():
        if counts[state]:
            yield reason, int(counts[state])
