"""One bare nng round trip between two processes: the limit of the control plane's requests."""

from __future__ import annotations

import time

import pynng

ECHO_BYTES = 256
"""About a Reserve of eight pages."""


def serve_echo(url: str) -> None:
    """Answer every message with itself until the other side has gone."""
    with pynng.Pair1(listen=url, recv_timeout=60_000) as peer:
        try:
            while True:
                peer.send(peer.recv())
        except pynng.NNGException:
            return


def round_trips_s(url: str, count: int) -> list[float]:
    """Return how long each of `count` blocking round trips took."""
    with pynng.Pair1(dial=url, block_on_dial=False, recv_timeout=5_000) as peer:
        payload = bytes(ECHO_BYTES)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            peer.send(payload)
            peer.recv()
            times.append(time.perf_counter() - started)
        return times
