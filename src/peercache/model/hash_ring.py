"""The consistent-hash ring: which nodes own a page's location record.

A pure function of the set of live incarnations, so every process that knows the same set computes
the same owners. (Karger et al. 1997; owners after the first are the next distinct nodes clockwise,
as in Dynamo, 2007, §4.3.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys

TOKENS_KEPT_MEMBERS = 4096
"""Members whose tokens are remembered, 1.3 KB each: most members of a new ring were in the last
one, and hashing is most of the time that a ring takes."""


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
        # Equal tokens, if ever, stay in the order of their members: the same on every node.
        order = np.argsort(points, kind="stable")
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
        columns = [clockwise]
        at = np.arange(len(clockwise))
        while len(columns) < self.replicas:
            # One arc further, and again where the member of that arc is an owner already: there are
            # no fewer members than replicas, so this ends.
            owner = np.empty_like(clockwise)
            again = np.arange(len(clockwise))
            while len(again):
                at[again] += 1
                found = clockwise[at[again] % len(clockwise)]
                owner[again] = found
                again = again[np.any([column[again] == found for column in columns], axis=0)]
            columns.append(owner)
        return np.stack(columns, axis=1)[:, : self.replicas]


@lru_cache(maxsize=TOKENS_KEPT_MEMBERS)
def _tokens(member: int, count: int) -> npt.NDArray[np.uint64]:
    """Return a member's places on the circle, (count,), read-only: eight from each hash."""
    seed = member.to_bytes(8, "little")
    hashed = [
        hashlib.blake2b(seed + i.to_bytes(4, "little")).digest() for i in range(-(-count // 8))
    ]
    tokens = np.frombuffer(b"".join(hashed), "<u8")[:count].astype(np.uint64)
    tokens.flags.writeable = False
    return tokens
