"""The planted bugs of directory owners: when they are believed to know what they do not.

Each maker takes the right thing and returns the wrong one, close to how such a bug would look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peercache.actors.publisher.pending import WaitingCommits

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _known_at_home(_: Any) -> Any:
    def expect(self: Any, waiter: int, owner: int, positions: Any, *, is_awaited: bool) -> None:
        del self, waiter, owner, positions, is_awaited

    return expect


OWN_SHARD_COUNTS: Patches = ((WaitingCommits, "expect", _known_at_home),)
