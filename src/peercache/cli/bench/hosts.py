"""`peercache bench serve` and `bench drive`: the figures of a get over two hosts.

One host serves a working set from its memory. The other reads it, and compares every page with its
content, which both compute from the sizes.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from peercache.cli.bench.engine import Engine, WorkingSet

SHARED = {
    "cluster": "peercache-bench", "insecure": True, "embedded": True, "op_timeout_s": 30.0,
}  # fmt: skip
"""The pages are computed from their numbers, so serving them to every host reveals nothing."""


def serve(work: WorkingSet, settings: dict[str, Any]) -> None:
    """Hold the working set in this host's memory until SIGINT or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell ignores SIGINT for what it starts in the background.
        signal.signal(number, signal.default_int_handler)
    engine = Engine(work)
    try:
        engine.open("serve", {**SHARED, "pool_size": 2 * work.total_bytes, **settings})
        stored = engine.store("serve")
        print(
            f"{stored} of {work.pages} pages are served; now `bench drive` on the other host",
            flush=True,
        )
        while True:
            time.sleep(1)
    finally:
        engine.close()


def drive(work: WorkingSet, settings: dict[str, Any], seconds: float) -> dict[str, float]:
    """Read the working set that the other host serves; return the figures."""
    engine = Engine(work)
    defaults = {"pool_size": 64 * 2**20, "listen": ":0", "exists_timeout_s": 2.0}
    try:
        engine.open("drive", {**SHARED, **defaults, **settings})
        client, target = engine.clients["drive"], engine.target
        engine.adopt("drive")
        client.register_memory(int(target.ctypes.data), target.nbytes, target)
        read = engine.get("drive", seconds=seconds)
        # Which way the pages came: a fallback must not pass for the fabric that was asked for.
        by_fabric = {
            name: float(value)
            for name, value in client.stats().items()
            if name.startswith("pages_hit_")
        }
        return {
            "get_gb_s": read["gb_s"],
            "get_p50_ms": read["p50_ms"],
            "get_p99_ms": read["p99_ms"],
            "batches": read["batches"],
            "misses": read["missed"],
            "wrong_bytes": read["wrong_bytes"],
            **by_fabric,
            "exists_hot_us": engine.exists("drive")["us"],
        }
    finally:
        engine.close()
