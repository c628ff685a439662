"""Claims: nodes that members hold alive, and that have not answered a master. Pure.

A member judges only the masters itself, and no master judges what it does not hold alive: a member
that refutes to one node, and then is gone, would stay in that node's view.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import attrs

from peercache.model.member import DEAD, Member
from peercache.model.view import View, is_live

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
