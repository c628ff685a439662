"""Sockets of the data port on a trio loop: listeners, and connections before they are admitted."""

from __future__ import annotations

import errno
import socket
from math import inf
from typing import final

import trio

from peercache.config.quantities import format_address
from peercache.errors import AddressTaken, ConfigError
from peercache.fabric.tcp.tls import TlsSession

BACKLOG = 1024

PORT_TRIES_MAX = 16
"""Attempts to find one free port for both address families."""


async def open_listeners(host: str, port: int, congestion: str = "") -> list[trio.SocketListener]:
    """Listen on a host ("" means every interface) over IPv4 and IPv6, all on one port.

    port: 0 takes a free one. congestion: see the setting tcp_congestion.
    Raises AddressTaken if the port is in use, OSError if the host is not this one, ConfigError if
    the congestion control cannot be used.
    """
    taken: OSError | None = None
    for _ in range(1 if port else PORT_TRIES_MAX):
        try:
            return await _listen(host, port, congestion)
        except OSError as error:  # noqa: PERF203 - a few tries
            if error.errno != errno.EADDRINUSE:
                raise
            taken = error
    raise AddressTaken("data_port", format_address(host, port)) from taken


async def _listen(host: str, port: int, congestion: str) -> list[trio.SocketListener]:
    found = await trio.socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners: list[trio.SocketListener] = []
    unusable: OSError | None = None
    try:
        for family, address in dict.fromkeys((row[0], row[4]) for row in found):
            try:
                opened = socket.create_server(
                    (address[0], port, *address[2:]), family=family, backlog=BACKLOG
                )
            except OSError as error:
                if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                    raise
                unusable = error  # A host without this family serves the other.
                continue
            listeners.append(trio.SocketListener(trio.socket.from_stdlib_socket(opened)))
            port = port or opened.getsockname()[1]
            if congestion:
                set_congestion(opened, congestion)
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    if not listeners:
        raise unusable or OSError(errno.EADDRNOTAVAIL, f"no address of {host!r} can be bound")
    return listeners


def set_congestion(listener: socket.socket, name: str) -> None:
    """Set the congestion control of a listener's connections; raise ConfigError."""
    try:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except FileNotFoundError:
        problem = f"this kernel has no {name!r}: try `modprobe tcp_{name}`"
    except PermissionError:
        problem = f"not allowed: add {name!r} to `sysctl net.ipv4.tcp_allowed_congestion_control`"
    else:
        return
    raise ConfigError("tcp_congestion", problem)


@final
class Line:
    """A connection on a trio loop that is not admitted yet: reads exact sizes, with a timeout.

    silent_since: since when it has been waiting for the peer; inf while received bytes are being
                  handled.
    """

    def __init__(self, connection: socket.socket, session: TlsSession | None = None) -> None:
        """Take over a connection that does not block; its owner closes it."""
        self.connection = connection
        self.session = session
        self.silent_since = inf

    async def shake_hands(
        self,
        session: TlsSession,
        *,
        silence_s: float,
        of_host: trio.Lock,
        steps: trio.CapacityLimiter,
    ) -> None:
        """Encrypt the connection; raises TlsFailed, and trio.TooSlowError for a silent peer.

        A step runs on a thread, and the loop continues: to read a stranger's certificates may take
        10 ms.

        of_host: held for each step, so that the peers of one host wait for each other, and those of
                 other hosts do not wait for all of them.
        steps:   limits the number of steps at a time.
        """
        self.session = session
        while True:
            async with of_host:
                done = await trio.to_thread.run_sync(session.step, limiter=steps)
            if done is True:
                return
            if done is None:
                with trio.fail_after(silence_s):
                    await trio.lowlevel.wait_writable(self.connection)
            else:
                await self._wait_readable(silence_s)

    async def receive(self, into: bytearray, *, silence_s: float = inf) -> bool:
        """Fill `into`; return False if the other side closed, or violated TLS.

        Raises trio.TooSlowError when nothing arrives for silence_s.
        """
        view = memoryview(into)
        while view:
            try:
                taken = self._receive_at_once(view)
            except BlockingIOError:
                await self._wait_readable(silence_s)
                continue
            if not taken:
                return False
            view = view[taken:]
            # A client may send each byte in a TLS record of its own: the loop has others to serve.
            await trio.lowlevel.checkpoint()
        return True

    async def send(self, raw: bytes, *, stall_s: float) -> None:
        """Send all of it; raises trio.TooSlowError when no byte is accepted for stall_s."""
        if self.session is not None:
            done = self.session.send_at_once(raw)
            while not done:
                with trio.fail_after(stall_s):
                    await trio.lowlevel.wait_writable(self.connection)
                done = self.session.flush_at_once()
            return
        view = memoryview(raw)
        while view:
            try:
                sent = self.connection.send(view)
            except BlockingIOError:
                with trio.fail_after(stall_s):
                    await trio.lowlevel.wait_writable(self.connection)
                continue
            view = view[sent:]

    def close(self) -> None:
        """Close the session and the connection, unless they were handed over."""
        if self.session is not None:
            self.session.close()
        if self.connection.fileno() >= 0:
            trio.lowlevel.notify_closing(self.connection)
            self.connection.close()

    def _receive_at_once(self, view: memoryview) -> int:
        if self.session is None:
            return self.connection.recv_into(view)
        return self.session.receive_at_once(view)

    async def _wait_readable(self, silence_s: float) -> None:
        self.silent_since = trio.current_time()
        try:
            with trio.fail_after(silence_s):
                await trio.lowlevel.wait_readable(self.connection)
        finally:
            self.silent_since = inf
