"""The failure detector: when each member was last heard, and how long it has been silent. Pure.

It keeps two clocks a member, because they answer two questions. *When was it heard?* is evidence,
and only a message of the member sets it. *How long is it silent?* is suspicion, and starts anew
whenever this node could not have heard it: when it begins to judge the member, when another node
shows that the member lived, when this process was stopped. Both are this host's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final


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
        """Start the clock of a member anew at the next `judge`: it lived lately, though unheard."""
        self._silent_since.pop(incarnation, None)

    def restart_all(self, now: float) -> None:
        """Start every clock anew: this node could not have heard any member."""
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
