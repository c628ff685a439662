"""KV events of the tier: which chunks of this engine its home node holds.

vLLM publishes them for routers, next to those of its GPU and of its CPU cache.

Owns    the changes that vLLM has not taken yet, and what it has taken.
Takes   the chunks of each store and load; the changes of the home node, from `HeldPages`.
Keeps   a chunk is published as stored only if the home node reported it, in memory or on disk, and
        as removed when it leaves that node. The events of a chunk alternate, whatever happens
        between two steps of the engine: routers count them.
Limits  CHUNKS_MAX.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from peercache.events.following import AskedNode
from peercache.events.held import HeldPages
from peercache.model.keys import PageKeys
from peercache.observability.log import WarnOnce

CHUNKS_MAX: Final = 200_000
"""Chunks of this engine, the latest ones used: about 80 MB."""

OWNERSHIP: Final = "peercache"
"""With it vLLM keeps the tokens of a chunk until this tier reports the removal, too."""

REPEAT_S: Final = 600.0


@final
class TierEvents:
    """The events of one tier. Thread-safe."""

    def __init__(self, connect: Callable[[], AskedNode], log: Any) -> None:
        """Follow the home node. connect: opens a connection to it."""
        self._warn_once = WarnOnce(log, repeat_s=REPEAT_S)
        self._lock = threading.Lock()
        self._changed: dict[bytes, bool] = {}
        """By chunk: whether the home node holds it now."""
        self._taken: set[bytes] = set()
        """Chunks that vLLM has published as stored."""
        self._chunks: HeldPages[bytes] = HeldPages(
            connect,
            self._note,
            names_max=CHUNKS_MAX,
            held_max=CHUNKS_MAX,
            failed=self._log_problem,
            thread="peercache-vllm-events",
        )
        self._chunks.start()

    def used(self, keys: Sequence[bytes], names: PageKeys) -> None:
        """Record chunks that were stored or loaded."""
        self._chunks.name(names.tolist(), keys)

    def forget(self) -> None:
        """Publish all chunks as removed: the engine does not use them any more."""
        self._chunks.forget()

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            stored = [key for key, is_held in changed.items() if is_held and key not in self._taken]
            removed = [
                key for key, is_held in changed.items() if not is_held and key in self._taken
            ]
            self._taken.update(stored)
            self._taken.difference_update(removed)
        return [
            OffloadingEvent(
                keys=keys,
                medium=Medium.STORAGE,
                removed=is_removed,
                # The home node is on this host.
                locality=Locality.LOCAL,
                ownership=OWNERSHIP,
                removal_expected=True,
            )
            for keys, is_removed in ((removed, True), (stored, False))
            if keys
        ]

    def close(self) -> None:
        """End the threads; bounded, may be repeated."""
        self._chunks.close()

    def _note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        with self._lock:
            self._changed.update(dict.fromkeys(stored, True))
            self._changed.update(dict.fromkeys(removed, False))

    def _log_problem(self, problem: Exception) -> None:
        self._warn_once("vllm.home_not_followed", str(problem), why=str(problem))
