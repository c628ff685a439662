"""Names whose server is dead: a client that embeds a node starts alone, in a bounded time."""

from __future__ import annotations

import subprocess
import sys

from tests.pace import FACTOR, TIMEOUT_S, assert_within

NAME_S = 15.0 * FACTOR
"""Seconds until the server of a name fails."""

EMBEDDED = """
import socket, sys, time
real = socket.getaddrinfo

def dead(host, *more, **named):
    if "dead" in str(host):
        time.sleep(float(sys.argv[1]))
        raise socket.gaierror("timed out")
    return real(host, *more, **named)

socket.getaddrinfo = dead
from peercache import Client

began = time.monotonic()
client = Client.open(
    discovery_addr=("head-1.dead:31998", "head-2.dead:31998", "head-3.dead:31998"),
    embedded=True, insecure=True, pool_size="16MiB", metrics_port=0, op_timeout_s=60,
)
opened_s = time.monotonic() - began
page = bytes(range(256)) * 64
buffer = bytearray(len(page))
assert client.batch_set(["key"], [bytearray(page)]) == [True]
assert client.batch_get(["key"], [buffer]) == [True]
assert buffer == page
began = time.monotonic()
client.close()
print(opened_s, time.monotonic() - began)
"""


def test_an_embedded_node_starts_alone_and_serves() -> None:
    """Three names at fifteen seconds each were an error after thirty."""
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED, str(NAME_S)],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    opened_s, closed_s = map(float, done.stdout.split())
    assert_within(opened_s, NAME_S)
    assert_within(closed_s, NAME_S)
