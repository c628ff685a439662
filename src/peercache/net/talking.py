"""A talk: several pending questions to one peer over one connection, collected one by one.

The sender does something else between a question and its answer. Only for idempotent questions: the
ones that a stale connection swallowed are all sent once more, over a new one.

`Talk` knows neither sockets nor waiting; it is driven as `net.asking.Exchange` is.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable
from typing import Generic, final

from peercache.net.asking import (
    BURST_MESSAGES,
    LAST_TURN_S,
    SLICE_S,
    Connections,
    Kind,
    drive,
)
from peercache.net.dialled import Dialled
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Refused, SayHello, Welcome


@final
class Talk(Generic[Kind]):
    """The questions of one call to one peer."""

    def __init__(
        self,
        connections: Connections[Kind],
        peer: int,
        *,
        watch: Callable[[Kind], object],
        unwatch: Callable[[Kind], object],
    ) -> None:
        """Talk to `peer`; nothing is leased before the first question."""
        self._connections = connections
        self._peer = peer
        self._watch = watch
        self._unwatch = unwatch
        self._connection: Kind | None = None
        self._pending: dict[int, tuple[Message, float]] = {}
        """By number: the question, and when it was sent; in the order of sending."""
        self._answers: dict[int, Message] = {}
        self._heard_at = float("-inf")
        self._awaited = 0
        self._until = 0.0
        self._is_last = False

    def send(self, message: Message) -> int:
        """Send a question without waiting; return its number, 0 for a peer without an address."""
        number = self._connections.number()
        if self._connection is None and not self._lease(fresh=False):
            return 0
        self._say(number, message)
        return number

    def collect(self, number: int, until: float) -> None:
        """Wait, from the next turn on, for the answer to this question, but not beyond `until`."""
        self._awaited, self._until, self._is_last = number, until, False

    def answer(self) -> Message | None:
        """Return the answer to what was awaited, if it has come; else count the peer's silence."""
        number = self._awaited
        answer = self._answers.pop(number, None)
        if answer is None and number in self._pending:
            now = self._connections.clock()
            silent_since = max(self._pending.pop(number)[1], self._heard_at)
            self._connections.breakers.waited(self._peer, now - silent_since, now)
        return answer

    def wait_s(self) -> float | None:
        """Return how long to wait before the next turn; None when the wait is over."""
        if self._awaited not in self._pending or self._is_last:
            return None
        left_s = self._until - self._connections.clock()
        # One more turn then: if it was this thread that slept, the answer lies there.
        self._is_last = left_s <= 0
        return min(max(left_s, 0.0), SLICE_S)

    def turn(self, _readable: Iterable[tuple[int, int]]) -> None:
        """Take the messages that have come, then check the connection."""
        if self._connection is not None:
            self._take(self._connection)
        if self._connection is not None:
            self._check(self._connection)

    def end(self) -> None:
        """Give the connection back; answers that come later answer no pending question."""
        self._pending.clear()
        self._let_go()

    def _say(self, number: int, message: Message) -> None:
        connections = self._connections
        assert self._connection is not None, "a question goes over a connection"
        self._pending[number] = (message, connections.clock())
        self._connection.send(connections.encode(self._peer, message, number))

    def _take(self, connection: Kind) -> None:
        connections = self._connections
        stop_at = max(self._until, connections.clock() + LAST_TURN_S)
        for _ in range(BURST_MESSAGES):
            if connections.clock() >= stop_at or (raw := connection.receive()) is None:
                return
            message = connections.decode(raw)
            if message is None or isinstance(message, Welcome):
                continue
            connections.breakers.answered(self._peer)
            self._heard_at = connections.clock()
            if isinstance(message, SayHello):
                self._broke(connection)
                return
            if isinstance(message, Refused) and message.request in (0, *self._pending):
                self._refused(connection, message)
                return
            number: int = getattr(message, "request", 0)
            if number in self._pending:
                del self._pending[number]
                self._answers[number] = message
            else:
                connections.unasked(self._peer, message)

    def _refused(self, connection: Kind, message: Refused) -> None:
        if not connection.is_fresh:
            # Perhaps for what was posted over it before.
            self._broke(connection)
            return
        self._connections.refused(self._peer, message)
        for number in [message.request] if message.request else list(self._pending):
            del self._pending[number]
            self._answers[number] = message
        connection.is_broken = True
        self._let_go()
        self._again()

    def _check(self, connection: Kind) -> None:
        """Notice a connection that has broken, and an address that refuses."""
        now = self._connections.clock()
        asked_at = min((at for _, at in self._pending.values()), default=now)
        is_slow = now - asked_at >= SLICE_S and now < self._until
        if connection.is_broken or (
            is_slow and connection.is_refused(min(SLICE_S, self._until - now))
        ):
            self._broke(connection)

    def _broke(self, connection: Kind) -> None:
        """Send again over a new connection what a stale one swallowed; else the peer has failed."""
        connection.is_broken = True
        was_fresh = connection.is_fresh
        self._let_go()
        if was_fresh:
            self._connections.breakers.failed(self._peer, self._connections.clock())
            self._pending.clear()
        else:
            self._again()

    def _again(self) -> None:
        """Send every pending question over a new connection."""
        questions, self._pending = self._pending, {}
        if questions and self._lease(fresh=True):
            for number, (message, _) in questions.items():
                self._say(number, message)

    def _lease(self, *, fresh: bool) -> bool:
        self._connection = self._connections.lease(self._peer, fresh=fresh)
        if self._connection is None:
            self._connections.breakers.failed(self._peer, self._connections.clock())
            return False
        self._watch(self._connection)
        return True

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._unwatch(connection)
            self._connections.give_back(self._peer, connection)


@final
class Talking:
    """The talks of one call, by peer, driven by blocking polls. For one thread."""

    def __init__(self, connections: Connections[Dialled]) -> None:
        """Start without one."""
        self._connections = connections
        self._talks: dict[int, tuple[Talk[Dialled], select.poll]] = {}

    def send(self, peer: int, message: Message) -> int:
        """Send a question without waiting; return its number, 0 for a peer without an address."""
        if peer not in self._talks:
            poll = select.poll()
            self._talks[peer] = (
                Talk(
                    self._connections,
                    peer,
                    watch=lambda connection: poll.register(connection.fd, select.POLLIN),
                    unwatch=lambda connection: poll.unregister(connection.fd),
                ),
                poll,
            )
        return self._talks[peer][0].send(message)

    def collect(self, peer: int, number: int, until: float) -> Message | None:
        """Return the answer to a question, or None once the time is up."""
        talk, poll = self._talks[peer]
        talk.collect(number, until)
        # A poll gives up the interpreter's lock, and a busy thread keeps that for 5 ms: what has
        # come during the copy is taken without one.
        talk.turn(())
        drive(talk, poll)
        return talk.answer()

    def end(self) -> None:
        """Give every connection back."""
        for talk, _ in self._talks.values():
            talk.end()
