"""The HTTP server over real sockets: its pages, bodies, answers in parts, wrong applications."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from peercache.config.quantities import parse_address
from peercache.config.settings import DEFAULT_METRICS_PORT
from peercache.errors import AddressTaken
from peercache.http import server
from peercache.http.pages import Health
from peercache.http.server import (
    ADDRESS_DIVISOR,
    BODY_BYTES_MAX,
    LONG_BODIES,
    REQUEST_BYTES_MAX,
    Receive,
    Scope,
    Send,
)
from peercache.model.process import HTTP_MAX
from peercache.observability.metrics import Metrics
from tests.pace import PROMPT_S, TIMEOUT_S, ends_within
from tests.system.nodes import capture_logs
from tests.unit.http.http_node import OK, ask, served


async def test_healthz_is_200_only_while_serving() -> None:
    """The probe reports the truth of the moment, with the reason and the facts."""
    now = OK

    async with served(health=lambda: now) as address:
        healthy = await ask(address, "/healthz")
        now = attrs.evolve(OK, serving=False, reason="the pool is gone")
        ill = await ask(address, "/healthz")

    assert (healthy[0], json.loads(healthy[1])) == (200, {"status": "ok", "members": 3})
    assert ill[0] == 503
    assert json.loads(ill[1]) == {
        "status": "unavailable",
        "reason": "the pool is gone",
        "members": 3,
    }


async def test_degraded_node_serves_and_reports_what_does_not_work() -> None:
    """A probe that restarts nodes leaves it alone; a person and an alert see the reason."""
    half = attrs.evolve(OK, degraded="the disk is full")

    async with served(health=lambda: half) as address:
        status, body = await ask(address, "/healthz")

    assert status == 200
    assert json.loads(body) == {"status": "degraded", "reason": "the disk is full", "members": 3}


async def test_metrics_describe_process_and_build() -> None:
    """Which version runs, since when, and what it takes; asked for twice in one process."""
    metrics = Metrics()
    metrics.describe_process("1.2.3")
    metrics.describe_process("1.2.3")

    async with served(metrics=metrics) as address:
        _, body = await ask(address, "/metrics")

    assert 'peercache_build_info{python="' in body
    assert 'version="1.2.3"} 1.0' in body
    for name in ("start_time_seconds", "resident_memory_bytes", "open_fds", "max_fds"):
        assert f"\nprocess_{name} " in body


async def test_health_that_raises_is_not_healthy() -> None:
    """A bug in the probe is no health, and the server goes on."""

    def broken() -> Health:
        raise RuntimeError("no pool")

    async with served(health=broken) as address:
        status, body = await ask(address, "/healthz")
        again, _ = await ask(address, "/metrics")

    assert status == 503
    assert json.loads(body) == {"status": "unknown", "reason": "RuntimeError: no pool"}
    assert again == 200


async def test_metrics_are_the_exposition_of_this_registry() -> None:
    """What was counted is there, with its labels; another node's figures are not."""
    ours, theirs = Metrics(), Metrics()
    ours.pages_missed.labels(reason="deadline").inc(3)
    theirs.pages_missed.labels(reason="deadline").inc(4)

    async with served(metrics=ours) as address:
        status, body = await ask(address, "/metrics")

    assert status == 200
    assert 'peercache_pages_missed_total{reason="deadline"} 3.0' in body.splitlines()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/", 405),
        ("GET", "/healthz/", 404),
        ("POST", "/healthz", 405),
        ("PUT", "/metrics", 405),
    ],
)
async def test_anything_else_is_refused(method: str, path: str, status: int) -> None:
    """There are three pages and no way to change anything."""
    async with served() as address:
        assert (await ask(address, path, method))[0] == status


async def test_head_has_no_body() -> None:
    """HEAD of any page answers the status alone."""
    async with served() as address:
        assert await ask(address, "/", "HEAD") == (200, "")
        assert await ask(address, "/healthz", "HEAD") == (200, "")
        assert await ask(address, "/metrics", "HEAD") == (200, "")


async def test_named_port_that_is_taken_is_an_error() -> None:
    """An explicit port means that port: a port in use is an error."""
    async with served() as address:
        host, port = parse_address(address)

        with pytest.RaisesGroup(AddressTaken) as caught:
            async with served(host=host, port=port):
                pytest.fail("two servers on one port")

    assert str(port) in str(caught.value.exceptions[0])


async def test_default_port_gives_way_to_a_free_one() -> None:
    """Two nodes on one host both have metrics; one of them gets port 31997."""
    with capture_logs() as lines:
        async with served(port=-1) as first, served(port=-1) as second:
            ports = [parse_address(address)[1] for address in (first, second)]

            assert (await ask(first, "/healthz"))[0] == (await ask(second, "/healthz"))[0] == 200

    assert ports[0] != ports[1] != DEFAULT_METRICS_PORT
    # A scrape of the default port misses this node.
    assert any("http.default_port_taken" in line and second in line for line in lines)


async def test_every_interface_is_both_families() -> None:
    """An empty host serves IPv4 and, where the host has it, IPv6."""
    async with served(host="") as address:
        _, port = parse_address(address)

        assert (await ask(f"127.0.0.1:{port}", "/healthz"))[0] == 200
        if address.startswith("[::]"):
            assert (await ask(f"[::1]:{port}", "/healthz"))[0] == 200


async def test_ipv6_address_is_served_in_brackets() -> None:
    """The address that is handed back is one that `parse_address` reads."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    async with served(host="::1") as address:
        assert address.startswith("[::1]:")
        assert (await ask(address, "/healthz"))[0] == 200


async def test_client_that_never_reads_does_not_hold_up_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scraper that asks for much and reads nothing cannot keep a node from leaving."""
    monkeypatch.setattr(server, "CONNECTION_S", TIMEOUT_S)
    metrics = Metrics()
    for number in range(20_000):
        metrics.messages_received.labels(kind=f"kind-{number:04}-{'x' * 200}").inc()

    async with served(metrics=metrics) as address:
        host, port = parse_address(address)
        stream = await trio.open_tcp_stream(host, port)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert (await ask(address, "/healthz"))[0] == 200
        started = trio.current_time()

    assert trio.current_time() - started < PROMPT_S
    await stream.aclose()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /" + b"x" * (2 * REQUEST_BYTES_MAX), 431),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # a TLS greeting
    ],
)
async def test_broken_request_is_answered_and_does_no_harm(raw: bytes, status: int) -> None:
    """What is no HTTP gets an error, and the next probe its answer."""
    async with served() as address:
        stream = await trio.open_tcp_stream(*parse_address(address))
        async with stream:
            await stream.send_all(raw)
            answer = b"".join([chunk async for chunk in stream])
        following, _ = await ask(address, "/healthz")

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert following == 200


async def test_client_that_hangs_up_at_once_does_no_harm() -> None:
    """A port scan, or a reset in the middle of an answer, is no event."""
    async with served() as address:
        for raw in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            stream = await trio.open_tcp_stream(*parse_address(address))
            # Linger 0 makes the close a reset.
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if raw:
                await stream.send_all(raw)
            await stream.aclose()
        assert (await ask(address, "/healthz"))[0] == 200


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ECONNABORTED, errno.EPROTO])
async def test_an_accept_that_fails_ends_no_server(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a connection that ended before it was accepted in the same way."""
    accept = trio.SocketListener.accept

    async def fail_once(listener: trio.SocketListener) -> trio.SocketStream:
        monkeypatch.setattr(trio.SocketListener, "accept", accept)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(trio.SocketListener, "accept", fail_once)
    async with served() as address:
        assert (await ask(address, "/healthz"))[0] == 200


async def test_a_connection_that_fails_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of one connection is logged, and the next one is served."""
    run = server.HttpExchange.run

    async def fail_once(*_: object) -> bool:
        monkeypatch.setattr(server.HttpExchange, "run", run)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(server.HttpExchange, "run", fail_once)
    with capture_logs() as lines:
        async with served() as address:
            host, port = parse_address(address)
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(b"GET /healthz HTTP/1.1\r\n\r\n")
                # Of a request that was not read the end may be a reset.
                with suppress(trio.BrokenResourceError):
                    assert await stream.receive_some(1) == b""
            assert (await ask(address, "/healthz"))[0] == 200

    assert "http.connection_failed" in "".join(lines)


async def test_the_longest_silent_connection_gives_way_to_one_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Idle connections cost a bounded number of descriptors, and keep no probe out."""
    monkeypatch.setattr(server, "CONNECTION_S", TIMEOUT_S)
    async with served() as address:
        host, port = parse_address(address)
        idle = [await trio.open_tcp_stream(host, port) for _ in range(HTTP_MAX // ADDRESS_DIVISOR)]
        await trio.testing.wait_all_tasks_blocked(0.05)

        status = (await ask(address, "/healthz"))[0]

        with ends_within(PROMPT_S):
            assert await idle[0].receive_some() == b""
        with trio.move_on_after(0.1) as still_open:
            await idle[1].receive_some()
        assert status == 200
        assert still_open.cancelled_caught
        for stream in idle:
            await stream.aclose()


async def test_stop_frees_the_port_and_starts_no_thread_per_connection() -> None:
    """After the cancellation the port can be bound again; connections cost no threads."""
    tasks_before = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count of kernel threads

    async with served() as address:
        host, port = parse_address(address)
        streams = [await trio.open_tcp_stream(host, port) for _ in range(40)]
        tasks = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count of kernel threads
        for stream in streams:
            await stream.aclose()

    assert tasks - tasks_before < 10
    socket.create_server((host, port)).close()


START: MutableMapping[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what the request has: path, query, and its body in the parts that came."""
    body, more = b"", True
    while more:
        part = await receive()
        assert part["type"] == "http.request"
        body, more = body + part["body"], part["more_body"]
    reported = [scope["path"], scope["query_string"].decode(), len(body), scope["client"][0]]
    answer = json.dumps(reported).encode()
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


async def test_client_that_waits_before_its_body_is_asked_to_go_on() -> None:
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
    monkeypatch.setattr("peercache.http.access.is_on_loopback", lambda *_: False)
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
    assert sum(server.PAGE_FAILED in line for line in lines) == 2


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
    """A browser is a process of the user's; the name it was given states who sent it here."""
    async with served() as address:
        found, body = await ask(address, "/", named=named)

    assert found == status
    assert found == 200 or "127.0.0.1" in body
