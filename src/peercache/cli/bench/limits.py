"""The machine's own limits, measured in the same run: memory copy, one tcp stream, nng."""

from __future__ import annotations

import socket
import statistics
import time

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]

WARM_UP_TRIPS = 50


def copy_gb_s(source: Memory, target: Memory, page_bytes: int) -> float:
    """Return the rate of `np.copyto`, page by page over the whole working set."""
    started = time.perf_counter()
    for begin in range(0, len(source), page_bytes):
        np.copyto(target[begin : begin + page_bytes], source[begin : begin + page_bytes])
    return len(source) / (time.perf_counter() - started) / 1e9


def send_stream(port: int, source: Memory, page_bytes: int) -> None:
    """Send the whole working set over one connection, page by page, once."""
    with socket.create_connection(("127.0.0.1", port)) as stream:
        view = source.data
        for begin in range(0, len(source), page_bytes):
            stream.sendall(view[begin : begin + page_bytes])


def receive_stream(listener: socket.socket, target: Memory) -> float:
    """Receive one working set with `recv_into`; return GB/s from the first byte on."""
    stream, _ = listener.accept()
    with stream:
        view = target.data
        done = stream.recv_into(view[:1])
        started = time.perf_counter()
        while done < len(view):
            count = stream.recv_into(view[done:])
            if not count:
                raise ConnectionError("the stream ended early")
            done += count
        return len(view) / (time.perf_counter() - started) / 1e9


def median_us(times_s: list[float]) -> float:
    """Return the median in microseconds, the warm-up left out."""
    return statistics.median(times_s[WARM_UP_TRIPS:] or times_s) * 1e6


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
