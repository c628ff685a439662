"""The HTTP server of a node: on the node's own trio loop, no thread per connection.

Hears   one request a connection, in clear text or, with certificates, over TLS: the first byte
        tells which.
Says    the answer of an ASGI application where `Access` allows it, and closes.
Keeps   no client delays a stop: no send is shielded from cancellation.
Limits  `DescriptorShares.http` connections, half of them of one address, CONNECTION_S seconds each,
        and those of one request (`gateway`). A new connection is always taken: it replaces the one
        that needs its place least, so that clients which ask and read nothing keep no probe out.
"""

from __future__ import annotations

import errno
import socket
from functools import partial

import attrs
import trio

from peercache.config.quantities import format_address
from peercache.config.settings import DEFAULT_METRICS_PORT
from peercache.errors import AddressTaken
from peercache.http.access import Access, HttpClient
from peercache.http.gateway import RECEIVE_BYTES, Application, HttpExchange, Phase
from peercache.model.descriptors import HTTP_MAX
from peercache.observability.log import get_logger

ADDRESS_PART = 2  # One host that opens many leaves half of the places to all others.
HANDSHAKE_S = 5.0  # Two round trips, on a loop that may be busy.
TLS_HANDSHAKE = 0x16  # The first byte of a TLS connection; no HTTP method begins with it.
CONNECTION_S = 10.0  # Prometheus gives a scrape ten seconds by default.
DISCARDED_BYTES_MAX = 64 * 1024  # A longer body is cut off by a reset instead.
DISCARD_S = 1.0  # A client that has its answer closes at once.
ACCEPT_PAUSE_S = 0.1  # After an accept that failed.


async def serve_http(
    host: str,
    port: int,
    *,
    application: Application,
    access: Access,
    connections_max: int = HTTP_MAX,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an application until cancelled; hand HOST:PORT to `task_status.started`.

    host: a name, an IPv4 or an IPv6 address; "" is every interface of both.
    port: -1 takes 31997, or a free one where that is taken; 0 takes a free one; any other must be
          free, else AddressTaken is raised before anything is served.
    """
    listening = await _listening(host, port)
    address = format_address(*listening.getsockname()[:2])
    if port == -1 and listening.getsockname()[1] != DEFAULT_METRICS_PORT:
        # A scraper that is set up for the default port asks another node there, or none.
        get_logger().warning(
            "http.default_port_taken", wanted=DEFAULT_METRICS_PORT, serving_at=address
        )
    connections = _Connections(application, access, connections_max)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with listener, trio.open_nursery() as nursery:
        task_status.started(address)
        while True:
            try:
                nursery.start_soon(connections.admit, await listener.accept())
            except OSError:  # noqa: PERF203 - each turn waits for a client
                # No descriptor is left, or the client hung up before the accept: the next one may
                # come in. trio.serve_listeners would write a traceback each time.
                await trio.sleep(ACCEPT_PAUSE_S)


@attrs.define(eq=False)
class _Held:
    """One connection that is served."""

    scope: trio.CancelScope
    address: str
    exchange: HttpExchange | None = None

    @property
    def phase(self) -> Phase:
        """How far it is."""
        return Phase.SILENT if self.exchange is None else self.exchange.phase


@attrs.define(eq=False)
class _Connections:
    """Admits connections, one request each, and bounds them."""

    application: Application
    access: Access
    connections_max: int
    held: list[_Held] = attrs.field(factory=list)
    """Oldest first."""

    async def admit(self, stream: trio.SocketStream) -> None:
        """Serve one connection and close it; no error of the other side leaves this method."""
        async with stream:
            try:
                client = HttpClient(
                    _end(stream.socket.getsockname()), _end(stream.socket.getpeername())
                )
            except OSError:
                return  # The other side went away.
            held = _Held(trio.move_on_after(CONNECTION_S), client.remote[0])
            self._make_room(held.address)
            self.held.append(held)
            try:
                with held.scope:
                    await self._converse(stream, client, held)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # The other side went away.
            except Exception:
                # One connection's fault ends that connection, and not the node.
                get_logger().error("http.connection_failed", peer=client.remote[0], exc_info=True)
            finally:
                if held in self.held:
                    self.held.remove(held)

    def _make_room(self, address: str) -> None:
        """End connections until one more fits: of one address first, then of all."""
        own = [held for held in self.held if held.address == address]
        most_own = max(1, self.connections_max // ADDRESS_PART)
        for held, most in ((own, most_own), (self.held, self.connections_max)):
            if len(held) >= most:
                # min takes the first, which is the oldest, of equals.
                least = min(held, key=lambda each: each.phase)
                self.held.remove(least)
                least.scope.cancel()

    async def _converse(self, plain: trio.SocketStream, client: HttpClient, held: _Held) -> None:
        first = await plain.receive_some(RECEIVE_BYTES)
        if not first:
            return
        if first[0] != TLS_HANDSHAKE or self.access.ssl_context is None:
            await self._serve(_Begun(plain, first), client, held)
            return
        stream = trio.SSLStream(
            _Begun(plain, first), self.access.ssl_context, server_side=True, https_compatible=True
        )
        try:
            with trio.fail_after(HANDSHAKE_S):
                await stream.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            cause = error.__cause__
            reason = "" if cause is None else str(getattr(cause, "verify_message", "") or cause)
            self.access.count("handshake", client, reason)
            return
        client = attrs.evolve(client, is_encrypted=True, certificate=stream.getpeercert() or None)
        await self._serve(stream, client, held)

    async def _serve(self, stream: trio.abc.Stream, client: HttpClient, held: _Held) -> None:
        held.exchange = exchange = HttpExchange(stream, client)
        if not await exchange.run(self.application, partial(self.access.refusal, client)):
            return
        if isinstance(stream, _Begun):
            await _hang_up(stream)
        else:
            await stream.aclose()  # TLS says itself that nothing more will come.


class _Begun(trio.abc.Stream):
    """A stream of which the first bytes were read already."""

    def __init__(self, stream: trio.SocketStream, first: bytes | bytearray) -> None:
        self._stream = stream
        self._first = bytes(first)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return the first bytes, then what comes."""
        if self._first:
            size = len(self._first) if max_bytes is None else max_bytes
            taken, self._first = self._first[:size], self._first[size:]
            await trio.lowlevel.checkpoint()
            return taken
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Say that nothing more will be sent."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close it."""
        await self._stream.aclose()


def _end(name: object) -> tuple[str, int]:
    """Return (host, port) of one end; an IPv4 address within IPv6 as IPv4."""
    assert isinstance(name, tuple), "of a TCP socket"
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


async def _hang_up(stream: _Begun) -> None:
    """Say that nothing more will come, and let the other side take what was sent."""
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
