"""The HTTP server of a node: on the node's own trio loop, no thread per connection.

Takes   one request per connection, in clear text or, with certificates, over TLS: the first byte
        shows which.
Sends   the answer of an ASGI application where `Access` allows it, and closes.
Keeps   no client delays a stop: no send is shielded from cancellation.
Limits  `DescriptorShares.http` connections, half of them of one address, CONNECTION_S seconds each,
        REQUEST_BYTES_MAX of head a request. A new connection is always taken: it replaces the one
        that needs its place least, so that clients which ask and read nothing keep no probe out.

`HttpExchange` carries one request to the ASGI application, and its answer back: h11's events in, a
head, then a body of at most BODY_BYTES_MAX, or as many as LONG_BODIES gives its path; 400, 413,
431, 500 or 503 where there is nothing of the application to send. One path for all: what access is
asked about is what the application routes by.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias, final
from urllib.parse import unquote

import attrs
import h11
import trio

from peercache.config.quantities import format_address
from peercache.config.settings import DEFAULT_METRICS_PORT
from peercache.errors import AddressTaken, Rejected
from peercache.http.access import Access, HttpClient
from peercache.model.process import HTTP_MAX
from peercache.observability.log import get_logger

REQUEST_BYTES_MAX = 16 * 1024  # The limit of common servers; a probe needs one line.
BODY_BYTES_MAX = 64 * 1024  # 64 connections hold 4 MiB of bodies at most.
RECEIVE_BYTES = 16 * 1024
LONG_RECEIVE_BYTES = 256 * 1024  # Of a long body: one turn of the loop, where it has arrived.

LONG_BODIES = {
    f"/api/v1/{of}/{by}": 2 * 2**20 for of in ("prefix", "hints") for by in ("tokens", "hashes")
}
"""By path: bytes of a body where more are taken. The application bounds how many are read at once;
others wait unread, in the kernel."""

PAGE_FAILED = "http.page_failed"
"""Log event: making a page failed, which is a bug of ours."""

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An application as ASGI 3 describes it."""

Header: TypeAlias = tuple[bytes, bytes]


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""A page loads nothing but this node's own files, and runs no script that stands in a page."""

_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-store"),
    (b"connection", b"close"),
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
"""Of every answer, whatever the application says."""


class Phase(IntEnum):
    """How far a connection is. The lower, the less its client loses when it is closed."""

    ANSWERED = 0
    """Its client has the answer, and should close."""
    SILENT = 1
    """Its client has sent no whole request."""
    SLOW = 2
    """Its client does not read its answer."""
    ASKED = 3
    """Its answer is being made."""


class _BodyTooLong(Exception):
    """The body of a request has more bytes than are taken."""


@final
class HttpExchange:
    """One request and its answer."""

    def __init__(self, stream: trio.abc.Stream, client: HttpClient) -> None:
        """Begin; nothing is received yet."""
        self.phase = Phase.SILENT
        self._stream = stream
        self._client = client
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        self._is_head = False
        self._head: h11.Response | None = None
        """The answer's head, which goes out with the first part of its body."""
        self._is_sent = False
        """Something of the answer was sent."""
        self._received_bytes = 0
        self._body_bytes_max = BODY_BYTES_MAX
        self._receive_bytes = RECEIVE_BYTES
        self._is_received = False
        """The request's body is received whole."""
        self._refused: Exception | None = None
        """Why a part of the body was not taken: what the gateway answers."""

    async def run(self, application: Application, refusal: Callable[[str, str, str], str]) -> bool:
        """Answer one request; return False where the other side closed without one.

        refusal: why a request is refused, in words for its client, "" where it is not; of its
                 path and its headers Authorization and Host; raises Rejected where that cannot
                 be determined now.
        """
        try:
            request = await self._request()
            if request is None:
                return False
            self._is_head = request.method == b"HEAD"
            scope = _scope(request, self._client)
            headers = dict(request.headers)
            problem = refusal(
                scope["path"],
                headers.get(b"authorization", b"").decode("latin-1"),
                headers.get(b"host", b"").decode("latin-1"),
            )
            if problem:
                await self._refuse(401, problem, [(b"www-authenticate", b"Bearer")])
            else:
                self.phase = Phase.ASKED
                if scope["path"] in LONG_BODIES:
                    self._body_bytes_max = LONG_BODIES[scope["path"]]
                    self._receive_bytes = LONG_RECEIVE_BYTES
                await self._apply(application, scope)
        except Rejected as error:
            await self._refuse(503, error.detail)
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint, str(error))
        except _BodyTooLong:
            await self._refuse(413, f"a request has a body of at most {self._body_bytes_max} bytes")
        return True

    async def _apply(self, application: Application, scope: Scope) -> None:
        try:
            await application(scope, self._receive, self._send)
            if self._refused is not None:
                raise self._refused
        except (h11.RemoteProtocolError, _BodyTooLong, trio.BrokenResourceError):
            raise
        except Exception as error:
            # A node goes on serving when one of its pages cannot be made.
            get_logger().exception(PAGE_FAILED, page=scope["path"])
            await self._refuse(500, f"{type(error).__name__}: {error}")

    async def _request(self) -> h11.Request | None:
        """Return the head of the request, or None if the other side closed without one."""
        event = await self._event()
        return event if isinstance(event, h11.Request) else None

    async def _event(self) -> object:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            if self._connection.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._stream.send_all(self._connection.send(go_on) or b"")
            self._connection.receive_data(
                bytes(await self._stream.receive_some(self._receive_bytes))
            )
        return event

    async def _receive(self) -> MutableMapping[str, Any]:
        """Hand the next part of the request's body to the application."""
        try:
            return await self._part()
        except (h11.RemoteProtocolError, _BodyTooLong) as error:
            self._refused = error
            raise

    async def _part(self) -> MutableMapping[str, Any]:
        if self._is_received:
            # The answer is all that is left. A client that goes away ends its connection.
            await trio.sleep_forever()
        event = await self._event()
        if isinstance(event, h11.Data):
            self._received_bytes += len(event.data)
            if self._received_bytes > self._body_bytes_max:
                raise _BodyTooLong
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        self._is_received = True
        if isinstance(event, h11.EndOfMessage):
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        """Take the next part of the answer from the application."""
        # Starlette answers 500 to every exception, before it raises it again.
        if self._refused is None:
            await self._put(message)

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        """Send the next part of the answer."""
        if message["type"] == "http.response.start":
            self._head = _response(message["status"], message.get("headers", ()))
            return
        body, is_whole = message.get("body", b""), not message.get("more_body", False)
        raw = b""
        if self._head is not None:
            raw += self._connection.send(self._head) or b""
            self._head = None
        if body and not self._is_head:
            raw += self._connection.send(h11.Data(data=body)) or b""
        if is_whole:
            raw += self._connection.send(h11.EndOfMessage()) or b""
        self.phase, self._is_sent = Phase.SLOW, True
        await self._stream.send_all(raw)
        if is_whole:
            self.phase = Phase.ANSWERED

    async def _refuse(self, status: int, problem: str, headers: list[Header] | None = None) -> None:
        """Answer with a problem, unless an answer has begun."""
        if self._is_sent:
            return
        body = (json.dumps({"error": problem}) + "\n").encode()
        head = [(b"content-type", b"application/json"), *(headers or [])]
        head.append((b"content-length", str(len(body)).encode()))
        await self._put({"type": "http.response.start", "status": status, "headers": head})
        await self._put({"type": "http.response.body", "body": body})


def _response(status: int, headers: Iterable[Header]) -> h11.Response:
    own = {name for name, _ in _HEADERS}
    kept = [(name, value) for name, value in headers if name.lower() not in own]
    return h11.Response(status_code=status, headers=[*kept, *_HEADERS])


def _scope(request: h11.Request, client: HttpClient) -> Scope:
    """Return what ASGI calls the scope of a request."""
    raw_path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version.decode("ascii"),
        "method": request.method.decode("latin-1"),
        "scheme": "https" if client.is_encrypted else "http",
        "path": unquote(raw_path.decode("latin-1")),
        "raw_path": bytes(raw_path),
        "query_string": bytes(query),
        "root_path": "",
        "headers": [(bytes(name), bytes(value)) for name, value in request.headers],
        "client": client.remote,
        "server": client.local,
    }


ADDRESS_DIVISOR = 2  # One host that opens many leaves half of the places to all others.
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
        most_own = max(1, self.connections_max // ADDRESS_DIVISOR)
        for held, most in ((own, most_own), (self.held, self.connections_max)):
            if len(held) >= most:
                # min takes the first, which is the oldest, of equals.
                least = min(held, key=lambda each: each.phase)
                self.held.remove(least)
                least.scope.cancel()

    async def _converse(self, plain: trio.SocketStream, client: HttpClient, held: _Held) -> None:
        try:
            # The byte stays in the socket, for TLS or for HTTP.
            first = await plain.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return  # The other side went away.
        if not first:
            return
        if first[0] != TLS_HANDSHAKE or self.access.ssl_context is None:
            await self._serve(plain, client, held)
            return
        stream = trio.SSLStream(
            plain, self.access.ssl_context, server_side=True, https_compatible=True
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
        if isinstance(stream, trio.SocketStream):
            await _hang_up(stream)
        else:
            await stream.aclose()  # TLS says itself that nothing more will come.


def _end(name: object) -> tuple[str, int]:
    """Return (host, port) of one end; an IPv4 address within IPv6 as IPv4."""
    assert isinstance(name, tuple), "of a TCP socket"
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


async def _hang_up(stream: trio.SocketStream) -> None:
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
