"""Who cannot be read over rdma for a while: members, and single rails to them."""

from __future__ import annotations

from typing import final

ALL_RAILS = -1


@final
class Absences:
    """What is believed of each member, until when. Thread-safe: each step is one of a dict's."""

    def __init__(self) -> None:
        """Believe nothing."""
        self._until: dict[tuple[int, int], float] = {}

    def note(self, peer: int, until: float, rail: int = ALL_RAILS) -> None:
        """Believe until then that a member cannot be read, over one rail or over any."""
        self._until[peer, rail] = until

    def has(self, peer: int, now: float, rail: int = ALL_RAILS) -> bool:
        """Return whether that is believed now."""
        return self._until.get((peer, rail), 0.0) > now

    def any(self) -> bool:
        """Return whether there may be something believed of somebody."""
        return bool(self._until)

    def rails(self, peer: int, now: float) -> list[int]:
        """Return the single rails over which a member cannot be read now."""
        return [
            rail
            for (of, rail), until in list(self._until.items())
            if of == peer and rail != ALL_RAILS and until > now
        ]

    def forget(self, peer: int) -> None:
        """Forget a member."""
        for key in [key for key in list(self._until) if key[0] == peer]:
            self._until.pop(key, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._until.clear()
