"""What was promoted and may not have been read yet: it must not be evicted for the next portion."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, final

import attrs

READ_WITHIN_S: Final = 0.25
"""How long a reader has to read what was promoted for it, before it counts as any other page."""


@final
@attrs.define(eq=False)
class _Promoted:
    at: float
    size: int
    readers: dict[int, None]


@final
@attrs.define(eq=False)
class Unread:
    """The bytes of pages that were promoted, and for whom. size: their sum."""

    size: int = 0
    _promoted: deque[_Promoted] = attrs.field(factory=deque)

    def add(self, now: float, size: int, readers: dict[int, None]) -> None:
        """Note what was promoted for these readers; for nobody, if it was a wish."""
        self._promoted.append(_Promoted(now, size, readers))
        self.size += size

    def read_by(self, reader: int) -> None:
        """Note that a reader has read what was promoted for it."""
        for promoted in self._promoted:
            if reader in promoted.readers:
                del promoted.readers[reader]
                if not promoted.readers:
                    self.size -= promoted.size
                    promoted.size = 0

    def expire(self, now: float) -> None:
        """Let go of what has had its time."""
        while self._promoted and self._promoted[0].at + READ_WITHIN_S <= now:
            self.size -= self._promoted.popleft().size

    def deadline(self) -> float:
        """Return when the oldest has had its time; inf if there is none."""
        return self._promoted[0].at + READ_WITHIN_S if self._promoted else inf
