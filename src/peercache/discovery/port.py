"""The port of all sources of addresses, and the limits that apply to every source.

A source only returns addresses. Membership tries them, and decides which nodes are members: so a
source that fails, or returns wrong addresses, does not affect a running cluster.

Names are resolved by the system's resolver, in separate threads, which are abandoned after a
timeout. HTTP uses one request per connection, with h11 on the node's own loop; all sizes and times
are bounded.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TypeAlias, final

import attrs
import h11
import trio

from peercache.config.quantities import format_address, parse_address

ADDRESSES_MAX = 16_384
"""Addresses kept from one source: the members of the largest cluster."""

ADDRESS_CHARACTERS_MAX = 270
"""The longest DNS name, a port, and brackets."""

PROBLEM_CHARACTERS_MAX = 200
"""The longest text of a server's refusal: one line of the log."""

OnAddresses: TypeAlias = Callable[[Iterable[str]], None]


class SourceFailed(Exception):
    """A source cannot return addresses now. Its text explains why, and what to do."""


class AddressSource(Protocol):
    """A source of addresses of nodes, each HOST:PORT.

    text: the entry of `discovery_addr` that names it.
    """

    text: str

    async def follow(self, on_addresses: OnAddresses) -> None:
        """Report all addresses, and all of them again when they change; raise SourceFailed."""


@attrs.frozen
class Cleaned:
    """The addresses of an answer that can be dialled. dropped: the number of others."""

    addresses: frozenset[str]
    dropped: int


def cleaned(raw: Iterable[str]) -> Cleaned:
    """Return the addresses that are HOST:PORT, at most ADDRESSES_MAX of them."""
    kept: set[str] = set()
    dropped = 0
    for text in raw:
        address = _address(text)
        if address and (len(kept) < ADDRESSES_MAX or address in kept):
            kept.add(address)
        else:
            dropped += 1
    return Cleaned(frozenset(kept), dropped)


def _address(text: object) -> str:
    """Return an address as every node writes it, "" for anything else."""
    if not isinstance(text, str) or not text.isascii() or len(text) > ADDRESS_CHARACTERS_MAX:
        return ""
    try:
        host, port = parse_address(text)
    except ValueError:
        return ""
    is_host = host and all(c.isalnum() or c in "-_.:%" for c in host)
    return format_address(host, port) if is_host and port else ""


@contextmanager
def reading(whose: str) -> Iterator[None]:
    """Turn an answer without the expected structure into a failure of the source."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SourceFailed(
            f"{whose} answers what it should not ({printable(error)}): "
            "is it the server that you mean?"
        ) from error


def printable(value: object) -> str:
    """Return the text of another program as one short, printable line."""
    line = "".join(c if c.isprintable() else " " for c in str(value)[: 4 * PROBLEM_CHARACTERS_MAX])
    return " ".join(line.split())[:PROBLEM_CHARACTERS_MAX] or type(value).__name__


def refusal_in(body: bytes) -> str:
    """Return the reason in a server's refusal: the message of a JSON object, or the text."""
    with suppress(LookupError, TypeError, ValueError, RecursionError, AttributeError):
        found = json.loads(body)
        return printable(found.get("message") or found["error"])
    return printable(body.decode(errors="replace"))


GAP_MIN_S = 1.0
GAP_MAX_S = 10.0
GAP_OF_ONE_S = 0.01
"""Least time between two readings, and how it grows with the addresses: a thousand nodes that start
together must not read a thousand keys a thousand times a second."""


async def pause(addresses: int, rng: random.Random) -> None:
    """Wait between two readings of this many addresses, each node for a different time."""
    gap_s = min(GAP_MAX_S, GAP_MIN_S + addresses * GAP_OF_ONE_S)
    await trio.sleep(gap_s * rng.uniform(0.5, 1.0))


RESOLVE_S = 5.0
"""How long a name may take: glibc asks a server for five seconds before it asks the next."""

THREADS_MAX = 2
"""Threads that wait for names, abandoned ones included: a hanging resolver blocks no more."""

Lookup: TypeAlias = Callable[[str, int], list[str]]


def looked_up(name: str, port: int) -> list[str]:
    """Return the numeric addresses of a name, IPv4 and IPv6; OSError if there are none. Blocks."""
    rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


@final
class Resolver:
    """Resolves names for one source, without blocking the loop."""

    def __init__(self, lookup: Lookup = looked_up) -> None:
        """Use the system's resolver."""
        self._lookup = lookup
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    async def resolve(self, name: str, port: int) -> list[str]:
        """Return the numeric addresses of a name; raise SourceFailed if there are none in time."""
        look = partial(self._lookup, name, port)
        with trio.move_on_after(RESOLVE_S):
            try:
                return await trio.to_thread.run_sync(
                    look, abandon_on_cancel=True, limiter=self._threads
                )
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise SourceFailed(
                    f"the name {name} does not resolve ({why}): correct it, or make its record"
                ) from error
        raise SourceFailed(
            f"the name {name} does not resolve within {RESOLVE_S:g} s: look at /etc/resolv.conf "
            "of this host"
        )


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
    """The answer of a server."""

    status: int
    body: bytes


@attrs.frozen
class Request:
    """A request to a server. headers: in addition to Host, Connection and Content-Length."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@final
@attrs.define(eq=False)
class WebServer:
    """One server; with `tls` its name is verified."""

    host: str
    port: int
    resolver: Resolver
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        """HOST:PORT, as used in errors."""
        return format_address(self.host, self.port)

    async def ask(self, request: Request) -> WebAnswer:
        """Return the whole answer; raise SourceFailed if it does not arrive within REQUEST_S."""
        taken = _Whole()
        with trio.move_on_after(REQUEST_S):
            await self._exchange(request, taken.take)
        if not taken.is_complete:
            raise self._is_late()
        return WebAnswer(taken.status, bytes(taken.body))

    async def follow_lines(
        self, request: Request, is_news: Callable[[bytes], bool], within_s: float
    ) -> int:
        """Return the status once a line of an endless answer is news, it ends, or the time is up.

        Raises SourceFailed if the answer does not begin within REQUEST_S.
        """
        with trio.CancelScope(deadline=trio.current_time() + REQUEST_S) as scope:
            lines = _Lines(is_news, lambda: _extend(scope, within_s))
            await self._exchange(request, lines.take)
        if not lines.status:
            raise self._is_late()
        return lines.status

    def _is_late(self) -> SourceFailed:
        return SourceFailed(
            f"{self.address} does not answer within {REQUEST_S:g} s: start it, or look at the "
            "network to it"
        )

    async def _exchange(self, request: Request, take: Callable[[h11.Event], bool]) -> None:
        """Send a request, and pass events to `take` until it returns False."""
        try:
            stream = await self._connect()
            async with stream:
                await self._talk(stream, request, take)
        except _FAULTS as error:
            raise SourceFailed(
                f"{self.address} does not answer ({_reason(error)}): start it, or look at the "
                "network to it"
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
    """An answer that is collected until it is complete."""

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
    """Return the error of the kernel or of TLS, without trio's wrappers."""
    error = error.__cause__ or error
    inner = getattr(error, "exceptions", (error,))[0]
    return printable(getattr(inner, "strerror", None) or inner)


def _extend(scope: trio.CancelScope, by_s: float) -> None:
    scope.deadline = trio.current_time() + by_s


@attrs.define
class _Lines:
    """An answer of lines, which are not kept. begins: called when its head has arrived."""

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
