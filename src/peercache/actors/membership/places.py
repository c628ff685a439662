"""Places: the addresses at which the other members of the view are, and their head ranks. Pure.

Kept up entry by entry: a view of thousands changes thousands of times while its nodes start.
"""

from __future__ import annotations

from typing import TypeVar, final

from peercache.model.member import ALIVE, Member
from peercache.model.view import is_live

_Key = TypeVar("_Key", str, int)


@final
class Places:
    """What the entries of the other members say of places. All three are to be read only.

    live_at: the incarnations that are alive or suspect at each control address.
    reached: the control addresses of those that are alive; ranks: their head ranks. Each with how
             many members it has.
    """

    def __init__(self) -> None:
        """Start with no other member."""
        self.live_at: dict[str, set[int]] = {}
        self.reached: dict[str, int] = {}
        self.ranks: dict[int, int] = {}

    def change(self, before: Member | None, after: Member | None) -> None:
        """Follow one entry: None before it comes, and after it is forgotten."""
        if before is not None and is_live(before):
            incarnations = self.live_at[before.control]
            incarnations.remove(before.incarnation)
            if not incarnations:
                del self.live_at[before.control]
            if before.state == ALIVE:
                _count(self.reached, before.control, -1)
                _count(self.ranks, before.head_rank, -1)
        if after is not None and is_live(after):
            self.live_at.setdefault(after.control, set()).add(after.incarnation)
            if after.state == ALIVE:
                _count(self.reached, after.control, 1)
                _count(self.ranks, after.head_rank, 1)


def _count(counts: dict[_Key, int], key: _Key, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]
