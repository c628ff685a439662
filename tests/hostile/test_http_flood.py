"""A flood of HTTP clients that read nothing: health probes are always answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

from peercache.config.quantities import parse_address
from peercache.http import server
from peercache.http.server import ADDRESS_DIVISOR
from peercache.model.process import HTTP_MAX
from peercache.observability.metrics import Metrics
from tests.pace import PROMPT_S, TIMEOUT_S, ends_within
from tests.unit.http.http_node import ask, served

ASKED = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _large() -> Metrics:
    """Return metrics of which the exposition fills every socket buffer."""
    metrics = Metrics()
    for number in range(2_000):
        metrics.messages_received.labels(kind=f"kind-{number:04}-{'x' * 200}").inc()
    return metrics


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /heal", ASKED.replace(b"/metrics", b"/healthz"),
     pytest.param(ASKED, marks=pytest.mark.slow)],
    ids=["silent", "half a request", "answered and open", "reads no answer"],
)  # fmt: skip
async def test_flood_from_one_address_keeps_no_probe_out(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new connection is served, though four times as many as there are places are held."""
    monkeypatch.setattr(server, "CONNECTION_S", TIMEOUT_S)
    monkeypatch.setattr(server, "DISCARD_S", TIMEOUT_S)
    metrics = _large() if sent == ASKED else Metrics()
    held = []
    async with served(metrics=metrics) as address:
        host, port = parse_address(address)
        for number in range(4 * HTTP_MAX):
            stream = await trio.open_tcp_stream(host, port)
            held.append(stream)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(sent or b"")
            if number % 32 == 31:
                with ends_within(PROMPT_S):
                    assert (await ask(address, "/healthz"))[0] == 200
        for stream in held:
            await trio.aclose_forcefully(stream)


async def test_one_address_leaves_places_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections of one address replace each other, and none of another address."""
    monkeypatch.setattr(server, "CONNECTION_S", TIMEOUT_S)
    async with served(host="") as address:
        _, port = parse_address(address)
        near = await trio.open_tcp_stream("127.0.0.1", port)
        many = [await _from("127.0.0.2", port) for _ in range(2 * HTTP_MAX)]
        await trio.testing.wait_all_tasks_blocked(0.1)

        await near.send_all(ASKED.replace(b"/metrics", b"/healthz"))
        with ends_within(PROMPT_S):
            assert (await near.receive_some()).startswith(b"HTTP/1.1 200")
        open_ones = [stream for stream in many if await _is_open(stream)]
        assert len(open_ones) == HTTP_MAX // ADDRESS_DIVISOR
        assert open_ones == many[-HTTP_MAX // ADDRESS_DIVISOR :]
        for stream in (near, *many):
            await trio.aclose_forcefully(stream)


async def _from(source: str, port: int) -> trio.SocketStream:
    connection = trio.socket.socket()
    await connection.bind((source, 0))
    await connection.connect(("127.0.0.1", port))
    return trio.SocketStream(connection)


async def _is_open(stream: trio.SocketStream) -> bool:
    """Return whether the server has not closed it."""
    with trio.move_on_after(0.02), suppress(trio.BrokenResourceError):
        await stream.receive_some()
        return False
    return True


@pytest.mark.slow
async def test_steady_flood_keeps_no_probe_out() -> None:
    """A hundred clients a second ask, read nothing and stay for two seconds."""
    held: list[trio.SocketStream] = []
    async with served() as address, trio.open_nursery() as nursery:
        host, port = parse_address(address)

        async def flood() -> None:
            while True:
                stream = await trio.open_tcp_stream(host, port)
                held.append(stream)
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(ASKED.replace(b"/metrics", b"/healthz"))
                if len(held) > 200:
                    await trio.aclose_forcefully(held.pop(0))
                await trio.sleep(0.01)

        nursery.start_soon(flood)
        await trio.sleep(1.5)
        statuses = await _probed(lambda: ask(address, "/healthz"), count=20, pause_s=0.1)
        nursery.cancel_scope.cancel()
    for stream in held:
        await trio.aclose_forcefully(stream)

    assert statuses == [200] * 20


async def _probed(
    probe: Callable[[], Awaitable[tuple[int, str]]], *, count: int, pause_s: float
) -> list[int]:
    statuses = []
    for _ in range(count):
        with trio.move_on_after(PROMPT_S):
            try:
                statuses.append((await probe())[0])
            except (OSError, trio.BrokenResourceError, IndexError):
                statuses.append(0)
        await trio.sleep(pause_s)
    return statuses
