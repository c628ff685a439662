"""The HTTP server of a node: h11 on the node's own trio loop, no thread per connection.

Hears   one request a connection, from every host that can connect.
Says    the answer of `Pages`, and closes.
Keeps   no client delays a stop: no send is shielded from cancellation.
Limits  CONNECTIONS_MAX connections, CONNECTION_S seconds each, REQUEST_BYTES_MAX of head. A
        connection beyond that replaces the oldest one without a request, so that idle connections
        keep no probe out.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence

import attrs
import h11
import trio
from prometheus_client import CollectorRegistry

from peercache.config.quantities import format_address
from peercache.config.settings import DEFAULT_METRICS_PORT
from peercache.errors import AddressTaken
from peercache.http.overview import template
from peercache.http.pages import Answer, Health, Pages
from peercache.model.member import Member

CONNECTIONS_MAX = 64  # Scrapers and probes are a handful; other descriptors are for pages.
CONNECTION_S = 10.0  # Prometheus gives a scrape ten seconds by default.
REQUEST_BYTES_MAX = 16 * 1024  # The limit of common servers; a probe needs one line.
DISCARDED_BYTES_MAX = 64 * 1024  # A longer body is cut off by a reset instead.
DISCARD_S = 1.0  # A client that has its answer closes at once.
RECEIVE_BYTES = 16 * 1024
ACCEPT_PAUSE_S = 0.1  # While the process has no descriptors left.

_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


async def serve_http(
    host: str,
    port: int,
    *,
    registry: CollectorRegistry,
    health: Callable[[], Health],
    members: Callable[[], Sequence[Member]],
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the pages of a node until cancelled; hand HOST:PORT to `task_status.started`.

    host: a name, an IPv4 or an IPv6 address; "" is every interface of both.
    port: -1 takes 31997, or a free one where that is taken; 0 takes a free one; any other must be
          free, else AddressTaken is raised before anything is served.
    """
    template()  # Loaded before the node serves, so that no request delays the loop.
    listening = await _listening(host, port)
    address = format_address(*listening.getsockname()[:2])
    connections = _Connections(Pages(registry, health, members))
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with listener, trio.open_nursery() as nursery:
        task_status.started(address)
        while True:
            try:
                nursery.start_soon(connections.admit, await listener.accept())
            except OSError as error:  # noqa: PERF203 - each turn waits for a client
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                # trio.serve_listeners would write a traceback each time.
                await trio.sleep(ACCEPT_PAUSE_S)


@attrs.define(eq=False)
class _Connections:
    """Admits connections, one request each, and counts them."""

    pages: Pages
    count: int = 0
    idle: dict[trio.CancelScope, None] = attrs.field(factory=dict)
    """Those without a request, oldest first."""

    async def admit(self, stream: trio.SocketStream) -> None:
        """Serve one connection and close it; no error of the other side leaves this method."""
        async with stream:
            if self.count >= CONNECTIONS_MAX and not self._make_room():
                return
            self.count += 1
            scope = trio.move_on_after(CONNECTION_S)
            self.idle[scope] = None
            try:
                with scope:
                    await self._converse(stream, scope)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # The other side went away.
            finally:
                self.idle.pop(scope, None)
                self.count -= 1

    def _make_room(self) -> bool:
        """End the connection that has been idle longest, if there is one."""
        if not self.idle:
            return False
        oldest = next(iter(self.idle))
        del self.idle[oldest]
        oldest.cancel()
        return True

    async def _converse(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        try:
            request = await _request(stream, connection)
        except h11.RemoteProtocolError as error:
            answer = Answer(error.error_status_hint, "text/plain", f"{error}\n".encode())
            await _send(stream, connection, answer, is_head=False)
            return
        if request is None:
            return
        self.idle.pop(scope, None)
        accept = dict(request.headers).get(b"accept", b"").decode("latin-1")
        method, target = request.method.decode("latin-1"), request.target.decode("latin-1")
        answer = self.pages.answer(method, target, accept)
        await _send(stream, connection, answer, is_head=method == "HEAD")


async def _request(stream: trio.SocketStream, connection: h11.Connection) -> h11.Request | None:
    """Return the head of the request, or None if the other side closed without one."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await stream.receive_some(RECEIVE_BYTES))


async def _send(
    stream: trio.SocketStream, connection: h11.Connection, answer: Answer, *, is_head: bool
) -> None:
    headers = [
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        ("cache-control", "no-store"),
        ("connection", "close"),
    ]
    raw = connection.send(h11.Response(status_code=answer.status, headers=headers)) or b""
    if not is_head:
        raw += connection.send(h11.Data(data=answer.body)) or b""
    raw += connection.send(h11.EndOfMessage()) or b""
    await stream.send_all(raw)
    await stream.send_eof()
    # Closing with unread bytes would reset the connection, and the answer might be lost with it.
    discarded_bytes = 0
    with trio.move_on_after(DISCARD_S):
        while discarded_bytes < DISCARDED_BYTES_MAX:
            received = await stream.receive_some(RECEIVE_BYTES)
            if not received:
                return
            discarded_bytes += len(received)


async def _listening(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; raise AddressTaken for a port asked for by number."""
    for choice in (DEFAULT_METRICS_PORT, 0) if port == -1 else (port,):
        try:
            return await _bound(host, choice)
        except OSError as error:  # noqa: PERF203 - two tries at most
            if error.errno != errno.EADDRINUSE:
                raise
            taken = error
    raise AddressTaken("metrics_port", format_address(host or "*", port)) from taken


async def _bound(host: str, port: int) -> socket.socket:
    if not host:
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise
            # A host, or a container, without IPv6.
            return socket.create_server(("", port))
    resolved = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = resolved[0]
    return socket.create_server(address, family=family)
