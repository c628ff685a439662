"""An outbox: the queued messages to one peer, in order, bounded in messages and in bytes."""

from __future__ import annotations

from collections import deque
from typing import final

OUTBOX_MESSAGES_MAX = 512
"""Messages queued while a peer is away or slow. Beyond it the oldest goes: summaries repair, and
the newest message is most likely still true."""

OUTBOX_BYTES_MAX = 16 * 2**20
"""The same in bytes: 300,000 records."""


@final
class Outbox:
    """A queue that drops its oldest rather than grow."""

    def __init__(
        self, *, messages_max: int = OUTBOX_MESSAGES_MAX, bytes_max: int = OUTBOX_BYTES_MAX
    ) -> None:
        """Start empty."""
        self.waiting: deque[bytes] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def __len__(self) -> int:
        """Return how many messages are queued."""
        return len(self.waiting)

    def put(self, raw: bytes) -> int:
        """Add a message; return how many were dropped for it, perhaps itself."""
        self.waiting.append(raw)
        self._bytes += len(raw)
        dropped = 0
        while len(self.waiting) > self._messages_max or self._bytes > self._bytes_max:
            self.take()
            dropped += 1
        return dropped

    def take(self) -> bytes:
        """Remove and return the oldest message."""
        raw = self.waiting.popleft()
        self._bytes -= len(raw)
        return raw

    def clear(self) -> int:
        """Drop everything; return how many messages that was."""
        dropped = len(self.waiting)
        self.waiting.clear()
        self._bytes = 0
        return dropped
