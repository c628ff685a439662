"""Sockets of the data port on a trio loop: listeners, and exactly so many bytes."""

from __future__ import annotations

import errno
import socket

import trio

from peercache.config.quantities import format_address
from peercache.errors import AddressTaken

PORT_TRIES_MAX = 16
"""Tries to find one free port for both address families."""


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on a host ("" is every interface) over IPv4 and IPv6, all on one port.

    port: 0 takes a free one. Raises AddressTaken if the port is in use, OSError if the host is not
    ours.
    """
    for _ in range(PORT_TRIES_MAX):
        try:
            first = await _listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                if port:
                    raise AddressTaken("data_port", format_address(host, port)) from error
                continue
            raise
        return first
    raise AddressTaken("data_port", format_address(host, port))


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    found = await trio.socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners: list[trio.SocketListener] = []
    unusable: OSError | None = None
    try:
        for family, address in dict.fromkeys((row[0], row[4]) for row in found):
            try:
                listener = await _listen_at(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                    raise
                unusable = error  # A host without this family serves the other.
                continue
            listeners.append(listener)
            port = port or listener.socket.getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    if not listeners:
        raise unusable or OSError(errno.EADDRNOTAVAIL, f"no address of {host!r} can be bound")
    return listeners


async def _listen_at(family: int, address: tuple[object, ...]) -> trio.SocketListener:
    opened = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await opened.bind(address)
        opened.listen(1024)
    except BaseException:
        opened.close()
        raise
    return trio.SocketListener(opened)


async def receive(connection: socket.socket, into: bytearray) -> bool:
    """Fill `into`; return False if the other side closed before."""
    view = memoryview(into)
    while view:
        try:
            taken = connection.recv_into(view)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(connection)
            continue
        if not taken:
            return False
        view = view[taken:]
    return True


async def send(connection: socket.socket, raw: bytes, *, stall_s: float) -> None:
    """Send all of it; raises trio.TooSlowError when not a byte is taken for stall_s."""
    view = memoryview(raw)
    while view:
        try:
            sent = connection.send(view)
        except BlockingIOError:
            with trio.fail_after(stall_s):
                await trio.lowlevel.wait_writable(connection)
            continue
        view = view[sent:]
