"""Status: what a node answers about itself, its health and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import attrs

from peercache.config.settings import Config
from peercache.http.pages import Health
from peercache.model.ids import name_of
from peercache.model.member import ALIVE
from peercache.node.assembly import Crew
from peercache.node.disk import NodeDisk
from peercache.node.housekeeping import Housekeeping
from peercache.node.reach import Reach
from peercache.trust.files import LiveTls

LATE_S = 5.0
"""A loop whose housekeeping is this late does not serve, whatever else is fine."""


@final
@attrs.frozen(eq=False)
class NodeStatus:
    """Reads the health and the figures of one node."""

    incarnation: int
    crew: Crew
    disk: NodeDisk | None
    housekeeping: Housekeeping
    reach: Reach = attrs.field(kw_only=True)
    config: Config = attrs.field(kw_only=True)
    tls: LiveTls | None = attrs.field(kw_only=True)
    is_leaving: Callable[[], bool] = attrs.field(kw_only=True)

    def health(self) -> Health:
        """Return whether this node serves, and why not."""
        facts = self.figures()
        late_s = time.monotonic() - self.housekeeping.last_at
        if self.is_leaving():
            return Health(serving=False, reason="leaving the cluster", facts=facts)
        if late_s > LATE_S:
            return Health(serving=False, reason=f"the loop is {late_s:.0f} s late", facts=facts)
        if self.tls is not None and self.tls.own_problem:
            return Health(serving=False, reason=self.tls.own_problem, facts=facts)
        if not self.crew.pool.figures()["pool_bytes_usable"]:
            return Health(serving=False, reason="no page memory is populated yet", facts=facts)
        unreached = self.unreached()
        return Health(
            serving=not unreached, reason=unreached, degraded=self._disk_trouble(), facts=facts
        )

    def _disk_trouble(self) -> str:
        """Return why pages do not get to the disk that was asked for, "" if they do."""
        if self.disk is None or self.disk.is_opening:
            return ""
        problem = self.disk.problem or self.crew.disk.trouble
        return f"the disk tier of {self.config.disk_path}: {problem}" if problem else ""

    def unreached(self) -> str:
        """Return what keeps this node out of its cluster, "" where nothing does."""
        membership = self.crew.membership
        return "" if membership.is_joined else self.reach.problem(membership.me.control)

    def figures(self) -> dict[str, int | float | str]:
        """Return named figures about this node."""
        members = self.crew.membership.view.members()
        return {
            "node": name_of(self.incarnation),
            "control": self.crew.membership.me.control,
            "cluster": self.config.cluster,
            "insecure": int(bool(self.config.insecure)),
            **({} if self.tls is None else {"certificate_days": round(self.tls.days_left, 2)}),
            "members_alive": sum(member.state == ALIVE for member in members),
            "masters": len(self.crew.membership.masters()),
            "directory_records": self.crew.directory.record_count,
            "directory_shared": int(self.crew.directory.table.is_shared),
            **self.crew.pool.figures(),
            **self._disk_figures(),
            **self.crew.rdma.figures(),
        }

    def _disk_figures(self) -> dict[str, int | float | str]:
        if self.disk is None:
            return {}
        return {**self.crew.disk.figures(), "disk_problem": self.disk.problem}
