"""Channel pool: which channels to which peers exist, and which reads use them.

Owns    the channels of one client: their numbers. A driver keeps the sockets or queue pairs.
Takes   LeaseChannel, which is a tick, too; ReturnChannel, DestroyChannel, RetireIdle, ForgetPeer,
        CloseChannels; a tick, now and then, from a client that reads nothing.
Sends   ChannelLeased, with whether it must be opened first; CloseChannel. To a LeaseChannel it
        says nothing while all channels are in use, and after CloseChannels.
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
"""Shorter than the tcp server's own timeout (`fabric.tcp.server.IDLE_S`), so that as a rule the
client closes an idle channel: a close by the server would surprise a read."""


@attrs.frozen
class LeaseChannel:
    """A read wants a channel to a peer. rail: one of several ways to it; 0 where there is one."""

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
    """An idle channel was found dead: the others that were idle are closed, too.

    A channel that is idle after this has worked since, so a second try needs no third.
    """

    peer: int
    rail: int = 0


@attrs.frozen
class ForgetPeer:
    """A peer is dead: its idle channels are closed now, the others when they come back."""

    peer: int


@attrs.frozen
class CloseChannels:
    """The client closes: nothing is leased any more."""


@attrs.frozen
class CloseChannel:
    """The driver closes this idle channel."""

    channel: int


ChannelsHear: TypeAlias = (
    LeaseChannel | ReturnChannel | DestroyChannel | RetireIdle | ForgetPeer | CloseChannels
)
ChannelsSay: TypeAlias = ChannelLeased | CloseChannel


@attrs.define
class _Link:
    """The channels to one peer over one rail.

    idle:      (unused since, channel), oldest first.
    condemned: the part of `leased` that is closed instead of coming back.
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

    def on_message(self, message: ChannelsHear, now: float) -> list[ChannelsSay]:
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

    def on_tick(self, now: float) -> list[ChannelsSay]:
        """Close the channels that were unused for idle_s."""
        closing: list[ChannelsSay] = []
        for key, link in list(self._links.items()):
            while link.idle and link.idle[0][0] + self.idle_s <= now:
                closing.append(CloseChannel(link.idle.popleft()[1]))
            self._drop_if_empty(key)
        return closing

    def deadline(self) -> float:
        """Return when the next idle channel is too old; inf for never."""
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
            assert not idle & link.leased, f"{key}: a channel in use is on offer"
            assert link.condemned <= link.leased, f"{key}: condemned but not in use"
            assert max(idle | link.leased) <= self.newest, f"{key}: a channel of the future"
            assert not (self._is_closed and link.idle), f"{key}: open after close"

    def _lease(self, peer: int, rail: int) -> list[ChannelsSay]:
        if self._is_closed:
            return []
        link = self._links.setdefault((peer, rail), _Link())
        is_new = not link.idle
        if not is_new:
            # The one that was used last, so that a peer's surplus grows old and is closed.
            _, channel = link.idle.pop()
        elif len(link.leased) < self.max_channels_per_peer:
            self.newest = channel = self.newest + 1
        else:
            return []
        link.leased.add(channel)
        return [ChannelLeased(peer, rail, channel, is_new)]

    def _take_back(self, lease: ChannelLeased, now: float) -> list[ChannelsSay]:
        key = (lease.peer, lease.rail)
        link = self._links[key]
        link.leased.remove(lease.channel)
        if lease.channel in link.condemned:
            link.condemned.remove(lease.channel)
            self._drop_if_empty(key)
            return [CloseChannel(lease.channel)]
        link.idle.append((now, lease.channel))
        return []

    def _destroy(self, lease: ChannelLeased) -> list[ChannelsSay]:
        key = (lease.peer, lease.rail)
        link = self._links[key]
        link.leased.remove(lease.channel)
        link.condemned.discard(lease.channel)
        self._drop_if_empty(key)
        return []

    def _retire_idle(self, key: tuple[int, int]) -> list[ChannelsSay]:
        link = self._links.get(key)
        if link is None:
            return []
        closing: list[ChannelsSay] = [CloseChannel(channel) for _, channel in link.idle]
        link.idle.clear()
        self._drop_if_empty(key)
        return closing

    def _forget(self, keys: list[tuple[int, int]]) -> list[ChannelsSay]:
        closing: list[ChannelsSay] = []
        for key in keys:
            link = self._links[key]
            link.condemned |= link.leased
            closing += self._retire_idle(key)
        return closing

    def _drop_if_empty(self, key: tuple[int, int]) -> None:
        link = self._links[key]
        if not link.idle and not link.leased:
            del self._links[key]
