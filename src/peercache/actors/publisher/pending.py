"""Commits that wait to hear that their records are published.

A client's set is done when its pages are in the pool; it also wants to know that others can find
them. Each commit waits here until every record has one owner's acknowledgement, or until its
patience is over, and is answered exactly once.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Effect, Send, TellPool
from peercache.actors.mailboxes import PagesCommitted
from peercache.wire.messages.pool import Committed

WAITERS_MAX = 4096
"""Commits that wait at once: beyond, one is answered with what is acknowledged so far."""

PATIENCE_MAX_S = 60.0
"""Longest that a commit may wait: far beyond any operation's deadline."""


@attrs.define(eq=False)
class _Waiter:
    committed: PagesCommitted
    acknowledged: npt.NDArray[np.bool_]


@attrs.define(eq=False)
class WaitingCommits:
    """The commits without an answer. Each has a number from 1, its waiter; 0 is no commit."""

    _waiters: dict[int, _Waiter] = attrs.field(factory=dict)
    _patience: list[tuple[float, int]] = attrs.field(factory=list)
    """When each waiter's patience is over: a heap, with some among it that were answered before."""
    _last: int = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiters)

    def admit(self, committed: PagesCommitted, now: float) -> int:
        """Let a commit wait; return its number."""
        self._last += 1
        self._waiters[self._last] = _Waiter(committed, np.zeros(len(committed.records), np.bool_))
        until = now + min(committed.patience_s, PATIENCE_MAX_S)
        heappush(self._patience, (until, self._last))
        if len(self._patience) > 2 * WAITERS_MAX:
            self._patience = [entry for entry in self._patience if entry[1] in self._waiters]
            heapify(self._patience)
        return self._last

    def acknowledge(self, waiter: int, positions: npt.NDArray[np.intp]) -> None:
        """Note that these of its records have an owner that knows them."""
        waiting = self._waiters.get(waiter)
        if waiting is not None:
            waiting.acknowledged[positions] = True

    def answer_if_done(self, waiter: int) -> list[Effect]:
        """Answer a commit if it has nothing to wait for, no patience, or if too many wait."""
        waiting = self._waiters.get(waiter)
        if waiting is None:
            return []
        has_patience = waiting.committed.patience_s > 0
        if waiting.acknowledged.all() or not has_patience or len(self._waiters) > WAITERS_MAX:
            return self._answer(waiter)
        return []

    def expire(self, now: float) -> list[Effect]:
        """Answer those whose patience is over, with what is acknowledged so far."""
        effects: list[Effect] = []
        while self._patience and self._patience[0][0] <= now:
            effects += self._answer(heappop(self._patience)[1])
        return effects

    def deadline(self) -> float:
        """Return when the next patience is over, at the earliest; inf if no commit is pending."""
        return self._patience[0][0] if self._patience else math.inf

    def _answer(self, waiter: int) -> list[Effect]:
        # Taken out before it is answered: whatever acknowledges or expires it later finds nothing.
        waiting = self._waiters.pop(waiter, None)
        if waiting is None:
            return []
        committed = waiting.committed
        answer = Committed(
            committed.request,
            committed.sequence,
            committed.states,
            committed.records.tobytes() + committed.here.tobytes(),
            int(waiting.acknowledged.sum()) + len(committed.here),
            committed.ahead,
            committed.offsets,
        )
        return [Send(committed.origin, answer), *(TellPool(fact) for fact in committed.then)]
