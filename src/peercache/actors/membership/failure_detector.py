"""The failure detector: which members are silent, never answered, or have ended. Pure.

It keeps two clocks a member, because they answer two questions. *When was it heard?* is evidence,
and only a message of the member sets it. *How long is it silent?* is suspicion, and starts again
whenever this node could not have heard it: when it begins to judge the member, when another node
shows that the member lived, when this process was stopped. Both are this host's clock.

Claims are of nodes that members hold alive, and that have not answered a master. A member judges
only the masters itself, and no master judges what it does not hold alive: a member that refutes to
one node, and then is gone, would stay in that node's view.

Tombstones: the entry of a member that ended, dead or left, stays in the view for FORGET_S, so that
it wins against every view that still has the member alive. Then the entry leaves the view, and a
tombstone keeps its last counter, on this node only. An entry with no higher counter is one of the
same dead member.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, final

import attrs

from peercache.model.member import DEAD, Member
from peercache.model.view import View, is_live


@final
class FailureDetector:
    """The clocks of the members that this node judges, and of those that it heard."""

    def __init__(self) -> None:
        """Judge no member."""
        self._heard_at: dict[int, float] = {}
        self._silent_since: dict[int, float] = {}
        self._back_since: dict[int, float] = {}

    def __len__(self) -> int:
        """Return how many members are remembered as heard."""
        return len(self._heard_at)

    def judge(self, incarnations: Iterable[int], now: float) -> None:
        """Judge exactly these from now on; members judged already keep their clocks."""
        known = self._silent_since
        self._silent_since = {member: known.get(member, now) for member in incarnations}

    def watch(self, incarnation: int, now: float) -> None:
        """Judge this one too; its clock goes on if it is judged already."""
        self._silent_since.setdefault(incarnation, now)

    def heard(self, incarnation: int, now: float) -> None:
        """Note a message of a live member."""
        self._heard_at[incarnation] = now
        if incarnation in self._silent_since:
            self._silent_since[incarnation] = now

    def heard_within(self, incarnation: int, now: float, span_s: float) -> bool:
        """Tell whether a message of this member came less than `span_s` ago."""
        return now - self._heard_at.get(incarnation, -math.inf) < span_s

    def restart(self, incarnation: int) -> None:
        """Start the clock of a member again at the next `judge`: it lived lately."""
        self._silent_since.pop(incarnation, None)

    def restart_all(self, now: float) -> None:
        """Start every clock again: this node could not have heard any member."""
        self._silent_since = dict.fromkeys(self._silent_since, now)

    def ended(self, incarnation: int) -> None:
        """Judge a member no longer that is dead or has left, and drop what was heard of it."""
        self._heard_at.pop(incarnation, None)
        self._silent_since.pop(incarnation, None)
        self._back_since.pop(incarnation, None)

    def back(self, incarnation: int, now: float) -> None:
        """Note that a member lives which this node has held dead."""
        self._back_since[incarnation] = now

    def back_within(self, incarnation: int, now: float, span_s: float) -> bool:
        """Tell whether this node held a member dead less than `span_s` ago."""
        return now - self._back_since.get(incarnation, -math.inf) < span_s

    def silent_for(self, span_s: float, now: float) -> list[tuple[int, float]]:
        """Return members silent for `span_s` or longer, with how long, in the order of `judge`."""
        return [
            (member, now - at) for member, at in self._silent_since.items() if now - at >= span_s
        ]


CLAIMED_MAX: Final = 1024
"""Claims remembered."""


@final
class Claims:
    """Since when each such node is claimed to be alive, and when last."""

    def __init__(self, *, dead_s: float) -> None:
        """Take a node for dead that has not answered for `dead_s`."""
        self._dead_s = dead_s
        self._claimed: dict[int, tuple[float, float]] = {}

    def silent(self, unmet: Iterable[Member], now: float) -> tuple[Member, ...]:
        """Return as dead those of the entries that have not answered for long."""
        found: list[Member] = []
        for entry in unmet:
            since, _ = self._claimed.get(entry.incarnation, (now, now))
            if entry.incarnation in self._claimed or len(self._claimed) < CLAIMED_MAX:
                self._claimed[entry.incarnation] = (since, now)
            if now - since >= self._dead_s:
                found.append(attrs.evolve(entry, state=DEAD))
        return tuple(found)

    def forget(self, now: float, *, view: View) -> None:
        """Forget what is claimed no longer, and what lives in this node's view by now."""
        self._claimed = {
            incarnation: (since, last)
            for incarnation, (since, last) in self._claimed.items()
            if now - last < self._dead_s and not _lives(view.get(incarnation))
        }


def _lives(entry: Member | None) -> bool:
    return entry is not None and is_live(entry)


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
