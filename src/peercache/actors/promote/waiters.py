"""Waiters: the readers that wait for pages that are being loaded from disk.

A waiter is answered once: when each page of its portion has been promoted or lost, or when its
patience is over. Several waiters may wait for one page, which is loaded once.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs

from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import PromoteAnswered
from peercache.actors.origin import Origin
from peercache.observability.metrics import Metrics
from peercache.wire.messages.promote import LOST, PROMOTED

WAITERS_MAX: Final = 4096
"""Waiters at once; one more is answered at once, with what is in memory."""


@final
@attrs.define(eq=False)
class Waiter:
    """A reader that waits. open: how many of its pages are pending."""

    origin: Origin
    request: int
    keys: list[bytes]
    states: bytearray
    asked_at: float
    until: float
    open: int = 0


@final
@attrs.define(eq=False)
class Waiters:
    """All waiters, by page."""

    metrics: Metrics | None = None
    now: float = -inf
    """Of the step under way."""
    _waiters: dict[int, Waiter] = attrs.field(factory=dict)
    _pending: dict[bytes, dict[tuple[int, int], None]] = attrs.field(factory=dict)
    """By key: the waiters for it, and the page's position in their questions. Many may wait for one
    prefix, and all give up in one tick: each leaves without a look at the others."""
    _last: int = 0

    def __len__(self) -> int:
        """Return the number of waiters."""
        return len(self._waiters)

    def admit(self, waiter: Waiter, positions: list[int]) -> list[Effect]:
        """Let a reader wait for the pages at these positions, or answer at once."""
        waiter.open = len(positions)
        states = waiter.states
        has_news = PROMOTED in states or LOST in states or not states
        # An answer without news waits for the patience: else the reader would poll without pause.
        if (not positions and has_news) or len(self._waiters) >= WAITERS_MAX:
            return [self._answer(waiter)]
        self._last += 1
        self._waiters[self._last] = waiter
        for at in positions:
            self._pending.setdefault(waiter.keys[at], {})[self._last, at] = None
        return []

    def want(self, key: bytes) -> bool:
        """Return whether a reader waits for a page."""
        return key in self._pending

    def identities(self, key: bytes) -> dict[int, None]:
        """Return the readers that wait for a page."""
        pending = [self._waiters.get(number) for number, _ in self._pending.get(key, ())]
        return {waiter.origin.identity: None for waiter in pending if waiter is not None}

    def wanted_keys(self) -> list[bytes]:
        """Return all pages that readers wait for."""
        return list(self._pending)

    def settle(self, key: bytes, state: int) -> list[Effect]:
        """Tell the waiters for a page its state; answer those with no page pending."""
        effects: list[Effect] = []
        for number, at in self._pending.pop(key, ()):
            waiter = self._waiters.get(number)
            if waiter is not None:
                waiter.states[at] = state
                waiter.open -= 1
                if not waiter.open:
                    effects.append(self._answer(self._waiters.pop(number)))
        return effects

    def expire(self) -> list[Effect]:
        """Answer the waiters whose patience is over, with what has come."""
        over = [number for number, waiter in self._waiters.items() if waiter.until <= self.now]
        effects: list[Effect] = []
        for number in over:
            waiter = self._waiters.pop(number)
            for at, key in enumerate(waiter.keys):
                pending = self._pending.get(key, {})
                pending.pop((number, at), None)
                if not pending:
                    self._pending.pop(key, None)
            effects.append(self._answer(waiter))
        return effects

    def deadline(self) -> float:
        """Return when the next patience is over; inf without waiters."""
        return min((waiter.until for waiter in self._waiters.values()), default=inf)

    def _answer(self, waiter: Waiter) -> Effect:
        """Have the pool answer, which knows the records of this moment."""
        if self.metrics is not None:
            self.metrics.promote_s.observe(self.now - waiter.asked_at)
        keys, states = tuple(waiter.keys), bytes(waiter.states)
        return TellPool(PromoteAnswered(waiter.origin, waiter.request, keys, states))
