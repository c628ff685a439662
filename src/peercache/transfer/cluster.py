"""What a client knows of the cluster at the start of a call: one immutable value."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from peercache.hash_ring import HashRing
from peercache.messages import ALIVE, SUSPECT, Member


@attrs.frozen(eq=False)
class Cluster:
    """A snapshot of the cluster, as one client sees it.

    home:     incarnation of the home node, 0 while there is none.
    members:  the live members (alive or suspect) by incarnation.
    ring:     made with one owner more than `replicas`, whom readers ask during a hand-over.
    replicas: how many of the ring's owners keep a record.
    handover_until: monotonic seconds until which an owner's "absent" is not the last word.
    """

    home: int
    boot_id: str
    members: Mapping[int, Member]
    ring: HashRing
    replicas: int
    handover_until: float

    @classmethod
    def of(
        cls,
        view: Mapping[int, Member],
        *,
        home: int,
        boot_id: str,
        replicas: int,
        virtual_nodes: int,
        handover_until: float,
    ) -> Cluster:
        """Build from a view, dead and left members included."""
        live = {i: m for i, m in sorted(view.items()) if m.state in (ALIVE, SUSPECT)}
        ring = HashRing(live, virtual_nodes=virtual_nodes, replicas=replicas + 1)
        return cls(
            home=home if home in live else 0,
            boot_id=boot_id,
            members=live,
            ring=ring,
            replicas=replicas,
            handover_until=handover_until,
        )

    def distance(self, holder: int) -> int:
        """Return how far a holder is: 0 the home node, 1 this host, 2 another host."""
        if holder == self.home:
            return 0
        return 1 if self.members[holder].boot_id == self.boot_id else 2
