"""What a node serves over HTTP, on a free port, and one request to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from peercache.config.quantities import parse_address
from peercache.http.pages import Health
from peercache.http.server import serve_http
from peercache.model.member import Member
from peercache.observability.metrics import Metrics
from tests.pace import PATIENCE_S

OK = Health(serving=True, facts={"members": 3})


@asynccontextmanager
async def served(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    health: Callable[[], Health] = lambda: OK,
    metrics: Metrics | None = None,
    members: Sequence[Member] = (),
) -> AsyncIterator[str]:
    """Serve on a free port for the length of a block; the stop must not take long."""
    serve = partial(
        serve_http,
        host,
        port,
        registry=(metrics or Metrics()).registry,
        health=health,
        members=lambda: members,
    )
    async with trio.open_nursery() as nursery:
        address: str = await nursery.start(serve)
        with trio.fail_after(PATIENCE_S):
            yield address
        nursery.cancel_scope.cancel()


async def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Send one request and return its status and body."""
    host, port = parse_address(address)
    stream = await trio.open_tcp_stream(host, port)
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with stream:
        await stream.send_all(request.encode())
        raw = b"".join([chunk async for chunk in stream])
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
