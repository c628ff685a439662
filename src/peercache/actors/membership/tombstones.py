"""Tombstones: how ended members are forgotten and cannot come back by gossip. Pure.

The entry of a member that ended, dead or left, stays in the view for FORGET_S, so that it wins
against every view that still has the member alive. Then the entry leaves the view, and a tombstone
keeps its last counter, on this node only. An entry with no higher counter is one of the same dead
member.
"""

from __future__ import annotations

from typing import final

import attrs

from peercache.model.member import DEAD, Member

FORGET_S = 300.0
"""How long an ended entry stays in the view: long after it has reached every node."""

ENDED_MAX = 1024
"""Ended entries kept in the view and shared with it; beyond, the oldest leave it early."""

TOMBSTONES_MAX = 65_536
"""Tombstones kept, of about 150 bytes. Without one an old view revives its member for `dead_s`: the
member is silent, and so becomes dead again."""


@final
class Tombstones:
    """When each ended member ended, and the last counters of those that left the view."""

    def __init__(self) -> None:
        """Start with no ended member."""
        self._ended_at: dict[int, float] = {}  # oldest first
        self._counters: dict[int, int] = {}  # oldest first

    def __len__(self) -> int:
        """Return the number of tombstones."""
        return len(self._counters)

    def ended(self, incarnation: int, now: float) -> None:
        """Note that an entry of the view has ended."""
        self._ended_at.setdefault(incarnation, now)
        self._counters.pop(incarnation, None)

    def lives(self, incarnation: int) -> None:
        """Note that a member lives, by a counter higher than any known one."""
        self._ended_at.pop(incarnation, None)
        self._counters.pop(incarnation, None)

    def holds(self, member: Member) -> bool:
        """Tell whether a tombstone stands for this very entry or for a newer one."""
        return member.counter <= self._counters.get(member.incarnation, -1)

    def as_dead(self, member: Member) -> Member:
        """Return the entry that its tombstone stands for: dead, with the counter it died with."""
        return attrs.evolve(member, state=DEAD, counter=self._counters[member.incarnation])

    def due(self, now: float) -> list[int]:
        """Return the ended members that leave the view now, oldest first."""
        gone: list[int] = []
        for incarnation, ended_at in self._ended_at.items():
            if now - ended_at < FORGET_S and len(self._ended_at) - len(gone) <= ENDED_MAX:
                break
            gone.append(incarnation)
        return gone

    def set(self, member: Member) -> None:
        """Keep the counter of an entry that leaves the view."""
        del self._ended_at[member.incarnation]
        self._counters[member.incarnation] = member.counter
        if len(self._counters) > TOMBSTONES_MAX:
            del self._counters[next(iter(self._counters))]
