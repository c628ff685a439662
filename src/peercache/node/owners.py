"""Owners: which directory owners lag behind this node, and whether its own shard has authority.

It counts the followers of this node, too.

Housekeeping looks once a second; the log tells of owners that begin to lag and that catch up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import attrs

from peercache.actors.directory.holdings import ShardAuthority
from peercache.actors.publisher.actor import Publisher
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.node.envelopes import WARN_AGAIN_S
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics


@final
@attrs.define(eq=False)
class OwnersWatch:
    """Counts and logs what keeps "stored is found" from holding everywhere.

    publisher: of this node: the owners for which none of its commits waits, and its followers.
    authority: of this node's own shard.
    member_of: the member of an incarnation, if it is known.
    """

    publisher: Publisher
    authority: ShardAuthority
    member_of: Callable[[int], Member | None]
    metrics: Metrics
    log: Any
    _known: frozenset[int] = frozenset()
    _warn_once: WarnOnce = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Know of no lagging owner."""
        self._warn_once = WarnOnce(self.log, repeat_s=WARN_AGAIN_S)

    def look(self) -> None:
        """Set the gauges, and log the owners that have begun to lag or have caught up."""
        lagging = self.publisher.lagging()
        for owner in sorted(lagging - self._known):
            # One that lags again and again is told of once a minute.
            self._warn_once("directory.owner_lagged", owner, owner=self._name(owner))
        for owner in sorted(self._known - lagging):
            self.log.info("directory.owner_recovered", owner=self._name(owner))
        self._known = lagging
        self.metrics.directory_owners_lagging.set(len(lagging))
        self.metrics.followers.set(self.publisher.followers)
        self.metrics.directory_authority.set(bool(self.authority.ring))
        self.metrics.directory_holders_doubted.set(self.authority.doubted)

    def _name(self, owner: int) -> str:
        member = self.member_of(owner)
        return name_of(owner) if member is None else member.control
