"""Channel pool: which channels to which peers exist, and which reads use them.

Owns    the channels of one client: their numbers. A driver keeps the sockets or queue pairs.
Takes   LeaseChannel, which is a tick, too; ReturnChannel, DestroyChannel, RetireIdle, ForgetPeer,
        CloseChannels; an occasional tick from a client that reads nothing.
Sends   ChannelLeased, with whether it must be opened first; CloseChannel. A LeaseChannel gets no
        answer while all channels are in use, nor after CloseChannels.
Keeps   a channel has at most one user; a peer has at most max_channels_per_peer on each rail,
        opening and condemned ones included; a channel that ended is never leased again, and
        numbers rise.
Limits  max_channels_per_peer a peer and rail; IDLE_S until an unused channel is closed.

It has no sockets, no clock and no lock. No loop runs it: a read leases and returns its channel in
the caller's thread, and `fabric.channels` drives the pool there, under a lock (ADR 0012).
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TypeAlias, final

import attrs

IDLE_S = 60.0
"""Shorter than the timeout of the tcp server (`fabric.tcp.server.IDLE_S`), so that the client
normally closes an idle channel first: if the server closed it, a read would fail."""


@attrs.frozen
class LeaseChannel:
    """A read needs a channel to a peer. rail: the network path to it; 0 where there is only one."""

    peer: int
    rail: int = 0


@attrs.frozen
class ChannelLeased:
    """The right to use one channel alone.

    is_new: the channel must be opened first; if that fails, destroy it.
    """

    peer: int
    rail: int
    channel: int
    is_new: bool


@attrs.frozen
class ReturnChannel:
    """A read has ended, and its channel works."""

    lease: ChannelLeased


@attrs.frozen
class DestroyChannel:
    """A channel failed, or never opened. The driver has closed it already."""

    lease: ChannelLeased


@attrs.frozen
class RetireIdle:
    """An idle channel was found dead: close the peer's other idle channels, too.

    A channel that is idle afterwards has been used since, so one retry is enough.
    """

    peer: int
    rail: int = 0


@attrs.frozen
class ForgetPeer:
    """A peer is dead: close its idle channels now, and the others when they are returned."""

    peer: int


@attrs.frozen
class CloseChannels:
    """The client closes: no channel is leased any more."""


@attrs.frozen
class CloseChannel:
    """Effect: the driver must close this idle channel."""

    channel: int


ChannelsInput: TypeAlias = (
    LeaseChannel | ReturnChannel | DestroyChannel | RetireIdle | ForgetPeer | CloseChannels
)
ChannelsOutput: TypeAlias = ChannelLeased | CloseChannel


@attrs.define
class _Link:
    """The channels to one peer over one rail.

    idle:      (unused since, channel), oldest first.
    condemned: those of `leased` that are closed when they are returned.
    """

    idle: deque[tuple[float, int]] = attrs.field(factory=deque)
    leased: set[int] = attrs.field(factory=set)
    condemned: set[int] = attrs.field(factory=set)


@final
@attrs.define
class ChannelPool:
    """The channels of one client to all its peers."""

    max_channels_per_peer: int = attrs.field(kw_only=True)
    idle_s: float = attrs.field(default=IDLE_S, kw_only=True)
    newest: int = attrs.field(default=0, init=False)
    """The number of the newest channel."""
    _links: dict[tuple[int, int], _Link] = attrs.field(factory=dict, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)

    def on_message(self, message: ChannelsInput, now: float) -> list[ChannelsOutput]:
        """Handle one message; return what the driver does."""
        if isinstance(message, LeaseChannel):
            return [*self.on_tick(now), *self._lease(message.peer, message.rail)]
        if isinstance(message, ReturnChannel):
            return self._take_back(message.lease, now)
        if isinstance(message, DestroyChannel):
            return self._destroy(message.lease)
        if isinstance(message, RetireIdle):
            return self._retire_idle((message.peer, message.rail))
        if isinstance(message, ForgetPeer):
            return self._forget([key for key in self._links if key[0] == message.peer])
        self._is_closed = True
        return self._forget(list(self._links))

    def on_tick(self, now: float) -> list[ChannelsOutput]:
        """Close the channels that have been idle for idle_s."""
        closing: list[ChannelsOutput] = []
        for key, link in list(self._links.items()):
            while link.idle and link.idle[0][0] + self.idle_s <= now:
                closing.append(CloseChannel(link.idle.popleft()[1]))
            self._drop_if_empty(key)
        return closing

    def deadline(self) -> float:
        """Return when the next idle channel must be closed; inf if there is none."""
        oldest = (link.idle[0][0] for link in self._links.values() if link.idle)
        return min(oldest, default=inf) + self.idle_s

    def in_use(self) -> int:
        """Return how many channels are leased."""
        return sum(len(link.leased) for link in self._links.values())

    def channels(self) -> list[tuple[int, int]]:
        """Return (peer, channel) of every channel that has not ended."""
        return [
            (peer, channel)
            for (peer, _), link in self._links.items()
            for channel in (*(channel for _, channel in link.idle), *link.leased)
        ]

    def check(self) -> None:
        """Assert the invariants."""
        for key, link in self._links.items():
            idle = {channel for _, channel in link.idle}
            count = len(link.idle) + len(link.leased)
            assert 0 < count <= self.max_channels_per_peer, f"{key}: {count} channels"
            assert len(idle) == len(link.idle), f"{key}: a channel is idle twice"
            assert not idle & link.leased, f"{key}: a channel in use is listed as idle"
            assert link.condemned <= link.leased, f"{key}: condemned but not in use"
            assert max(idle | link.leased) <= self.newest, f"{key}: an unassigned channel number"
            assert not (self._is_closed and link.idle), f"{key}: open after close"

    def _lease(self, peer: int, rail: int) -> list[ChannelsOutput]:
        if self._is_closed:
            return []
        link = self._links.setdefault((peer, rail), _Link())
        is_new = not link.idle
        if not is_new:
            # The most recently used one, so that the peer's surplus channels become idle and are
            # closed.
            _, channel = link.idle.pop()
        elif len(link.leased) < self.max_channels_per_peer:
            self.newest = channel = self.newest + 1
        else:
            return []
        link.leased.add(channel)
        return [ChannelLeased(peer, rail, channel, is_new)]

    def _take_back(self, lease: ChannelLeased, now: float) -> list[ChannelsOutput]:
        key = (lease.peer, lease.rail)
        link = self._links[key]
        link.leased.remove(lease.channel)
        if lease.channel in link.condemned:
            link.condemned.remove(lease.channel)
            self._drop_if_empty(key)
            return [CloseChannel(lease.channel)]
        link.idle.append((now, lease.channel))
        return []

    def _destroy(self, lease: ChannelLeased) -> list[ChannelsOutput]:
        key = (lease.peer, lease.rail)
        link = self._links[key]
        link.leased.remove(lease.channel)
        link.condemned.discard(lease.channel)
        self._drop_if_empty(key)
        return []

    def _retire_idle(self, key: tuple[int, int]) -> list[ChannelsOutput]:
        link = self._links.get(key)
        if link is None:
            return []
        closing: list[ChannelsOutput] = [CloseChannel(channel) for _, channel in link.idle]
        link.idle.clear()
        self._drop_if_empty(key)
        return closing

    def _forget(self, keys: list[tuple[int, int]]) -> list[ChannelsOutput]:
        closing: list[ChannelsOutput] = []
        for key in keys:
            link = self._links[key]
            link.condemned |= link.leased
            closing += self._retire_idle(key)
        return closing

    def _drop_if_empty(self, key: tuple[int, int]) -> None:
        link = self._links[key]
        if not link.idle and not link.leased:
            del self._links[key]
