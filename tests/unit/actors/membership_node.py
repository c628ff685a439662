"""One Membership with a hand on its clock, and what to look for in its effects."""

from __future__ import annotations

import random
from typing import Any

from peercache.actors.effects import Effect, NotifyPublisher, Send, SendTo
from peercache.actors.mailboxes import PeerAnswered, Republish
from peercache.actors.membership.actor import Membership
from peercache.actors.origin import Origin
from peercache.model.member import Member
from peercache.wire.messages.membership import HeartbeatSeen, ShareView
from tests.unit.actors.membership_cluster import DEAD_S, HEARTBEAT_S, SUSPECT_S, member

# With max_masters = 2: nodes 1 and 2 are the masters whenever they live.
ME, ONE, TWO, NINE, TEN = 5, 1, 2, 9, 10


class Node:
    """A Membership with a clock that moves tick by tick."""

    def __init__(self, incarnation: int = ME, discovery: tuple[str, ...] = (), **more: Any) -> None:
        options: dict[str, Any] = {
            "me": member(incarnation),
            "discovery_addr": discovery,
            "max_masters": 2,
            "heartbeat_s": HEARTBEAT_S,
            "suspect_s": SUSPECT_S,
            "dead_s": DEAD_S,
            "rng": random.Random(1),
        }
        self.actor = Membership(**(options | more))
        self.now = 50.0
        self.first = self.actor.start(self.now)

    def take(self, sender: int, message: object, pipe: int = 0) -> list[Effect]:
        effects = self.actor.on_message(Origin(sender, pipe), message, self.now)
        self.actor.check()
        return effects

    def reported_by(self, sender: int, *members: Member) -> list[Effect]:
        return self.take(sender, ShareView(0, members))

    def knows(self, *incarnations: int) -> Node:
        """Have these answer at their addresses, a moment ago."""
        for incarnation in incarnations:
            self.meets(member(incarnation))
        return self

    def meets(self, known: Member) -> list[Effect]:
        """Have a member answer at its own address, which this node has dialled."""
        return self.take(0, PeerAnswered(known.control, known))

    def passes(self, seconds: float, speaking: tuple[int, ...] = ()) -> list[Effect]:
        """Let ticks happen on time; who speaks answers a heartbeat before each."""
        effects: list[Effect] = []
        until = self.now + seconds
        while self.actor.deadline() <= until:
            self.now = self.actor.deadline()
            for incarnation in speaking:
                effects += self.take(incarnation, HeartbeatSeen(self.actor.view.digest()))
            effects += self.actor.on_tick(self.now)
            self.actor.check()
            assert self.actor.deadline() > self.now
        self.now = until
        return effects

    def state(self, incarnation: int) -> int | None:
        entry = self.actor.member(incarnation)
        return None if entry is None else entry.state


def sends(effects: list[Effect], kind: type) -> list[Send]:
    return [e for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def calls(effects: list[Effect]) -> list[str]:
    return [e.address for e in effects if isinstance(e, SendTo)]


def republishes(effects: list[Effect]) -> int:
    return sum(isinstance(e, NotifyPublisher) and isinstance(e.fact, Republish) for e in effects)
