"""Blocking questions from the caller's thread: one outstanding question a connection.

Each peer has a few connections, leased for one question at a time; a question to several peers
waits for all of them in one poll. Nothing here needs a loop, so an engine's thread never waits for
another thread to be scheduled.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, final

import attrs

from peercache.codec import WrongCluster, WrongVersion, decode, encode
from peercache.errors import RemoteProtocolError
from peercache.messages import Envelope, Hello, Message, Refused, SayHello, Welcome
from peercache.net.sockets import Dialer, UnusableAddress, reached
from peercache.transfer.breaker import Breakers

IDLE_CONNECTIONS_MAX = 8
"""Connections kept to one peer: an engine has four storage threads."""

POLL_SLICE_S = 0.02
"""How long a wait goes on before it looks whether a connection has broken: nng tells that on a
thread of its own, which cannot wake a poll. And whether one has come about: if not by then, the
kernel is asked whether it is refused."""

CONNECT_TIMEOUT_S = 0.25

BURST_MESSAGES = 64
"""Messages taken from one connection before the clock is looked at again: a peer may send without
end."""


class _Connection:
    """One dialled socket to one incarnation."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_connected = False
        self.is_broken = False
        self.is_fresh = True
        self.is_probed = False
        self._dialer = Dialer(url, on_connected=self._came, on_removed=self._broke)
        self.fd = self._dialer.receive_fd
        self.send = self._dialer.send
        self.receive = self._dialer.receive
        self.close = self._dialer.close

    def _came(self) -> None:
        self.is_connected = True

    def _broke(self) -> None:
        self.is_broken = True

    def is_refused(self, timeout_s: float) -> bool:
        """Return whether nobody is there; looks once a lease, and only until it is connected."""
        if self.is_connected or self.is_probed:
            return False
        self.is_probed = True
        return reached(self.url, timeout_s) is False


@attrs.define(eq=False)
class _Question:
    """A question on its way."""

    place: int
    peer: int
    message: Message
    number: int
    connection: _Connection
    asked_at: float


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
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`; 0 is whoever listens."""
        self._identity = identity
        self._cluster = cluster
        self._hello_for = hello_for
        self._url_of = url_of
        self._breakers = breakers
        self._clock = clock
        self._on_refused = on_refused
        self._idle: dict[int, list[_Connection]] = {}
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._is_closed = False

    def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Callable[[Message], bool] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None, once all are in, one is `enough`, or time is up.

        A Refused is an answer too.
        """
        exchange = _Exchange(self, until, enough, len(questions))
        try:
            for place, (peer, message) in enumerate(questions):
                exchange.put(place, peer, message)
            exchange.wait()
        finally:
            exchange.end()
        return exchange.answers

    def post(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Send without expecting an answer; dropped where there is no connection to be had."""
        for peer, message in messages:
            if self._breakers.is_open(peer):
                continue
            connection = self.lease(peer, fresh=False)
            if connection is not None:
                connection.send(self.encode(peer, message))
                self.give_back(peer, connection)

    def greet(self, url: str, until: float) -> Message | None:
        """Say Hello at an address whoever listens there; return Welcome, Refused or None."""
        connect_s = max(POLL_SLICE_S, min(CONNECT_TIMEOUT_S, until - self._clock()))
        if reached(url, connect_s) is False:
            return None
        try:
            connection = _Connection(url)
        except UnusableAddress:
            return None
        try:
            connection.send(self.encode(0, self._hello_for(0)))
            poll = select.poll()
            poll.register(connection.fd, select.POLLIN)
            while (left := until - self._clock()) > 0:
                # What came before the connection broke still counts.
                is_broken = connection.is_broken
                poll.poll(1000 * min(left, POLL_SLICE_S))
                for _ in range(BURST_MESSAGES):
                    if (raw := connection.receive()) is None:
                        break
                    message = self.decode(raw)
                    if isinstance(message, (Welcome, Refused)):
                        return message
                if is_broken:
                    break
            return None
        finally:
            connection.close()

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

    # --- for an exchange --------------------------------------------------------------------------

    def lease(self, peer: int, *, fresh: bool) -> _Connection | None:
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
        if url is None or self._is_closed:
            return None
        try:
            connection = _Connection(url)
        except UnusableAddress:
            return None
        # The question follows at once: on one connection the order is kept.
        connection.send(self.encode(0, self._hello_for(peer)))
        return connection

    def give_back(self, peer: int, connection: _Connection) -> None:
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
            self._on_refused(0, Refused(0, "protocol", str(error)))
            return None

    def refused(self, peer: int, refusal: Refused) -> None:
        """Hand a refusal to whoever shows it to people."""
        self._on_refused(peer, refusal)

    @property
    def breakers(self) -> Breakers:
        """The breakers that questions report to."""
        return self._breakers

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds."""
        return self._clock


class _Exchange:
    """The questions of one `ask`."""

    def __init__(
        self, asker: Asker, until: float, enough: Callable[[Message], bool] | None, count: int
    ) -> None:
        self.answers: list[Message | None] = [None] * count
        self._asker = asker
        self._until = until
        self._enough = enough
        self._pending: dict[int, _Question] = {}
        self._poll = select.poll()
        self._is_done = False

    def put(self, place: int, peer: int, message: Message, *, fresh: bool = False) -> None:
        """Send one question; a peer that is away is noted at once."""
        asker = self._asker
        now = asker.clock()
        if now >= self._until:
            return
        connection = asker.lease(peer, fresh=fresh)
        if connection is None:
            asker.breakers.failed(peer, now)
            return
        number = asker.number()
        connection.send(asker.encode(peer, _numbered(message, number)))
        self._pending[connection.fd] = _Question(place, peer, message, number, connection, now)
        self._poll.register(connection.fd, select.POLLIN)

    def wait(self) -> None:
        """Take answers until all are in, one was enough, or the time is up."""
        clock = self._asker.clock
        while self._pending and not self._is_done:
            left = self._until - clock()
            for fd, _ in self._poll.poll(1000 * min(max(left, 0.0), POLL_SLICE_S)):
                if fd in self._pending:
                    self._take(self._pending[fd])
            for question in list(self._pending.values()):
                self._look(question)
            # Only now: if it was this thread that slept, the answers lie there.
            if left <= 0:
                break

    def end(self) -> None:
        """Give every connection back; who has been silent all the time is noted."""
        now = self._asker.clock()
        for question in list(self._pending.values()):
            # Whoever was cut short because another answer was enough has not failed.
            if not self._is_done:
                self._asker.breakers.waited(question.peer, now - question.asked_at, now)
            self._finish(question)

    def _take(self, question: _Question) -> None:
        asker = self._asker
        for _ in range(BURST_MESSAGES):
            if (raw := question.connection.receive()) is None:
                return
            message = asker.decode(raw)
            if message is None or isinstance(message, Welcome):
                continue
            asker.breakers.answered(question.peer)
            if isinstance(message, SayHello):
                self._broke(question)
                return
            if isinstance(message, Refused) and message.request in (0, question.number):
                if not question.connection.is_fresh:
                    # Perhaps for what was posted over it before.
                    self._broke(question)
                    return
                asker.refused(question.peer, message)
                question.connection.is_broken = True
                self.answers[question.place] = message
                self._finish(question)
                return
            # Anything else is the late answer to a question that was given up.
            if getattr(message, "request", 0) == question.number:
                self.answers[question.place] = message
                self._finish(question)
                if self._enough is not None and self._enough(message):
                    self._is_done = True
                return

    def _look(self, question: _Question) -> None:
        """Notice what a poll does not tell: broken connections, and such as will not come about."""
        connection, now = question.connection, self._asker.clock()
        late = now - question.asked_at >= POLL_SLICE_S and now < self._until
        if connection.is_broken or (
            late and connection.is_refused(min(POLL_SLICE_S, self._until - now))
        ):
            self._broke(question)

    def _broke(self, question: _Question) -> None:
        """Retry on a new connection what a stale one swallowed; else the peer has failed."""
        was_fresh = question.connection.is_fresh
        question.connection.is_broken = True
        self._finish(question)
        if was_fresh:
            self._asker.breakers.failed(question.peer, self._asker.clock())
        else:
            self.put(question.place, question.peer, question.message, fresh=True)

    def _finish(self, question: _Question) -> None:
        fd = question.connection.fd
        self._poll.unregister(fd)
        del self._pending[fd]
        self._asker.give_back(question.peer, question.connection)


def _numbered(message: Any, number: int) -> Message:
    numbered: Message = attrs.evolve(message, request=number)
    return numbered
