"""The consistent-hash ring: which nodes own a page's location record.

A pure function of the live incarnations and their hosts, so every process that knows the same set
computes the same owners. (Karger et al. 1997; owners after the first are the next distinct ones
clockwise, as in Dynamo, 2007, §4.3.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys

TOKENS_KEPT_MEMBERS = 4096
"""Members with cached tokens, 1.3 KB each: most members of a new ring were in the last one, and
hashing takes most of the time of building a ring."""

AUTO = "auto"
"""Means a number of owners that depends on the number of hosts."""

HOSTS_AT_HOME_MAX = 8
"""Up to this many hosts, each of them owns every key. A set sends a message to each owner, and an
owner keeps 80 bytes a record: with more hosts, both would grow with the cluster."""

OWNERS_MIN = 2
"""Owners of a key with two nodes, and in a large cluster: one of them may fail."""

Places = npt.NDArray[np.intp]


class HashRing:
    """The ring of one set of live incarnations. Immutable."""

    def __init__(
        self,
        members: Iterable[int] | Mapping[int, str],
        *,
        virtual_nodes: int,
        replicas: int | str,
        spares: int = 0,
    ) -> None:
        """Place `virtual_nodes` tokens for each member.

        members:  the incarnations, with the host of each (`Member.boot_id`); without hosts, each is
                  on a host of its own.
        replicas: distinct owners of a key. AUTO: one on each host, up to HOSTS_AT_HOME_MAX hosts,
                  and OWNERS_MIN on different hosts beyond; on one host OWNERS_MIN of its nodes.
        spares:   further members clockwise that `table` has after the owners.
        """
        hosts = members if isinstance(members, Mapping) else {m: f"{m:x}" for m in members}
        self.members: tuple[int, ...] = tuple(sorted(hosts))
        self.hosts: tuple[str, ...] = tuple(hosts[member] for member in self.members)
        """The host of each member."""
        self.version = _version(self.members, self.hosts, virtual_nodes, replicas)
        """Digest of all that determines the owners; only compared for equality, never zero."""
        tokens = [_tokens(member, virtual_nodes) for member in self.members]
        points = np.concatenate([np.empty(0, np.uint64), *tokens])
        places = np.repeat(np.arange(len(self.members)), virtual_nodes)
        # Equal tokens, if any, stay in the order of their members: the same on every node.
        order = np.argsort(points, kind="stable")
        self._tokens = points[order]
        clockwise = places[order]
        by_host = {host: number for number, host in enumerate(sorted(set(self.hosts)))}
        if isinstance(replicas, int):
            self.replicas = min(replicas, len(self.members))
        elif len(by_host) > 1:
            self.replicas = OWNERS_MIN if len(by_host) > HOSTS_AT_HOME_MAX else len(by_host)
        else:
            self.replicas = min(OWNERS_MIN, len(self.members))
        """How many owners each key has."""
        count = min(self.replicas + spares, len(self.members))
        if isinstance(replicas, int) or len(by_host) < OWNERS_MIN:
            self.table = _next_distinct([], clockwise, clockwise, count)
        else:
            host_of = np.array([by_host[host] for host in self.hosts], np.intp)
            if self.replicas == len(by_host):
                owners = _one_of_each(clockwise, host_of[clockwise])
            else:
                owners = _next_distinct([], clockwise, host_of[clockwise], self.replicas)
            columns = list(owners.T)
            self.table = _next_distinct(columns, clockwise, clockwise, count)
        """For each arc its owners and the spares, as indices of `members`: (arcs, columns)."""
        self._incarnations = np.array(self.members, np.uint64)

    @property
    def is_everywhere(self) -> bool:
        """Return whether each member owns every key, and there are members."""
        return 0 < len(self.members) == self.replicas

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def owners(self, keys: PageKeys) -> npt.NDArray[np.uint64]:
        """Return the owners of each key, nearest first: (n, replicas) uint64."""
        if not self.members:
            return np.empty((len(keys), 0), np.uint64)
        table = self.table[:, : self.replicas]
        owners: npt.NDArray[np.uint64] = self._incarnations[table[self.arcs(keys)]]
        return owners

    def arcs(self, keys: PageKeys) -> Places:
        """Return the arc of each key, a row of `table`; the ring must have members."""
        points = np.ascontiguousarray(keys).view("<u8").reshape(-1, 2)[:, 0]
        arcs: Places = np.searchsorted(self._tokens, points) % len(self._tokens)
        return arcs


def _version(
    members: tuple[int, ...], hosts: tuple[str, ...], virtual_nodes: int, replicas: int | str
) -> bytes:
    digest = hashlib.blake2b(f"{virtual_nodes}/{replicas}".encode(), digest_size=8)
    for member, host in zip(members, hosts, strict=True):
        named = host.encode()
        digest.update(member.to_bytes(8, "little") + len(named).to_bytes(4, "little") + named)
    # Elsewhere a word of zeros means that there is no ring.
    return digest.digest() if any(digest.digest()) else b"\1" * 8


def _next_distinct(columns: list[Places], clockwise: Places, groups: Places, count: int) -> Places:
    """Return for each arc the first members clockwise of `count` different groups: (arcs, count).

    columns: members that each arc has already; new members are of other groups.
    groups:  the group of each arc's own member; there must be at least `count` groups.
    """
    if not count:
        return np.empty((len(clockwise), 0), np.intp)
    columns = columns or [clockwise]
    group_of = np.zeros(int(clockwise.max()) + 1, np.intp)
    group_of[clockwise] = groups
    at = np.arange(len(clockwise))
    while len(columns) < count:
        # One arc further, and again if the group of that arc is used already.
        owner = np.empty_like(clockwise)
        again: Places = np.arange(len(clockwise))
        while len(again):
            at[again] += 1
            found = clockwise[at[again] % len(clockwise)]
            owner[again] = found
            taken = [group_of[column[again]] == group_of[found] for column in columns]
            again = again[np.any(taken, axis=0)]
        columns.append(owner)
    return np.stack(columns[:count], axis=1)


def _one_of_each(clockwise: Places, groups: Places) -> Places:
    """Return the first member clockwise of each group, nearest first: (arcs, groups)."""
    arcs = len(clockwise)
    steps = np.empty((int(groups.max()) + 1, arcs), np.intp)
    for group in range(len(steps)):
        own = np.flatnonzero(groups == group)
        own = np.append(own, own[0] + arcs)
        steps[group] = own[np.searchsorted(own, np.arange(arcs))]
    # Two groups never have the same arc, so the order is deterministic.
    nearest: Places = clockwise[np.sort(steps, axis=0).T % arcs]
    return nearest


@lru_cache(maxsize=TOKENS_KEPT_MEMBERS)
def _tokens(member: int, count: int) -> npt.NDArray[np.uint64]:
    """Return a member's positions on the circle, (count,), read-only: eight from each hash."""
    seed = member.to_bytes(8, "little")
    hashed = [
        hashlib.blake2b(seed + i.to_bytes(4, "little")).digest() for i in range(-(-count // 8))
    ]
    tokens = np.frombuffer(b"".join(hashed), "<u8")[:count].astype(np.uint64)
    tokens.flags.writeable = False
    return tokens
