"""The driver of a channel pool: leases channels to reads, and closes those that the pool drops.

Both fabrics with channels use it, tcp for its sockets and rdma for its queue pairs. It passes
messages to the pool in the thread of the read, under one lock, waits for a channel until the read's
deadline, and performs the effects of the pool (ADR 0012).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, final

from peercache.actors.channels.actor import (
    ChannelLeased,
    ChannelPool,
    ChannelsInput,
    ChannelsOutput,
    CloseChannel,
    CloseChannels,
    DestroyChannel,
    ForgetPeer,
    LeaseChannel,
    RetireIdle,
    ReturnChannel,
)
from peercache.observability.reasons import CLOSED, DEADLINE

CLOSE_MARGIN_S = 1.0
"""How long `close` waits after the last known deadline. Only a thread that does not exist any more
(in a forked child) keeps a channel for longer."""


class Closable(Protocol):
    """An open channel: a socket, or a queue pair."""

    def close(self) -> None:
        """Close it: afterwards it does not write to any destination."""


Kind = TypeVar("Kind", bound=Closable)
Choice = TypeVar("Choice")


@final
class ChannelDriver(Generic[Kind]):
    """The channels of one client, each leased to one read at a time. Thread-safe."""

    def __init__(self, *, max_channels_per_peer: int, clock: Callable[[], float]) -> None:
        """Open nothing yet. clock: the clock of the deadlines, in seconds."""
        self.channels: dict[int, Kind] = {}
        """The open channels by their numbers; a running read may use others."""
        self._clock = clock
        # Guards all state; a read waits on it until a channel is free.
        self._changed = threading.Condition()
        self._pool = ChannelPool(max_channels_per_peer=max_channels_per_peer)
        self._last_deadline = 0.0
        self._is_closed = False

    def lease(self, peer: int, deadline: float) -> ChannelLeased | str:
        """Lease a channel to a peer, when one is free; if that fails, return the miss reason."""
        return self.choose(lambda now: self.lease_now(peer, 0, now), deadline)

    def choose(self, choice: Callable[[float], Choice | None], deadline: float) -> Choice | str:
        """Call `choice(now)` after each change, until it returns something; return that.

        Returns the miss reason when the deadline has passed, or the client is closed. `choice`
        runs under the lock, and may call `lease_now`.
        """
        with self._changed:
            while True:
                now = self._clock()
                if self._is_closed:
                    return CLOSED
                if now >= deadline:
                    return DEADLINE
                chosen = choice(now)
                if chosen is not None:
                    self._last_deadline = max(self._last_deadline, deadline)
                    return chosen
                self._changed.wait(deadline - now)

    def lease_now(self, peer: int, rail: int, now: float) -> ChannelLeased | None:
        """Lease a channel to a peer over a rail if one is free; called within `choose`."""
        return self._perform(self._pool.on_message(LeaseChannel(peer, rail), now))

    def channel_of(self, lease: ChannelLeased) -> Kind | None:
        """Return the open channel of a lease, None if it must be opened first."""
        return self.channels.get(lease.channel)

    def end(self, lease: ChannelLeased, channel: Kind | None, *, works: bool) -> None:
        """End a lease. A broken channel is closed first, so that it writes nowhere."""
        try:
            if channel is not None and not works:
                channel.close()
        finally:
            with self._changed:
                if channel is not None and works:
                    self.channels[lease.channel] = channel
                    self._pass_on(ReturnChannel(lease))
                else:
                    self.channels.pop(lease.channel, None)
                    self._pass_on(DestroyChannel(lease))
                self._changed.notify_all()

    def retire_idle(self, peer: int, rail: int = 0) -> None:
        """Close the idle channels to a peer over a rail: one of them was found dead."""
        with self._changed:
            self._pass_on(RetireIdle(peer, rail))

    def forget(self, peer: int) -> None:
        """Close the channels to a dead member; those in use at the end of their reads."""
        with self._changed:
            self._pass_on(ForgetPeer(peer))
            self._changed.notify_all()

    def list_channels(self) -> tuple[int, list[tuple[int, int]]]:
        """Close channels idle for too long; return the newest number, and (peer, channel)s."""
        with self._changed:
            self._perform(self._pool.on_tick(self._clock()))
            return self._pool.newest, self._pool.channels()

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called: there are no new leases."""
        return self._is_closed

    def close(self) -> bool:
        """Close idle channels, and wait for the reads in flight; return whether all have ended.

        Each read ends by its own deadline.
        """
        with self._changed:
            self._is_closed = True
            self._pass_on(CloseChannels())
            self._changed.notify_all()
            until = max(self._last_deadline, self._clock()) + CLOSE_MARGIN_S
            while self._pool.in_use() and self._clock() < until:
                self._changed.wait(until - self._clock())
            return not self._pool.in_use()

    def _pass_on(self, message: ChannelsInput) -> None:
        """Pass a message to the pool and perform its effects; the caller holds the lock."""
        self._perform(self._pool.on_message(message, self._clock()))

    def _perform(self, effects: list[ChannelsOutput]) -> ChannelLeased | None:
        leased = None
        for effect in effects:
            if isinstance(effect, CloseChannel):
                self.channels.pop(effect.channel).close()
            else:
                leased = effect
        return leased
