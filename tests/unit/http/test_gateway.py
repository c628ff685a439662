"""The gateway over real sockets: bodies, parts of answers, and what an application may do wrong."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest
import trio

from peercache.config.quantities import parse_address
from peercache.http import gateway
from peercache.http.gateway import BODY_BYTES_MAX, LONG_BODIES, Receive, Scope, Send
from tests.system.nodes import capture_logs
from tests.unit.http.http_node import ask, served

START: MutableMapping[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what the request has: path, query, and its body in the parts that came."""
    body, more = b"", True
    while more:
        part = await receive()
        assert part["type"] == "http.request"
        body, more = body + part["body"], part["more_body"]
    told = [scope["path"], scope["query_string"].decode(), len(body), scope["client"][0]]
    answer = json.dumps(told).encode()
    await send({**START, "headers": [(b"content-length", str(len(answer)).encode())]})
    await send({"type": "http.response.body", "body": answer})


async def _say(address: str, *parts: bytes) -> bytes:
    stream = await trio.open_tcp_stream(*parse_address(address))
    async with stream:
        for part in parts:
            await stream.send_all(part)
        return b"".join([chunk async for chunk in stream])


def _post(size: int, *headers: str, path: str = "/put") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {size}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize(("path", "most"), [("/put", BODY_BYTES_MAX), *LONG_BODIES.items()])
async def test_body_reaches_the_application_up_to_its_bound(path: str, most: int) -> None:
    """A body of the bound is taken whole; one byte more is refused, and fills no memory."""
    async with served(application=_echo) as address:
        whole = await _say(address, _post(most, path=path), b"x" * most)
        long = await _say(address, _post(most + 1, path=path), b"x" * (most + 1))

    assert whole.startswith(b"HTTP/1.1 200 ")
    assert whole.endswith(f'["{path}", "", {most}, "127.0.0.1"]'.encode())
    assert long.startswith(b"HTTP/1.1 413 ")
    assert str(most).encode() in long


async def test_client_that_waits_before_its_body_is_told_to_go_on() -> None:
    """Curl asks first before it sends more than a kilobyte."""
    async with served(application=_echo) as address:
        stream = await trio.open_tcp_stream(*parse_address(address))
        async with stream:
            await stream.send_all(_post(5, "Expect: 100-continue"))
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
            await stream.send_all(b"12345")
            answer = b"".join([chunk async for chunk in stream])

    assert b'["/put", "", 5' in answer


async def test_chunks_that_are_none_are_refused() -> None:
    """What is no HTTP within a body is the client's error, too."""
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async with served(application=_echo) as address:
        answer = await _say(address, head, b"nonsense\r\n")
        following = await ask(address, "/")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert following[0] == 200


async def test_path_is_decoded_and_the_query_is_not() -> None:
    """The names of nodes have colons, which some clients encode."""
    async with served(application=_echo) as address:
        _, body = await ask(address, "/nodes/10.0.0.1%3A31998?a=%20")

    assert json.loads(body)[:2] == ["/nodes/10.0.0.1:31998", "a=%20"]


async def test_access_is_asked_about_the_path_that_is_routed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No way of writing a path opens a page that is not open."""
    monkeypatch.setattr("peercache.http.access.is_loopback", lambda _: False)
    closed = ("/%6detricsx", "//metrics", "/metrics/..", "/metrics%2f", "/metrics%00", "/./healthz")

    async with served(settings={"http_open": True}) as address:
        assert (await ask(address, "/%6detrics"))[0] == 200
        assert (await ask(address, "/metrics?/"))[0] == 200
        assert [(await ask(address, path))[0] for path in closed] == [401] * len(closed)


async def test_answer_in_parts_arrives_whole() -> None:
    """Its length is not known before its end."""

    async def parts(_: Scope, __: Receive, send: Send) -> None:
        await send(START)
        for part in (b"one ", b"two ", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    async with served(application=parts) as address:
        answer = await _say(address, b"GET / HTTP/1.0\r\n\r\n")
        head = await ask(address, "/", "HEAD")

    assert answer.endswith(b"\r\n\r\none two ")
    assert head == (200, "")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_application_that_fails_is_an_error_and_ends_nothing(has_begun: bool) -> None:
    """The reason is in the log; the client gets it where its answer has not begun."""

    async def broken(_: Scope, __: Receive, send: Send) -> None:
        if has_begun:
            await send({**START, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("no table")

    with capture_logs() as lines:
        async with served(application=broken) as address:
            answer = await _say(address, b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
            again = await _say(address, b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")

    assert answer == again
    if has_begun:
        assert answer.endswith(b"half")
    else:
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert answer.endswith(b'{"error": "RuntimeError: no table"}\n')
    assert sum(gateway.PAGE_FAILED in line for line in lines) == 2


async def test_every_answer_forbids_foreign_content() -> None:
    """A page loads nothing from elsewhere; errors and figures are no pages at all."""
    async with served() as address:
        for path in ("/", "/healthz", "/nothing"):
            raw = await _say(address, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = raw.partition(b"\r\n\r\n")[0].decode().lower()
            assert "content-security-policy: default-src 'none'; script-src 'self'" in head
            assert "x-content-type-options: nosniff" in head
            assert "cache-control: no-store" in head
            assert "connection: close" in head
            assert "unsafe" not in head


@pytest.mark.parametrize(
    ("named", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:31997", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("attacker.example", 401),
        ("127.0.0.1.attacker.example:31997", 401),
        ("localhost.attacker.example", 401),
        ("10.0.0.1", 401),
        ("a:b:c", 401),
    ],
)
async def test_web_page_that_resolves_to_this_host_reads_nothing(named: str, status: int) -> None:
    """A browser is a process of the user's; the name it was given says who sent it here."""
    async with served() as address:
        found, body = await ask(address, "/", named=named)

    assert found == status
    assert found == 200 or "127.0.0.1" in body
