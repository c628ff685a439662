"""Pages over aioquic, or a library with its interface: a program of `benchmarks.quic`.

python quic_python.py LIBRARY server|client ADDRESS PORT CA CERT KEY CONGESTION [PAGES FLIGHT LIMIT]

It imports nothing of PeerCache: a library may need another Python. Only the server is verified, and
by qh3 only: aioquic does not accept the names in PeerCache's certificates, and none of these
libraries requests a certificate of the client through its public interface.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import ssl
import sys
import time
from typing import Any

LIBRARY, ROLE, HOST, PORT, CA, CERT, KEY, CONGESTION = sys.argv[1:9]
PAGE_BYTES = 2**20
PAGE = bytes(PAGE_BYTES)
NAME = "127.0.0.1"
endpoint: Any = importlib.import_module(f"{LIBRARY}.asyncio")
events: Any = importlib.import_module(f"{LIBRARY}.quic.events")


def configure() -> Any:
    """Return a configuration whose windows limit nothing."""
    made: Any = importlib.import_module(f"{LIBRARY}.quic.configuration").QuicConfiguration(
        alpn_protocols=["page"], is_client=ROLE == "client"
    )
    wanted = {
        "max_data": 64 * 2**20,
        "max_stream_data": 16 * 2**20,
        "max_datagram_size": 1452,
        "congestion_control_algorithm": CONGESTION,
        "server_name": NAME,
        "verify_mode": ssl.CERT_REQUIRED if LIBRARY == "qh3" else ssl.CERT_NONE,
    }
    for name, value in wanted.items():
        if hasattr(made, name):
            setattr(made, name, value)
    made.load_cert_chain(CERT, KEY)
    made.load_verify_locations(CA)
    return made


def send(protocol: Any, stream: int, content: bytes) -> None:
    """Send all that a stream carries in this direction."""
    quic = protocol._quic  # noqa: SLF001 - as in the examples of aioquic
    quic.send_stream_data(stream, content, end_stream=True)
    if hasattr(protocol, "transmit"):
        protocol.transmit()


class Server(endpoint.QuicConnectionProtocol):  # type: ignore[misc]
    """Answers each stream with a page."""

    def quic_event_received(self, event: Any) -> None:
        """Answer a request that is complete."""
        if isinstance(event, events.StreamDataReceived) and event.end_stream:
            send(self, event.stream_id, PAGE)


class Client(endpoint.QuicConnectionProtocol):  # type: ignore[misc]
    """Counts the bytes of each stream."""

    def __init__(self, *given: Any, **more: Any) -> None:
        """Wait for nothing yet."""
        super().__init__(*given, **more)
        self.left: dict[int, int] = {}
        self.arrived: dict[int, asyncio.Future[None]] = {}

    def quic_event_received(self, event: Any) -> None:
        """Count, and end the wait for a page that is complete."""
        if isinstance(event, events.StreamDataReceived) and event.data:
            self.left[event.stream_id] -= len(event.data)
            if not self.left[event.stream_id]:
                self.arrived.pop(event.stream_id).set_result(None)

    async def read(self) -> None:
        """Read one page."""
        stream = self._quic.get_next_available_stream_id()
        self.left[stream] = PAGE_BYTES
        self.arrived[stream] = asyncio.get_running_loop().create_future()
        arrived = self.arrived[stream]
        send(self, stream, b"page")
        await arrived


async def serve() -> None:
    """Serve until the process ends."""
    await endpoint.serve(HOST, int(PORT), configuration=configure(), create_protocol=Server)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def read(pages: int, flight: int, limit_s: float) -> None:
    """Read pages, and print the figures."""
    took: list[float] = []
    began = time.monotonic()
    async with endpoint.connect(
        HOST, int(PORT), configuration=configure(), create_protocol=Client
    ) as client:
        shaken, busy = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)

        async def stream() -> None:
            while pages - len(client.left) > 0 and time.monotonic() < shaken + limit_s:
                since = time.monotonic()
                await client.read()
                took.append(time.monotonic() - since)

        await asyncio.gather(*[stream() for _ in range(flight)])
        seconds, after = time.monotonic() - shaken, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - busy.ru_utime - busy.ru_stime
    figures = {"handshake_s": shaken - began, "seconds": seconds, "cpu_s": cpu_s, "took": took}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # Without waiting until the connection has drained.


if __name__ == "__main__":
    numbers = [float(each) for each in sys.argv[9:]]
    asyncio.run(serve() if ROLE == "server" else read(int(numbers[0]), int(numbers[1]), numbers[2]))
