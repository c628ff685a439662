"""The sockets of a publisher: where it listens, who may connect, and how much a reader may cost.

ZeroMQ asks for no certificate, and keeps what each reader subscribes to. So a socket that other
hosts reach names the addresses that may connect; others are closed as they are accepted. What a
reader may send is small, and too many subscriptions end the connections of all readers, which
connect again by themselves. Who may connect is trusted with what is published, and not to send a
message of endless parts: ZeroMQ bounds no number of them.
"""

from __future__ import annotations

import errno
import ipaddress
import time
from collections.abc import Callable, Sequence
from typing import Final, final

import zmq

from peercache.errors import ConfigError
from peercache.observability.log import get_logger

PORT_MAX: Final = 65_535

FRAME_BYTES_MAX: Final = 512
"""Of what a reader sends: a topic, or the sequence of a replay; and the handshake, in which a name
has at most 255 bytes. ZeroMQ ends a connection that sends more."""

TOPIC_BYTES_MAX: Final = 256

SUBSCRIPTIONS_MAX: Final = 1000
"""Of all readers together; each reader has one. ZeroMQ keeps some kilobytes for each."""

HANDSHAKE_MS: Final = 5_000
"""After which a connection without a handshake is closed: each holds a descriptor of the engine."""

WARN_S: Final = 60.0

THIS_HOST: Final = "127.0.0.0/8"


def is_on_this_host(endpoint: str) -> bool:
    """Return whether only processes of this host can connect to an endpoint that is bound."""
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
    """Return the networks that may connect; raise ConfigError for a reader that is none."""
    try:
        return tuple(str(ipaddress.IPv4Network(reader, strict=False)) for reader in readers)
    except ValueError as error:
        problem = f"{error}: an IPv4 address or network is meant, such as 10.0.0.0/16"
        raise ConfigError("readers", problem) from error


def bind(socket: zmq.Socket[bytes], endpoint: str, readers: Sequence[str] = ()) -> None:
    """Bind for these readers.

    readers: addresses or networks of other hosts; a socket that they reach wants some.
    Raises ConfigError for readers that are missing or none, OSError that says why an endpoint
    cannot be bound.
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
        # ZeroMQ takes what is left of it in 16 bits: no router would find the publisher there.
        raise OSError(errno.EINVAL, f"a port is at most {PORT_MAX}")
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error.strerror)) from None


@final
class Readers:
    """The socket that all readers of a publisher listen to. For one thread."""

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

    def hear(self) -> bool:
        """Take what readers have sent; return whether one has come."""
        if self._socket is None and not self._bind_again():
            return False
        socket, has_come = self._socket, False
        while socket is not None and socket.poll(0):
            # 1 and a topic: a reader has come; 0: one has gone.
            is_one = socket.recv()[:1] == b"\1"
            has_come |= is_one
            self._subscriptions += 1 if is_one else -1
            if self._subscriptions > SUBSCRIPTIONS_MAX:
                self._drop(socket)
                break
        return has_come

    def send(self, frames: Sequence[bytes], flags: int = 0) -> None:
        """Send to each reader; raise zmq.Again as the socket's options have it."""
        if self._socket is not None:
            self._socket.send_multipart(frames, flags)

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        """Let all readers go, and what ZeroMQ keeps of them; those that are well come again."""
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
            # ZeroMQ closes in a thread of its own: the next turn tries again.
            return False
        return True

    def _bound(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.XPUB)
        try:
            socket.linger = 0
            # Each subscription and each end of one is received, also one like another.
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)
            # Not more of them wait than are taken in a turn.
            socket.rcvhwm = SUBSCRIPTIONS_MAX // 10
            self._prepare(socket)
            bind(socket, endpoint, self._readers)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket
