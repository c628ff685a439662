"""The planted bugs of directory owners: they are trusted although they lack records.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import ShardAuthority
from peercache.actors.publisher.waiters import WaitingCommits
from peercache.model.member import ALIVE, SUSPECT
from peercache.wire.messages.directory import HandedOver, StreamSummary

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _known_at_home(_: Any) -> Any:
    def expect(self: Any, waiter: int, owner: int, positions: Any, *, is_awaited: bool) -> None:
        del self, waiter, owner, positions, is_awaited

    return expect


OWN_SHARD_COUNTS: Patches = ((WaitingCommits, "expect", _known_at_home),)


def _as_published(_: Any) -> Any:
    def join(self: Any, *_changes: Any) -> None:
        del self

    return join


HERE_COUNTS_AS_PUBLISHED: Patches = ((WaitingCommits, "join", _as_published),)


def _nothing_is_missing(right: Any) -> Any:
    def apply(self: Any, sender: Any, message: Any, now: float) -> Any:
        held = self._held.get(sender.identity)
        if held is not None and message.number > held.number:
            held.number = message.number - 1
        return right(self, sender, message, now)

    return apply


GAP_NOT_DOUBTED: Patches = ((DirectoryShard, "_apply", _nothing_is_missing),)


def _as_the_one_before(right: Any) -> Any:
    def judge(self: Any, holder: int, now: float) -> None:
        held = self.held.get(holder)
        is_new = held is None or not held.complete
        if is_new and self.states.get(holder) == ALIVE:
            # In sync from the start, like the process that had this place in the ring before.
            self._in_sync.add(holder)
            self._behind.pop(holder, None)
            return
        right(self, holder, now)

    return judge


INCARNATION_INHERITS: Patches = ((ShardAuthority, "_judge", _as_the_one_before),)


def _without_a_look(_: Any) -> Any:
    def notice_stall(self: Any, now: float) -> None:
        del self, now

    return notice_stall


STALL_UNNOTICED: Patches = ((DirectoryShard, "_notice_stall", _without_a_look),)


def _suspects_as_alive(right: Any) -> Any:
    def follow(self: Any, view: Any, now: float) -> None:
        alive = tuple(
            attrs.evolve(member, state=ALIVE) if member.state == SUSPECT else member
            for member in view.members
        )
        right(self, attrs.evolve(view, members=alive), now)

    return follow


SUSPECT_IN_SYNC: Patches = ((DirectoryShard, "_follow", _suspects_as_alive),)


def _by_any_summary(right: Any) -> Any:
    def compare(self: Any, sender: Any, summary: Any, now: float) -> Any:
        if isinstance(summary, StreamSummary):
            ring = self.authority._ring
            summary = HandedOver(summary.number, summary.count, summary.digest, ring)
        return right(self, sender, summary, now)

    return compare


SUMMARY_COUNTS_AS_HAND_OVER: Patches = ((DirectoryShard, "_compare", _by_any_summary),)


def _any_number(_: Any) -> Any:
    def least(self: Any, holder: int) -> int:
        del self, holder
        return 0

    return least


SUMMARY_OF_BEFORE_COUNTS: Patches = ((ShardAuthority, "least", _any_number),)
