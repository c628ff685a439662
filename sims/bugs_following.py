"""The planted bugs of followers: changes that they are not sent, and pages that they do not forget.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from typing import Any

from peercache.actors.publisher.waiters import Following
from peercache.events.following import NodeFollower
from sims.canary import Canary, Patch
from sims.following import follow

Patches = tuple[Patch, ...]


def _kept_or_not(_: Any) -> Any:
    def begins_again(self: Any, asked: Any) -> bool:
        return bool(asked.incarnation != self.incarnation)

    return begins_again


def _counts_on(right: Any) -> Any:
    def on_tick(self: Any, now: float) -> Any:
        was_followed, last = self.is_followed, self._last
        effects = right(self, now)
        if was_followed and not self.is_followed:
            self._last = self._floor = last
        return effects

    return on_tick


def _only_what_is_stored(_: Any) -> Any:
    def gone(self: Any, keys: Any, now: float) -> None:
        del self, keys, now

    return gone


def _it_may_come_back(_: Any) -> Any:
    def failed(self: Any) -> None:
        self._failures += 1

    return failed


GAP_NOT_SENT: Patches = ((Following, "_begins_again", _kept_or_not),)

UNCOUNTED_NOT_SENT: Patches = ((Following, "on_tick", _counts_on),)

DROPS_NOT_SENT: Patches = ((Following, "gone", _only_what_is_stored),)

DEAD_NODE_STAYS: Patches = ((NodeFollower, "failed", _it_may_come_back),)

CANARIES = (
    Canary(
        "gap-not-sent",
        "a follower that has missed changes receives the rest as if it had not",
        5,
        patches=GAP_NOT_SENT,
        story=follow,
    ),
    Canary(
        "uncounted-not-sent",
        "what changed while a node had no followers is not notified to those that come back",
        5,
        patches=UNCOUNTED_NOT_SENT,
        story=follow,
    ),
    Canary(
        "drops-not-sent",
        "followers are notified of what is stored, and not what is evicted or removed",
        5,
        patches=DROPS_NOT_SENT,
        story=follow,
    ),
    Canary(
        "dead-node-stays",
        "a follower keeps the pages of a node that does not answer any more",
        5,
        patches=DEAD_NODE_STAYS,
        story=follow,
    ),
)
