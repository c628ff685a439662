"""A placement actor and its clock, with members and records for a story about them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from peercache.actors.effects import NotifyPool
from peercache.actors.mailboxes import CopiesMade, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import Placement
from peercache.model.member import ALIVE, Member
from peercache.model.records import HAS_CHECKSUM, RECORD, RESIDENT, Records
from peercache.wire.messages.membership import ReportRoom, RequestRoom

ME, ONE, TWO, THREE = 11, 21, 22, 23
INSIDE = Origin(0)
PAGE = 4096
RATE = 2**30


def member(incarnation: int, state: int = ALIVE, host: str = "", counter: int = 1) -> Member:
    """Return a member; each is on a host of its own unless one is named."""
    addresses = f"a:{incarnation}", f"b:{incarnation}"
    return Member(incarnation, counter, state, 255, "h", *addresses, host or str(incarnation), "")


def records_of(
    *numbers: int, holder: int = ME, length: int = PAGE, flags: int = RESIDENT | HAS_CHECKSUM
) -> Records:
    """Return the records of these pages."""
    records = np.zeros(len(numbers), RECORD)
    for row, number in zip(records, numbers, strict=True):
        row["key"] = np.void(number.to_bytes(16, "big"))
        row["holder"], row["generation"], row["length"] = holder, 2 * number, length
        row["flags"], row["checksum"] = flags, 100 + number
    return records


@attrs.define(eq=False)
class Placed:
    """The placement actor of a node, its clock, and what it sends."""

    actor: Placement = attrs.field(factory=lambda: Placement(ME))
    now: float = attrs.field(default=100.0, kw_only=True)
    ticks: int = attrs.field(default=0, init=False)

    def take(self, message: Any, sender: Origin = INSIDE) -> list[Any]:
        """Take a message; return the effects."""
        effects = self.actor.on_message(sender, message, self.now)
        self.actor.check()
        return effects

    def see(self, *members: int | Member) -> list[Any]:
        """Let the view be this node and these members."""
        others = [each if isinstance(each, Member) else member(each) for each in members]
        return self.take(ViewChanged((member(ME), *others)))

    def wait(self, seconds: float) -> list[Any]:
        """Let time pass, from tick to tick."""
        effects: list[Any] = []
        until = self.now + seconds
        while self.actor.deadline() <= until:
            self.now = max(self.now, self.actor.deadline())
            effects += self.actor.on_tick(self.now)
            self.ticks += 1
            self.actor.check()
            assert self.actor.deadline() > self.now
        self.now = until
        return effects

    def answer_all(self, asked: list[Any], rooms: dict[int, tuple[int, float]]) -> list[Any]:
        """Answer for the nodes that are asked for room: by default much of it."""
        effects: list[Any] = []
        for effect in asked:
            assert isinstance(effect.message, RequestRoom)
            report = ReportRoom(effect.message.number, *rooms.get(effect.to, (2**30, 0.0)))
            effects += self.take(report, Origin(effect.to))
        return effects


def made_in(effects: list[Any]) -> list[tuple[list[int], int, bool]]:
    """Return what the pool learns of copies: generations, node, and whether it is certain."""
    facts = [e.fact for e in effects if isinstance(e, NotifyPool)]
    return [
        (fact.drops["generation"].tolist(), fact.node, fact.is_sure)
        for fact in facts
        if isinstance(fact, CopiesMade)
    ]
