"""Handover: hands the pages of a node that is drained over to other nodes, and takes theirs.

Owns    the drain of this node: which pages are offered to whom, and how far it is; and the offers
        of other nodes that are being read.
Takes   OfferPages, PagesTaken and ReportDrainState, from members; ViewChanged, from membership;
        DrainBegan, DrainCancelled and PullDone, from the node; PagesToGive, Granted and Committed,
        from the pool.
Sends   OfferPages, PagesTaken and RequestDrainState to members; DrainChanged, RequestGive, TakeOver
        and TakenOver to the pool; Pull to the node, which reads.
Keeps   a page is taken as a mirrored one is: its slot is reserved before it is read, its bytes are
        verified by the holder's seal, and what was removed meanwhile is not committed. The holder
        keeps it. Nothing is evicted for it. A node that is drained takes nothing. Pages are taken
        from nodes only that say that they drain, and both ends' certificates bound of which
        namespaces.
Limits  one offer a target, of OFFER_PAGES and OFFER_BYTES; TAKINGS_MAX offers at
        once are read here, one of each node, at a minimum rate; one more of each waits. What is
        lost is offered to another target, within the drain's time.

An offer waits twice: until its offerer has said that it drains, and until one of the places is
free. Each offerer has one place, and one more offer that waits: however many it sends, the others
have their turn. A read must come at a minimum rate, so no place is kept for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from typing import Final, final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.effects import Effect, Pull, Send, TellPool
from peercache.actors.mailboxes import (
    DrainBegan,
    DrainCancelled,
    DrainChanged,
    HandoverMessage,
    PagesToGive,
    PullDone,
    RequestGive,
    TakenOver,
    TakeOver,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.model.keys import space_of
from peercache.model.member import ALIVE, Member
from peercache.model.records import HAS_CHECKSUM, RECORD, RESIDENT, Records
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import (
    OfferPages,
    PagesTaken,
    ReportDrainState,
    RequestDrainState,
)
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Reserve,
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

    def follow(self, members: Sequence[Member], own: int, now: float) -> list[Effect]:
        """Offer to the live members, but to this node."""
        live = [m.incarnation for m in members if m.state == ALIVE and m.incarnation != own]
        for gone in [target for target in self._targets if target not in live]:
            self._retake(self._targets.pop(gone).offer)
        for target in live:
            self._targets.setdefault(target, Recipient())
        return self.go_on(now)

    def begin(self, until: float, now: float) -> list[Effect]:
        """Refuse new pages, and hand over those that are here; once it has begun, go on."""
        if self.state != SERVING:
            return []
        self.state, self.progress = HANDING_OVER, Progress()
        self._until, self._settle_until = until, now + UNFINISHED_S
        self._is_dry, self._is_asking = False, True
        self._behind = self._behind_bytes = 0
        for target in self._targets.values():
            target.is_given_up, target.times_full, target.rests_until = False, 0, -inf
        return [TellPool(DrainChanged(is_draining=True)), TellPool(RequestGive(again=True))]

    def cancel(self) -> list[Effect]:
        """Take new pages again; what other nodes have taken they keep."""
        if self.state == SERVING:
            return []
        self.state = SERVING
        self._forget()
        return [TellPool(DrainChanged(is_draining=False))]

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
            effects.append(TellPool(RequestGive(again=True)))
        late = [number for number, (_, _, until) in self._offers.items() if until <= now]
        for number in late:
            self._targets[self._offers[number][0]].is_given_up = True
            self._retake(number)
        # The time may be over at the same moment: what is due at a tick is done in it.
        return [*effects, *self.go_on(now)]

    def deadline(self, now: float) -> float:
        """Return when something is due."""
        if self.state != HANDING_OVER:
            return inf
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
            effects.append(TellPool(RequestGive(again=False)))
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
        for target in self._targets.values():
            target.offer = 0


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


TAKINGS_MAX: Final = 4
"""Offers that are taken at once, each read by a thread of its own: few nodes are drained at a time,
and the others wait."""

OFFERED_MAX: Final = 256
"""Pages of an offer that are looked at."""

PULL_BASE_S: Final = 1.0
"""How long the reading of an offer may take whatever its size: a connection is made for it."""

PULL_RATE: Final = 2**23
"""Bytes a second, at least: a tenth of what a network of 1 Gbit/s carries. So the largest offer of
an honest node (OFFER_BYTES) is given up after 5 s."""

PULL_MAX_S: Final = 5.0
"""The most, for one page that is larger than that: shorter than OFFER_S."""


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
        self, origin: Origin, message: OfferPages, member: Member | None, *, has_room: bool
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
        return [Send(origin, RequestDrainState(self._last))]

    def told(self, sender: int, told: ReportDrainState) -> list[Effect]:
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


_PAGE_STATES: Final = ("given", "there", "lost", "left")


@final
@attrs.define(eq=False)
class Handover:
    """The handover actor of one node.

    incarnation: of this node. spaces: those that its certificate allows now; None for all.
    """

    incarnation: int
    spaces: Callable[[], frozenset[int] | None] = lambda: None
    giving: Giving = attrs.field(init=False)
    takings: Takings = attrs.field(factory=Takings)
    _members: dict[int, Member] = attrs.field(factory=dict)
    _deadline: float = inf

    @giving.default
    def _new_giving(self) -> Giving:
        return Giving(self._may_use)

    def show(self, metrics: Metrics) -> None:
        """Compute the figures of the drain when they are read, and count what is taken over."""
        for state in _PAGE_STATES:
            metrics.drain_pages.labels(state).set_function(partial(self._figure, state))
            size = metrics.drain_bytes.labels(state)
            size.set_function(partial(self._figure, f"{state}_bytes"))
        self.takings.count = metrics.pages_taken_over.inc

    def _figure(self, name: str) -> float:
        return float(attrs.asdict(self.giving.progress)[name])

    def on_message(self, sender: Origin, message: HandoverMessage, now: float) -> list[Effect]:
        """Take one message; the effects must be performed in the order of the list."""
        effects = self._apply(sender, message, now)
        self._deadline = self.giving.deadline(now)
        return effects

    def on_tick(self, now: float) -> list[Effect]:
        """Give up targets that are silent, and ask again those that had no room."""
        effects = self.giving.on_tick(now)
        self._deadline = self.giving.deadline(now)
        return effects

    def deadline(self) -> float:
        """Return when the next tick is due."""
        return self._deadline

    def check(self) -> None:
        """Assert the bounds."""
        self.giving.check()
        self.takings.check()

    def _apply(self, sender: Origin, message: HandoverMessage, now: float) -> list[Effect]:
        match message:
            case OfferPages():
                member = self._members.get(sender.identity)
                takes = self.giving.state == SERVING and self._may_use(message.namespace)
                return self.takings.offered(sender, message, member, has_room=takes)
            case ReportDrainState():
                return self.takings.told(sender.identity, message)
            case PagesTaken():
                return self.giving.taken(sender.identity, message, now)
            case ViewChanged(members):
                self._members = {member.incarnation: member for member in members}
                self.takings.follow(self._members)
                return self.giving.follow(members, self.incarnation, now)
            case DrainBegan(until):
                return [*self.giving.begin(until, now), *self.takings.turn_away()]
            case DrainCancelled():
                return self.giving.cancel()
            case PagesToGive():
                return self.giving.offered(message, now)
            case Granted():
                return self.takings.granted(message)
            case PullDone():
                return self.takings.pulled(message)
            case Committed():
                return self.takings.committed(message)
        assert_never(message)

    def _may_use(self, namespace: int) -> bool:
        spaces = self.spaces()
        return spaces is None or space_of(namespace) in spaces
