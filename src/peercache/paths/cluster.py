"""The cluster as a client knows it: a snapshot, and unknown holders.

`Cluster` is one immutable value, which a call reads at its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.hash_ring import HashRing
from peercache.model.member import ALIVE, SUSPECT, Member


@attrs.frozen(eq=False)
class Cluster:
    """A snapshot of the cluster, as one client sees it.

    home:     incarnation of the home node, 0 without one.
    members:  the live members (alive or suspect) by incarnation, and a home node that is in no view
              yet.
    ring:     that of the members in the view; its table has one spare, which readers ask during a
              hand-over.
    replicas: how many owners each key has.
    query_order: the ring's table, with the owners of each arc in the order in which this client
                 asks them.
    handover_until: monotonic time until which an owner's "absent" is not final.
    suspects: members that other nodes have not received a message from lately.
    """

    home: int
    boot_id: str
    members: Mapping[int, Member]
    ring: HashRing
    query_order: npt.NDArray[np.intp]
    replicas: int
    handover_until: float
    suspects: frozenset[int] = frozenset()
    _owned_arcs: dict[int, npt.NDArray[np.bool_]] = attrs.field(factory=dict, init=False)
    _owns_all: dict[int, bool] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(
        cls,
        view: Mapping[int, Member],
        *,
        home: int,
        boot_id: str,
        replicas: int | str,
        virtual_nodes: int,
        handover_until: float,
        newcomer: Member | None = None,
    ) -> Cluster:
        """Build from a view, dead and left members included.

        newcomer: the home node, if it is in no view yet. It is read and asked like any member, but
                  owns no record before the others know it.
        """
        live = {i: m for i, m in sorted(view.items()) if m.state in (ALIVE, SUSPECT)}
        hosts = {incarnation: member.boot_id for incarnation, member in live.items()}
        ring = HashRing(hosts, virtual_nodes=virtual_nodes, replicas=replicas, spares=1)
        if newcomer is not None:
            live.setdefault(newcomer.incarnation, newcomer)
        home = home if home in live else 0
        return cls(
            home=home,
            boot_id=boot_id,
            members=live,
            ring=ring,
            query_order=_query_order(ring, home),
            replicas=ring.replicas,
            handover_until=handover_until,
            suspects=frozenset(i for i, member in live.items() if member.state == SUSPECT),
        )

    def owned_arcs(self, node: int) -> npt.NDArray[np.bool_]:
        """Return which arcs of the ring a node owns, (arcs,) bool."""
        owned = self._owned_arcs.get(node)
        if owned is None:
            members = self.ring.members
            # A home node that the others do not know yet owns nothing.
            place = members.index(node) if node in members else -1
            owned = (self.ring.table[:, : self.replicas] == place).any(axis=1)
            self._owned_arcs[node] = owned
        return owned

    def owns_all(self, node: int) -> bool:
        """Return whether a node owns every key, as the only node of its host does up to 8 hosts."""
        owns = self._owns_all.get(node)
        if owns is None:
            owns = self._owns_all[node] = bool(self.owned_arcs(node).all())
        return owns

    def distance(self, holder: int) -> int:
        """Return how far a holder is: 0 the home node, 1 this host, 2 another host."""
        if holder == self.home:
            return 0
        return 1 if self.members[holder].boot_id == self.boot_id else 2


def _query_order(ring: HashRing, home: int) -> npt.NDArray[np.intp]:
    """Return the ring's table with the owners of all arcs in the same order.

    The home node is first, because a search asks it in any case, then the members after it in a
    circle. So the keys of a batch have few different first owners, each of which costs a request,
    and clients of other home nodes ask other owners first.
    """
    order: npt.NDArray[np.intp] = ring.table.copy()
    if home in ring.members:
        owners = order[:, : ring.replicas]
        turns = (owners - ring.members.index(home)) % len(ring)
        order[:, : ring.replicas] = np.take_along_axis(owners, turns.argsort(axis=1), axis=1)
    return order


STRANGER_S = 1.0
"""How long a holder counts as unknown after a new view did not contain it: as long as a client's
view may be outdated anyway."""

STRANGERS_MAX = 1024
"""Unknown holders that are remembered: an owner may invent them."""


@final
class Strangers:
    """Holders that are in no view, and for which a new view was requested. Thread-safe."""

    def __init__(self) -> None:
        """Start with no holder."""
        self._lock = Lock()
        self._asked: dict[int, float] = {}

    def are_new(self, holders: frozenset[int], now: float) -> bool:
        """Return whether to request the view because of these: once per holder and STRANGER_S."""
        with self._lock:
            new = [h for h in holders if now - self._asked.get(h, -np.inf) >= STRANGER_S]
            for holder in new:
                self._asked.pop(holder, None)
                self._asked[holder] = now
            while len(self._asked) > STRANGERS_MAX:
                del self._asked[next(iter(self._asked))]
            return bool(new)
