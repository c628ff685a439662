"""What vLLM's scheduler asked for, and what is known of it.

The scheduler asks key by key, and may not wait: the first answer to a key is "later", and a step's
questions become one call a request, in a thread. A verdict holds until its request has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

REQUESTS_MAX = 65536
"""Requests that are remembered; more than vLLM ever schedules, so only lost ends come to it."""


@final
class Lookups:
    """Verdicts by request and key. But for `settle`, one call at a time."""

    def __init__(self, ask: Callable[[str, list[bytes]], None]) -> None:
        """Ask by `ask`, which does not wait, and has `settle` called for each key in the end."""
        self._ask = ask
        self._verdicts: dict[str, dict[bytes, bool | None]] = {}
        self._batch: dict[str, list[bytes]] = {}

    def verdict(self, request: str, key: bytes) -> bool | None:
        """Return whether a chunk is held; None where that is not known yet."""
        known = self._verdicts.get(request)
        if known is None:
            if len(self._verdicts) >= REQUESTS_MAX:
                return False
            known = self._verdicts[request] = {}
        if key not in known:
            known[key] = None
            self._batch.setdefault(request, []).append(key)
        return known[key]

    def flush(self) -> None:
        """Ask for what came in this step."""
        batch, self._batch = self._batch, {}
        for request, keys in batch.items():
            self._ask(request, keys)

    def settle(self, request: str, keys: Iterable[bytes], *, held: Iterable[bool]) -> None:
        """Keep verdicts, unless the request has finished. Any thread may call it."""
        if (known := self._verdicts.get(request)) is not None:
            known.update(zip(keys, held, strict=True))

    def forget(self, request: str) -> None:
        """Drop a request that has finished."""
        self._verdicts.pop(request, None)
        self._batch.pop(request, None)
