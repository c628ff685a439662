"""Unread pages: bytes that were promoted and may not have been read yet.

They must not be evicted for the next portion, so they count against the promote actor's share of
the pool until their readers have had time.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, final

import attrs

READ_WITHIN_S: Final = 0.25
"""How long a reader has to read its portion; afterwards its pages count as any other page."""


@final
@attrs.define(eq=False)
class _Portion:
    at: float
    size: int
    readers: dict[int, None]


@final
@attrs.define(eq=False)
class UnreadPages:
    """The bytes of promoted pages, by their readers. size: their sum."""

    size: int = 0
    _portions: deque[_Portion] = attrs.field(factory=deque)

    def add(self, now: float, size: int, readers: dict[int, None]) -> None:
        """Note what was promoted for these readers; a wish has none."""
        self._portions.append(_Portion(now, size, readers))
        self.size += size

    def read_by(self, reader: int) -> None:
        """Note that a reader has read what was promoted for it."""
        for portion in self._portions:
            if reader in portion.readers:
                del portion.readers[reader]
                if not portion.readers:
                    self.size -= portion.size
                    portion.size = 0

    def expire(self, now: float) -> None:
        """Count out the portions whose time is over."""
        while self._portions and self._portions[0].at + READ_WITHIN_S <= now:
            self.size -= self._portions.popleft().size

    def deadline(self) -> float:
        """Return when the oldest portion's time is over; inf without one."""
        return self._portions[0].at + READ_WITHIN_S if self._portions else inf
