"""The overview, /metrics and /healthz over real sockets."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs
import pytest
import trio
import trio.testing

from pace import PATIENCE_S, PROMPT_S
from peercache.config import DEFAULT_METRICS_PORT, parse_address
from peercache.errors import AddressTaken
from peercache.http import server
from peercache.http.pages import Health
from peercache.http.server import CONNECTIONS_MAX, REQUEST_BYTES_MAX, serve_http
from peercache.messages import ALIVE, DEAD, Member
from peercache.observe import Metrics

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


async def test_healthz_is_200_only_while_serving() -> None:
    """The probe tells the truth of the moment, with the reason and the facts."""
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


def member(number: int, state: int, host_name: str) -> Member:
    """Return a member of a view; only what people look at differs."""
    at = f"10.0.0.{number}"
    return Member(
        number, 1, state, 255, host_name, f"{at}:31998", f"{at}:4000", "boot", "/dev/shm/x"
    )


async def test_overview_shows_the_node_its_calls_and_its_members() -> None:
    """What a person looks for first is on the page, with figures as people read them."""
    facts: dict[str, int | float | str] = {
        "node": f"{1:016x}",
        "pool_bytes": 4 * 2**30,
        "pool_bytes_usable": 4 * 2**30,
        "pool_bytes_used": 3 * 2**30,
        "pool_pages": 3072,
        "directory_records": 77,
    }
    metrics = Metrics()
    metrics.pages_hit.labels("rdma").inc(1234)
    metrics.bytes_read.labels("rdma").inc(1234 * 2**20)
    metrics.pages_missed.labels("deadline").inc(5)
    metrics.pages_set.labels("copied").inc(6)
    metrics.bytes_written.inc(6 * 2**20)
    members = [member(2, DEAD, "beta"), member(1, ALIVE, "alpha")]

    async with served(
        health=lambda: Health(serving=True, facts=facts), metrics=metrics, members=members
    ) as address:
        status, page = await ask(address, "/?from=a-bookmark")

    assert status == 200
    assert "3.0 GiB of 4.0 GiB, 3072 pages" in page
    lines = re.findall("<tr>(.*?)</tr>", page)
    rows = [re.sub("<[^>]+>", " ", line).split() for line in lines]
    assert ["get", "hit", "over", "rdma", "1,234", "1.2", "GiB"] in rows
    assert ["get", "miss:", "deadline", "5"] in rows
    assert ["set", "copied", "6", "6.0", "MiB"] in rows
    ours = [f"{1:016x}", "(this", "node)", "alive", "alpha", "10.0.0.1:31998", "10.0.0.1:4000"]
    assert ours in rows
    assert [f"{2:016x}", "dead", "beta", "10.0.0.2:31998", "10.0.0.2:4000"] in (
        row[:5] for row in rows
    )
    assert rows.index(ours) < len(rows) - 1  # the living first
    assert "Members: 1 live" in page
    assert "77 records" in page
    assert "Disk" not in page


async def test_overview_escapes_what_other_nodes_say_of_themselves() -> None:
    """A host name is a stranger's text: it is shown, never run."""
    async with served(members=[member(1, ALIVE, "<script>alert(1)</script>")]) as address:
        _, page = await ask(address, "/")

    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src 'none'" in page


async def test_overview_of_a_node_that_is_not_well_says_why() -> None:
    """They see the reason, also that of a bug of ours, and that of a disk that has ended."""
    now: Health | None = Health(
        serving=False, reason="the loop is 9 s late", facts={"disk_problem": "stuck <sda>"}
    )

    def health() -> Health:
        if now is None:
            raise RuntimeError("no pool")
        return now

    async with served(health=health) as address:
        late = await ask(address, "/")
        now = None
        broken = await ask(address, "/")

    assert late[0] == broken[0] == 200
    assert "not serving: the loop is 9 s late" in late[1]
    assert "off: stuck &lt;sda&gt;" in late[1]
    assert "not serving: RuntimeError: no pool" in broken[1]


async def test_overview_shows_what_no_encoding_and_no_integer_holds() -> None:
    """A path that is no text, a counter that has run over: the page is made all the same."""
    metrics = Metrics()
    for _ in range(2):
        metrics.pages_hit.labels("shm").inc(1.7e308)
        metrics.bytes_read.labels("shm").inc(1.7e308)
    ill = Health(serving=True, facts={"disk_problem": "no room in /disk\udcff"})

    async with served(health=lambda: ill, metrics=metrics) as address:
        status, page = await ask(address, "/")

    assert status == 200
    assert "no room in /disk?" in page
    assert "inf" in page


async def test_page_that_cannot_be_made_is_an_error_and_ends_nothing() -> None:
    """A bug in one page must not take the node with it."""

    def broken() -> tuple[Member, ...]:
        raise RuntimeError("no view")

    serve = partial(
        serve_http, "127.0.0.1", 0, registry=Metrics().registry, health=lambda: OK, members=broken
    )
    async with trio.open_nursery() as nursery:
        address: str = await nursery.start(serve)
        failed = await ask(address, "/")
        following = await ask(address, "/healthz")
        nursery.cancel_scope.cancel()

    assert (failed[0], json.loads(failed[1])) == (500, {"error": "RuntimeError: no view"})
    assert following[0] == 200


async def test_overview_of_a_large_cluster_stays_small() -> None:
    """Thousands of members are counted, and the first hundreds shown."""
    members = [member(number, ALIVE, "host") for number in range(1, 5001)]

    async with served(members=members) as address:
        _, page = await ask(address, "/")

    assert "and 4800 more" in page
    assert len(page) < 60_000


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
    """An explicit port means that port: somebody else on it is told, not worked around."""
    async with served() as address:
        host, port = parse_address(address)

        with pytest.RaisesGroup(AddressTaken) as caught:
            async with served(host=host, port=port):
                pytest.fail("two servers on one port")

    assert str(port) in str(caught.value.exceptions[0])


async def test_default_port_gives_way_to_a_free_one() -> None:
    """Two nodes on one host both have metrics, whoever has port 31997."""
    async with served(port=-1) as first, served(port=-1) as second:
        ports = [parse_address(address)[1] for address in (first, second)]

        assert (await ask(first, "/healthz"))[0] == (await ask(second, "/healthz"))[0] == 200

    assert ports[0] != ports[1] != DEFAULT_METRICS_PORT


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
    monkeypatch.setattr(server, "CONNECTION_S", PATIENCE_S)
    metrics = Metrics()
    for number in range(20_000):
        metrics.messages_received.labels(kind=f"kind-{number:04}-{'x' * 200}").inc()

    async with served(metrics=metrics) as address:
        host, port = parse_address(address)
        stream = await trio.open_tcp_stream(host, port)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
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
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # a TLS greeting
    ],
)
async def test_broken_request_is_answered_and_harms_nobody(raw: bytes, status: int) -> None:
    """What is no HTTP gets an error, and the next probe its answer."""
    async with served() as address:
        stream = await trio.open_tcp_stream(*parse_address(address))
        async with stream:
            await stream.send_all(raw)
            answer = b"".join([chunk async for chunk in stream])
        following, _ = await ask(address, "/healthz")

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert following == 200


async def test_client_that_hangs_up_at_once_harms_nobody() -> None:
    """A port scan, or a reset in the middle of an answer, is no event."""
    async with served() as address:
        for raw in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
            stream = await trio.open_tcp_stream(*parse_address(address))
            # Linger 0 makes the close a reset.
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if raw:
                await stream.send_all(raw)
            await stream.aclose()
        assert (await ask(address, "/healthz"))[0] == 200


async def test_the_longest_silent_connection_gives_way_to_one_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Idle connections cost a bounded number of descriptors, and keep no probe out."""
    monkeypatch.setattr(server, "CONNECTION_S", PATIENCE_S)
    async with served() as address:
        host, port = parse_address(address)
        idle = [await trio.open_tcp_stream(host, port) for _ in range(CONNECTIONS_MAX)]
        await trio.testing.wait_all_tasks_blocked(0.05)

        status = (await ask(address, "/healthz"))[0]

        with trio.fail_after(PROMPT_S):
            assert await idle[0].receive_some() == b""
        with trio.move_on_after(0.1) as still_open:
            await idle[1].receive_some()
        assert status == 200
        assert still_open.cancelled_caught
        for stream in idle:
            await stream.aclose()


async def test_connections_beyond_the_limit_are_closed_where_all_have_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who reads no answer is not silent: nobody takes its place before its time is over."""
    monkeypatch.setattr(server, "CONNECTION_S", PATIENCE_S)
    async with served() as address:
        host, port = parse_address(address)
        busy = [await trio.open_tcp_stream(host, port) for _ in range(CONNECTIONS_MAX)]
        for stream in busy:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        refused = await trio.open_tcp_stream(host, port)

        with trio.fail_after(PROMPT_S):
            assert await refused.receive_some() == b""

        for stream in [*busy, refused]:
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await ask(address, "/healthz"))[0] == 200


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
