"""Channel pool: which connections to which peers exist, and who uses them.

Owns    the channels of one client: numbers, given to whoever keeps the sockets or queue pairs.
Hears   lease, give_back, destroy, retire_idle, forget, close; a tick when an idle one is too old.
Says    which channel to use, whether it must be opened first, and which ones to close.
Keeps   a channel has at most one user; a peer has at most max_channels_per_peer, opening ones and
        condemned ones included; one that was destroyed or closed is never leased again.
Limits  max_channels_per_peer a peer; IDLE_S until an unused channel is closed.

It has no sockets, no clock and no lock: its user drives it under a lock of its own, and performs
what it says. Waiting for a free channel is the user's too, for it knows its deadline.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import final

import attrs

IDLE_S = 60.0
"""Shorter than the server's own patience (tcp_server.IDLE_S), so that as a rule the side that would
be surprised by a close is the one that closes."""


@attrs.frozen
class Lease:
    """The right to use one channel alone.

    is_new: the channel must be opened first; if that fails, destroy the lease.
    """

    peer: int
    channel: int
    is_new: bool


@attrs.define
class _Peer:
    idle: deque[tuple[float, int]] = attrs.field(factory=deque)
    """(unused since, channel), oldest first."""
    leased: set[int] = attrs.field(factory=set)
    condemned: set[int] = attrs.field(factory=set)
    """The part of `leased` that is closed instead of coming back."""


@final
@attrs.define
class ChannelPool:
    """The channels of one client to all its peers."""

    max_channels_per_peer: int = attrs.field(kw_only=True)
    idle_s: float = attrs.field(default=IDLE_S, kw_only=True)
    _peers: dict[int, _Peer] = attrs.field(factory=dict, init=False)
    _next_channel: int = attrs.field(default=1, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def lease(self, peer: int) -> Lease | None:
        """Return a channel to use alone, or None while all are in use (or after close).

        The one that was used last is preferred, so that a peer's surplus grows old and is closed.
        """
        if self._closed:
            return None
        ours = self._peers.setdefault(peer, _Peer())
        if ours.idle:
            _, channel = ours.idle.pop()
            ours.leased.add(channel)
            return Lease(peer, channel, is_new=False)
        if len(ours.idle) + len(ours.leased) >= self.max_channels_per_peer:
            return None
        channel = self._next_channel
        self._next_channel += 1
        ours.leased.add(channel)
        return Lease(peer, channel, is_new=True)

    def give_back(self, lease: Lease, now: float) -> list[int]:
        """Take back a channel that works; return it if it must be closed instead of kept."""
        ours = self._peers[lease.peer]
        ours.leased.remove(lease.channel)
        if lease.channel in ours.condemned:
            ours.condemned.remove(lease.channel)
            self._drop_if_empty(lease.peer)
            return [lease.channel]
        ours.idle.append((now, lease.channel))
        return []

    def destroy(self, lease: Lease) -> None:
        """Strike out a channel that failed, or never opened. Its user has closed it already."""
        ours = self._peers[lease.peer]
        ours.leased.remove(lease.channel)
        ours.condemned.discard(lease.channel)
        self._drop_if_empty(lease.peer)

    def retire_idle(self, peer: int) -> list[int]:
        """Return the idle channels of a peer, to be closed: one of them was just found dead.

        What is idle after this has worked since, so a second try needs no third.
        """
        ours = self._peers.get(peer)
        if ours is None:
            return []
        closing = [channel for _, channel in ours.idle]
        ours.idle.clear()
        self._drop_if_empty(peer)
        return closing

    def forget(self, peer: int) -> list[int]:
        """Give up a dead peer; return its idle channels to be closed, the rest when they return."""
        ours = self._peers.get(peer)
        if ours is not None:
            ours.condemned |= ours.leased
        return self.retire_idle(peer)

    def close(self) -> list[int]:
        """Lease nothing any more; return the idle channels to be closed."""
        self._closed = True
        return [channel for peer in list(self._peers) for channel in self.forget(peer)]

    def in_use(self) -> int:
        """Return how many channels are leased."""
        return sum(len(ours.leased) for ours in self._peers.values())

    def on_tick(self, now: float) -> list[int]:
        """Return the channels that nobody used for idle_s, to be closed."""
        closing: list[int] = []
        for peer, ours in list(self._peers.items()):
            while ours.idle and ours.idle[0][0] + self.idle_s <= now:
                closing.append(ours.idle.popleft()[1])
            self._drop_if_empty(peer)
        return closing

    def deadline(self) -> float:
        """Return when the next idle channel is too old; inf for never."""
        oldest = (ours.idle[0][0] for ours in self._peers.values() if ours.idle)
        return min(oldest, default=inf) + self.idle_s

    def check(self) -> None:
        """Assert the invariants."""
        for peer, ours in self._peers.items():
            idle = {channel for _, channel in ours.idle}
            count = len(ours.idle) + len(ours.leased)
            assert 0 < count <= self.max_channels_per_peer, f"{peer}: {count} channels"
            assert len(idle) == len(ours.idle), f"{peer}: a channel is idle twice"
            assert not idle & ours.leased, f"{peer}: a channel in use is on offer"
            assert ours.condemned <= ours.leased, f"{peer}: condemned but not in use"
            assert max(idle | ours.leased) < self._next_channel, f"{peer}: a channel of the future"
            assert not (self._closed and ours.idle), f"{peer}: open after close"

    def _drop_if_empty(self, peer: int) -> None:
        ours = self._peers[peer]
        if not ours.idle and not ours.leased:
            del self._peers[peer]
