"""Requests of a simulated client: `net.requests.Asker` with simulated connections and waits.

Production code decides which requests are retried, which answers count, and which peer is to blame
(`net.requests`); this module replaces nng's sockets and the poll.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import trio

from peercache.net.breaker import Breakers
from peercache.net.requests import Connections, Conversation, Enough, Hedge
from peercache.net.sockets import RECONNECT_MAX_MS, RECONNECT_MIN_MS, SEND_BUFFER_MESSAGES
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello, Refused
from sims.network import TO_LISTENER, Network, Pipe
from sims.places import Place

CLUSTER = "sims"

DIAL_S = 1.0
"""How long one attempt to connect lasts."""


class Connection:
    """One dialled socket to one incarnation, like nng's: redials while it is lost."""

    def __init__(self, url: str, fd: int, place: Place, network: Network) -> None:
        """Wait for `run`."""
        self.fd = fd
        self.is_broken = False
        self.is_fresh = True
        self.is_redial = False
        self.inbox: deque[bytes] = deque()
        self.wake: Callable[[], None] = _no_waiter
        self.url = url
        self._place = place
        self._network = network
        self._pipe: Pipe | None = None
        self._is_closed = False
        self._waiting: deque[bytes] = deque()

    def send(self, raw: bytes, /) -> bool:
        """Send, or queue the message until it is connected."""
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
        """Return whether no process listens there, unless it is connected."""
        return self._pipe is None and self._network.is_refused(self.url)

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
                self._place, self.url, DIAL_S, self._came, self._broke
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
        self.is_broken = True
        self.wake()


class SimAsker:
    """Asks nodes on behalf of one client."""

    def __init__(
        self,
        *,
        identity: int,
        place: Place,
        network: Network,
        hello_for: Callable[[str], Hello],
        url_of: Callable[[int], str | None],
        breakers: Breakers,
        on_refused: Callable[[int, Refused], None],
        on_unasked: Callable[[int, Message], None],
        nursery: Callable[[], trio.Nursery],
    ) -> None:
        """Send `hello_for(url)` on a new connection to a peer, at the address `url_of(peer)`."""
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
        enough: Enough | None = None,
        hedge: tuple[float, Hedge] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None: when all are in, or are `enough`, or at `until`."""
        talk = self.talk()
        try:
            return await talk.ask(questions, until, enough, hedge)
        finally:
            talk.end()

    async def greet(self, url: str, until: float) -> Message | None:
        """Send Hello to the node at an address; return Welcome, Refused or None."""
        await trio.lowlevel.checkpoint()
        if self._network.is_refused(url):
            return None
        talk = Talk(self._connections, self._place, Breakers())
        try:
            return await talk.greet(url, until)
        finally:
            talk.end()

    def talk(self) -> Talk:
        """Return a conversation of one call, like `net.requests.Talk` for the bridge."""
        return Talk(self._connections, self._place)

    def _connect(self, url: str, _peer: int) -> Connection:
        connection = Connection(url, next(self._fds), self._place, self._network)
        self._nursery().start_soon(connection.run)
        return connection


class Talk:
    """A conversation, driven by events."""

    def __init__(
        self,
        connections: Connections[Connection],
        place: Place,
        breakers: Breakers | None = None,
    ) -> None:
        """Start without requests."""
        self._place = place
        self._poll = Poll()
        self._conversation = Conversation(
            connections,
            watch=self._poll.register,
            unwatch=self._poll.unregister,
            breakers=breakers,
        )
        self.send = self._conversation.send
        self.end = self._conversation.end

    async def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Enough | None,
        hedge: tuple[float, Hedge] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None: when all are in, or are `enough`, or at `until`."""
        numbers = self._conversation.ask(questions, until, enough, hedge)
        await self._wait()
        return [self._conversation.answer(number) for number in numbers]

    async def greet(self, url: str, until: float) -> Message | None:
        """Send Hello to the node at an address; return Welcome, Refused or None."""
        number = self._conversation.greet(url, until)
        await self._wait()
        return self._conversation.answer(number)

    async def collect(self, number: int, until: float) -> Message | None:
        """Return the answer to a request, or None if there is none until `until`."""
        self._conversation.collect(number, until)
        await self._wait()
        return self._conversation.answer(number)

    async def _wait(self) -> None:
        while (wait_s := self._conversation.wait_s()) is not None:
            await self._poll.wait(wait_s / self._place.rate)
            await self._place.awake()
            self._conversation.turn(self._poll.readable())
        self._conversation.stop()


class Poll:
    """The equivalent of `select.poll`."""

    def __init__(self) -> None:
        """Start without connections."""
        self._watched: dict[int, Connection] = {}
        self._event = trio.Event()

    def register(self, connection: Connection) -> None:
        """Also wait for this one."""
        self._watched[connection.fd] = connection
        connection.wake = self._wake

    def unregister(self, connection: Connection) -> None:
        """Stop to wait for it."""
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
