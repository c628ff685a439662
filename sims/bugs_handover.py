"""The planted bugs of a drain: what is handed over and must not be.

Each maker takes the right thing and returns the wrong one, close to how such a bug would look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peercache.actors.mailboxes import TAKER
from peercache.actors.pool.actor import Pool
from sims import node

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _as_a_client_stores(_: Any) -> Any:
    def take_over(self: Any, reserve: Any, now: float) -> Any:
        del now
        return self._reserve(TAKER, reserve)

    return take_over


def _whatever_came(_: Any) -> Any:
    def arrived(records: Any, namespace: int, fetched: Any) -> bytes:
        del namespace, fetched
        return bytes([1]) * len(records)

    return arrived


THOUGH_REMOVED: Patches = ((Pool, "_take_over", _as_a_client_stores),)

UNVERIFIED: Patches = ((node, "arrived", _whatever_came),)
