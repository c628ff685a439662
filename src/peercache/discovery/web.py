"""HTTP for sources: one request a connection, h11 on the node's own loop, everything bounded."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TypeAlias, final

import attrs
import h11
import trio

from peercache.config.quantities import format_address
from peercache.discovery.port import SourceFailed, printable
from peercache.discovery.resolving import Resolver

REQUEST_S = 5.0
"""How long a server may take for an answer: a busy one takes a second."""

BODY_BYTES_MAX = 8 * 2**20
"""A page of ten EndpointSlices with a thousand endpoints each has 3 MB."""

RECEIVE_BYTES = 64 * 1024

OK = 200

_FAULTS = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError)

Stream: TypeAlias = "trio.abc.Stream"


@attrs.frozen
class WebAnswer:
    """What a server answered."""

    status: int
    body: bytes


@attrs.frozen
class Request:
    """What a server is asked. headers: beside Host, Connection and Content-Length."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@final
@attrs.define(eq=False)
class WebServer:
    """One server, for the source of the entry `text`; with `tls` it must prove its name."""

    text: str
    host: str
    port: int
    resolver: Resolver
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        """HOST:PORT, as errors name it."""
        return format_address(self.host, self.port)

    async def ask(self, request: Request) -> WebAnswer:
        """Return the whole answer; raise SourceFailed if it does not come in REQUEST_S."""
        taken = _Whole()
        with trio.move_on_after(REQUEST_S):
            await self._exchange(request, taken.take)
        if not taken.is_complete:
            raise self._is_late()
        return WebAnswer(taken.status, bytes(taken.body))

    async def hear(
        self, request: Request, is_news: Callable[[bytes], bool], within_s: float
    ) -> int:
        """Return the status once a line of an endless answer is news, it ends, or time is up.

        Raises SourceFailed if the answer does not begin in REQUEST_S.
        """
        with trio.CancelScope(deadline=trio.current_time() + REQUEST_S) as scope:
            heard = _Lines(is_news, lambda: _extend(scope, within_s))
            await self._exchange(request, heard.take)
        if not heard.status:
            raise self._is_late()
        return heard.status

    def _is_late(self) -> SourceFailed:
        return SourceFailed(
            f"discovery_addr: {self.text}: {self.address} does not answer within "
            f"{REQUEST_S:g} s: start it, or look at the network to it"
        )

    async def _exchange(self, request: Request, take: Callable[[h11.Event], bool]) -> None:
        """Send a request, and hand over events until `take` wants no more of them."""
        try:
            stream = await self._connect()
            async with stream:
                await self._talk(stream, request, take)
        except _FAULTS as error:
            raise SourceFailed(
                f"discovery_addr: {self.text}: {self.address} does not answer "
                f"({_reason(error)}): start it, or look at the network to it"
            ) from error

    async def _connect(self) -> Stream:
        hosts = await self.resolver.resolve(self.host, self.port)
        fault: OSError | None = None
        for host in hosts:
            try:
                plain = await trio.open_tcp_stream(host, self.port)
            except OSError as error:
                fault = error
                continue
            if self.tls is None:
                return plain
            return trio.SSLStream(plain, self.tls, server_hostname=self.host, https_compatible=True)
        raise fault or OSError("the name has no address")

    async def _talk(
        self, stream: Stream, request: Request, take: Callable[[h11.Event], bool]
    ) -> None:
        connection = h11.Connection(h11.CLIENT)
        head = h11.Request(
            method=request.method,
            target=request.path,
            headers=[
                ("Host", self.address),
                ("Connection", "close"),
                ("Content-Length", str(len(request.body))),
                *request.headers,
            ],
        )
        parts = (head, h11.Data(data=request.body), h11.EndOfMessage())
        await stream.send_all(b"".join([connection.send(part) or b"" for part in parts]))
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
            elif not isinstance(event, h11.Event) or not take(event):
                return


@attrs.define
class _Whole:
    """An answer that is kept until it is complete."""

    status: int = 0
    body: bytearray = attrs.field(factory=bytearray)
    is_complete: bool = False

    def take(self, event: h11.Event) -> bool:
        if isinstance(event, h11.Response):
            self.status = event.status_code
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("it ends in the middle of an answer")
        elif isinstance(event, h11.Data):
            self.body += event.data
            if len(self.body) > BODY_BYTES_MAX:
                raise h11.RemoteProtocolError(f"an answer of more than {BODY_BYTES_MAX} bytes")
        elif isinstance(event, h11.EndOfMessage):
            self.is_complete = True
        return not self.is_complete


def _reason(error: BaseException) -> str:
    """Return what the kernel or TLS said, out of what trio has wrapped around it."""
    error = error.__cause__ or error
    inner = getattr(error, "exceptions", (error,))[0]
    return printable(getattr(inner, "strerror", None) or inner)


def _extend(scope: trio.CancelScope, by_s: float) -> None:
    scope.deadline = trio.current_time() + by_s


@attrs.define
class _Lines:
    """An answer of lines, none of which is kept. begins: is called when its head has come."""

    is_news: Callable[[bytes], bool]
    begins: Callable[[], None]
    status: int = 0
    begun: bytearray = attrs.field(factory=bytearray)

    def take(self, event: h11.Event) -> bool:
        if isinstance(event, h11.Response):
            self.status = event.status_code
            self.begins()
            return self.status == OK
        if isinstance(event, h11.Data):
            return not any(map(self.is_news, self._lines(bytes(event.data))))
        return not isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed))

    def _lines(self, data: bytes) -> list[bytes]:
        first, *more = data.split(b"\n")
        self.begun += first
        if len(self.begun) > BODY_BYTES_MAX:
            raise h11.RemoteProtocolError(f"a line of more than {BODY_BYTES_MAX} bytes")
        if not more:
            return []
        whole, self.begun = bytes(self.begun), bytearray(more[-1])
        return [line for line in (whole, *more[:-1]) if line]
