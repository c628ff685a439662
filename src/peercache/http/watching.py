"""Watching: the statuses of the members, while something looks at them, and their history.

Hears   requests for pages, and the clock.
Says    questions to the members, through the node's gatherer.
Keeps   a cluster that nothing looks at, and that is not small, asks nothing of its members.
Limits  one question to all members each STEP_S, WATCHED_S after the last look; and `History`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, final

import trio

from peercache.http.history import POINTS, STEP_S, History
from peercache.model.status import MemberStatus
from peercache.observability.log import get_logger

WATCHED_S = POINTS * STEP_S
"""A page that was looked at this long ago has nothing left to show."""

SMALL_MEMBERS_MAX = 16
"""Up to this many members are always watched, so that the first look shows what led to it: all of
them ask each other at most 48 times a second in all."""


class Gather(Protocol):
    """Asks all members how they are."""

    def __call__(self, *, detail: bool = False) -> Awaitable[Sequence[MemberStatus]]:
        """Return every member; those that do not answer in a second, too."""


@final
class Watching:
    """What a node with an HTTP port knows of all members."""

    def __init__(self, gather: Gather) -> None:
        """Ask nothing yet."""
        self.history = History()
        self._gather = gather
        self._looked_at = float("-inf")
        self._members = 0

    async def members(self, *, detail: bool = False) -> Sequence[MemberStatus]:
        """Return every member for a page, by its name."""
        self._looked_at = trio.current_time()
        members = _without_past(await self._gather(detail=detail))
        return sorted(members, key=lambda member: member.status.name)

    async def run(self) -> None:
        """Take a step of history each STEP_S until cancelled."""
        while True:
            now = trio.current_time()
            if self._members <= SMALL_MEMBERS_MAX or now - self._looked_at <= WATCHED_S:
                try:
                    await self._step()
                except Exception:
                    # What cannot be gathered is no reason to end a node that serves.
                    get_logger().exception("http.history_failed")
            await trio.sleep(max(0.1, now + STEP_S - trio.current_time()))

    async def _step(self) -> None:
        members = _without_past(await self._gather())
        self._members = len(members)
        self.history.take(trio.current_time(), members)


def _without_past(members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Return members without those of which a later start answers at the same address."""
    living = {member.status.name for member in members if member.answers}
    return [member for member in members if member.answers or member.status.name not in living]
