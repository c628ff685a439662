"""Publishes block events over ZeroMQ, like vLLM, for routers that read events of vLLM's engines.

A reader that joins late, or has missed a batch, asks the replay endpoint for all batches since a
sequence; if those are not kept any more, everything is sent again to all readers. Routers do not
forget blocks by themselves when a publisher restarts, and ignore sequences below those that they
have seen. So sequences start with the clock, and a publisher's first event, also after a loss, is
AllBlocksCleared, followed by all current blocks.

ZeroMQ requires no certificate, and stores the subscriptions of each reader. So a socket that other
hosts reach has a list of addresses that may connect; other connections are closed when they are
accepted. Readers may only send small messages, and too many subscriptions end the connections of
all readers, which reconnect by themselves. Hosts that may connect are trusted with the events, and
trusted not to send a message with endless parts: ZeroMQ does not limit their number.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, TypeVar, final

import attrs
import zmq

from peercache.errors import ConfigError, InvalidRequest, RemoteProtocolError
from peercache.events.blocks import (
    SEQUENCE_END,
    AllBlocksCleared,
    BlockEvent,
    EventBatch,
    check,
    encode,
    frames_of,
    sequence_of,
)
from peercache.observability.log import get_logger

PORT_MAX: Final = 65_535

FRAME_BYTES_MAX: Final = 512
"""The longest frame of a reader: a topic, the sequence of a replay, or the handshake, in which a
name has at most 255 bytes. ZeroMQ ends a connection that sends more."""

TOPIC_BYTES_MAX: Final = 256

SUBSCRIPTIONS_MAX: Final = 1000
"""Subscriptions of all readers; each reader has one. ZeroMQ uses some kilobytes for each."""

HANDSHAKE_MS: Final = 5_000
"""A connection without a handshake is closed after this: it uses an engine's descriptor."""

WARN_S: Final = 60.0

THIS_HOST: Final = "127.0.0.0/8"


def is_on_this_host(endpoint: str) -> bool:
    """Return whether only processes of this host can connect to a bound endpoint."""
    scheme, _, place = endpoint.partition("://")
    if scheme != "tcp":
        return scheme in ("ipc", "inproc")
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # "*", or the name of an interface.
        return host in ("localhost", "lo")


def networks_of(readers: Sequence[str]) -> tuple[str, ...]:
    """Return the networks that may connect; raise ConfigError for a reader that is invalid."""
    try:
        return tuple(str(ipaddress.IPv4Network(reader, strict=False)) for reader in readers)
    except ValueError as error:
        problem = f"{error}: an IPv4 address or network is meant, such as 10.0.0.0/16"
        raise ConfigError("readers", problem) from error


def bind(socket: zmq.Socket[bytes], endpoint: str, readers: Sequence[str] = ()) -> None:
    """Bind for these readers.

    readers: addresses or networks of other hosts; required if they can reach the socket.
    Raises ConfigError for missing or invalid readers, OSError with the endpoint and the reason why
    it cannot be bound.
    """
    networks = networks_of(readers)
    if not is_on_this_host(endpoint):
        if not networks:
            raise ConfigError(
                "readers",
                f"{endpoint} is open to other hosts: name the addresses of those that may read it, "
                "such as 10.0.0.7 or 10.0.0.0/16, or bind 127.0.0.1",
            )
        for network in (*networks, THIS_HOST):
            socket.setsockopt_string(zmq.TCP_ACCEPT_FILTER, network)
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > PORT_MAX:
        # ZeroMQ truncates it to 16 bits: no router would find the publisher there.
        raise OSError(errno.EINVAL, f"a port is at most {PORT_MAX}: {endpoint}")
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{error.strerror}: {endpoint}") from None


@final
class Readers:
    """The socket of all readers of a publisher. Used by one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        readers: Sequence[str],
        prepare: Callable[[zmq.Socket[bytes]], None],
    ) -> None:
        """Bind. prepare: sets further options of a socket. Raises as `bind`."""
        self._context = context
        self._readers = tuple(readers)
        self._prepare = prepare
        self._log = get_logger()
        self._warned_at = float("-inf")
        self._subscriptions = 0
        self._socket: zmq.Socket[bytes] | None = self._bound(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> bool:
        """Handle the messages of readers; return whether a new reader has subscribed."""
        if self._socket is None and not self._bind_again():
            return False
        socket, has_come = self._socket, False
        while socket is not None and socket.poll(0):
            # 1 and a topic: a reader has subscribed; 0: one has unsubscribed.
            is_one = socket.recv()[:1] == b"\1"
            has_come |= is_one
            self._subscriptions += 1 if is_one else -1
            if self._subscriptions > SUBSCRIPTIONS_MAX:
                self._drop(socket)
                break
        return has_come

    def send(self, frames: Sequence[bytes], flags: int = 0) -> None:
        """Send to each reader; raise zmq.Again according to the options of the socket."""
        if self._socket is not None:
            self._socket.send_multipart(frames, flags)

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        """Disconnect all readers, and free what ZeroMQ stores for them; good readers reconnect."""
        now = time.monotonic()
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            self._log.warning(
                "events.readers_dropped", at=self.endpoint, subscriptions=self._subscriptions
            )
        self._socket, self._subscriptions = None, 0
        socket.close(linger=0)
        self._bind_again()

    def _bind_again(self) -> bool:
        try:
            self._socket = self._bound(self.endpoint)
        except OSError:
            # ZeroMQ closes the socket in another thread: the next turn tries again.
            return False
        return True

    def _bound(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.XPUB)
        try:
            socket.linger = 0
            # Each subscription and unsubscription is received, duplicates included.
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)
            # At most as many of them wait as are handled in a turn.
            socket.rcvhwm = SUBSCRIPTIONS_MAX // 10
            self._prepare(socket)
            bind(socket, endpoint, self._readers)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket


Item = TypeVar("Item")

RESYNC_S: Final = 5.0
"""Pause before everything is sent again after an error, for example of `present`. For block events
also the pause after a replay that asks for batches that are no longer kept."""

WAITING_MAX: Final = 1000
"""Messages that wait for one reader."""

CLOSE_S: Final = 1.0
"""How long `close` waits for what is queued."""

POLL_MS: Final = 50
"""How long a batch waits for more events, and how soon a reader or a close is noticed."""


class EventPublisher(Generic[Item]):
    """A queue, a socket for readers, and the thread that owns it. Subclasses define what is sent.

    It is a loss if the queue is full, or something could not be sent: then `_send_some` sends
    everything again.
    """

    def __init__(
        self,
        endpoint: str,
        readers: Sequence[str],
        *,
        name: str,
        queued_max: int,
        is_lossless: bool,
    ) -> None:
        """Bind; the subclass starts the thread. Raises as `bind`.

        name: of the thread. is_lossless: a full queue of one reader is an error.
        """

        def prepare(socket: zmq.Socket[bytes]) -> None:
            socket.sndhwm = WAITING_MAX
            socket.setsockopt(zmq.XPUB_NODROP, is_lossless)

        self._log = get_logger()
        self._context = zmq.Context()
        with self._closed_on_error():
            self._readers = Readers(self._context, endpoint, readers, prepare)
        self.endpoint = self._readers.endpoint
        self._queued_max = queued_max
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._is_lossy = False
        """Something was not queued, or not sent: everything is sent again."""
        # Higher than all sequences of an earlier publisher at this endpoint, which sent fewer than
        # a million messages a second.
        self._next = time.time_ns() // 1000
        self._resting_until = -math.inf
        self._is_closing = threading.Event()
        self._has_items = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def resync(self) -> None:
        """Make all readers forget what they were sent, and send everything that is present."""
        with self._lock:
            self._queue.clear()
            self._is_lossy = True
        self._has_items.set()

    def close(self) -> None:
        """Send the queue, and end; bounded, may be repeated."""
        self._is_closing.set()
        self._has_items.set()
        self._thread.join(CLOSE_S + 1)

    def _add(self, items: Sequence[Item]) -> None:
        """Queue items; never waits. With too many waiting, everything is sent again instead."""
        with self._lock:
            if len(self._queue) + len(items) > self._queued_max:
                self._queue.clear()
                self._is_lossy = True
            elif not self._is_lossy:
                self._queue.extend(items)
            # Changes before the call of `present` are part of its result.
        self._has_items.set()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        until = math.inf
        try:
            while time.monotonic() < until:
                self._receive()
                sent = self._tried()
                if self._is_closing.is_set():
                    if not sent:
                        return
                    until = min(until, time.monotonic() + CLOSE_S)
                elif not sent:
                    self._has_items.wait(POLL_MS / 1000)
                    self._has_items.clear()
        finally:
            self._context.destroy(linger=int(CLOSE_S * 1000))

    def _tried(self) -> bool:
        """Send some items; after an error send everything again a little later.

        Otherwise an ended thread would leave routers with its last blocks forever.
        """
        if time.monotonic() < self._resting_until:
            return False
        try:
            return self._send_some()
        except Exception as error:
            if not isinstance(error, zmq.Again):
                self._log.exception("events.publish_failed", at=self.endpoint)
            self._resting_until = time.monotonic() + RESYNC_S
            self.resync()
            return False

    def _take(self, count: int) -> tuple[list[Item], bool]:
        """Return up to `count` queued items, and whether everything must be sent again."""
        with self._lock:
            is_lossy, self._is_lossy = self._is_lossy, False
            return [self._queue.popleft() for _ in range(min(len(self._queue), count))], is_lossy

    @abstractmethod
    def _receive(self) -> None:
        """Handle the messages of readers."""

    @abstractmethod
    def _send_some(self) -> bool:
        """Send one message, or everything again; return whether there was something to send."""

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._context.destroy(linger=0)
            raise


EVENTS_A_BATCH: Final = 256
"""Events of one message: some hundred kilobytes."""

QUEUE_EVENTS_MAX: Final = 16_384
"""Events that wait to be sent. A caller never waits: beyond that everything is sent again."""

REPLAY_BATCHES_MAX: Final = 10_000
REPLAY_BYTES_MAX: Final = 64 * 2**20
"""Bytes that are kept for readers that have missed something."""

QUIET_S: Final = 1.0
"""Silence after which an empty batch is sent: a reader that has missed the last batch, or has
joined since, sees the gap and asks for a replay."""

REPLAYS_A_TURN: Final = 8
"""Replays that are answered before the next events are sent."""


@attrs.frozen
class PublisherFigures:
    """Counters of a publisher. resyncs: how often it sent everything again after a loss."""

    events: int
    batches: int
    resyncs: int
    replays: int


@final
class BlockPublisher(EventPublisher[BlockEvent]):
    """One publisher of block events, with a thread that owns its sockets."""

    def __init__(
        self,
        endpoint: str,
        replay: str = "",
        *,
        topic: str = "",
        rank: int | None = None,
        present: Callable[[], Iterable[BlockEvent]] = tuple,
        readers: Sequence[str] = (),
    ) -> None:
        """Bind, and send all blocks that are present.

        endpoint: to bind, such as tcp://127.0.0.1:5557; `tcp://127.0.0.1:*` takes a free port.
        replay:   the endpoint for readers that have missed something; "" for none.
        present:  yields events that store all current blocks; called by the publisher's thread when
                  it starts and after it had too many events to send. After an error, which is
                  logged, it is called again RESYNC_S later.
        readers:  addresses or networks of other hosts that may connect, such as 10.0.0.0/16;
        required for an endpoint beyond loopback.
        Raises OSError with the endpoint if one cannot be bound, ConfigError without readers.
        """
        if len(topic.encode()) > TOPIC_BYTES_MAX:
            raise InvalidRequest(f"a topic has at most {TOPIC_BYTES_MAX} bytes")
        super().__init__(
            endpoint, readers, name="peercache-events", queued_max=QUEUE_EVENTS_MAX,
            is_lossless=False,
        )  # fmt: skip
        self._router: zmq.Socket[bytes] | None = None
        self.replay = ""
        if replay:
            with self._closed_on_error():
                self._router = self._asked_at(replay, readers)
            self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._topic, self._rank, self._present = topic.encode(), rank, present
        self._has_begun = False
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._is_trimmed = False
        self._sent_at = self._resynced_at = -math.inf
        self._counts = {"events": 0, "batches": 0, "resyncs": 0, "replays": 0}
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Queue events; never waits. With too many waiting, everything is sent again instead.

        Raises InvalidRequest, and queues none of them, if readers would reject one.
        """
        for event in events:
            check(event)
        self._add(events)

    def figures(self) -> PublisherFigures:
        """Return the counters."""
        return PublisherFigures(**self._counts)

    # --- the thread ---------------------------------------------------------------------------

    def _receive(self) -> None:
        self._readers.receive()
        if self._router is not None:
            self._answer_replays(self._router)

    def _send_some(self) -> bool:
        events, is_lossy = self._take(EVENTS_A_BATCH if self._has_begun else 0)
        self._counts["resyncs"] += is_lossy
        if self._has_begun and not is_lossy:
            if events or time.monotonic() - self._sent_at >= QUIET_S:
                self._send(events)
            return bool(events)
        self._has_begun = True
        batch: list[BlockEvent] = [AllBlocksCleared()]
        # Events that are queued from here on may be sent twice, in order: that is harmless.
        for event in self._present():
            batch.append(event)
            if len(batch) == EVENTS_A_BATCH:
                self._send(batch)
                batch = []
        if batch:
            self._send(batch)
        return True

    def _send(self, events: Sequence[BlockEvent]) -> None:
        payload = encode(EventBatch(time.time(), tuple(events), self._rank))
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_BATCHES_MAX or self._kept_bytes > REPLAY_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])
            self._is_trimmed = True
        # An XPUB socket drops messages of a reader that is too slow; it sees the gap and asks
        # again.
        self._readers.send(frames_of(number, payload, self._topic))
        self._sent_at = time.monotonic()
        self._counts["batches"] += 1
        self._counts["events"] += len(events)

    def _answer_replays(self, router: zmq.Socket[bytes]) -> None:
        """Answer each request for a replay: all kept batches since a sequence, and an end."""
        for _ in range(REPLAYS_A_TURN):
            if not router.poll(0):
                return
            asker, *asked = router.recv_multipart()
            try:
                since = sequence_of(asked[-1] if asked else b"")
            except RemoteProtocolError:
                continue
            self._counts["replays"] += 1
            self._resync_before(since)
            for number, payload in self._kept:
                if number >= since:
                    # Not copied: otherwise each reader that does not read would hold a copy of all
                    # kept batches.
                    router.send_multipart([asker, *frames_of(number, payload)], copy=False)
            router.send_multipart([asker, *frames_of(SEQUENCE_END, b"")])

    def _resync_before(self, since: int) -> None:
        """Send everything again if a reader has missed a batch that is not kept any more."""
        now = time.monotonic()
        if self._is_trimmed and since < self._kept[0][0] and now - self._resynced_at >= RESYNC_S:
            self._resynced_at = now
            self.resync()

    # --- sockets ------------------------------------------------------------------------------

    def _asked_at(self, endpoint: str, readers: Sequence[str]) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        # Messages that wait for one slow reader; further ones are dropped, and the reader sees a
        # gap.
        socket.sndhwm = REPLAY_BATCHES_MAX + 1
        socket.copy_threshold = 0
        bind(socket, endpoint, readers)
        return socket
