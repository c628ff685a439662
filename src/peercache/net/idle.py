"""Idle connections: which of a client's connections are kept between two questions.

A client dials a node when it has a question for it, and keeps the connection for the next one. It
would come to have one to every node of the cluster, and each takes DESCRIPTORS of the engine's.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar, final

IDLE_S = 60.0
"""How long a connection without a question is kept. To dial again costs a fifth of a millisecond of
this processor's time, and several with TLS."""

OF_ONE_MAX = 8
"""Connections kept to one peer: an engine has four storage threads."""

DESCRIPTORS = 3
"""Open files of one connection: the socket, and the pipe by which nng tells that it is readable."""

DESCRIPTORS_PART = 4
"""A client uses a quarter of its process's open files for idle connections: the rest is the
engine's, and of the questions under way."""

KEPT_MIN = 16
KEPT_MAX = 1024
"""A client of the largest clusters asks a thousand owners again and again."""


def most_kept() -> int:
    """Return how many idle connections this process keeps, by its limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return KEPT_MAX
    return min(KEPT_MAX, max(KEPT_MIN, limit // (DESCRIPTORS * DESCRIPTORS_PART)))


class Keepable(Protocol):
    """A connection, as far as it matters here."""

    is_broken: bool

    def close(self) -> None:
        """Hang up."""


Kind = TypeVar("Kind", bound=Keepable)


@final
class IdleConnections(Generic[Kind]):
    """The idle connections of one client, by peer. Its user holds a lock, and closes what goes."""

    def __init__(self, *, most: int, clock: Callable[[], float]) -> None:
        """Keep at most so many; the peer that was used least lately loses its own first."""
        self._most = most
        self._clock = clock
        # The peer that was used last stands last, and so does its connection.
        self._of: dict[int, deque[tuple[Kind, float]]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return self._count

    def take(self, peer: int) -> Kind | None:
        """Return the connection to a peer that was used last, broken or not; None without one."""
        kept = self._of.get(peer)
        if not kept:
            return None
        connection, _ = kept.pop()
        self._count -= 1
        if not kept:
            del self._of[peer]
        return connection

    def keep(self, peer: int, connection: Kind) -> list[Kind]:
        """Keep a connection that was used just now; return those to close instead."""
        now = self._clock()
        kept = self._of.pop(peer, deque())
        self._of[peer] = kept
        kept.append((connection, now))
        self._count += 1
        gone: list[Kind] = []
        while kept and (len(kept) > OF_ONE_MAX or now - kept[0][1] >= IDLE_S):
            gone.append(self._oldest(peer))
        while self._count > self._most:
            gone.append(self._oldest(next(iter(self._of))))
        while now - (oldest := next(iter(self._of.items())))[1][0][1] >= IDLE_S:
            gone.append(self._oldest(oldest[0]))
        return gone

    def drop(self, peers: Iterable[int]) -> list[Kind]:
        """Forget these peers; return their connections."""
        gone = [connection for peer in peers for connection, _ in self._of.pop(peer, ())]
        self._count -= len(gone)
        return gone

    def peers(self) -> list[int]:
        """Return the peers with a connection."""
        return list(self._of)

    def _oldest(self, peer: int) -> Kind:
        kept = self._of[peer]
        connection, _ = kept.popleft()
        self._count -= 1
        if not kept:
            del self._of[peer]
        return connection
