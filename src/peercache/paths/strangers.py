"""Holders of records that the client's view does not name: they may have joined since."""

from __future__ import annotations

from threading import Lock
from typing import final

import numpy as np

STRANGER_S = 1.0
"""How long a holder stays unknown that the view did not name when it was asked for: as long as a
client's view may be old anyhow."""

STRANGERS_MAX = 1024
"""Unknown holders that are remembered: an owner may invent them."""


@final
class Strangers:
    """The holders of records that no view has named, for which the view was asked. Thread-safe."""

    def __init__(self) -> None:
        """Know none."""
        self._lock = Lock()
        self._asked: dict[int, float] = {}

    def are_new(self, holders: frozenset[int], now: float) -> bool:
        """Return whether to ask for the view because of these: once a holder and STRANGER_S."""
        with self._lock:
            new = [h for h in holders if now - self._asked.get(h, -np.inf) >= STRANGER_S]
            for holder in new:
                self._asked.pop(holder, None)
                self._asked[holder] = now
            while len(self._asked) > STRANGERS_MAX:
                del self._asked[next(iter(self._asked))]
            return bool(new)
