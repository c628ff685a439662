"""Questions of a simulated client: `net.asking.Asker` with simulated connections and waits.

Production code decides which questions are retried, which answers count, and which peer is
to blame
(`net.asking`); here is what stands for nng's sockets and for the poll.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import trio

from peercache.net.asking import Connections, Exchange, HelloExchange, Turns
from peercache.net.breaker import Breakers
from peercache.net.sockets import RECONNECT_MAX_MS, RECONNECT_MIN_MS, SEND_BUFFER_MESSAGES
from peercache.net.talking import Talk
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello, Refused
from sims.network import TO_LISTENER, Network, Pipe
from sims.places import Place

CLUSTER = "sims"

DIAL_S = 1.0
"""How long one attempt to connect goes on."""


class Connection:
    """One dialled socket to one incarnation, as nng does it: dials again while it is lost."""

    def __init__(self, url: str, fd: int, place: Place, network: Network) -> None:
        """Wait for `run`."""
        self.fd = fd
        self.is_broken = False
        self.is_fresh = True
        self.is_probed = False
        self.inbox: deque[bytes] = deque()
        self.wake: Callable[[], None] = _no_waiter
        self._url = url
        self._place = place
        self._network = network
        self._pipe: Pipe | None = None
        self._is_closed = False
        self._waiting: deque[bytes] = deque()

    def send(self, raw: bytes, /) -> bool:
        """Send, or keep it until the connection has come about."""
        if self._pipe is not None:
            self._network.send(self._pipe, TO_LISTENER, raw)
        elif len(self._waiting) < SEND_BUFFER_MESSAGES:
            self._waiting.append(raw)
        else:
            return False
        return True

    def receive(self) -> bytes | None:
        """Return a message that has arrived, or None."""
        return self.inbox.popleft() if self.inbox else None

    def is_refused(self, _timeout_s: float, /) -> bool:
        """Return whether no peer is connected."""
        if self._pipe is not None or self.is_probed:
            return False
        self.is_probed = True
        return self._network.is_refused(self._url)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        if self._pipe is not None:
            self._network.hang_up(self._pipe)

    async def run(self) -> None:
        """Dial until a peer answers, or the connection is closed."""
        backoff_s = RECONNECT_MIN_MS / 1000
        while not self._is_closed:
            pipe = await self._network.connect(
                self._place, self._url, DIAL_S, self._came, self._broke
            )
            if pipe is None:
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, RECONNECT_MAX_MS / 1000)
                continue
            if self._is_closed:
                self._network.hang_up(pipe)
                return
            self._pipe = pipe
            while self._waiting:
                self._network.send(pipe, TO_LISTENER, self._waiting.popleft())
            return

    def _came(self, raw: bytes) -> None:
        self.inbox.append(raw)
        self.wake()

    def _broke(self) -> None:
        # As in production this wakes no waiting task.
        self.is_broken = True


class SimAsker:
    """Asks nodes on behalf of one client."""

    def __init__(
        self,
        *,
        identity: int,
        place: Place,
        network: Network,
        hello_for: Callable[[int], Hello],
        url_of: Callable[[int], str | None],
        breakers: Breakers,
        on_refused: Callable[[int, Refused], None],
        on_unasked: Callable[[int, Message], None],
        nursery: Callable[[], trio.Nursery],
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `url_of(peer)`."""
        self.breakers = breakers
        self._place = place
        self._network = network
        self._nursery = nursery
        self._fds = itertools.count(1)
        self._connections: Connections[Connection] = Connections(
            identity=identity,
            cluster=CLUSTER,
            hello_for=hello_for,
            url_of=url_of,
            connect=self._connect,
            breakers=breakers,
            clock=place.now,
            on_refused=on_refused,
            on_unasked=on_unasked,
        )
        self.post = self._connections.post
        self.drain = self._connections.drain
        self.forget = self._connections.forget

    async def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Callable[[Sequence[Message | None]], bool] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None, once all are in, or are `enough`, or time is up."""
        poll = Poll()
        exchange = Exchange(
            self._connections,
            count=len(questions),
            until=until,
            enough=enough,
            watch=poll.register,
            unwatch=poll.unregister,
        )
        try:
            for place, (peer, message) in enumerate(questions):
                exchange.put(place, peer, message)
            await self._drive(exchange, poll)
        finally:
            exchange.end()
        return exchange.answers

    async def greet(self, url: str, until: float) -> Message | None:
        """Send Hello to the node at an address; return Welcome, Refused or None."""
        await trio.lowlevel.checkpoint()
        if self._network.is_refused(url):
            return None
        connection = self._connections.greeting(url)
        assert connection is not None, "a simulated address can be tried"
        poll = Poll()
        poll.register(connection)
        greeting = HelloExchange(self._connections, connection, until)
        try:
            await self._drive(greeting, poll)
            return greeting.answer
        finally:
            connection.close()

    def talking(self) -> Talking:
        """Return the talks of one call: what `net.talking.Talking` is to the bridge."""
        return Talking(self._connections, self._drive)

    async def _drive(self, turns: Turns, poll: Poll) -> None:
        while (wait_s := turns.wait_s()) is not None:
            await poll.wait(wait_s / self._place.rate)
            await self._place.awake()
            turns.turn(poll.readable())

    def _connect(self, url: str, _peer: int) -> Connection:
        connection = Connection(url, next(self._fds), self._place, self._network)
        self._nursery().start_soon(connection.run)
        return connection


class Talking:
    """The talks of one call, by peer."""

    def __init__(
        self,
        connections: Connections[Connection],
        drive: Callable[[Turns, Poll], Awaitable[None]],
    ) -> None:
        """Start without one."""
        self._connections = connections
        self._drive = drive
        self._talks: dict[int, tuple[Talk[Connection], Poll]] = {}

    def send(self, peer: int, message: Message) -> int:
        """Send a question without waiting; return its number, 0 for a peer without an address."""
        if peer not in self._talks:
            poll = Poll()
            talk = Talk(self._connections, peer, watch=poll.register, unwatch=poll.unregister)
            self._talks[peer] = talk, poll
        return self._talks[peer][0].send(message)

    async def collect(self, peer: int, number: int, until: float) -> Message | None:
        """Return the answer to a question, or None once the time is up."""
        talk, poll = self._talks[peer]
        talk.collect(number, until)
        talk.turn(())
        await self._drive(talk, poll)
        return talk.answer()

    def end(self) -> None:
        """Give every connection back."""
        for talk, _ in self._talks.values():
            talk.end()


class Poll:
    """What `select.poll` is to sockets."""

    def __init__(self) -> None:
        """Begin with no connections."""
        self._watched: dict[int, Connection] = {}
        self._event = trio.Event()

    def register(self, connection: Connection) -> None:
        """Wait for this one too."""
        self._watched[connection.fd] = connection
        connection.wake = self._wake

    def unregister(self, connection: Connection) -> None:
        """Wait for it no more."""
        del self._watched[connection.fd]
        connection.wake = _no_waiter

    async def wait(self, timeout_s: float) -> None:
        """Return as soon as one has something, or the time is up."""
        self._event = trio.Event()
        if not self.readable():
            with trio.move_on_after(timeout_s):
                await self._event.wait()

    def readable(self) -> list[tuple[int, int]]:
        """Return those that have something."""
        return [(fd, 1) for fd, connection in self._watched.items() if connection.inbox]

    def _wake(self) -> None:
        self._event.set()


def _no_waiter() -> None:
    return
