"""The planted bugs of hand-overs: of records to a new owner, and of a drained node's pages.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peercache.actors.mailboxes import TAKER
from peercache.actors.pool.actor import Pool
from peercache.actors.publisher.actor import Publisher
from sims import node

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _as_a_client_stores(_: Any) -> Any:
    def take_over(self: Any, message: Any, now: float) -> Any:
        del now
        return self._reserve(TAKER, message.reserve)

    return take_over


def _whatever_came(_: Any) -> Any:
    def arrived(records: Any, namespace: int, fetched: Any) -> bytes:
        del namespace, fetched
        return bytes([1]) * len(records)

    return arrived


def _as_soon_as_it_begins(right: Any) -> Any:
    def turn(self: Any, ring: Any, now: float) -> Any:
        effects = right(self, ring, now)
        self._is_complete = True
        for stream in self._streams.values():
            stream.ask_soon(now)
        self._due = now
        return effects

    return turn


INCOMPLETE_HAND_OVER: Patches = ((Publisher, "_turn", _as_soon_as_it_begins),)

THOUGH_REMOVED: Patches = ((Pool, "_take_over", _as_a_client_stores),)

UNVERIFIED: Patches = ((node, "arrived", _whatever_came),)
