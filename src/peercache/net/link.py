"""A link: sends the messages of this node to one other node, in order, from a bounded outbox.

Every new connection begins with a Hello; the messages of the outbox follow it. Answers to the Hello
arrive over the same connection.

A connection may be lost without an error: behind a firewall that drops its state, or in nng, whose
dialer sometimes misses the end of a TLS connection that arrived with a last message. Other messages
are answered over the peer's own link, so a link that sends but receives nothing sends Hello again,
and dials again if there is no answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

import attrs
import trio

from peercache.net.peers import ControlTls, Peer
from peercache.net.sockets import Dialer, OutOfDescriptors, UnusableAddress

OUTBOX_MESSAGES_MAX = 512
"""Messages queued while a peer is unreachable or slow. Beyond that the oldest is dropped: summaries
repair, and the newest message is the most likely to be still valid."""

OUTBOX_BYTES_MAX = 16 * 2**20
"""The same in bytes: 300,000 records."""


@final
class Outbox:
    """A bounded queue that drops its oldest messages."""

    def __init__(
        self, *, messages_max: int = OUTBOX_MESSAGES_MAX, bytes_max: int = OUTBOX_BYTES_MAX
    ) -> None:
        """Start empty."""
        self.waiting: deque[bytes] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def __len__(self) -> int:
        """Return how many messages are queued."""
        return len(self.waiting)

    def put(self, raw: bytes) -> int:
        """Add a message; return how many were dropped for it, possibly itself."""
        self.waiting.append(raw)
        self._bytes += len(raw)
        dropped = 0
        while len(self.waiting) > self._messages_max or self._bytes > self._bytes_max:
            self.take()
            dropped += 1
        return dropped

    def take(self) -> bytes:
        """Remove and return the oldest message."""
        raw = self.waiting.popleft()
        self._bytes -= len(raw)
        return raw

    def clear(self) -> int:
        """Drop everything; return the number of dropped messages."""
        dropped = len(self.waiting)
        self.waiting.clear()
        self._bytes = 0
        return dropped


BURST_MESSAGES = 64
"""Messages taken from the peer before other tasks get a turn."""

SILENT_S = 5.0
"""How long a link that sends may receive nothing before it sends Hello again."""

UNANSWERED_S = 15.0
"""How long that Hello may be unanswered before the link dials again: longer than a busy peer
takes."""

DIAL_AGAIN_S = 1.0
"""Pause after a lack of descriptors for a link. Meanwhile its outbox drops the oldest."""


@final
@attrs.define(eq=False, kw_only=True)
class Link:
    """One directed link to an address; `run` dials it.

    hello:     returns the Hello to send.
    on_answer: called with the peer's messages.
    accepts:   verifies the process that has answered, on a thread of nng.
    """

    url: str = attrs.field(kw_only=False)
    _hello: Callable[[], bytes]
    _on_answer: Callable[[bytes], None]
    _on_dropped: Callable[[int], None]
    _accepts: Callable[[Peer], bool]
    _tls: ControlTls | None = None
    _outbox: Outbox = attrs.field(factory=Outbox, init=False)
    _greeted: bool = attrs.field(default=False, init=False)
    _has_sent: bool = attrs.field(default=False, init=False)
    """Whether it has sent since it last received something."""
    _received_at: float = attrs.field(default=0.0, init=False)
    _asked_at: float | None = attrs.field(default=None, init=False)
    """When it sent the Hello that is not answered yet."""
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)
    _connected: bool = attrs.field(default=False, init=False)
    _is_usable: bool = attrs.field(default=True, init=False)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _dialer: Dialer | None = attrs.field(default=None, init=False)

    def send(self, raw: bytes) -> None:
        """Send at once, or queue behind earlier messages; never blocks, may drop the oldest."""
        at_once = self._connected and self._greeted and not self._outbox
        if at_once and self._dialer is not None and self._dialer.send(raw):
            self._has_sent = True
            return
        dropped = self._outbox.put(raw)
        if not self._is_usable:
            dropped += self._outbox.clear()
        if dropped:
            self._on_dropped(dropped)
        self._wake.set()

    def greet_again(self) -> None:
        """Send Hello again: the peer does not know us, or has forgotten us."""
        self._greeted = False
        self._wake.set()

    def renew_tls(self) -> None:
        """Use the current certificates of `tls` for the next connection."""
        if self._dialer is not None and self._tls is not None:
            self._dialer.renew_tls(self._tls)

    def disconnect(self) -> None:
        """End the connection, and make it again: then the peer is verified again."""
        if self._dialer is not None:
            self._dialer.disconnect()

    def stop(self) -> None:
        """End `run`; queued messages are not sent."""
        self._scope.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether every message was passed to nng."""
        return not self._outbox

    async def run(self) -> None:
        """Dial, send Hello, send and receive messages until stopped.

        Drops every message if the address cannot be dialled: a peer announces its own address.
        """
        token = trio.lowlevel.current_trio_token()

        def from_nng(fact: Callable[[], None]) -> Callable[[], None]:
            def report() -> None:
                try:
                    token.run_sync_soon(fact)
                except trio.RunFinishedError:
                    return  # The node is gone, and nothing waits for this.

            return report

        with self._scope:
            self._connected = False
            dialer = None
            while dialer is None:
                try:
                    dialer = Dialer(
                        self.url,
                        on_connected=from_nng(self._on_connected),
                        on_removed=from_nng(self._on_removed),
                        tls=self._tls,
                        accepts=self._accepts,
                    )
                except OutOfDescriptors:  # noqa: PERF203 - each turn waits
                    await trio.sleep(DIAL_AGAIN_S)
                except UnusableAddress:
                    self._is_usable = False
                    self._on_dropped(self._outbox.clear())
                    await trio.sleep_forever()
            try:
                self._dialer = dialer
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, dialer)
                    nursery.start_soon(self._probe, dialer)
                    await self._talk(dialer)
            finally:
                self._dialer = None
                dialer.close()

    def _on_connected(self) -> None:
        self._connected, self._greeted = True, False
        self._received()
        self._asked_at = trio.current_time()
        self._wake.set()

    def _on_removed(self) -> None:
        self._connected = False

    async def _listen(self, dialer: Dialer) -> None:
        while True:
            await trio.lowlevel.wait_readable(dialer.receive_fd)
            for _ in range(BURST_MESSAGES):
                if (raw := dialer.receive()) is None:
                    break
                self._received()
                self._on_answer(raw)

    def _received(self) -> None:
        self._has_sent, self._asked_at = False, None
        self._received_at = trio.current_time()

    async def _probe(self, dialer: Dialer) -> None:
        """End a connection whose peer does not answer a Hello; nng dials again."""
        while True:
            await trio.sleep(SILENT_S)
            now = trio.current_time()
            if not self._connected:
                continue
            if self._asked_at is not None:
                if now - self._asked_at >= UNANSWERED_S:
                    self._asked_at = None
                    dialer.disconnect()
            elif self._has_sent and now - self._received_at >= SILENT_S:
                self._asked_at = now
                self.greet_again()

    async def _talk(self, dialer: Dialer) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._connected and (self._outbox or not self._greeted):
                raw = self._outbox.waiting[0] if self._greeted else self._hello()
                if not dialer.send(raw):
                    await trio.lowlevel.wait_readable(dialer.send_fd)
                    continue
                self._has_sent = True
                if self._greeted:
                    # The outbox may have dropped its oldest only between sends, never during one.
                    self._outbox.take()
                else:
                    self._greeted = True
            await trio.lowlevel.checkpoint()
