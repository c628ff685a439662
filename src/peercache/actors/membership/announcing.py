"""Announcing: what ring, directory and removal hear of the view, and how often. Pure."""

from __future__ import annotations

import math
from typing import Final, final

from peercache.actors.effects import Effect, TellDirectory, TellHandover, TellRemoval, TellRing
from peercache.actors.mailboxes import ViewChanged
from peercache.model.view import STATE_NAMES, View
from peercache.observability.metrics import Metrics

ANNOUNCED_AT_ONCE_MAX: Final = 64
"""Members of a view each change of which is told at once: that takes less than a tenth of a
millisecond."""

ANNOUNCE_GAP_S: Final = 0.1
"""Least time between two announcements of a larger view: a thousand members that come within some
seconds are not a thousand rings."""


@final
class Announcing:
    """When the view was told last, and when it is to be told again.

    due: when a change that was not told yet is to be told; inf if there is none.
    """

    def __init__(self, metrics: Metrics | None) -> None:
        """Have told nothing."""
        self._metrics = metrics
        self._told_at = -math.inf
        self.due = math.inf

    def changed(self, view: View, now: float) -> list[Effect]:
        """Tell a change, or let it wait."""
        if len(view) > ANNOUNCED_AT_ONCE_MAX and now - self._told_at < ANNOUNCE_GAP_S:
            self.due = self._told_at + ANNOUNCE_GAP_S
            return []
        return self.tell(view, now)

    def tell(self, view: View, now: float) -> list[Effect]:
        """Tell the view."""
        self._told_at, self.due = now, math.inf
        changed = ViewChanged(view.members())
        if self._metrics is not None:
            for state, name in enumerate(STATE_NAMES):
                count = sum([member.state == state for member in changed.members])
                self._metrics.members.labels(state=name).set(count)
        return [
            TellRing(changed),
            TellDirectory(changed),
            TellRemoval(changed),
            TellHandover(changed),
        ]
