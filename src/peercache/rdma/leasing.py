"""A client's channels over all its rails: who uses which, and what nodes are told of them.

Keeps   a channel has at most one user; one that failed is closed before its lease ends, and its
        number is never used again. Numbers rise over all rails, so that a node can tell a channel
        that was given up from one that is newer than what it hears.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import islice
from typing import final

import attrs

from peercache.actors.channels.actor import Lease
from peercache.observability.reasons import CLOSED, DEADLINE
from peercache.rdma.channel import Channel
from peercache.rdma.client_rail import Side
from peercache.rdma.progress import Progress
from peercache.wire.messages.rdma import ChannelsHeld

CLOSE_MARGIN_S = 1.0
"""What `close` waits beyond the last deadline it knows."""

HELD_S = 20.0
"""How often the channels held are listed to a node where none has changed: a third of the time
after which a node ends what nobody lists."""

STRIPE_BYTES_MIN = 2**20
"""A smaller read goes over one rail: another doorbell and wake-up cost more than they save."""


@attrs.frozen(eq=False)
class Reserved:
    """The right to use one channel of one rail. number: what the peer knows it by."""

    side: Side
    lease: Lease
    number: int


@final
class Channels:
    """The channels of one client. Thread-safe."""

    def __init__(self, sides: Sequence[Side], clock: Callable[[], float]) -> None:
        """Start with none."""
        self._sides = tuple(sides)
        self._clock = clock
        # Guards everything below; whoever waits on it waits for a channel to come free.
        self._changed = threading.Condition()
        self._numbers: dict[tuple[int, int], tuple[int, int]] = {}
        self._newest = 0
        self._listed: dict[int, tuple[tuple[int, ...], float]] = {}
        self._last_deadline = 0.0
        self._turn = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Return whether nothing is leased any more."""
        return self._closed

    def reserve(self, progress: Progress) -> tuple[list[Reserved], str]:
        """Lease a channel of every rail, or of one for a small read, waiting until there is one.

        Returns none, and why, where that cannot be; "" is: no rail is left.
        """
        with self._changed:
            while True:
                now = self._clock()
                if self._closed:
                    return [], CLOSED
                if now >= progress.deadline:
                    return [], DEADLINE
                sides = [
                    side
                    for side in self._sides
                    if side.index not in progress.avoided and side.is_usable(now)
                ]
                if not sides:
                    return [], ""
                wanted = len(sides)
                if progress.total_bytes < STRIPE_BYTES_MIN:
                    # In turn; but a rail that is busy is not waited for beside one that is free.
                    self._turn += 1
                    first, wanted = self._turn % len(sides), 1
                    sides = sides[first:] + sides[:first]
                free = (
                    Reserved(side, lease, self._number(side, lease))
                    for side in sides
                    if (lease := side.pool.lease(progress.peer)) is not None
                )
                reserved = list(islice(free, wanted))
                if reserved:
                    self._last_deadline = max(self._last_deadline, progress.deadline)
                    return reserved, ""
                self._changed.wait(progress.deadline - now)

    def has_spare(self, progress: Progress, reserved: Sequence[Reserved]) -> bool:
        """Return whether a small read that does not get on over its rail could go over another.

        A large one that has a single rail waits: nothing tells how long it may take.
        """
        is_small = progress.total_bytes < STRIPE_BYTES_MIN
        if not is_small or len(self._sides) == 1 or len(reserved) > 1:
            return False
        now, busy = self._clock(), {reserved[0].side.index, *progress.avoided}
        return any(side.index not in busy and side.is_usable(now) for side in self._sides)

    def idle(self, reserved: Reserved) -> Channel | None:
        """Return the channel of a lease, None if it is to be made."""
        with self._changed:
            return reserved.side.channels.get(reserved.lease.channel)

    def end(self, reserved: Reserved, channel: Channel | None, *, works: bool) -> None:
        """End a lease: the channel is closed first, unless it works."""
        side, lease = reserved.side, reserved.lease
        try:
            if channel is not None and not works:
                channel.close()
        finally:
            with self._changed:
                if channel is not None and works:
                    side.channels[lease.channel] = channel
                    self._drop(side, side.pool.give_back(lease, self._clock()))
                else:
                    side.channels.pop(lease.channel, None)
                    self._numbers.pop((side.index, lease.channel), None)
                    side.pool.destroy(lease)
                self._changed.notify_all()

    def retire(self, side: Side, peer: int) -> None:
        """Close the idle channels to a peer: one of them was just found dead."""
        with self._changed:
            self._drop(side, side.pool.retire_idle(peer))

    def forget(self, peer: int) -> None:
        """Close the channels to a member that is dead, those in use when their reads end."""
        with self._changed:
            for side in self._sides:
                self._drop(side, side.pool.forget(peer))
            self._changed.notify_all()

    def held(self) -> list[tuple[int, ChannelsHeld]]:
        """Return what to tell nodes about their channels now, and close idle ones; each second."""
        now = self._clock()
        with self._changed:
            for side in self._sides:
                self._drop(side, side.pool.on_tick(now))
            by_peer: dict[int, list[int]] = {peer: [] for peer in self._listed}
            for peer, number in self._numbers.values():
                by_peer.setdefault(peer, []).append(number)
            newest = self._newest
        told = []
        for peer, numbers in by_peer.items():
            current = tuple(sorted(numbers))
            before, at = self._listed.get(peer, ((), float("-inf")))
            if current != before or now - at >= HELD_S:
                told.append((peer, ChannelsHeld(newest, current)))
                self._listed[peer] = (current, now)
            if not current:
                self._listed.pop(peer, None)
        return told

    def close(self) -> bool:
        """Lease nothing any more, close idle channels, wait for the others; return if all are."""
        with self._changed:
            self._closed = True
            for side in self._sides:
                self._drop(side, side.pool.close())
            self._changed.notify_all()
            until = max(self._last_deadline, self._clock()) + CLOSE_MARGIN_S
            while self._numbers and self._clock() < until:
                self._changed.wait(until - self._clock())
            return not self._numbers

    def _number(self, side: Side, lease: Lease) -> int:
        """Return what a channel is called to its peer; the caller holds the lock."""
        key = (side.index, lease.channel)
        if lease.is_new:
            self._newest += 1
            self._numbers[key] = (lease.peer, self._newest)
        return self._numbers[key][1]

    def _drop(self, side: Side, channels: Sequence[int]) -> None:
        """Close idle channels; the caller holds the lock."""
        for channel in channels:
            side.channels.pop(channel).close()
            self._numbers.pop((side.index, channel), None)
