"""Askers: who waits for pages that are being loaded from disk, and for which.

An asker is answered once: when each page of its portion has been promoted or lost, or when its
patience is over. Several may wait for one page, which is loaded once.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs

from peercache.actors.effects import Effect, Send
from peercache.actors.origin import Origin
from peercache.actors.pool.page_table import Page, PageTable
from peercache.observability.metrics import Metrics
from peercache.wire.messages.promote import LATER, LOST, PROMOTED, Promote, Promoted

PATIENCE_MAX_S: Final = 60.0

ASKERS_MAX: Final = 4096
"""Questions that wait at once; beyond, one is answered with what has come so far."""


@final
@attrs.define(eq=False)
class _Asker:
    """Who waits. open: how many of its pages may yet be settled."""

    origin: Origin
    request: int
    keys: list[bytes]
    states: bytearray
    asked_at: float
    until: float
    open: int


@final
@attrs.define(eq=False)
class Askers:
    """Everybody who waits, by page."""

    pages: PageTable
    metrics: Metrics | None = None
    now: float = -inf
    """Of the step under way."""
    _askers: dict[int, _Asker] = attrs.field(factory=dict)
    _waiting: dict[bytes, list[tuple[int, int]]] = attrs.field(factory=dict)
    """By key: the askers that wait for it, and at which place of theirs."""
    _last: int = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._askers)

    def admit(
        self,
        origin: Origin,
        message: Promote,
        keys: list[bytes],
        states: bytearray,
        places: list[int],
        now: float,
    ) -> list[Effect]:
        """Let somebody wait for the pages at these places, or answer at once.

        states: of all its pages as they are; those at `places` will be settled.
        """
        until = now + min(message.patience_s, PATIENCE_MAX_S)
        asker = _Asker(origin, message.request, keys, states, now, until, len(places))
        is_told_something = PROMOTED in states or LOST in states or not states
        # With nothing to tell the answer waits: whoever asks in vain must not ask without end.
        if (not places and is_told_something) or len(self._askers) >= ASKERS_MAX:
            return [self._answer(asker)]
        self._last += 1
        self._askers[self._last] = asker
        for at in places:
            self._waiting.setdefault(keys[at], []).append((self._last, at))
        return []

    def want(self, key: bytes) -> bool:
        """Return whether somebody waits for a page."""
        return key in self._waiting

    def identities(self, key: bytes) -> dict[int, None]:
        """Return who waits for a page."""
        waiting = [self._askers.get(number) for number, _ in self._waiting.get(key, ())]
        return {asker.origin.identity: None for asker in waiting if asker is not None}

    def waited_for(self) -> list[bytes]:
        """Return all pages that somebody waits for."""
        return list(self._waiting)

    def settle(self, key: bytes, state: int) -> list[Effect]:
        """Tell whoever waits for a page what became of it; answer those that wait no more."""
        effects: list[Effect] = []
        for number, at in self._waiting.pop(key, ()):
            asker = self._askers.get(number)
            if asker is not None:
                asker.states[at] = state
                asker.open -= 1
                if not asker.open:
                    effects.append(self._answer(self._askers.pop(number)))
        return effects

    def expire(self) -> list[Effect]:
        """Answer those whose patience is over, with what has come."""
        over = [number for number, asker in self._askers.items() if asker.until <= self.now]
        effects: list[Effect] = []
        for number in over:
            asker = self._askers.pop(number)
            for key in asker.keys:
                rest = [pair for pair in self._waiting.get(key, ()) if pair[0] != number]
                if rest:
                    self._waiting[key] = rest
                else:
                    self._waiting.pop(key, None)
            effects.append(self._answer(asker))
        return effects

    def deadline(self) -> float:
        """Return when somebody's patience is over; inf if nobody waits."""
        return min((asker.until for asker in self._askers.values()), default=inf)

    def _answer(self, asker: _Asker) -> Effect:
        """Answer with the records as they are now: what was evicted since is to be asked again."""
        find, states = self.pages.find, asker.states
        promoted: list[Page] = []
        for at, state in enumerate(states):
            if state == PROMOTED:
                page = find(asker.keys[at])
                if page is None:
                    states[at] = LATER
                else:
                    promoted.append(page)
        if self.metrics is not None:
            self.metrics.promote_s.observe(self.now - asker.asked_at)
        records = self.pages.records(promoted).tobytes()
        return Send(asker.origin, Promoted(asker.request, bytes(states), records))
