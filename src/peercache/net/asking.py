"""Blocking questions from the caller's thread: one outstanding question a connection.

Each peer has a few connections, leased for one question at a time; a question to several peers
waits for all of them in one poll. Nothing here needs a loop, so an engine's thread never waits for
another thread to be scheduled. What is asked and which answer counts: `net.exchange`.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import final

from peercache.net.exchange import SLICE_S, Connections, Exchange, Greeting
from peercache.net.sockets import Dialer, UnusableAddress, reached
from peercache.paths.breaker import Breakers
from peercache.wire.envelope import Message
from peercache.wire.messages.session import Hello, Refused

CONNECT_TIMEOUT_S = 0.25


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


def _connected(url: str) -> _Connection | None:
    try:
        return _Connection(url)
    except UnusableAddress:
        return None


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
        on_late: Callable[[int, Message], None],
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`; 0 is whoever listens."""
        self.breakers = breakers
        self._clock = clock
        self._connections: Connections[_Connection] = Connections(
            identity=identity,
            cluster=cluster,
            hello_for=hello_for,
            url_of=url_of,
            connect=_connected,
            breakers=breakers,
            clock=clock,
            on_refused=on_refused,
            on_late=on_late,
        )
        self.post = self._connections.post
        self.hear = self._connections.hear
        self.forget = self._connections.forget
        self.close = self._connections.close

    def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Callable[[Message], bool] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None, once all are in, one is `enough`, or time is up.

        A Refused is an answer too.
        """
        poll = select.poll()
        exchange = Exchange(
            self._connections,
            count=len(questions),
            until=until,
            enough=enough,
            watch=lambda connection: poll.register(connection.fd, select.POLLIN),
            unwatch=lambda connection: poll.unregister(connection.fd),
        )
        try:
            for place, (peer, message) in enumerate(questions):
                exchange.put(place, peer, message)
            _drive(exchange, poll)
        finally:
            exchange.end()
        return exchange.answers

    def greet(self, url: str, until: float) -> Message | None:
        """Say Hello at an address whoever listens there; return Welcome, Refused or None."""
        connect_s = max(SLICE_S, min(CONNECT_TIMEOUT_S, until - self._clock()))
        if reached(url, connect_s) is False:
            return None
        connection = self._connections.greeting(url)
        if connection is None:
            return None
        try:
            poll = select.poll()
            poll.register(connection.fd, select.POLLIN)
            greeting = Greeting(self._connections, connection, until)
            _drive(greeting, poll)
            return greeting.answer
        finally:
            connection.close()


def _drive(exchange: Exchange[_Connection] | Greeting[_Connection], poll: select.poll) -> None:
    """Wait and take, turn by turn, until it is over."""
    while (wait_s := exchange.wait_s()) is not None:
        exchange.turn(poll.poll(1000 * wait_s))
