"""The connections of a client: which are kept between two questions, how many, and how long.

A client dials a node when it has a question for it, and keeps the connection for the next one. It
would come to have one to every node of the cluster, and each takes DESCRIPTORS of the engine's.
"""

from __future__ import annotations

import itertools
import resource
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar, final

from peercache.errors import RemoteProtocolError
from peercache.net.breaker import Breakers
from peercache.net.peers import Peer, Transport
from peercache.net.sockets import Dialer, reached
from peercache.net.tls import ControlTls
from peercache.observability.log import request_of
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello, HelloRequired, Refused

IDLE_S = 60.0
"""How long a connection without a question is kept. To dial again costs a fifth of a millisecond of
this processor's time, and several with TLS."""

OF_ONE_MAX = 8
"""Connections kept to one peer: an engine has four storage threads."""

DESCRIPTORS = 3
"""Open files of one connection: the socket, and the pipe by which nng tells that it is readable."""

DESCRIPTORS_DIVISOR = 4
"""A client uses a quarter of its process's open files for idle connections: the rest is the
engine's, and of the questions under way."""

KEPT_MIN = 16
KEPT_MAX = 1024
"""A client of the largest clusters asks a thousand owners again and again."""


AT_ONCE_DIVISOR = 2
"""Questions of one `ask` that are under way at once: half as many as connections are kept, so that
the four threads of an engine use half of its open files. The others follow as answers come."""

SLICE_S = 0.02
"""Longest wait between two looks at the connections: nng reports a broken one on a thread of its
own, which cannot wake a poll. A connection that is not there after this time is probed: the kernel
knows a refusal, nng does not tell it."""

BURST_MESSAGES = 64
"""Messages taken from one connection before the others get a turn: a peer may go on sending."""


class Connection(Protocol):
    """One connection to one incarnation, dialled by us; messages wait in it until it is connected.

    fd:        names it in a poll.
    is_broken: it has ended, or must not be used again.
    is_fresh:  this lease is its first.
    is_probed: this lease has probed the address already.
    """

    fd: int
    is_broken: bool
    is_fresh: bool
    is_probed: bool

    def send(self, raw: bytes, /) -> bool:
        """Hand a message over; it may never arrive."""

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None."""

    def is_refused(self, timeout_s: float, /) -> bool:
        """Probe whether the address refuses: once a lease, and only until it is connected."""

    def close(self) -> None:
        """Hang up."""


Kind = TypeVar("Kind", bound=Connection)


@final
class Connections(Generic[Kind]):
    """The connections of one client, and its messages over them. Thread-safe."""

    def __init__(
        self,
        *,
        identity: int,
        cluster: str,
        hello_for: Callable[[int], Hello],
        url_of: Callable[[int], str | None],
        connect: Callable[[str, int], Kind | None],
        breakers: Breakers,
        clock: Callable[[], float],
        on_refused: Callable[[int, Refused], None],
        on_unasked: Callable[[int, Message], None],
        kept_max: int = KEPT_MAX,
        slice_s: float = SLICE_S,
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`; peer 0 is any listener.

        connect:    dials an address to reach a peer, without waiting; None where that cannot be.
        on_unasked: takes each message that answers no pending question.
        kept_max:   idle connections that are kept.
        slice_s:    longest wait between two looks at the connections.
        """
        self.breakers = breakers
        self.clock = clock
        self.refused = on_refused
        self.unasked = on_unasked
        self.slice_s = slice_s
        self._identity = identity
        self._cluster = cluster
        self.hello_for = hello_for
        self._url_of = url_of
        self._connect = connect
        self._kept_max = kept_max
        # Each with when it was given back. The peer that was used last stands last.
        self._idle: OrderedDict[int, deque[tuple[Kind, float]]] = OrderedDict()
        self._idle_count = 0
        self.at_once_max = max(1, kept_max // AT_ONCE_DIVISOR)
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._is_closed = False
        self.other_cluster = ""
        """The cluster of a node that has answered from another one."""

    def post(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Send without expecting an answer; a message to a peer without a connection is dropped."""
        for peer, message in messages:
            if self.breakers.is_open(peer):
                continue
            connection = self.lease(peer, fresh=False)
            if connection is not None:
                connection.send(self.encode(peer, message))
                self.give_back(peer, connection)

    def drain(self, peer: int) -> None:
        """Take the messages of a peer that answer no pending question."""
        with self._lock:
            connection = self._take(peer)
        if connection is None:
            return
        for _ in range(BURST_MESSAGES):
            if (raw := connection.receive()) is None:
                break
            message = self.decode(raw)
            if isinstance(message, (HelloRequired, Refused)):
                # The next question goes over a new one, and learns why.
                connection.is_broken = True
            elif message is not None:
                self.unasked(peer, message)
        self.give_back(peer, connection)

    def forget(self, alive: set[int]) -> None:
        """Close the connections to peers that are not alive any more."""
        with self._lock:
            gone = [peer for peer in self._idle if peer not in alive]
            connections = [each for peer in gone for each, _ in self._idle.pop(peer)]
            self._idle_count -= len(connections)
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Close every idle connection; leased ones close when they come back."""
        self._is_closed = True
        self.forget(set())

    def lease(self, peer: int, *, fresh: bool) -> Kind | None:
        """Return a connection, a new one if `fresh` or none is idle; None without an address.

        Never waits: a new one is still connecting, and may never be connected.
        """
        with self._lock:
            while not fresh and (connection := self._take(peer)) is not None:
                if not connection.is_broken:
                    connection.is_fresh = connection.is_probed = False
                    return connection
                connection.close()
        url = self._url_of(peer)
        made = None if url is None else self.dial(url, peer)
        if made is not None:
            # A question may follow at once: on one connection the order is kept.
            made.send(self.encode(0, self.hello_for(peer)))
        return made

    def dial(self, url: str, peer: int) -> Kind | None:
        """Return a new connection, over which a Hello comes first; None if it cannot be dialled."""
        return None if self._is_closed else self._connect(url, peer)

    def give_back(self, peer: int, connection: Kind) -> None:
        """Keep a connection for the next question; peer 0 gets none: its name is not known."""
        gone = [connection]
        with self._lock:
            if peer and not self._is_closed and not connection.is_broken:
                gone = self._keep(peer, connection)
        for each in gone:
            each.close()

    def number(self) -> int:
        """Return a new correlation number."""
        return request_of(next(self._numbers))

    def encode(self, target: int, message: Message, number: int = 0) -> bytes:
        """Return the bytes of a message from us; number: of a question, which its answer names."""
        envelope = Envelope(self._identity, target, message)
        return encode(envelope, cluster=self._cluster, request=number)

    def decode(self, raw: bytes) -> Message | None:
        """Return the message, or None for bytes that no correct peer sends."""
        try:
            return decode(raw, cluster=self._cluster).message
        except WrongCluster as error:
            # We cannot read its refusal; that it speaks another language is the refusal.
            self.other_cluster = error.cluster
            return Refused(0, "cluster", error.what)
        except WrongVersion as error:
            return Refused(0, "wire_version", error.what)
        except RemoteProtocolError as error:
            self.refused(0, Refused(0, "protocol", str(error)))
            return None

    def _take(self, peer: int) -> Kind | None:
        """Take out the connection to a peer that was used last, broken or not."""
        kept = self._idle.get(peer)
        return None if kept is None else self._out(peer, kept.pop())

    def _keep(self, peer: int, connection: Kind) -> list[Kind]:
        """Keep a connection; return those that go: too many to a peer or in all, or too old."""
        now, gone = self.clock(), []
        own = self._idle.setdefault(peer, deque())
        self._idle.move_to_end(peer)
        own.append((connection, now))
        self._idle_count += 1
        while len(own) > OF_ONE_MAX or now - own[0][1] >= IDLE_S:
            gone.append(self._out(peer, own.popleft()))
        while True:
            eldest, kept = next(iter(self._idle.items()))
            if self._idle_count <= self._kept_max and now - kept[0][1] < IDLE_S:
                return gone
            gone.append(self._out(eldest, kept.popleft()))

    def _out(self, peer: int, taken: tuple[Kind, float]) -> Kind:
        self._idle_count -= 1
        if not self._idle[peer]:
            del self._idle[peer]
        return taken[0]


@final
class Dialled:
    """One nng socket to one incarnation. Implements `Connection`."""

    def __init__(
        self, url: str, *, tls: ControlTls | None, accepts: Callable[[Peer], bool]
    ) -> None:
        self.url = url
        self._accepts = accepts
        self.is_connected = False
        self._is_broken = False
        self._peer = Peer(Transport.TCP)
        self.is_fresh = True
        self.is_probed = False
        self._dialer = Dialer(
            url,
            on_connected=self._connected,
            on_removed=self._removed,
            tls=tls,
            accepts=self._judged,
            waits_to_send=False,
        )
        self.fd = self._dialer.receive_fd
        self.send = self._dialer.send
        self.receive = self._dialer.receive
        self.close = self._dialer.close

    @property
    def is_broken(self) -> bool:
        """Whether it has ended, or must not be used again."""
        return self._is_broken or self._peer.has_expired()

    @is_broken.setter
    def is_broken(self, is_broken: bool) -> None:
        self._is_broken = is_broken

    def _judged(self, peer: Peer) -> bool:
        self._peer = peer
        is_accepted = self._accepts(peer)
        # Another process listens there: a question fails now, not at its deadline.
        self.is_broken = self.is_broken or not is_accepted
        return is_accepted

    def _connected(self) -> None:
        self.is_connected = True

    def _removed(self) -> None:
        self.is_broken = True

    def is_refused(self, timeout_s: float) -> bool:
        """Probe whether the address refuses: once a lease, and only until it is connected."""
        if self.is_connected or self.is_probed:
            return False
        self.is_probed = True
        return reached(self.url, timeout_s) is False


def most_kept() -> int:
    """Return how many idle connections this process keeps, by its limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return KEPT_MAX
    return min(KEPT_MAX, max(KEPT_MIN, limit // (DESCRIPTORS * DESCRIPTORS_DIVISOR)))
