"""Ring: which nodes own which records, according to the current view.

Owns    the hash ring of the members that are alive or suspect.
Takes   ViewChanged, from membership; RingBuilt, when a ring that it asked for is ready.
Sends   BuildRing, for a ring that is too large for a turn of the loop; RingChanged, to the
        publisher and the directory, when there is a ring for a new set of live members.
Keeps   the ring is a pure function of that set and its hosts: equal views make equal rings on every
        node. The old ring serves until the new one is ready; the last ring is always one of the
        last view.
Limits  one ring is built at a time: view changes in the meantime cost one more. A ring is as large
        as the view.
"""

from __future__ import annotations

import math
from functools import partial
from typing import final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import BuildRing, Effect, NotifyDirectory, NotifyPublisher
from peercache.actors.mailboxes import RingBuilt, RingChanged, RingMessage, ViewChanged
from peercache.actors.origin import Origin
from peercache.model.hash_ring import HashRing
from peercache.model.member import ALIVE, SUSPECT

TOKENS_AT_ONCE_MAX = 8192
"""Tokens of a ring that is made within a turn of the loop: 51 members of 160 tokens, two
milliseconds. A thousand members take 25, which is too long for every other message."""


@final
@attrs.define(kw_only=True)
class RingActor:
    """Follows the view; `current` is the newest ring, empty before the first view."""

    virtual_nodes: int
    replicas: int | str
    tokens_at_once_max: int = TOKENS_AT_ONCE_MAX
    current: HashRing = attrs.field(init=False)
    _wanted: dict[int, str] = attrs.field(init=False, factory=dict)
    """The live members and their hosts, by incarnation; replaced, never changed."""
    _is_building: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        """Start with an empty ring."""
        self.current = HashRing([], virtual_nodes=self.virtual_nodes, replicas=self.replicas)

    def on_message(self, sender: Origin, message: RingMessage, now: float) -> list[Effect]:  # noqa: ARG002 - the port of every state actor
        """Handle a view or a ring; notify others if the ring has changed."""
        match message:
            case ViewChanged():
                return self._follow(message)
            case RingBuilt(ring):
                self._is_building = False
                return [*self._turn(ring), *self._build()]
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:  # noqa: ARG002 - the port of every state actor
        """Do nothing: a ring does not depend on time."""
        return []

    def deadline(self) -> float:
        """Return inf: there is no deadline."""
        return math.inf

    def check(self) -> None:
        """Assert that a ring of the last view is ready, or is being built."""
        assert self._is_building or self._is_current(), "an old ring for good"

    def _follow(self, view: ViewChanged) -> list[Effect]:
        # A suspect member stays: it usually refutes, and moving its arcs twice costs far more than
        # a few failed lookups, which readers retry at the replica.
        live = {m.incarnation: m.boot_id for m in view.members if m.state in (ALIVE, SUSPECT)}
        self._wanted = dict(sorted(live.items()))
        return self._build()

    def _is_current(self) -> bool:
        names, hosts = tuple(self._wanted), tuple(self._wanted.values())
        return (names, hosts) == (self.current.members, self.current.hosts)

    def _build(self) -> list[Effect]:
        if self._is_building or self._is_current():
            return []
        wanted = self._wanted
        build = partial(HashRing, wanted, virtual_nodes=self.virtual_nodes, replicas=self.replicas)
        if len(wanted) * self.virtual_nodes <= self.tokens_at_once_max:
            return self._turn(build())
        self._is_building = True
        return [BuildRing(tuple(wanted), build)]

    def _turn(self, ring: HashRing) -> list[Effect]:
        if ring.version == self.current.version:
            return []
        self.current = ring
        return [NotifyPublisher(RingChanged(ring)), NotifyDirectory(RingChanged(ring))]
