"""The tcp fabric, client side: blocking sockets in the caller's thread.

No thread and no loop moves bytes. One read leases one channel, sends what it wants in one call,
and receives straight into the caller's memory. A channel that did not end its read in full and in
order is closed before `read` returns: a socket that is closed writes nowhere, which is how "after
it returns nothing writes to a destination" is kept. Idle channels are closed on the way of later
reads; a client that reads nothing more keeps them until the server's patience ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from peercache.actors.channels.actor import ChannelPool, Lease
from peercache.config.quantities import parse_address
from peercache.errors import LocalProtocolError
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.channel import GONE, REFUSED_BECAUSE, TcpChannel, dial
from peercache.fabric.tcp.names import Names
from peercache.fabric.tcp.watchdog import Watchdog
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.model.reads import ODD, Fetched, PeerRead
from peercache.model.records import PAGE_BYTES_MAX
from peercache.model.runs import U64
from peercache.observability.log import WarnOnce, get_logger
from peercache.observability.reasons import CLOSED, DEADLINE, INTERNAL, PEER_UNREACHABLE, REFUSED

STALL_S = 0.25
"""Silence after which a peer counts as unreachable. A paused process is silent for ever; a busy one
on a local network answers in milliseconds."""
CONNECT_TIMEOUT_S = 0.5
"""Patience for a connection; a lost first packet is sent again only after a second."""
CLOSE_MARGIN_S = 1.0
"""What `close` waits beyond the last deadline it knows. Only a thread that is no more (we are its
forked child) keeps a channel for longer."""

_log = get_logger(actor="tcp")


@final
class TcpFabric:
    """Reads pages of any reachable member over pooled connections. Thread-safe; never raises."""

    name = "tcp"

    def __init__(
        self,
        *,
        cluster: str,
        credentials: str,
        granule: int,
        max_channels_per_peer: int,
        stall_s: float = STALL_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open nothing yet. clock: the seconds that deadlines are in."""
        self._cluster = cluster
        self._credentials = credentials
        self._granule = granule
        self._stall_s = stall_s
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._names = Names()
        self._watchdog = Watchdog(clock)
        # Guards everything below; whoever waits on it waits for a channel to come free.
        self._changed = threading.Condition()
        self._pool = ChannelPool(max_channels_per_peer=max_channels_per_peer)
        self._channels: dict[int, TcpChannel] = {}
        self._last_deadline = 0.0
        self._closed = False
        self._warn_once = WarnOnce(_log)

    def reaches(self, member: Member) -> bool:
        """Return whether the member says where it serves; whether it does, only a read tells."""
        return bool(member.data)

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Fill the destinations in page order by `deadline`; see `Fabric`.

        A peer that is silent for stall_s, refuses connections or breaks the protocol is
        "peer_unreachable"; one that will not serve us, or not these slots, "refused".
        """
        words = np.full(len(read.offsets), ODD, np.uint64)
        if not len(words):
            return Fetched(words, "", self.name)
        done = 0
        try:
            done, failure = self._read(read, words, deadline)
        except Exception:
            _log.error("tcp.read_failed", peer=name_of(read.member.incarnation), exc_info=True)
            failure = INTERNAL
        # A word that came in part may look like a generation.
        words[done:] = ODD
        return Fetched(words, failure, self.name)

    def forget(self, incarnation: int) -> None:
        """Close the channels to a member that is dead, those in use when their reads end."""
        with self._changed:
            self._drop(self._pool.forget(incarnation))
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse new reads, wait for those in flight (each ends by its deadline), close all."""
        with self._changed:
            self._closed = True
            self._drop(self._pool.close())
            self._changed.notify_all()
            until = max(self._last_deadline, self._clock()) + CLOSE_MARGIN_S
            while self._pool.in_use() and self._clock() < until:
                self._changed.wait(until - self._clock())
        self._watchdog.close()

    def _read(self, read: PeerRead, words: U64, deadline: float) -> tuple[int, str]:
        if not np.array_equal(read.lengths, read.runs.lengths):
            raise LocalProtocolError("lengths differ from the destinations' sizes")
        if int(read.lengths.max()) > PAGE_BYTES_MAX:
            return 0, REFUSED
        peer = read.member.incarnation
        for _ in range(2):
            lease = self._lease(peer, deadline)
            if isinstance(lease, str):
                return 0, lease
            done, failure = self._use(lease, read, words, deadline)
            if failure != GONE:
                return done, failure
            # The server closed it: while it was idle (then a new one may work), or for good.
            with self._changed:
                self._drop(self._pool.retire_idle(peer))
            if lease.is_new:
                break
        return 0, PEER_UNREACHABLE

    def _lease(self, peer: int, deadline: float) -> Lease | str:
        """Return a channel, waiting until one is free, or the failure."""
        with self._changed:
            while True:
                now = self._clock()
                if self._closed:
                    return CLOSED
                if now >= deadline:
                    return DEADLINE
                if self._pool.deadline() <= now:
                    self._drop(self._pool.on_tick(now))
                lease = self._pool.lease(peer)
                if lease is not None:
                    self._last_deadline = max(self._last_deadline, deadline)
                    return lease
                self._changed.wait(deadline - now)

    def _use(self, lease: Lease, read: PeerRead, words: U64, deadline: float) -> tuple[int, str]:
        """Read over one channel, which afterwards is back in the pool or closed."""
        channel: TcpChannel | None = None
        works = False
        try:
            if lease.is_new:
                channel, failure = self._open(read.member, deadline)
                if channel is None:
                    return 0, failure
            else:
                channel = self._channels[lease.channel]
            watched = self._watchdog.watch(channel.interrupt, deadline)
            try:
                done, failure = channel.fetch(read, words, deadline)
            finally:
                in_time = self._watchdog.release(watched)
            works = in_time and not failure
            return done, self._explain(failure, read.member)
        finally:
            self._end(lease, channel, works=works)

    def _end(self, lease: Lease, channel: TcpChannel | None, *, works: bool) -> None:
        # Also on the way of a KeyboardInterrupt: an unfinished channel never goes back.
        if channel is not None and not works:
            channel.close()
        with self._changed:
            if channel is not None and works:
                self._channels[lease.channel] = channel
                self._drop(self._pool.give_back(lease, self._clock()))
            else:
                self._channels.pop(lease.channel, None)
                self._pool.destroy(lease)
            self._changed.notify_all()

    def _open(self, member: Member, deadline: float) -> tuple[TcpChannel | None, str]:
        try:
            host, port = parse_address(member.data)
        except ValueError:
            return None, PEER_UNREACHABLE
        wait_s = min(self._connect_timeout_s, deadline - self._clock())
        connection = dial(
            self._names.resolve(host, port, wait_s),
            until=deadline,
            connect_timeout_s=self._connect_timeout_s,
            clock=self._clock,
        )
        if connection is None:
            return None, DEADLINE if self._clock() >= deadline else PEER_UNREACHABLE
        channel = TcpChannel(connection, stall_s=self._stall_s, clock=self._clock)
        greeting = wire.greet(
            cluster=self._cluster,
            credentials=self._credentials,
            granule=self._granule,
            incarnation=member.incarnation,
        )
        failure = self._explain(channel.greet(greeting, deadline), member)
        if failure:
            channel.close()
            # A close instead of an answer, on a connection that never was idle.
            return None, PEER_UNREACHABLE if failure == GONE else failure
        return channel, ""

    def _explain(self, failure: str, member: Member) -> str:
        """Return the miss reason of a failure; tell people once why a peer refuses us."""
        if not failure.startswith(REFUSED_BECAUSE):
            return failure
        reason = failure.removeprefix(REFUSED_BECAUSE)
        key = (member.incarnation, reason)
        name = name_of(member.incarnation)
        self._warn_once("tcp.read_refused", key, peer=name, at=member.data, reason=reason)
        return REFUSED

    def _drop(self, channels: Sequence[int]) -> None:
        """Close idle channels; the caller holds the lock."""
        for channel in channels:
            self._channels.pop(channel).close()
