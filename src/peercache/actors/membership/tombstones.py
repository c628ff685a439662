"""Graves: how ended members are forgotten without coming back. Pure.

An entry that ends, dead or left, stays in the view for FORGET_S, so that it wins against every view
that still has it alive. Then it is buried: it leaves the view, and only its last counter is kept
here, for this node alone. Whoever brings it up again with no higher counter brings up a dead one.
"""

from __future__ import annotations

from typing import final

import attrs

from peercache.model.member import DEAD, Member

FORGET_S = 300.0
"""How long an ended entry stays in the view: long after it has reached everybody."""

ENDED_MAX = 1024
"""Ended entries kept in the view, and shared with it; more are buried early, oldest first."""

BURIED_MAX = 65_536
"""Counters kept, at about 150 bytes. Of one deeper down an old view makes a ghost: it is silent,
and dead again after dead_s."""


@final
class Graves:
    """Who has ended, and when; who is buried, and with which counter."""

    def __init__(self) -> None:
        """Nobody has ended yet."""
        self._ended_at: dict[int, float] = {}  # oldest first
        self._buried: dict[int, int] = {}  # oldest first

    def __len__(self) -> int:
        """Return the number of the buried."""
        return len(self._buried)

    def ended(self, incarnation: int, now: float) -> None:
        """Note that an entry of the view has ended."""
        self._ended_at.setdefault(incarnation, now)
        self._buried.pop(incarnation, None)

    def lives(self, incarnation: int) -> None:
        """Note that it lives, by a counter higher than any we knew."""
        self._ended_at.pop(incarnation, None)
        self._buried.pop(incarnation, None)

    def holds(self, member: Member) -> bool:
        """Return whether this very entry, or a newer one, is buried."""
        return member.counter <= self._buried.get(member.incarnation, -1)

    def exhumed(self, member: Member) -> Member:
        """Return a buried one as it has to be told: dead, with the counter it died with."""
        return attrs.evolve(member, state=DEAD, counter=self._buried[member.incarnation])

    def due(self, now: float) -> list[int]:
        """Return whom to bury now, oldest first."""
        gone: list[int] = []
        for incarnation, ended_at in self._ended_at.items():
            if now - ended_at < FORGET_S and len(self._ended_at) - len(gone) <= ENDED_MAX:
                break
            gone.append(incarnation)
        return gone

    def bury(self, member: Member) -> None:
        """Keep the counter of an entry that leaves the view."""
        del self._ended_at[member.incarnation]
        self._buried[member.incarnation] = member.counter
        if len(self._buried) > BURIED_MAX:
            del self._buried[next(iter(self._buried))]
