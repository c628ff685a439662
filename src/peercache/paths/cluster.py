"""What a client knows of the cluster at the start of a call: one immutable value."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.hash_ring import HashRing
from peercache.model.keys import PageKeys
from peercache.model.member import ALIVE, SUSPECT, Member


@attrs.frozen(eq=False)
class Cluster:
    """A snapshot of the cluster, as one client sees it.

    home:     incarnation of the home node, 0 while there is none.
    members:  the live members (alive or suspect) by incarnation.
    ring:     made with one owner more than `replicas`, whom readers ask during a hand-over.
    replicas: how many of the ring's owners keep a record.
    asked:    the ring's table in the order in which this client asks a key's owners.
    handover_until: monotonic seconds until which an owner's "absent" is not the last word.
    """

    home: int
    boot_id: str
    members: Mapping[int, Member]
    ring: HashRing
    asked: npt.NDArray[np.intp]
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
        home = home if home in live else 0
        return cls(
            home=home,
            boot_id=boot_id,
            members=live,
            ring=ring,
            asked=_in_order(ring, home, replicas),
            replicas=replicas,
            handover_until=handover_until,
        )

    def owners(self, keys: PageKeys) -> npt.NDArray[np.intp]:
        """Return whom to ask about each key, first first, as places in `ring.members`.

        (n, owners). Those that may have known it before the last view change stand last.
        """
        if not self.members:
            return np.empty((len(keys), 0), np.intp)
        owners: npt.NDArray[np.intp] = self.asked[self.ring.arcs(keys)]
        return owners

    def distance(self, holder: int) -> int:
        """Return how far a holder is: 0 the home node, 1 this host, 2 another host."""
        if holder == self.home:
            return 0
        return 1 if self.members[holder].boot_id == self.boot_id else 2


def _in_order(ring: HashRing, home: int, replicas: int) -> npt.NDArray[np.intp]:
    """Return the ring's table with the owners of each arc in one order for all arcs.

    The home node first, which is asked in any case, then round from there: so the keys of a batch
    have few first owners between them, each of which costs a question, and clients of other homes
    ask others first.
    """
    asked: npt.NDArray[np.intp] = ring.table.copy()
    if home:
        owners = asked[:, :replicas]
        turns = (owners - ring.members.index(home)) % len(ring)
        asked[:, :replicas] = np.take_along_axis(owners, turns.argsort(axis=1), axis=1)
    return asked
