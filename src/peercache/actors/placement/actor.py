"""Placement: gives pages of this node to other nodes (drain, spill, copies), and takes theirs.

Owns    the drain of this node: which pages are offered to whom, and how far it is; the pages that
        it offers ahead of their eviction (spill), or for a second copy; and the offers of other
        nodes that are read here.
Takes   OfferPages, OfferSpill, PagesTaken, CopiesEvicted, ReportRoom and ReportDrainState, from
        members;
        ViewChanged, from membership; DrainBegan, DrainCancelled and PullDone, from the node;
        PagesToGive, ColdPages, PagesToCopy and Granted, from the pool; Committed, from the
        directory shard, once the owners of the records know of the pages.
Sends   OfferPages, OfferSpill, RequestRoom, PagesTaken and RequestDrainState to members;
        DrainChanged, RequestGive, RequestSpill, PagesGiven, RequestCopies, CopiesMade,
        CopiesLost, HoldersChanged, TakeOver and TakenOver to the pool; Pull to the node, which
        reads.
Keeps   a page is taken as a mirrored one is: its slot is reserved before it is read, its bytes are
        verified by the holder's seal, and what was removed meanwhile is not committed. For a drain
        nothing is evicted, for a spill what was touched longer ago. A node that is drained takes
        nothing, and spills nothing. Both ends' certificates bound of which namespaces pages are
        given and taken; pages of a drain are taken only from a node that reports that it drains.
        A node that may have missed removals spills nothing that it had then.
Limits  one offer a target, of OFFER_PAGES and OFFER_BYTES; one spill and one offer of pages to copy
        at a time, at one rate together; TAKINGS_MAX offers at once are read here, one of each node,
        at a minimum rate; one more of each kind waits. What is lost of a drain is offered to
        another target, within the drain's time.

An offer of a drain waits twice: until its offerer has reported that it drains, and until one of the
places is free. Each offerer has one place, and one more offer that waits: however many it sends,
the others have their turn. A read must come at a minimum rate, so no place is kept for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Final, final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import Effect, NotifyPool
from peercache.actors.mailboxes import (
    ColdPages,
    CopiesLost,
    DrainBegan,
    DrainCancelled,
    HoldersChanged,
    PagesToCopy,
    PagesToGive,
    PlacementMessage,
    PullDone,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.offers import (
    COPY_NUMBERS,
    HANDING_OVER,
    SERVING,
    SPILL_NUMBERS,
    Giving,
    Offers,
)
from peercache.actors.placement.takings import (
    PlacementFigures,
    Takings,
)
from peercache.model.keys import space_of
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import DRAINING, NAMESPACE
from peercache.wire.messages.membership import (
    CopiesEvicted,
    OfferPages,
    OfferSpill,
    PagesTaken,
    ReportDrainState,
    ReportRoom,
)
from peercache.wire.messages.pool import (
    Committed,
    Granted,
)

_PAGE_STATES: Final = ("given", "there", "lost", "left")


@final
@attrs.define(eq=False)
class Placement:
    """The placement actor of one node.

    incarnation: of this node. spaces: those that its certificate allows now; None for all.
    """

    incarnation: int
    spaces: Callable[[], frozenset[int] | None] = lambda: None
    spilling: Offers = attrs.field(factory=Offers)
    copying: Offers = attrs.field(factory=partial(Offers, is_copying=True))
    giving: Giving = attrs.field(init=False)
    figures: PlacementFigures = attrs.field(factory=PlacementFigures)
    takings: Takings = attrs.field(init=False)
    _members: dict[int, Member] = attrs.field(factory=dict)
    _others: frozenset[int] = frozenset()
    _deadline: float = inf

    @giving.default
    def _new_giving(self) -> Giving:
        return Giving(self._may_use)

    @takings.default
    def _new_takings(self) -> Takings:
        return Takings(self.figures)

    def __attrs_post_init__(self) -> None:
        """Let both directions follow the same rules."""
        self.spilling.may_give = self.copying.may_give = self._may_use
        self.copying.pace = self.spilling.pace
        self.takings.min_age_s = self.spilling.min_age_s

    def show(self, metrics: Metrics) -> None:
        """Compute the figures of drain and spill when they are read; count what is taken over."""
        for state in _PAGE_STATES:
            metrics.drain_pages.labels(state).set_function(partial(self._figure, state))
            size = metrics.drain_bytes.labels(state)
            size.set_function(partial(self._figure, f"{state}_bytes"))
        self.figures.show(metrics)
        self.spilling.not_moved = self.copying.not_moved = self.figures.not_moved
        spilled, copied = self.spilling.progress, self.copying.progress
        for name in ("moved", "there", "refused", "failed"):
            pages = metrics.placement_pages.labels(name)
            pages.set_function(partial(getattr, spilled, name))
            copies = metrics.copies_pages.labels("copied" if name == "moved" else name)
            copies.set_function(partial(getattr, copied, name))
        metrics.placement_bytes.set_function(partial(getattr, spilled, "moved_bytes"))
        metrics.copies_bytes.set_function(partial(getattr, copied, "moved_bytes"))

    def _figure(self, name: str) -> float:
        return float(attrs.asdict(self.giving.progress)[name])

    def on_message(self, sender: Origin, message: PlacementMessage, now: float) -> list[Effect]:
        """Take one message; the effects must be performed in the order of the list."""
        effects = self._apply(sender, message, now)
        self._note_deadline(now)
        return effects

    def on_tick(self, now: float) -> list[Effect]:
        """Give up targets that are silent, and ask again those that had no room."""
        effects = [effect for part in self._offering() for effect in part.on_tick(now)]
        self._note_deadline(now)
        return effects

    def deadline(self) -> float:
        """Return when the next tick is due."""
        return self._deadline

    def check(self) -> None:
        """Assert the bounds."""
        for part in self._offering():
            part.check()
        if self.takings.waiting or self.takings.begun:
            self.takings.check()

    def _offering(self) -> list[Giving | Offers]:
        """Return the parts that offer pages: a drain under way, and what the settings switch on.

        The others need neither members nor time.
        """
        parts: list[Giving | Offers] = [self.giving] if self.giving.state == HANDING_OVER else []
        return [*parts, *(each for each in (self.copying, self.spilling) if each.rate)]

    def _note_deadline(self, now: float) -> None:
        self.spilling.is_serving = self.copying.is_serving = self.giving.state == SERVING
        self._deadline = min((part.deadline(now) for part in self._offering()), default=inf)

    def _apply(self, sender: Origin, message: PlacementMessage, now: float) -> list[Effect]:
        match message:
            case OfferPages() | OfferSpill():
                member = self._members.get(sender.identity)
                return self.takings.offered(sender, message, member, self._refusal(message), now)
            case ReportDrainState():
                return self.takings.drain_state(sender.identity, message)
            case PagesTaken():
                return self._taken(sender.identity, message, now)
            case ReportRoom(number) if number > COPY_NUMBERS:
                return self.copying.reported(sender.identity, message, now)
            case ReportRoom():
                return self.spilling.reported(sender.identity, message, now)
            case ColdPages():
                return self.spilling.named(message, now)
            case CopiesEvicted():
                # By way of this actor, which has to note first what the node answered before.
                return [NotifyPool(CopiesLost(sender.identity, message))]
            case PagesToCopy():
                return self.copying.named(message, now)
            case ViewChanged(members):
                return self._follow(members, now)
            case DrainBegan(until):
                known = self._members.values()
                begun = self.giving.begin(known, self.incarnation, until, now)
                return [*begun, *self.takings.turn_away()]
            case DrainCancelled():
                return self.giving.cancel()
            case PagesToGive():
                return self.giving.offered(message, now)
            case Granted():
                return self.takings.granted(message)
            case PullDone():
                return self.takings.pulled(message)
            case Committed():
                return self.takings.committed(message, self._others)
        assert_never(message)

    def _follow(self, members: Sequence[Member], now: float) -> list[Effect]:
        self._members = {member.incarnation: member for member in members}
        if self.takings.waiting:
            self.takings.follow(self._members)
        effects = [
            effect
            for part in self._offering()
            for effect in part.follow(members, self.incarnation, now)
        ]
        there = {m.incarnation for m in members if m.state in (ALIVE, SUSPECT)}
        others = frozenset(there - {self.incarnation})
        lost, self._others = self._others - others, others
        if lost:
            # A node that joins holds no copy yet: the pool need not look at its pages.
            effects.append(NotifyPool(HoldersChanged(tuple(sorted(others)))))
        return effects

    def _refusal(self, offer: OfferPages | OfferSpill) -> str:
        """Return why this node takes no page of an offer; "" if it does."""
        if self.giving.state != SERVING:
            return DRAINING
        return "" if self._may_use(offer.namespace) else NAMESPACE

    def _taken(self, sender: int, message: PagesTaken, now: float) -> list[Effect]:
        """Note what another node has taken."""
        offered: Giving | Offers = self.giving
        if message.number > SPILL_NUMBERS:
            offered = self.copying if message.number > COPY_NUMBERS else self.spilling
        pages, size = self._given()
        effects = offered.taken(sender, message, now)
        given, given_size = self._given()
        self.figures.gave(self._members.get(sender), given - pages, given_size - size)
        return effects

    def _given(self) -> tuple[int, int]:
        """Return the pages and bytes that other nodes took: of this drain, and of all else."""
        drained = self.giving.progress
        others = self.spilling.progress, self.copying.progress
        return (
            drained.given + sum(each.moved for each in others),
            drained.given_bytes + sum(each.moved_bytes for each in others),
        )

    def _may_use(self, namespace: int) -> bool:
        spaces = self.spaces()
        return spaces is None or space_of(namespace) in spaces
