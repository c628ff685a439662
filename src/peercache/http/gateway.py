"""The gateway: carries one HTTP request to an ASGI application, and its answer back.

Hears   h11's events of one request: head, then a body of at most BODY_BYTES_MAX, or as many as
        LONG_BODIES gives its path.
Says    what the application sends; 400, 413, 431, 500 or 503 where there is nothing of it to send.
Keeps   one path for all: what access is asked about is what the application routes by.
Limits  REQUEST_BYTES_MAX of head. The connection's place and time are the server's business.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from enum import IntEnum
from typing import Any, TypeAlias, final
from urllib.parse import unquote

import h11
import trio

from peercache.errors import Rejected
from peercache.http.access import HttpClient
from peercache.observability.log import get_logger

REQUEST_BYTES_MAX = 16 * 1024  # The limit of common servers; a probe needs one line.
BODY_BYTES_MAX = 64 * 1024  # 64 connections hold 4 MiB of bodies at most.
RECEIVE_BYTES = 16 * 1024
LONG_RECEIVE_BYTES = 256 * 1024  # Of a long body: one turn of the loop, where it has arrived.

LONG_BODIES = {"/api/v1/prefix/tokens": 2 * 2**20, "/api/v1/prefix/hashes": 2 * 2**20}
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
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
                 be told for now.
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
                await self._tell(401, problem, [(b"www-authenticate", b"Bearer")])
            else:
                self.phase = Phase.ASKED
                if scope["path"] in LONG_BODIES:
                    self._body_bytes_max = LONG_BODIES[scope["path"]]
                    self._receive_bytes = LONG_RECEIVE_BYTES
                await self._apply(application, scope)
        except Rejected as error:
            await self._tell(503, error.detail)
        except h11.RemoteProtocolError as error:
            await self._tell(error.error_status_hint, str(error))
        except _BodyTooLong:
            await self._tell(413, f"a request has a body of at most {self._body_bytes_max} bytes")
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
            await self._tell(500, f"{type(error).__name__}: {error}")

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

    async def _tell(self, status: int, problem: str, headers: list[Header] | None = None) -> None:
        """Answer with a problem, unless an answer has begun."""
        if self._is_sent:
            return
        body = (json.dumps({"error": problem}) + "\n").encode()
        told = [(b"content-type", b"application/json"), *(headers or [])]
        told.append((b"content-length", str(len(body)).encode()))
        await self._put({"type": "http.response.start", "status": status, "headers": told})
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
