"""Questions to peers and their answers: connections, retries, and which silence a breaker counts.

Blocking, in the caller's thread: a question to several peers waits for all of them in one poll, and
no loop takes part, so an engine's thread never waits for another thread to be scheduled.

A connection carries one pending question at a time; idle ones are kept (`net.idle`). A kept
connection may be stale: a question that it swallowed is sent once more, over a new one. A new one
that breaks is the peer's failure. A silence counts for the breakers only as far as it lasted.

`Connections`, `Exchange` and `HelloExchange` know neither sockets nor waiting. Their driver waits
as long as `wait_s` says, for the connections that `watch` named, and calls `turn`, until `wait_s`
is None: with a poll here, with an event in a simulation.
"""

from __future__ import annotations

import itertools
import select
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Generic, Protocol, TypeVar, final

import attrs

from peercache.errors import Rejected, RemoteProtocolError
from peercache.net.breaker import Breakers
from peercache.net.dialled import Dialled
from peercache.net.idle import IDLE_S, KEPT_MAX, OF_ONE_MAX, most_kept
from peercache.net.peers import Gate, Peer
from peercache.net.sockets import UnusableAddress, reached
from peercache.net.tls import ControlTls
from peercache.observability.calls import request_of
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello, Refused, SayHello, Welcome

CONNECT_TIMEOUT_S = 0.25
"""How long a greeting waits for a connection."""

AT_ONCE_PART = 2
"""Questions of one `ask` that are under way at once: half as many as connections are kept, so that
the four threads of an engine use half of its open files. The others follow as answers come."""

SLICE_S = 0.02
"""Longest wait between two looks at the connections: nng reports a broken one on a thread of its
own, which cannot wake a poll. A connection that is not there after this time is probed: the kernel
knows a refusal, nng does not tell it."""

BURST_MESSAGES = 64
"""Messages taken from one connection before the others get a turn: a peer may go on sending."""

LAST_TURN_S = 0.02
"""How long a turn may last beyond the deadline, for what arrived while this thread slept."""


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


class Turns(Protocol):
    """What a driver drives: waits, and takes what has come."""

    def wait_s(self) -> float | None:
        """Return how long to wait before the next turn; None when it is over."""

    def turn(self, readable: Iterable[tuple[int, int]], /) -> None:
        """Take the messages that have come."""


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
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`; peer 0 is any listener.

        connect:    dials an address to reach a peer, without waiting; None where that cannot be.
        on_unasked: takes each message that answers no pending question.
        kept_max:   idle connections that are kept.
        """
        self.breakers = breakers
        self.clock = clock
        self.refused = on_refused
        self.unasked = on_unasked
        self._identity = identity
        self._cluster = cluster
        self._hello_for = hello_for
        self._url_of = url_of
        self._connect = connect
        self._kept_max = kept_max
        # Each with when it was given back. The peer that was used last stands last.
        self._idle: OrderedDict[int, deque[tuple[Kind, float]]] = OrderedDict()
        self._idle_count = 0
        self.at_once_max = max(1, kept_max // AT_ONCE_PART)
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._is_closed = False

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
            if isinstance(message, (SayHello, Refused)):
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
        return None if url is None else self.greeting(url, peer)

    def greeting(self, url: str, peer: int = 0) -> Kind | None:
        """Return a new connection that begins with our Hello; None if it cannot be dialled."""
        made = None if self._is_closed else self._connect(url, peer)
        if made is not None:
            # A question may follow at once: on one connection the order is kept.
            made.send(self.encode(0, self._hello_for(peer)))
        return made

    def give_back(self, peer: int, connection: Kind) -> None:
        """Keep a connection for the next question."""
        gone = [connection]
        with self._lock:
            if not self._is_closed and not connection.is_broken:
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
        except (WrongCluster, WrongVersion) as error:
            # We cannot read its refusal; that it speaks another language is the refusal.
            reason = "cluster" if isinstance(error, WrongCluster) else "wire_version"
            return Refused(0, reason, error.what)
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


@attrs.define(eq=False)
class Question(Generic[Kind]):
    """A pending question."""

    place: int
    peer: int
    message: Message
    number: int
    connection: Kind
    asked_at: float


@final
class Exchange(Generic[Kind]):
    """The questions of one `ask`."""

    def __init__(
        self,
        connections: Connections[Kind],
        *,
        count: int,
        until: float,
        enough: Callable[[Sequence[Message | None]], bool] | None,
        watch: Callable[[Kind], object],
        unwatch: Callable[[Kind], object],
    ) -> None:
        """Wait for `count` answers, until those so far are `enough`, or the time is up."""
        self.answers: list[Message | None] = [None] * count
        self._connections = connections
        self._until = until
        self._enough = enough
        self._watch = watch
        self._unwatch = unwatch
        self._open: dict[int, Question[Kind]] = {}
        self._waiting: deque[tuple[int, int, Message, bool]] = deque()
        self._is_done = False
        self._is_last = False

    def put(self, place: int, peer: int, message: Message, *, fresh: bool = False) -> None:
        """Send one question, or keep it until others are answered.

        A peer without an address has failed at once.
        """
        connections = self._connections
        if len(self._open) >= connections.at_once_max:
            self._waiting.append((place, peer, message, fresh))
            return
        now = connections.clock()
        if now >= self._until:
            return
        connection = connections.lease(peer, fresh=fresh)
        if connection is None:
            connections.breakers.failed(peer, now)
            return
        number = connections.number()
        connection.send(connections.encode(peer, message, number))
        self._open[connection.fd] = Question(place, peer, message, number, connection, now)
        self._watch(connection)

    def wait_s(self) -> float | None:
        """Return how long to wait before the next turn; None when it is over."""
        if not self._open or self._is_done or self._is_last:
            return None
        left_s = self._until - self._connections.clock()
        # One more turn then: if it was this thread that slept, the answers lie there.
        self._is_last = left_s <= 0
        return min(max(left_s, 0.0), SLICE_S)

    def turn(self, readable: Iterable[tuple[int, int]]) -> None:
        """Take the messages of the connections that a poll names, then check every connection."""
        stop_at = max(self._until, self._connections.clock() + LAST_TURN_S)
        for fd, _ in readable:
            if fd in self._open:
                self._take(self._open[fd], stop_at)
        if self._enough is not None and self._open and any(self.answers):
            self._is_done = self._enough(self.answers)
        for question in list(self._open.values()):
            self._check(question)

    def end(self) -> None:
        """Give every connection back; peers that did not answer were silent until the deadline."""
        until = min(now := self._connections.clock(), self._until)
        self._waiting.clear()
        for question in list(self._open.values()):
            # A peer that was cut short because another answer was enough has not failed.
            if not self._is_done:
                self._connections.breakers.waited(question.peer, until - question.asked_at, now)
            self._finish(question)

    def _take(self, question: Question[Kind], stop_at: float) -> None:
        connections = self._connections
        for _ in range(BURST_MESSAGES):
            # Before each message, and not only between bursts: to decode one takes milliseconds.
            if connections.clock() >= stop_at or (raw := question.connection.receive()) is None:
                return
            message = connections.decode(raw)
            if message is None or isinstance(message, Welcome):
                continue
            connections.breakers.answered(question.peer)
            if isinstance(message, SayHello):
                self._broke(question)
                return
            if isinstance(message, Refused) and message.request in (0, question.number):
                if not question.connection.is_fresh:
                    # Perhaps for what was posted over it before.
                    self._broke(question)
                    return
                connections.refused(question.peer, message)
                question.connection.is_broken = True
                self.answers[question.place] = message
                self._finish(question)
                return
            if getattr(message, "request", 0) == question.number:
                self.answers[question.place] = message
                self._finish(question)
                return
            # The answer to a posted message, or to a question that was given up.
            connections.unasked(question.peer, message)

    def _check(self, question: Question[Kind]) -> None:
        """Notice a connection that has broken, and an address that refuses."""
        connection, now = question.connection, self._connections.clock()
        is_slow = now - question.asked_at >= SLICE_S and now < self._until
        if connection.is_broken or (
            is_slow and connection.is_refused(min(SLICE_S, self._until - now))
        ):
            self._broke(question)

    def _broke(self, question: Question[Kind]) -> None:
        """Retry on a new connection what a stale one swallowed; without one the peer has failed."""
        was_fresh = question.connection.is_fresh
        question.connection.is_broken = True
        self._finish(question)
        if was_fresh:
            self._connections.breakers.failed(question.peer, self._connections.clock())
        else:
            self.put(question.place, question.peer, question.message, fresh=True)

    def _finish(self, question: Question[Kind]) -> None:
        self._unwatch(question.connection)
        del self._open[question.connection.fd]
        self._connections.give_back(question.peer, question.connection)
        while self._waiting and len(self._open) < self._connections.at_once_max:
            place, peer, message, fresh = self._waiting.popleft()
            self.put(place, peer, message, fresh=fresh)


@final
class HelloExchange(Generic[Kind]):
    """A Hello to the listener of an address, driven like an Exchange."""

    def __init__(self, connections: Connections[Kind], connection: Kind, until: float) -> None:
        """Wait for the answer on a connection of `Connections.greeting`."""
        self.answer: Message | None = None
        self._connections = connections
        self._connection = connection
        self._until = until
        self._is_over = False
        self._was_broken = False

    def wait_s(self) -> float | None:
        """Return how long to wait before the next turn; None when it is over."""
        left_s = self._until - self._connections.clock()
        if self._is_over or left_s <= 0:
            return None
        # A message that came before the connection broke still counts.
        self._was_broken = self._connection.is_broken
        return min(left_s, SLICE_S)

    def turn(self, _readable: Iterable[tuple[int, int]]) -> None:
        """Take the messages that have come."""
        stop_at = max(self._until, self._connections.clock() + LAST_TURN_S)
        for _ in range(BURST_MESSAGES):
            if self._connections.clock() >= stop_at or (raw := self._connection.receive()) is None:
                break
            message = self._connections.decode(raw)
            if isinstance(message, (Welcome, Refused)):
                self.answer, self._is_over = message, True
                return
        self._is_over = self._was_broken


@final
class Asker:
    """Asks nodes questions on behalf of one client; thread-safe."""

    def __init__(
        self,
        *,
        identity: int,
        cluster: str,
        hello_for: Callable[[int], Hello],
        url_of: Callable[[int], str | None],
        breakers: Breakers,
        clock: Callable[[], float],
        on_refused: Callable[[int, Refused], None],
        on_unasked: Callable[[int, Message], None],
        gate: Gate,
        name_of_peer: Callable[[int], str | None],
        tls: ControlTls | None = None,
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`; peer 0 is any listener.

        gate:         judges each process that answers, as the node `name_of_peer(peer)`.
        name_of_peer: the name in a peer's certificate; None for one that is not known yet.
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
        )
        self.post = self.connections.post
        self.drain = self.connections.drain
        self.forget = self.connections.forget
        self.close = self.connections.close

    def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Callable[[Sequence[Message | None]], bool] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None, once all are in, or are `enough`, or time is up.

        A Refused is an answer too.
        """
        poll = select.poll()
        exchange = Exchange(
            self.connections,
            count=len(questions),
            until=until,
            enough=enough,
            watch=lambda connection: poll.register(connection.fd, select.POLLIN),
            unwatch=lambda connection: poll.unregister(connection.fd),
        )
        try:
            for place, (peer, message) in enumerate(questions):
                exchange.put(place, peer, message)
            drive(exchange, poll)
        finally:
            exchange.end()
        return exchange.answers

    def _dialled(self, url: str, peer: int) -> Dialled | None:
        try:
            return Dialled(url, tls=self._tls, accepts=lambda found: self._accepts(found, peer))
        except UnusableAddress:
            return None

    def _accepts(self, found: Peer, peer: int) -> bool:
        """Judge the process that has answered in place of a peer; comes on a thread of nng."""
        try:
            self._gate.check_node(found, self._name_of_peer(peer))
        except Rejected as rejected:
            self._refused(peer, Refused(0, rejected.reason, rejected.detail))
            return False
        return True

    def greet(self, url: str, until: float) -> Message | None:
        """Say Hello to the listener of an address; return Welcome, Refused or None."""
        connect_s = max(SLICE_S, min(CONNECT_TIMEOUT_S, until - self._clock()))
        if reached(url, connect_s) is False:
            return None
        connection = self.connections.greeting(url)
        if connection is None:
            return None
        try:
            poll = select.poll()
            poll.register(connection.fd, select.POLLIN)
            greeting = HelloExchange(self.connections, connection, until)
            drive(greeting, poll)
            return greeting.answer
        finally:
            connection.close()


def drive(turns: Turns, poll: select.poll) -> None:
    """Wait and take, turn by turn, until it is over."""
    while (wait_s := turns.wait_s()) is not None:
        turns.turn(poll.poll(1000 * wait_s))
