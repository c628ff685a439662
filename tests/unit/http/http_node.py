"""What a node serves over HTTP, on a free port, and one request to it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from peercache.config.quantities import parse_address
from peercache.config.settings import Config
from peercache.http.access import Access
from peercache.http.history import Watching
from peercache.http.pages import Health, Pages
from peercache.http.server import Application, serve_http
from peercache.model.status import OK as SERVES
from peercache.model.status import MemberStatus, Status
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing
from tests.pace import ends_within

OK = Health(serving=True, facts={"members": 3})


OWN = "10.0.0.1:31998"


async def alone(*, detail: bool = False) -> Sequence[MemberStatus]:
    return [MemberStatus(seen="alive", answers=True, status=Status(name=OWN, state=SERVES))]


@asynccontextmanager
async def served(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    health: Callable[[], Health] = lambda: OK,
    metrics: Metrics | None = None,
    watching: Watching | None = None,
    settings: Mapping[str, Any] | None = None,
    tls: LiveTls | None = None,
    sharing: Sharing | None = None,
    application: Application | None = None,
) -> AsyncIterator[str]:
    """Serve on a free port for the length of a block; the stop must not take long."""
    metrics = metrics or Metrics()
    access = Access(
        Config.load(settings),
        sharing=sharing or Sharing.of(),
        tls=tls,
        metrics=metrics,
        log=get_logger(),
    )
    serve = partial(
        serve_http,
        host,
        port,
        application=application
        or Pages(metrics.registry, health, lambda: OWN, watching or Watching(alone)).application(),
        access=access,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(access.follow)
        address: str = await nursery.start(serve)
        with ends_within():
            yield address
        nursery.cancel_scope.cancel()


async def ask(
    address: str,
    path: str,
    method: str = "GET",
    *,
    token: str = "",
    named: str = "",
    context: ssl.SSLContext | None = None,
) -> tuple[int, str]:
    """Send one request, over TLS with a context, and return its status and body.

    named: its Host header; "" is the address.
    """
    host, port = parse_address(address)
    stream: trio.abc.Stream = await trio.open_tcp_stream(host, port)
    if context is not None:
        stream = trio.SSLStream(stream, context, server_hostname="peercache", https_compatible=True)
    header = f"Authorization: Bearer {token}\r\n" if token else ""
    request = (
        f"{method} {path} HTTP/1.1\r\nHost: {named or address}\r\n{header}Connection: close\r\n\r\n"
    )
    async with stream:
        await stream.send_all(request.encode())
        raw = b"".join([chunk async for chunk in stream])
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
