"""Warnings about peers, each once: a path that is broken is met by every read."""

from __future__ import annotations

import threading
from typing import Any, final

from peercache.model.ids import name_of

TOLD_MAX = 1024
"""Warnings remembered so that each is logged once; then they are told anew."""


@final
class News:
    """Tells what is new. Thread-safe."""

    def __init__(self, log: Any) -> None:
        """Tell it to a log."""
        self._log = log
        self._lock = threading.Lock()
        self._told: dict[tuple[str, int, str], None] = {}

    def tell(self, event: str, peer: int, why: str, **facts: str) -> None:
        """Warn once a peer and reason."""
        with self._lock:
            if len(self._told) >= TOLD_MAX:
                self._told.clear()
            is_news = (event, peer, why) not in self._told
            self._told[event, peer, why] = None
        if is_news:
            self._log.warning(event, peer=name_of(peer), reason=why, **facts)
