"""Ring: which nodes own which records, by the view as it is now.

Owns    the hash ring of the members that are alive or suspect.
Hears   ViewChanged, from membership.
Says    RingChanged, to the publisher, when the set of live members has changed.
Keeps   the ring is a pure function of that set: equal views make equal rings on every node.
Limits  none of its own; a ring is as large as the view.
"""

from __future__ import annotations

import math
from typing import final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import Effect, TellPublisher
from peercache.actors.mailboxes import RingChanged, RingHears, ViewChanged
from peercache.actors.origin import Origin
from peercache.model.hash_ring import HashRing
from peercache.model.member import ALIVE, SUSPECT


@final
@attrs.define(kw_only=True)
class RingActor:
    """Follows the view; `current` is the ring of it, empty before the first view."""

    virtual_nodes: int
    replicas: int
    current: HashRing = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Start with an empty ring."""
        self.current = self._ring_of([])

    def on_message(self, sender: Origin, message: RingHears, now: float) -> list[Effect]:  # noqa: ARG002 - the port of every state actor
        """Take a view; say so if the ring is another one now."""
        match message:
            case ViewChanged():
                return self._follow(message)
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:  # noqa: ARG002 - the port of every state actor
        """Do nothing: a ring depends on no time."""
        return []

    def deadline(self) -> float:
        """Return never."""
        return math.inf

    def check(self) -> None:
        """Assert that no more owners are asked for than there are members."""
        assert self.current.replicas <= max(self.replicas, 0), "more owners than replicas"

    def _follow(self, view: ViewChanged) -> list[Effect]:
        # A suspect member stays: it usually refutes, and moving its arcs twice costs far more than
        # a few failed lookups, which readers retry at the replica.
        live = sorted({m.incarnation for m in view.members if m.state in (ALIVE, SUSPECT)})
        if tuple(live) == self.current.members:
            return []
        self.current = self._ring_of(live)
        return [TellPublisher(RingChanged(self.current))]

    def _ring_of(self, members: list[int]) -> HashRing:
        return HashRing(members, virtual_nodes=self.virtual_nodes, replicas=self.replicas)
