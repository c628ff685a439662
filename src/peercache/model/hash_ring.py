"""The consistent-hash ring: which nodes own a page's location record.

A pure function of the set of live incarnations, so every process that knows the same set computes
the same owners. (Karger et al. 1997; owners after the first are the next distinct nodes clockwise,
as in Dynamo, 2007, §4.3.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys


class HashRing:
    """The ring of one set of live incarnations. Immutable."""

    def __init__(self, members: Iterable[int], *, virtual_nodes: int, replicas: int) -> None:
        """Place `virtual_nodes` tokens a member; a key has up to `replicas` distinct owners."""
        self.members: tuple[int, ...] = tuple(sorted(set(members)))
        self.replicas = min(replicas, len(self.members))
        self.version = hashlib.blake2b(
            b"".join(m.to_bytes(8, "little") for m in self.members), digest_size=8
        ).digest()
        """Digest of the member set; compared only for equality."""
        tokens = [_tokens(member, virtual_nodes) for member in self.members]
        points = np.concatenate([np.empty(0, np.uint64), *tokens])
        places = np.repeat(np.arange(len(self.members)), virtual_nodes)
        # Equal tokens, if ever, stand in the order of their members: the same on every node.
        order = np.lexsort((places, points))
        self._tokens = points[order]
        self.table = self._successors(places[order])
        """For each arc its owners, as places in `members`: (arcs, replicas)."""
        self._incarnations = np.array(self.members, np.uint64)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def owners(self, keys: PageKeys) -> npt.NDArray[np.uint64]:
        """Return the owners of each key, nearest first: (n, min(replicas, members)) uint64."""
        if not self.members:
            return np.empty((len(keys), 0), np.uint64)
        owners: npt.NDArray[np.uint64] = self._incarnations[self.table[self.arcs(keys)]]
        return owners

    def arcs(self, keys: PageKeys) -> npt.NDArray[np.intp]:
        """Return the arc that each key is on, a row of `table`; not for a ring without members."""
        points = np.ascontiguousarray(keys).view("<u8").reshape(-1, 2)[:, 0]
        arcs: npt.NDArray[np.intp] = np.searchsorted(self._tokens, points) % len(self._tokens)
        return arcs

    def _successors(self, clockwise: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return for each arc the places of its first `replicas` distinct members, clockwise."""
        arcs = np.arange(len(clockwise))
        table = np.full((len(clockwise), self.replicas), -1, np.intp)
        filled = np.zeros(len(clockwise), np.intp)
        step = 0
        while len(arcs):
            found = clockwise[(arcs + step) % len(clockwise)]
            fresh = (table[arcs] != found[:, None]).all(axis=1)
            rows = arcs[fresh]
            table[rows, filled[rows]] = found[fresh]
            filled[rows] += 1
            arcs = arcs[filled[arcs] < self.replicas]
            step += 1
        return table


def _tokens(member: int, count: int) -> npt.NDArray[np.uint64]:
    """Return a member's places on the circle, (count,): eight from each hash."""
    seed = member.to_bytes(8, "little")
    hashed = [
        hashlib.blake2b(seed + i.to_bytes(4, "little")).digest() for i in range(-(-count // 8))
    ]
    return np.frombuffer(b"".join(hashed), "<u8")[:count].astype(np.uint64)
