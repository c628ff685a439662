"""View log: what has changed in this node's view lately, so that a peer is told that alone. Pure.

A digest names the set of live entries. So "what changed since the view had this digest" is exact:
a peer that has it needs those entries and no others. A digest that the log does not know, or from
which too much has changed, is answered as ever: by comparing, or with the whole view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, final

LOG_MAX: Final = 1024
"""Changes remembered: those of a start of a thousand nodes, or of hours of a steady cluster."""

TOLD_MAX: Final = 64
"""Entries told as changes, 20 KB at most: beyond, views are compared."""

BEHIND_BEATS: Final = 3
"""Heartbeats for which a peer counts as behind whose view this node had; then it may differ by more
than what is told in heartbeats, and the views are compared."""


@final
class ViewLog:
    """The last changes of a view, and where in them each digest was left."""

    def __init__(self, *, heartbeat_s: float) -> None:
        """Know no change."""
        self._recent_s = BEHIND_BEATS * heartbeat_s
        self._changes: deque[int] = deque()  # incarnations, oldest first
        self._forgotten = 0
        self._left: dict[bytes, tuple[int, float]] = {}  # by digest: how many changes came before

    def __len__(self) -> int:
        """Return how many changes are remembered."""
        return len(self._changes)

    def changed(self, before: bytes, after: bytes, touched: Iterable[int], now: float) -> None:
        """Note that these entries have changed, and the view's digest with them."""
        if before == after:
            return  # Entries of the ended: no peer has to hear of them.
        self._left.pop(before, None)
        self._left[before] = (self._forgotten + len(self._changes), now)
        self._changes.extend(touched)
        while len(self._changes) > LOG_MAX:
            self._changes.popleft()
            self._forgotten += 1
        while self._left and next(iter(self._left.values()))[0] < self._forgotten:
            del self._left[next(iter(self._left))]

    def was(self, digest: bytes, now: float) -> bool:
        """Tell whether the view had this digest lately: who has it still is behind this node."""
        left = self._left.get(digest)
        return left is not None and now - left[1] < self._recent_s

    def since(self, digest: bytes) -> list[int] | None:
        """Return the entries that changed since the view had this digest; None if not known."""
        left = self._left.get(digest)
        count = 0 if left is None else self._forgotten + len(self._changes) - left[0]
        if not 0 < count <= 4 * TOLD_MAX:
            return None
        changed = dict.fromkeys(self._changes[at - count] for at in range(count))
        return list(changed) if len(changed) <= TOLD_MAX else None
