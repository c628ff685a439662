"""Handover: hands the pages of a node that is drained over to other nodes, and takes theirs.

Owns    the drain of this node: which pages are offered to whom, and how far it is; and the offers
        of other nodes that are being read.
Hears   PagesOffered, PagesTaken and DrainTold, from members; ViewChanged, from membership;
        DrainBegan, DrainCancelled and PullDone, from the node; PagesToGive, Granted and Committed,
        from the pool.
Says    PagesOffered, PagesTaken and DrainAsked to members; DrainChanged, GiveAsked, TakeOver and
        TakenOver to the pool; Pull to the node, which reads.
Keeps   a page is taken as a mirrored one is: its slot is reserved before it is read, its bytes are
        verified by the holder's seal, and what was removed meanwhile is not committed. The holder
        keeps it. Nothing is evicted for it. A node that is drained takes nothing. Pages are taken
        from nodes only that say that they drain, and both ends' certificates bound of which
        namespaces.
Limits  one offer a target, of `giving.OFFER_PAGES` and OFFER_BYTES; `taking.TAKINGS_MAX` offers at
        once are read here, one of each node, at a minimum rate; one more of each waits. What is
        lost is offered to another target, within the drain's time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final, final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import Effect
from peercache.actors.handover.giving import SERVING, Giving
from peercache.actors.handover.taking import Takings
from peercache.actors.mailboxes import (
    DrainBegan,
    DrainCancelled,
    HandoverHears,
    PagesToGive,
    PullDone,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.model.keys import space_of
from peercache.model.member import Member
from peercache.observability.metrics import Metrics
from peercache.wire.messages.draining import DrainTold, PagesOffered, PagesTaken
from peercache.wire.messages.pool import Committed, Granted

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

    def on_message(self, sender: Origin, message: HandoverHears, now: float) -> list[Effect]:
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

    def _apply(self, sender: Origin, message: HandoverHears, now: float) -> list[Effect]:
        match message:
            case PagesOffered():
                member = self._members.get(sender.identity)
                takes = self.giving.state == SERVING and self._may_use(message.namespace)
                return self.takings.offered(sender, message, member, has_room=takes)
            case DrainTold():
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
