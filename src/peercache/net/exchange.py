"""Questions and their answers, without sockets: what is open, what counts, who is to blame.

One outstanding question a connection, a few idle connections a peer. A pooled connection may be
stale: what it swallowed is asked once more, on a new one; a new one that breaks is the peer's
failure. Silence counts for the breakers only as far as it lasted.

Whoever drives this waits: as long as `wait_s` says, for what `watch` has named, then `turn`, until
`wait_s` says None. It does so with a poll in production and with an event in a simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar, final

import attrs

from peercache.errors import RemoteProtocolError
from peercache.paths.breaker import Breakers
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import Envelope, Message
from peercache.wire.messages.session import Hello, Refused, SayHello, Welcome

IDLE_CONNECTIONS_MAX = 8
"""Connections kept to one peer: an engine has four storage threads."""

SLICE_S = 0.02
"""How long a wait goes on before it looks whether a connection has broken: nng tells that on a
thread of its own, which cannot wake a poll. And whether one has come about: if not by then, the
kernel is asked whether it is refused."""

BURST_MESSAGES = 64
"""Messages taken from one connection before the clock is looked at again: a peer may send without
end."""


class Connection(Protocol):
    """One connection to one incarnation, dialled by us; what is sent before it came about waits.

    fd:        its name where one waits for it.
    is_broken: it has ended, or must not be used any more.
    is_fresh:  nothing was asked over it before this lease.
    is_probed: it was asked in this lease whether anybody is there.
    """

    fd: int
    is_broken: bool
    is_fresh: bool
    is_probed: bool

    def send(self, raw: bytes, /) -> bool:
        """Hand a message over; it may never arrive."""

    def receive(self) -> bytes | None:
        """Return a message that has arrived, or None."""

    def is_refused(self, timeout_s: float, /) -> bool:
        """Return whether nobody is there; looks once a lease, and only until it is connected."""

    def close(self) -> None:
        """Hang up."""


Kind = TypeVar("Kind", bound=Connection)


@final
class Connections(Generic[Kind]):
    """The connections of one client, and what is said over them. Thread-safe."""

    def __init__(
        self,
        *,
        identity: int,
        cluster: str,
        hello_for: Callable[[int], Hello],
        url_of: Callable[[int], str | None],
        connect: Callable[[str], Kind | None],
        breakers: Breakers,
        clock: Callable[[], float],
        on_refused: Callable[[int, Refused], None],
        on_late: Callable[[int, Message], None],
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`; 0 is whoever listens.

        connect: dials, without waiting; None where that cannot even be tried.
        on_late: hears what answers no question that waits, of whatever is looked at.
        """
        self.breakers = breakers
        self.clock = clock
        self.refused = on_refused
        self.late = on_late
        self._identity = identity
        self._cluster = cluster
        self._hello_for = hello_for
        self._url_of = url_of
        self._connect = connect
        self._idle: dict[int, list[Kind]] = {}
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._is_closed = False

    def post(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Send without expecting an answer; dropped where there is no connection to be had."""
        for peer, message in messages:
            if self.breakers.is_open(peer):
                continue
            connection = self.lease(peer, fresh=False)
            if connection is not None:
                connection.send(self.encode(peer, message))
                self.give_back(peer, connection)

    def hear(self, peer: int) -> None:
        """Take what has come from a peer and answers nothing that anybody waits for."""
        with self._lock:
            idle = self._idle.get(peer)
            connection = idle.pop() if idle else None
        if connection is None:
            return
        for _ in range(BURST_MESSAGES):
            if (raw := connection.receive()) is None:
                break
            message = self.decode(raw)
            if isinstance(message, (SayHello, Refused)):
                # Whoever asks next learns why, on a new one.
                connection.is_broken = True
            elif message is not None:
                self.late(peer, message)
        self.give_back(peer, connection)

    def forget(self, alive: set[int]) -> None:
        """Close the connections to peers that are not alive any more."""
        with self._lock:
            gone = [peer for peer in self._idle if peer not in alive]
            connections = [c for peer in gone for c in self._idle.pop(peer)]
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Close every idle connection; leased ones close when they come back."""
        self._is_closed = True
        self.forget(set())

    def lease(self, peer: int, *, fresh: bool) -> Kind | None:
        """Return a connection, a new one if `fresh` or none is idle; None if there is none.

        Never waits: a new one may not have come about yet, or never will.
        """
        with self._lock:
            idle = self._idle.get(peer, [])
            while idle and not fresh:
                connection = idle.pop()
                if not connection.is_broken:
                    connection.is_fresh = connection.is_probed = False
                    return connection
                connection.close()
        url = self._url_of(peer)
        return None if url is None else self.greeting(url, peer)

    def greeting(self, url: str, peer: int = 0) -> Kind | None:
        """Return a new connection that begins with our Hello; None if it cannot be tried."""
        made = None if self._is_closed else self._connect(url)
        if made is not None:
            # A question may follow at once: on one connection the order is kept.
            made.send(self.encode(0, self._hello_for(peer)))
        return made

    def give_back(self, peer: int, connection: Kind) -> None:
        """Keep a connection for the next question."""
        with self._lock:
            idle = self._idle.setdefault(peer, [])
            if (
                not self._is_closed
                and not connection.is_broken
                and len(idle) < IDLE_CONNECTIONS_MAX
            ):
                idle.append(connection)
                return
        connection.close()

    def number(self) -> int:
        """Return a new correlation number."""
        return next(self._numbers)

    def encode(self, target: int, message: Message) -> bytes:
        """Return the bytes of a message from us."""
        return encode(Envelope(self._identity, target, message), cluster=self._cluster)

    def decode(self, raw: bytes) -> Message | None:
        """Return the message, or None for what no correct peer sends."""
        try:
            return decode(raw, cluster=self._cluster).message
        except (WrongCluster, WrongVersion) as error:
            # Its refusal cannot be read by us; that it does not fit is the refusal.
            reason = "cluster" if isinstance(error, WrongCluster) else "wire_version"
            return Refused(0, reason, error.what)
        except RemoteProtocolError as error:
            self.refused(0, Refused(0, "protocol", str(error)))
            return None


@attrs.define(eq=False)
class Question(Generic[Kind]):
    """A question on its way."""

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
        enough: Callable[[Message], bool] | None,
        watch: Callable[[Kind], object],
        unwatch: Callable[[Kind], object],
    ) -> None:
        """Wait for `count` answers, or until one is `enough`, or the time is up."""
        self.answers: list[Message | None] = [None] * count
        self._connections = connections
        self._until = until
        self._enough = enough
        self._watch = watch
        self._unwatch = unwatch
        self._open: dict[int, Question[Kind]] = {}
        self._is_done = False
        self._is_last = False

    def put(self, place: int, peer: int, message: Message, *, fresh: bool = False) -> None:
        """Send one question; a peer that is away is noted at once."""
        connections = self._connections
        now = connections.clock()
        if now >= self._until:
            return
        connection = connections.lease(peer, fresh=fresh)
        if connection is None:
            connections.breakers.failed(peer, now)
            return
        number = connections.number()
        connection.send(connections.encode(peer, _numbered(message, number)))
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
        """Take what has come on these, as a poll names them, and look after the rest."""
        for fd, _ in readable:
            if fd in self._open:
                self._take(self._open[fd])
        for question in list(self._open.values()):
            self._look(question)

    def end(self) -> None:
        """Give every connection back; who has been silent all the time is noted."""
        now = self._connections.clock()
        for question in list(self._open.values()):
            # Whoever was cut short because another answer was enough has not failed.
            if not self._is_done:
                self._connections.breakers.waited(question.peer, now - question.asked_at, now)
            self._finish(question)

    def _take(self, question: Question[Kind]) -> None:
        connections = self._connections
        for _ in range(BURST_MESSAGES):
            if (raw := question.connection.receive()) is None:
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
                if self._enough is not None and self._enough(message):
                    self._is_done = True
                return
            # The answer to what was posted, or to a question that was given up.
            connections.late(question.peer, message)

    def _look(self, question: Question[Kind]) -> None:
        """Notice what no message tells: broken connections, and such as will not come about."""
        connection, now = question.connection, self._connections.clock()
        late = now - question.asked_at >= SLICE_S and now < self._until
        if connection.is_broken or (
            late and connection.is_refused(min(SLICE_S, self._until - now))
        ):
            self._broke(question)

    def _broke(self, question: Question[Kind]) -> None:
        """Retry on a new connection what a stale one swallowed; else the peer has failed."""
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


@final
class Greeting(Generic[Kind]):
    """A Hello to whoever listens at an address, driven like an Exchange."""

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
        # What came before the connection broke still counts.
        self._was_broken = self._connection.is_broken
        return min(left_s, SLICE_S)

    def turn(self, _readable: Iterable[tuple[int, int]]) -> None:
        """Take what has come."""
        for _ in range(BURST_MESSAGES):
            if (raw := self._connection.receive()) is None:
                break
            message = self._connections.decode(raw)
            if isinstance(message, (Welcome, Refused)):
                self.answer, self._is_over = message, True
                return
        self._is_over = self._was_broken


def _numbered(message: Any, number: int) -> Message:
    numbered: Message = attrs.evolve(message, request=number)
    return numbered
