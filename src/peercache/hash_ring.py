"""The consistent-hash ring: which nodes own a page's location record.

A pure function of the set of live incarnations, so every process that knows the same set computes
the same owners, and there is nothing to agree on but the set. (Karger et al. 1997; owners after the
first are the next distinct nodes clockwise, as in Dynamo, 2007, §4.3.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from peercache.keys import PageKeys


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
        placed = sorted(
            (token, index)
            for index, member in enumerate(self.members)
            for token in _tokens(member, virtual_nodes)
        )
        self._tokens = np.array([token for token, _ in placed], np.uint64)
        self._owners = self._successors([index for _, index in placed])

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def owners(self, keys: PageKeys) -> npt.NDArray[np.uint64]:
        """Return the owners of each key, nearest first: (n, min(replicas, members)) uint64."""
        if not self.members:
            return np.empty((len(keys), 0), np.uint64)
        points = np.ascontiguousarray(keys).view("<u8").reshape(-1, 2)[:, 0]
        arcs = np.searchsorted(self._tokens, points, side="left") % len(self._tokens)
        owners: npt.NDArray[np.uint64] = self._owners[arcs]
        return owners

    def _successors(self, clockwise: list[int]) -> npt.NDArray[np.uint64]:
        """Return for each arc its first `replicas` distinct members, clockwise."""
        table = np.zeros((len(clockwise), self.replicas), np.uint64)
        for arc in range(len(clockwise)):
            distinct: dict[int, None] = {}
            step = arc
            while len(distinct) < self.replicas:
                distinct[clockwise[step % len(clockwise)]] = None
                step += 1
            table[arc] = [self.members[index] for index in distinct]
        return table


def _tokens(member: int, count: int) -> list[int]:
    seed = member.to_bytes(8, "little")
    return [
        int.from_bytes(
            hashlib.blake2b(seed + i.to_bytes(4, "little"), digest_size=8).digest(), "little"
        )
        for i in range(count)
    ]
