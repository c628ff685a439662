"""Questions of a simulated client: `net.asking.Asker` over the simulated network.

The same rules: one question a connection at a time, a few idle ones a peer, a stale one is tried
again on a new one, and the same evidence goes to the breakers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from peercache.codec import decode, encode
from peercache.messages import Envelope, Hello, Message, Refused, SayHello, Welcome
from peercache.net.asking import CONNECT_TIMEOUT_S, IDLE_CONNECTIONS_MAX
from peercache.transfer.breaker import Breakers
from sims.network import TO_LISTENER, Network, Pipe
from sims.places import Place

CLUSTER = "sims"


class Connection:
    """One connection to one incarnation; what is sent before it has come about waits."""

    def __init__(self) -> None:
        """Start without a pipe."""
        self.pipe: Pipe | None = None
        self.is_broken = False
        self.is_closed = False
        self.is_fresh = True
        self.inbox: deque[bytes] = deque()
        self.waiting: deque[bytes] = deque()
        self.wake: Callable[[], None] = _nobody

    def receive(self, raw: bytes) -> None:
        """Take a message from the network."""
        self.inbox.append(raw)
        self.wake()

    def broke(self) -> None:
        """Hear that the connection has ended, or will not come about."""
        self.is_broken = True
        self.wake()


@attrs.define(eq=False)
class _Question:
    place: int
    peer: int
    message: Message
    number: int
    connection: Connection
    asked_at: float


class SimAsker:
    """Asks nodes on behalf of one client."""

    def __init__(
        self,
        *,
        identity: int,
        place: Place,
        network: Network,
        hello_for: Callable[[int], Hello],
        address_of: Callable[[int], str | None],
        breakers: Breakers,
        nursery: Callable[[], trio.Nursery],
    ) -> None:
        """Say `hello_for(peer)` on a new connection to `address_of(peer)`."""
        self.identity = identity
        self.breakers = breakers
        self._place = place
        self._network = network
        self._hello_for = hello_for
        self._address_of = address_of
        self._nursery = nursery
        self._idle: dict[int, list[Connection]] = {}
        self._numbers = itertools.count(1)

    async def ask(
        self,
        questions: Sequence[tuple[int, Message]],
        until: float,
        enough: Callable[[Message], bool] | None = None,
    ) -> list[Message | None]:
        """Return each peer's answer, or None, once all are in, one is `enough`, or time is up."""
        exchange = _Exchange(self, until, enough, len(questions))
        for place, (peer, message) in enumerate(questions):
            exchange.put(place, peer, message)
        await exchange.wait()
        exchange.end()
        return exchange.answers

    def post(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Send without expecting an answer; dropped where there is no connection to be had."""
        for peer, message in messages:
            if self.breakers.is_open(peer):
                continue
            connection = self.lease(peer, fresh=False)
            if connection is not None:
                self.send(connection, peer, message)
                self.give_back(peer, connection)

    async def greet(self, address: str, until: float) -> Message | None:
        """Say Hello at an address whoever listens there; return Welcome, Refused or None."""
        connection = self._connect(address, 0)
        event = trio.Event()
        connection.wake = lambda: event.set()  # noqa: PLW0108 - whichever it is then
        try:
            while True:
                event = trio.Event()
                while connection.inbox:
                    message = self.decode(connection.inbox.popleft())
                    if isinstance(message, (Welcome, Refused)):
                        return message
                if connection.is_broken or trio.current_time() >= until:
                    return None
                with trio.move_on_at(until):
                    await event.wait()
                await self.awake()
        finally:
            self.close(connection)

    def forget(self, alive: set[int]) -> None:
        """Close the connections to peers that are not alive any more."""
        for peer in [peer for peer in self._idle if peer not in alive]:
            for connection in self._idle.pop(peer):
                self.close(connection)

    # --- for an exchange --------------------------------------------------------------------------

    def lease(self, peer: int, *, fresh: bool) -> Connection | None:
        """Return a connection, a new one if `fresh` or none is idle; None if there is none."""
        idle = self._idle.get(peer, [])
        while idle and not fresh:
            connection = idle.pop()
            if not connection.is_broken:
                connection.is_fresh = False
                return connection
            self.close(connection)
        address = self._address_of(peer)
        return None if address is None else self._connect(address, peer)

    def give_back(self, peer: int, connection: Connection) -> None:
        """Keep a connection for the next question."""
        connection.wake = _nobody
        idle = self._idle.setdefault(peer, [])
        if not connection.is_broken and len(idle) < IDLE_CONNECTIONS_MAX:
            idle.append(connection)
        else:
            self.close(connection)

    def send(self, connection: Connection, target: int, message: Message) -> None:
        """Encode and send, or keep it until the connection has come about."""
        raw = encode(Envelope(self.identity, target, message), cluster=CLUSTER)
        if connection.pipe is None:
            connection.waiting.append(raw)
        else:
            self._network.send(connection.pipe, TO_LISTENER, raw)

    def close(self, connection: Connection) -> None:
        """Hang up."""
        connection.is_closed = True
        if connection.pipe is not None:
            self._network.hang_up(connection.pipe)

    def decode(self, raw: bytes) -> Message:
        """Return the message."""
        return decode(raw, cluster=CLUSTER).message

    def number(self) -> int:
        """Return a new correlation number."""
        return next(self._numbers)

    async def awake(self) -> None:
        """Wait while this process is stopped."""
        await self._place.awake()

    def _connect(self, address: str, peer: int) -> Connection:
        connection = Connection()
        self.send(connection, 0, self._hello_for(peer))
        self._nursery().start_soon(self._dial, connection, address)
        return connection

    async def _dial(self, connection: Connection, address: str) -> None:
        pipe = await self._network.connect(
            self._place, address, CONNECT_TIMEOUT_S, connection.receive, connection.broke
        )
        if pipe is None:
            connection.broke()
            return
        if connection.is_closed:
            self._network.hang_up(pipe)
            return
        connection.pipe = pipe
        while connection.waiting:
            self._network.send(pipe, TO_LISTENER, connection.waiting.popleft())


class _Exchange:
    """The questions of one `ask`."""

    def __init__(
        self, asker: SimAsker, until: float, enough: Callable[[Message], bool] | None, count: int
    ) -> None:
        self.answers: list[Message | None] = [None] * count
        self._asker = asker
        self._until = until
        self._enough = enough
        self._pending: dict[int, _Question] = {}
        self._event = trio.Event()
        self._is_done = False

    def put(self, place: int, peer: int, message: Message, *, fresh: bool = False) -> None:
        """Send one question; a peer without an address is noted at once."""
        asker = self._asker
        now = trio.current_time()
        if now >= self._until:
            return
        connection = asker.lease(peer, fresh=fresh)
        if connection is None:
            asker.breakers.failed(peer, now)
            return
        number = asker.number()
        connection.wake = lambda: self._event.set()  # noqa: PLW0108 - whichever it is then
        question: Any = message
        numbered: Message = attrs.evolve(question, request=number)
        asker.send(connection, peer, numbered)
        self._pending[number] = _Question(place, peer, message, number, connection, now)

    async def wait(self) -> None:
        """Take answers until all are in, one was enough, or the time is up."""
        while self._pending and not self._is_done:
            self._event = trio.Event()
            for question in list(self._pending.values()):
                self._take(question)
                if question.number in self._pending and question.connection.is_broken:
                    self._broke(question)
            if not self._pending or self._is_done:
                return
            if trio.current_time() >= self._until:
                return
            with trio.move_on_at(self._until):
                await self._event.wait()
            await self._asker.awake()

    def end(self) -> None:
        """Give every connection back; who has been silent all the time is noted."""
        now = trio.current_time()
        for question in list(self._pending.values()):
            if not self._is_done:
                self._asker.breakers.waited(question.peer, now - question.asked_at, now)
            self._finish(question)

    def _take(self, question: _Question) -> None:
        asker = self._asker
        while question.connection.inbox and question.number in self._pending:
            message = asker.decode(question.connection.inbox.popleft())
            if isinstance(message, Welcome):
                continue
            asker.breakers.answered(question.peer)
            if isinstance(message, SayHello):
                self._broke(question)
                return
            if isinstance(message, Refused) and message.request in (0, question.number):
                if not question.connection.is_fresh:
                    self._broke(question)
                    return
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

    def _broke(self, question: _Question) -> None:
        """Retry on a new connection what a stale one swallowed; else the peer has failed."""
        was_fresh = question.connection.is_fresh
        question.connection.is_broken = True
        self._finish(question)
        if was_fresh:
            self._asker.breakers.failed(question.peer, trio.current_time())
        else:
            self.put(question.place, question.peer, question.message, fresh=True)

    def _finish(self, question: _Question) -> None:
        del self._pending[question.number]
        self._asker.give_back(question.peer, question.connection)


def _nobody() -> None:
    return
