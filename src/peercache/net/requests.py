"""Requests to peers and their answers: connections, retries, deadlines, and detection of silence.

Blocking, in the caller's thread: a request to several peers waits for all of them in one poll. No
loop is involved, so an engine's thread never waits for another thread to be scheduled.

A client dials a node when it has a request for it, and keeps the connection for the next one. It
would end up with one to every node of the cluster, and each takes DESCRIPTORS of the engine's
descriptors. So `Connections` bounds how many are kept, and how long.

A kept connection may be stale: a request that was lost on it is sent once more, over a new one. If
a new one breaks, that is the peer's failure. For the breakers, silence counts only for as long as
it lasted.

`Conversation` has no sockets and does not wait. Its driver waits for `wait_s`, for the connections
passed to `watch`, and calls `turn`, until `wait_s` is None: with a poll here, with an event in a
simulation.
"""

from __future__ import annotations

import itertools
import resource
import select
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeAlias, TypeVar, final

import attrs

from peercache.errors import Rejected, RemoteProtocolError
from peercache.net.breaker import HEDGE_MIN_S, Breakers
from peercache.net.peers import ControlTls, Gate, Peer
from peercache.net.sockets import Dialer, UnusableAddress, alarm_of_thread, reached
from peercache.observability.log import request_of
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello, HelloRequired, Refused, Welcome

IDLE_S = 60.0
"""How long an idle connection is kept. Dialling again costs a fifth of a millisecond of processor
time, and several milliseconds with TLS."""

OF_ONE_MAX = 8
"""Connections kept to one peer: an engine has four storage threads."""

DESCRIPTORS = 3
"""Open files of one connection: the socket, and the pipe by which nng signals that it is
readable."""

DESCRIPTORS_DIVISOR = 4
"""A client uses a quarter of its process's open files for idle connections: the rest is for the
engine, and for requests in flight."""

KEPT_MIN = 16
KEPT_MAX = 1024
"""In the largest clusters, a client asks a thousand owners again and again."""


AT_ONCE_DIVISOR = 2
"""Requests of one `ask` in flight: half the number of kept connections, so that the four threads of
an engine use half of its open files. The others are sent as answers arrive."""

SLICE_S = 0.02
"""Longest wait between two checks of the connections. A connection that is not established after
this time is probed: the kernel knows of a refusal, nng does not report it."""

REDIAL_S = 0.001
"""The same for one that was dialled because another one had broken: the peer may have been killed.
A node that is there accepts in less."""

REPROBE_FACTOR = 4
"""How many times longer it waits before each further probe: the address of a process that is being
killed may still accept, because the kernel closes its connections before its listeners. The six
probes of a hung peer in 2 s block the caller for 30 ms."""

BURST_MESSAGES = 64
"""Messages read from one connection before the others get a turn: a peer may send without end."""


class Connection(Protocol):
    """One connection to one incarnation, dialled by us; it queues messages until it is connected.

    url:       the address that was dialled.
    fd:        names it in a poll.
    is_broken: it has ended, or must not be used again.
    is_fresh:  this lease is its first.
    is_redial: it was dialled because another one to the same peer had broken.
    """

    url: str
    fd: int
    is_broken: bool
    is_fresh: bool
    is_redial: bool

    def send(self, raw: bytes, /) -> bool:
        """Send a message; it may never arrive."""

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None."""

    def is_refused(self, timeout_s: float, /) -> bool:
        """Probe whether the address refuses, unless it is connected."""

    def close(self) -> None:
        """Close the connection."""


Kind = TypeVar("Kind", bound=Connection)


@final
@attrs.define(eq=False, kw_only=True)
class Connections(Generic[Kind]):
    """The connections of one client, and its messages over them. Thread-safe.

    hello_for: returns the Hello for a new connection to an address.
    url_of:    returns the address at which to dial a peer now, None without one.
    connect:   dials an address to reach a peer, without waiting; None if that is impossible.
    unasked:   called with each message that answers no pending request.
    kept_max:  the most idle connections.
    slice_s:   longest wait between two checks of the connections.
    other_cluster: name of another cluster from which a node has answered.
    """

    _identity: int
    _cluster: str
    hello_for: Callable[[str], Hello]
    _url_of: Callable[[int], str | None]
    _connect: Callable[[str, int], Kind | None]
    breakers: Breakers
    clock: Callable[[], float]
    refused: Callable[[int, Refused], None] = attrs.field(alias="on_refused")
    unasked: Callable[[int, Message], None] = attrs.field(alias="on_unasked")
    _kept_max: int = KEPT_MAX
    slice_s: float = SLICE_S
    # Each with the time at which it was returned. The last used peer is last.
    _idle: OrderedDict[int, deque[tuple[Kind, float]]] = attrs.field(
        factory=OrderedDict, init=False
    )
    _idle_count: int = attrs.field(default=0, init=False)
    _lock: Lock = attrs.field(factory=Lock, init=False)
    _numbers: itertools.count[int] = attrs.field(factory=lambda: itertools.count(1), init=False)
    _is_closed: bool = attrs.field(default=False, init=False)
    other_cluster: str = attrs.field(default="", init=False)

    @property
    def at_once_max(self) -> int:
        """How many requests of one `ask` may be in flight."""
        return max(1, self._kept_max // AT_ONCE_DIVISOR)

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
        """Handle the messages of a peer, at today's address, that answer no pending request."""
        url = self._url_of(peer)
        if url is None:
            return
        with self._lock:
            while (connection := self._take(peer)) is not None and connection.url != url:
                connection.close()
        if connection is None:
            return
        for _ in range(BURST_MESSAGES):
            if (raw := connection.receive()) is None:
                break
            message = self.decode(raw)
            if isinstance(message, (HelloRequired, Refused)):
                # The next request uses a new one, and finds out why.
                connection.is_broken = True
            elif message is not None:
                self.unasked(peer, message)
        self.give_back(peer, connection)

    def forget(self, alive: set[int]) -> None:
        """Close the connections to peers that are no longer alive."""
        with self._lock:
            gone = [peer for peer in self._idle if peer not in alive]
            connections = [each for peer in gone for each, _ in self._idle.pop(peer)]
            self._idle_count -= len(connections)
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Close every idle connection; leased ones are closed when they are returned."""
        self._is_closed = True
        self.forget(set())

    def lease(self, peer: int, *, fresh: bool, is_redial: bool = False) -> Kind | None:
        """Return a connection, a new one if `fresh` or none is idle; None without an address.

        Never waits: a new one is still connecting, and may never be connected. is_redial: another
        one to this peer has just broken.

        The address of a peer changes when it becomes the home node: a client may have asked it
        before, over a connection on which it must not write.
        """
        url = self._url_of(peer)
        if url is None:
            return None
        with self._lock:
            while not fresh and (connection := self._take(peer)) is not None:
                if not connection.is_broken and connection.url == url:
                    connection.is_fresh = connection.is_redial = False
                    return connection
                connection.close()
                is_redial = is_redial or connection.is_broken
        made = self.dial(url, peer)
        if made is not None:
            # A request may follow at once: a connection keeps the order.
            made.send(self.encode(0, self.hello_for(url)))
            made.is_redial = is_redial
        return made

    def dial(self, url: str, peer: int) -> Kind | None:
        """Return a new connection, on which Hello is sent first; None if it cannot be dialled."""
        return None if self._is_closed else self._connect(url, peer)

    def give_back(self, peer: int, connection: Kind) -> None:
        """Keep a connection for the next request; not for peer 0: its identity is not known."""
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
        """Return the bytes of a message from us; number: of a request; its answer repeats it."""
        envelope = Envelope(self._identity, target, message)
        return encode(envelope, cluster=self._cluster, request=number)

    def decode(self, raw: bytes) -> Message | None:
        """Return the message, or None for invalid bytes."""
        try:
            return decode(raw, cluster=self._cluster).message
        except WrongCluster as error:
            # We cannot read its refusal; the different protocol is the refusal.
            self.other_cluster = error.cluster
            return Refused(0, "cluster", error.what)
        except WrongVersion as error:
            return Refused(0, "wire_version", error.what)
        except RemoteProtocolError as error:
            self.refused(0, Refused(0, "protocol", str(error)))
            return None

    def _take(self, peer: int) -> Kind | None:
        """Remove and return the last used connection to a peer, broken or not."""
        kept = self._idle.get(peer)
        return None if kept is None else self._out(peer, kept.pop())

    def _keep(self, peer: int, connection: Kind) -> list[Kind]:
        """Keep a connection; return those to close: too many to a peer or in total, or too old."""
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
        self._valid_until = float("inf")
        self.is_fresh = True
        self.is_redial = False
        self.wake: Callable[[], None] = _no_waiter
        """Called when it breaks, on a thread of nng."""
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
        return self._is_broken or self._valid_until <= time.time()

    @is_broken.setter
    def is_broken(self, is_broken: bool) -> None:
        self._is_broken = is_broken

    def _judged(self, peer: Peer) -> bool:
        self._valid_until = peer.valid_until
        is_accepted = self._accepts(peer)
        # Another process listens there: a request fails now, not at its deadline.
        self.is_broken = self.is_broken or not is_accepted
        return is_accepted

    def _connected(self) -> None:
        self.is_connected = True

    def _removed(self) -> None:
        self.is_broken = True
        self.wake()

    def is_refused(self, timeout_s: float) -> bool:
        """Probe whether the address refuses, unless it is connected."""
        return not self.is_connected and reached(self.url, timeout_s) is False


def _no_waiter() -> None:
    return


def most_kept() -> int:
    """Return how many idle connections this process keeps, by its limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return KEPT_MAX
    return min(KEPT_MAX, max(KEPT_MIN, limit // (DESCRIPTORS * DESCRIPTORS_DIVISOR)))


CONNECT_TIMEOUT_S = 0.25
"""How long a Hello waits for a connection."""

LAST_TURN_S = 0.02
"""How long a turn may last beyond the deadline, to read what arrived while this thread slept."""

Enough: TypeAlias = Callable[[Sequence[Message | None]], bool]
"""Returns whether the answers so far, one for each request, make the others unnecessary."""

Hedge: TypeAlias = Callable[[Sequence[Message | None]], tuple[Sequence[tuple[int, Message]], float]]
"""Takes the answers so far, one for each request; returns further requests, and when to be called
again."""


@attrs.define(eq=False)
class Lease(Generic[Kind]):
    """A connection that a conversation uses.

    is_kept:     it is kept until the conversation ends, for more requests; else until its answer
                 has arrived.
    pending:     by number, in the order of sending: each request, and when it was sent.
    probe_at:    when to probe whether the address refuses; a redial again, `probe_s` later.
    answered_at: when the last answer to one of them arrived.
    """

    peer: int
    connection: Kind
    is_kept: bool
    probe_at: float
    probe_s: float
    pending: dict[int, tuple[Message, float]] = attrs.field(factory=dict)
    answered_at: float = float("-inf")


@final
class Conversation(Generic[Kind]):
    """The requests of one call: to one peer or many, awaited at once or later.

    It owns the connections leased for them, and the pending requests on each: it matches answers to
    requests by number, and sends requests again that were lost on a stale connection. When a wait
    ends, it records the silence of each peer that has not sent an awaited answer.
    """

    def __init__(
        self,
        connections: Connections[Kind],
        *,
        watch: Callable[[Kind], object],
        unwatch: Callable[[Kind], object],
        breakers: Breakers | None = None,
    ) -> None:
        """Lease nothing yet. breakers: used in place of the connections' own breakers."""
        self._connections = connections
        self._watch = watch
        self._unwatch = unwatch
        self._breakers = connections.breakers if breakers is None else breakers
        self._leases: dict[int, Lease[Kind]] = {}
        """By descriptor."""
        self._kept: dict[int, Lease[Kind]] = {}
        """By peer."""
        self._waiting: deque[tuple[int, tuple[int, Message]]] = deque()
        self._answers: dict[int, Message] = {}
        self._awaited: set[int] = set()
        self._numbers: list[int] = []
        """Those of the requests of one `ask`, in the order of its questions."""
        self._enough: Enough | None = None
        self._hedge: Hedge | None = None
        self._hedge_at = float("inf")
        self._until = float("inf")
        self._is_last = self._has_hedged = False

    # --- requests ---------------------------------------------------------------------------------

    def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Enough | None = None,
        hedge: tuple[float, Hedge] | None = None,
    ) -> list[int]:
        """Send requests, and await all answers, or until the answers so far are `enough`.

        hedge: when some of them are still missing at this time, the function is called, and what it
               returns is sent and awaited, too. The times of the answers are recorded.

        Returns the numbers of the requests, a list that grows with further requests. Each uses a
        connection of its own, which is returned with its answer. A peer without an address fails at
        once.
        """
        self._await((), until, enough)
        self._numbers = []
        if hedge is not None:
            self._hedge_at, self._hedge = hedge
            self._breakers.times.asked()
        self._ask_more(questions)
        return self._numbers

    def _ask_more(self, questions: Sequence[tuple[int, Message]]) -> None:
        numbers = [self._connections.number() for _ in questions]
        self._numbers += numbers
        self._awaited.update(numbers)
        self._waiting.extend(zip(numbers, questions, strict=True))
        self._send_waiting()

    def greet(self, url: str, until: float) -> int:
        """Send Hello to the listener of an address, and await its answer; return the number."""
        number = self._connections.number()
        self._await((number,), until)
        lease = self._lease(0, self._connections.dial(url, 0), is_kept=True)
        if lease is not None:
            self._send_now(lease, number, self._connections.hello_for(url))
        return number

    def keep_as(self, peer: int) -> None:
        """Keep the connection of a Hello for later requests to the peer that has answered."""
        if 0 in self._kept:
            self._kept[0].peer = peer

    def send(self, peer: int, message: Message) -> int:
        """Send a request, to be collected later; return its number.

        All requests to one peer use one connection, in order. Only for idempotent requests: those
        that were lost on a stale connection are all sent once more, over a new one.
        """
        number, lease = self._connections.number(), self._kept.get(peer)
        if lease is None:
            connection = self._connections.lease(peer, fresh=False)
            lease = self._lease(peer, connection, is_kept=True)
        if lease is not None:
            self._send_now(lease, number, message)
        return number

    def collect(self, number: int, until: float) -> None:
        """Await the answer to a request that was sent before."""
        self._await((), until)
        for lease in self._leases.values():
            if number in lease.pending:
                self._awaited.add(number)
                # A poll releases the GIL, and a busy thread keeps that for 5 ms: answers that
                # arrived during the copy are read without a poll.
                stop_at = max(until, self._connections.clock() + LAST_TURN_S)
                self._take(lease, stop_at)
                if number in self._awaited and self._leases.get(lease.connection.fd) is lease:
                    self._check(lease, stop_at)
                return

    def answer(self, number: int) -> Message | None:
        """Return the answer to a request, if it has arrived."""
        return self._answers.pop(number, None)

    # --- the wait ---------------------------------------------------------------------------------

    def wait_s(self) -> float | None:
        """Return how long to wait before the next turn; None when the wait is over."""
        if not self._awaited or not self._leases or self._is_last:
            return None
        now = self._connections.clock()
        left_s = self._until - now
        # One more turn then: if this thread was paused, the answers have arrived.
        self._is_last = left_s <= 0
        probes_at = (each.probe_at for each in self._leases.values() if each.connection.is_redial)
        next_at = min(self._hedge_at, min(probes_at, default=float("inf")))
        return min(max(min(left_s, next_at - now), 0.0), self._connections.slice_s)

    def turn(self, readable: Iterable[tuple[int, int]]) -> None:
        """Read from the connections that a poll returned, then check every connection."""
        stop_at = max(self._until, self._connections.clock() + LAST_TURN_S)
        for fd, _ in readable:
            if fd in self._leases:
                self._take(self._leases[fd], stop_at)
        if self._awaited and self._connections.clock() >= self._hedge_at:
            self._send_hedges(stop_at)
        enough = self._enough
        is_news = self._awaited and (self._answers or self._has_hedged)
        if is_news and enough is not None and enough(self._so_far()):
            if self._has_hedged:
                # A peer in place of which another one was asked has had its time.
                self.stop()
            self._awaited.clear()
        for lease in list(self._leases.values()):
            self._check(lease, stop_at)

    def _so_far(self) -> list[Message | None]:
        return [self._answers.get(number) for number in self._numbers]

    def _send_hedges(self, stop_at: float) -> None:
        """Ask other peers in place of those without an answer."""
        for lease in list(self._leases.values()):
            # What has arrived while this thread slept is in time.
            if self._leases.get(lease.connection.fd) is lease:
                self._take(lease, stop_at)
        if not self._awaited or self._hedge is None:
            return
        self._has_hedged = True
        more, self._hedge_at = self._hedge(self._so_far())
        self._ask_more(more)

    def stop(self) -> None:
        """End the wait: peers without an awaited answer were silent until now or the deadline."""
        if not self._awaited:
            # Also if other answers were enough: a peer that had less time has not failed.
            return
        until = min(now := self._connections.clock(), self._until)
        for lease in self._leases.values():
            for number in self._awaited & lease.pending.keys():
                silent_since = max(lease.pending.pop(number)[1], lease.answered_at)
                self._breakers.waited(lease.peer, until - silent_since, now)
        self._awaited.clear()

    def end(self) -> None:
        """End the wait, and return every connection."""
        self.stop()
        self._waiting.clear()
        for lease in list(self._leases.values()):
            self._close(lease)

    # --- sending ----------------------------------------------------------------------------------

    def _await(self, numbers: Iterable[int], until: float, enough: Enough | None = None) -> None:
        self._awaited = set(numbers)
        self._until, self._enough = until, enough
        self._hedge, self._hedge_at = None, float("inf")
        self._is_last = self._has_hedged = False

    def _send_waiting(self) -> None:
        """Send waiting requests, as long as few are in flight and there is time."""
        waiting, connections = self._waiting, self._connections
        while waiting and len(self._leases) < connections.at_once_max:
            if connections.clock() >= self._until:
                return
            number, (peer, message) = waiting.popleft()
            lease = self._lease(peer, connections.lease(peer, fresh=False), is_kept=False)
            if lease is None:
                self._awaited.discard(number)
            else:
                self._send_now(lease, number, message)

    def _send_now(self, lease: Lease[Kind], number: int, message: Message) -> None:
        connections = self._connections
        lease.pending[number] = (message, connections.clock())
        lease.connection.send(connections.encode(lease.peer, message, number))

    def _lease(self, peer: int, connection: Kind | None, *, is_kept: bool) -> Lease[Kind] | None:
        """Lease a connection to a peer; None means that the peer has failed."""
        now = self._connections.clock()
        if connection is None:
            self._breakers.failed(peer, now)
            return None
        probe_s = REDIAL_S if connection.is_redial else SLICE_S
        lease = Lease(peer, connection, is_kept, now + probe_s, probe_s)
        self._leases[connection.fd] = lease
        if is_kept:
            self._kept[peer] = lease
        self._watch(connection)
        return lease

    def _close(self, lease: Lease[Kind]) -> None:
        self._unwatch(lease.connection)
        del self._leases[lease.connection.fd]
        if lease.is_kept:
            self._kept.pop(lease.peer, None)
        self._connections.give_back(lease.peer, lease.connection)

    # --- receiving --------------------------------------------------------------------------------

    def _take(self, lease: Lease[Kind], stop_at: float) -> None:
        connections, pending = self._connections, lease.pending
        for _ in range(BURST_MESSAGES):
            # Before each message, and not only between bursts: decoding one takes milliseconds.
            if connections.clock() >= stop_at or (raw := lease.connection.receive()) is None:
                return
            message = connections.decode(raw)
            number: int = getattr(message, "request", 0)
            is_answer = number in pending
            if message is None or (isinstance(message, Welcome) and not is_answer):
                continue
            self._breakers.answered(lease.peer)
            if isinstance(message, HelloRequired):
                self._broke(lease)
                return
            if isinstance(message, Refused) and (is_answer or not number):
                self._refused(lease, message)
                return
            if not is_answer:
                # The answer to a posted message, or to an abandoned request.
                connections.unasked(lease.peer, message)
                continue
            self._settle(lease, number, message)
            if lease.is_kept:
                lease.answered_at = connections.clock()
            elif not pending:
                self._close(lease)
                if self._waiting:
                    self._send_waiting()
                return

    def _settle(self, lease: Lease[Kind], number: int, answer: Message) -> None:
        _, asked_at = lease.pending.pop(number)
        if self._hedge is not None and not lease.connection.is_fresh:
            self._breakers.times.answered(lease.peer, self._connections.clock() - asked_at)
        self._answers[number] = answer
        self._awaited.discard(number)

    def _refused(self, lease: Lease[Kind], message: Refused) -> None:
        if not lease.connection.is_fresh:
            # Possibly for a message that was posted over it before.
            self._broke(lease)
            return
        if lease.peer:
            self._connections.refused(lease.peer, message)
        for number in (message.request,) if message.request else tuple(lease.pending):
            self._settle(lease, number, message)
        self._replace(lease)

    def _check(self, lease: Lease[Kind], stop_at: float) -> None:
        """Notice a connection that has broken, and an address that refuses."""
        connection, now = lease.connection, self._connections.clock()
        if connection.is_broken:
            # Messages that arrived before it broke still count.
            self._take(lease, stop_at)
            if self._leases.get(connection.fd) is lease:
                self._broke(lease)
            return
        if now < lease.probe_at or now >= self._until:
            return
        lease.probe_s *= REPROBE_FACTOR
        lease.probe_at = now + lease.probe_s if connection.is_redial else float("inf")
        timeout_s = HEDGE_MIN_S if connection.is_redial else SLICE_S
        if connection.is_refused(min(timeout_s, self._until - now)):
            self._broke(lease)

    def _broke(self, lease: Lease[Kind]) -> None:
        """Repeat the requests lost on a stale connection; if it was new, the peer has failed."""
        if lease.connection.is_fresh:
            self._breakers.failed(lease.peer, self._connections.clock())
            self._awaited.difference_update(lease.pending)
            lease.pending.clear()
        self._replace(lease)

    def _replace(self, lease: Lease[Kind]) -> None:
        """Close a connection, and send its pending requests over a new one."""
        lease.connection.is_broken = True
        self._close(lease)
        pending, instead = lease.pending, None
        if pending and self._connections.clock() < self._until:
            connection = self._connections.lease(lease.peer, fresh=True, is_redial=True)
            instead = self._lease(lease.peer, connection, is_kept=lease.is_kept)
        if instead is None:
            self._awaited.difference_update(pending)
        else:
            for number, (message, _) in pending.items():
                self._send_now(instead, number, message)
        self._send_waiting()


@final
class Talk:
    """A conversation of the calling thread, driven by a poll."""

    def __init__(self, connections: Connections[Dialled], breakers: Breakers | None = None) -> None:
        """Start without requests."""
        self._poll = select.poll()
        self._alarm = alarm_of_thread()
        if self._alarm.fd >= 0:
            self._poll.register(self._alarm.fd, select.POLLIN)
        self._conversation = Conversation(
            connections, watch=self._watch, unwatch=self._unwatch, breakers=breakers
        )
        self.keep_as = self._conversation.keep_as
        self.end = self._conversation.end

    def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Enough | None = None,
        hedge: tuple[float, Hedge] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None: when all are in, or are `enough`, or at `until`.

        hedge: see `Conversation.ask`; the answers to further requests follow.
        """
        numbers = self._conversation.ask(questions, until, enough, hedge)
        self._wait()
        return [self._conversation.answer(number) for number in numbers]

    def greet(self, url: str, until: float) -> Message | None:
        """Send Hello to the listener of an address; return Welcome, Refused or None."""
        number = self._conversation.greet(url, until)
        self._wait()
        return self._conversation.answer(number)

    def send(self, peer: int, message: Message) -> int:
        """Send a request without waiting; return its number."""
        return self._conversation.send(peer, message)

    def collect(self, number: int, until: float) -> Message | None:
        """Return the answer to a sent request, or None if there is none until `until`."""
        self._conversation.collect(number, until)
        self._wait()
        return self._conversation.answer(number)

    def _watch(self, connection: Dialled) -> None:
        self._poll.register(connection.fd, select.POLLIN)
        connection.wake = self._alarm.ring
        if connection.is_broken:
            self._alarm.ring()

    def _unwatch(self, connection: Dialled) -> None:
        connection.wake = _no_waiter
        self._poll.unregister(connection.fd)

    def _wait(self) -> None:
        conversation, poll = self._conversation, self._poll
        while (wait_s := conversation.wait_s()) is not None:
            readable = poll.poll(1000 * wait_s)
            # Before the check of the connections: one that breaks later rings again.
            self._alarm.reset()
            conversation.turn(readable)
        conversation.stop()


@final
class Asker:
    """Sends requests to nodes on behalf of one client; thread-safe."""

    def __init__(
        self,
        *,
        identity: int,
        cluster: str,
        hello_for: Callable[[str], Hello],
        url_of: Callable[[int], str | None],
        breakers: Breakers,
        clock: Callable[[], float],
        on_refused: Callable[[int, Refused], None],
        on_unasked: Callable[[int, Message], None],
        gate: Gate,
        name_of_peer: Callable[[int], str | None],
        tls: ControlTls | None = None,
        slice_s: float = SLICE_S,
    ) -> None:
        """Send `hello_for(url)` on a new connection to a peer, at the address `url_of(peer)`.

        gate:         verifies that each process that answers is the node `name_of_peer(peer)`.
        name_of_peer: the name in a peer's certificate; None if it is not known yet.
        slice_s:      longest wait between two checks of the connections.
        """
        self.breakers = breakers
        self._clock = clock
        self._gate = gate
        self._name_of_peer = name_of_peer
        self._tls = tls
        self._refused = on_refused
        self.connections: Connections[Dialled] = Connections(
            identity=identity,
            cluster=cluster,
            hello_for=hello_for,
            url_of=url_of,
            connect=self._dialled,
            breakers=breakers,
            clock=clock,
            on_refused=on_refused,
            on_unasked=on_unasked,
            kept_max=most_kept(),
            slice_s=slice_s,
        )
        self.post = self.connections.post
        self.drain = self.connections.drain
        self.forget = self.connections.forget
        self.close = self.connections.close

    def talk(self) -> Talk:
        """Return a conversation for the calling thread, which must end it."""
        return Talk(self.connections)

    def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Enough | None = None,
        hedge: tuple[float, Hedge] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None: when all are in, or are `enough`, or at `until`.

        hedge: see `Conversation.ask`; the answers to further requests follow. A Refused is an
        answer, too.
        """
        talk = Talk(self.connections)
        try:
            return talk.ask(questions, until, enough, hedge)
        finally:
            talk.end()

    def greet(self, url: str, until: float, *, keeps: bool = False) -> Message | None:
        """Send Hello to the listener of an address; return Welcome, Refused or None.

        keeps: keep the connection for requests to the node that has answered.
        """
        connect_s = max(SLICE_S, min(CONNECT_TIMEOUT_S, until - self._clock()))
        if reached(url, connect_s) is False:
            return None
        # It is not certain which member has that address: this does not affect a breaker.
        talk = Talk(self.connections, Breakers())
        try:
            answer = talk.greet(url, until)
            if keeps and isinstance(answer, Welcome):
                talk.keep_as(answer.member.incarnation)
            return answer
        finally:
            talk.end()

    def _dialled(self, url: str, peer: int) -> Dialled | None:
        try:
            return Dialled(url, tls=self._tls, accepts=lambda found: self._accepts(found, peer))
        except UnusableAddress:
            return None

    def _accepts(self, found: Peer, peer: int) -> bool:
        """Verify that the process that has answered is this peer; called on a thread of nng."""
        try:
            self._gate.check_node(found, self._name_of_peer(peer))
        except Rejected as rejected:
            self._refused(peer, Refused(0, rejected.reason, rejected.detail))
            return False
        return True
