"""Measures for some seconds: memory copy, one tcp stream, READs over the chosen port."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peercache.cli.bench.limits import copy_gb_s, receive_stream, send_stream
from peercache.cli.doctor.facts import Speed
from peercache.config.settings import Config
from peercache.errors import PeerCacheError
from peercache.rdma.loopback import Loopback
from peercache.rdma.rail import Settings

PAGE_BYTES = 2**20
PAGES = 32
ROUNDS = 5
SMALL_BYTES = 4096
SMALL_READS = 100
SMALL_PAGES = 16


def measure(config: Config, chosen: Sequence[tuple[str, int]], *, is_quick: bool) -> Speed:
    """Measure each; READs only where a port is chosen."""
    if is_quick:
        return Speed()
    source = np.arange(PAGES * PAGE_BYTES // 8, dtype=np.uint64).view(np.uint8)
    target = np.zeros_like(source)
    copy, tcp = copy_gb_s(source, target, PAGE_BYTES), _tcp_gb_s(source, target)
    if not chosen:
        return Speed(tcp_gb_s=tcp, copy_gb_s=copy)
    name, gid_index = chosen[0]
    settings = Settings(device_names=(name,), gid_index=gid_index)
    try:
        gb_s, one_us = _reads(config, settings)
    except (PeerCacheError, OSError) as error:
        return Speed(tcp_gb_s=tcp, copy_gb_s=copy, read_over=name, read_problem=str(error))
    return Speed(tcp_gb_s=tcp, copy_gb_s=copy, read_over=name, read_gb_s=gb_s, read_us=one_us)


def _tcp_gb_s(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = threading.Thread(target=send_stream, args=(port, source, PAGE_BYTES))
        sender.start()
        try:
            return receive_stream(listener, target)
        finally:
            sender.join()


def _reads(config: Config, settings: Settings) -> tuple[float, float]:
    """Return GB/s of whole pages and the µs of a small one; raise if a page is wrong."""

    def loopback(page_bytes: int, pages: int) -> Loopback:
        return Loopback(
            near=settings, far=settings, shm_dir=config.shm_dir, granule=SMALL_BYTES,
            page_bytes=page_bytes, pages=pages,
        )  # fmt: skip

    times = []
    with loopback(PAGE_BYTES, PAGES) as large:
        for _ in range(ROUNDS):
            large.clear()
            started = time.perf_counter()
            fetched = large.read(0, PAGES)
            times.append(time.perf_counter() - started)
            if not large.arrived(0, PAGES, fetched):
                why = fetched.failure or "a page arrived with wrong bytes"
                raise PeerCacheError(f"READs of {PAGES} pages: {why}")
    small_times = []
    with loopback(SMALL_BYTES, SMALL_PAGES) as small:
        for number in range(SMALL_READS):
            started = time.perf_counter()
            fetched = small.read(number % SMALL_PAGES, 1)
            small_times.append(time.perf_counter() - started)
            if fetched.failure:
                raise PeerCacheError(f"READs of {SMALL_BYTES} bytes: {fetched.failure}")
    gb_s = PAGES * PAGE_BYTES / statistics.median(times[1:]) / 1e9
    return gb_s, statistics.median(small_times) * 1e6
