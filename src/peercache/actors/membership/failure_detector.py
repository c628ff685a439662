"""Silence: who spoke to us lately, and since when the others do not. Pure.

Two clocks, because they answer two questions. *Did I hear it?* is evidence, and only a message of
its own sets it. *How long is it silent?* is a verdict, and starts anew whenever we could not have
heard it: when we begin to judge it, when it is known to have lived, when we were stopped ourselves.
Both are this host's clock and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final


@final
class Silence:
    """The clocks of those we judge, and of those we heard."""

    def __init__(self) -> None:
        """Judge nobody."""
        self._heard_at: dict[int, float] = {}
        self._silent_since: dict[int, float] = {}

    def __len__(self) -> int:
        """Return how many are remembered as heard."""
        return len(self._heard_at)

    def judge(self, incarnations: Iterable[int], now: float) -> None:
        """Judge exactly these from now on; those judged already keep their clocks."""
        known = self._silent_since
        self._silent_since = {who: known.get(who, now) for who in incarnations}

    def heard(self, incarnation: int, now: float) -> None:
        """Note a message of a living member."""
        self._heard_at[incarnation] = now
        if incarnation in self._silent_since:
            self._silent_since[incarnation] = now

    def heard_within(self, incarnation: int, now: float, span_s: float) -> bool:
        """Return whether a message of it came less than `span_s` ago."""
        return now - self._heard_at.get(incarnation, -math.inf) < span_s

    def pardon(self, incarnation: int) -> None:
        """Start the silence of one anew at the next `judge`: it lived lately, though unheard."""
        self._silent_since.pop(incarnation, None)

    def pardon_all(self, now: float) -> None:
        """Start every silence anew: we could not have heard anybody."""
        self._silent_since = dict.fromkeys(self._silent_since, now)

    def ended(self, incarnation: int) -> None:
        """Drop what was heard of one that is dead or has left."""
        self._heard_at.pop(incarnation, None)

    def longer_than(self, span_s: float, now: float) -> list[tuple[int, float]]:
        """Return those silent for `span_s` or longer, with how long, in the order of `judge`."""
        return [(who, now - at) for who, at in self._silent_since.items() if now - at >= span_s]
