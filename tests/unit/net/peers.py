"""Peers for the tests of the sockets: control ports with set answers, each in a thread.

Real nng on real addresses; only what stands behind the port is scripted.
"""

from __future__ import annotations

import itertools
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from peercache.model.member import ALIVE, Member
from peercache.net.breaker import Breakers
from peercache.net.peers import Gate
from peercache.net.requests import SLICE_S, Asker
from peercache.net.sockets import Listener
from peercache.trust.sharing import Sharing
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.session import Hello, HelloRequired, Welcome
from tests.pace import TIMEOUT_S

CLUSTER = "test"
CLIENT = 77
_numbers = itertools.count(1)


def files_open() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def threads_running() -> int:
    """Return how many threads of whatever library this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


def hello(**fields: Any) -> Hello:
    """Return a greeting that fits; name what shall not."""
    fitting = Hello(0, 2, 2, CLUSTER, False, 16384, "", b"", "", "", "", b"")
    return attrs.evolve(fitting, **fields)


def member(incarnation: int, control: str = "") -> Member:
    """Return a member of a view."""
    return Member(incarnation, 1, ALIVE, 255, "host", control, control, "boot", "")


def located(message: Message) -> Message | None:
    """Answer a Lookup with as many zero records as it has keys; a node that knows no page."""
    return Located(message.request, b"") if isinstance(message, Lookup) else None


class Peer:
    """One control port.

    answer: what it answers to a message that is no Hello; None: nothing.
    received:  (pipe, message) of everything that came, in order.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        url: str = "",
        incarnation: int = 7,
        answer: Callable[[Message], Message | None] = located,
        cluster: str = CLUSTER,
    ) -> None:
        """Listen on tcp or ipc, or once more on an address that was free a moment ago."""
        self.incarnation = incarnation
        self.answer = answer
        self.cluster = cluster
        self.received: list[tuple[int, Message]] = []
        self.ended: list[int] = []
        self._greeted: dict[int, None] = {}
        self.listener = Listener(on_removed=self.ended.append)
        if kind == "ipc":
            self.url = url or f"ipc://{folder}/{next(_numbers)}.ipc"
            self.listener.listen_local(self.url)
        else:
            port = int(url.rpartition(":")[2]) if url else 0
            port = self.listener.listen_tcp("listen", "127.0.0.1", port)
            self.url = f"tcp://127.0.0.1:{port}"
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def of(self, kind: type[Message]) -> list[Any]:
        """Return the messages of a kind that came."""
        return [message for _, message in list(self.received) if isinstance(message, kind)]

    def say(self, pipe: int, message: Message) -> None:
        """Send something of our own accord."""
        raw = encode(Envelope(self.incarnation, CLIENT, message), cluster=self.cluster)
        assert self.listener.reply(pipe, raw)

    def end(self) -> None:
        """Close the port and every connection."""
        if not self._is_closing:
            self._is_closing = True
            self._thread.join()
            self.listener.close()

    def __enter__(self) -> Peer:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()

    def _main(self) -> None:
        poll = select.poll()
        poll.register(self.listener._receive_fd, select.POLLIN)
        while not self._is_closing:
            poll.poll(5)
            while (taken := self.listener.receive_now()) is not None:
                self._take(*taken)

    def _take(self, pipe: int, raw: bytes) -> None:
        envelope = decode(raw, cluster=CLUSTER)
        message = envelope.message
        answer: Message | None
        if isinstance(message, Hello):
            self._greeted[pipe] = None
            answer = Welcome(message.request, message.wire_newest, member(self.incarnation), 0)
        elif pipe in self._greeted:
            answer = self.answer(message)
        else:
            answer = HelloRequired(self.incarnation)
        self.received.append((pipe, message))
        if answer is not None and self.listener.is_open(pipe):
            self.say(pipe, answer)


class Asking:
    """An asker and what it reports."""

    def __init__(
        self,
        urls: dict[int, str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        slice_s: float = SLICE_S,
    ) -> None:
        """Know these peers by incarnation."""
        self.urls = urls
        self.refusals: list[tuple[int, Message]] = []
        self.unasked: list[tuple[int, Message]] = []
        self.breakers = Breakers()
        self.asker = Asker(
            identity=CLIENT,
            cluster=CLUSTER,
            hello_for=lambda _: hello(),
            url_of=self.urls.get,
            breakers=self.breakers,
            clock=clock,
            on_refused=lambda peer, refusal: self.refusals.append((peer, refusal)),
            on_unasked=lambda peer, message: self.unasked.append((peer, message)),
            gate=Gate(Sharing.of(), None),
            name_of_peer=lambda _: None,
            slice_s=slice_s,
        )

    def __enter__(self) -> Asking:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the asker."""
        self.asker.close()

    def ask(self, *peers: int, timeout_s: float = TIMEOUT_S) -> list[Message | None]:
        """Ask each of these peers one Lookup."""
        questions = [(peer, Lookup(0, bytes(16))) for peer in peers]
        return self.asker.ask(questions, time.monotonic() + timeout_s)
