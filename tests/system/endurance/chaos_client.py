"""An engine's cache under chaos, as a process: it sets, reads, and checks every byte of every hit.

    python -m tests.system.endurance.chaos_client CLUSTER HOME FABRIC SEED FIGURES

What it did is in the file FIGURES at any moment, also after a `kill -9`. It ends by itself only
where a promise is broken, and says which one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peercache import Client
from peercache.errors import PeerCacheError
from tests.faults.worker import Pauses
from tests.system.endurance.load import Corpus
from tests.system.nodes import keys_of

OP_TIMEOUT_S = 2.0
EXISTS_TIMEOUT_S = 0.5
KEYS, PAGE_BYTES, BATCH = 1024, 32 * 1024, 16
FIGURES_S = 0.2


def opened(cluster: str, home: str, fabric: str) -> Client:
    """Attach to a home node, which may be dead for now."""
    while True:
        try:
            return Client.open(
                cluster=cluster,
                home=home,
                fabric=fabric,
                op_timeout_s=OP_TIMEOUT_S,
                exists_timeout_s=EXISTS_TIMEOUT_S,
            )
        except PeerCacheError:  # noqa: PERF203 - each turn waits
            time.sleep(0.2)


def main() -> None:
    """Work until killed."""
    cluster, home, fabric, seed, path = sys.argv[1:]
    rng, figures = random.Random(int(seed)), Path(path)
    corpus = Corpus(keys_of("chaos", KEYS), PAGE_BYTES)
    client = opened(cluster, home, fabric)
    counts: dict[str, Any] = {"hits": 0, "misses": 0, "stored": 0, "calls": 0, "longest": {}}
    pauses = Pauses()
    buffers = [np.empty(PAGE_BYTES, np.uint8) for _ in range(BATCH)]

    def timed(kind: str, call: Callable[[], Any]) -> Any:
        began, paused_s = time.monotonic(), pauses.total_s
        answer = call()
        took_s = time.monotonic() - began
        if took_s > EXISTS_TIMEOUT_S:
            # A pause that ends with the call is counted a moment later.
            time.sleep(3 * pauses.TICK_S)
            took_s -= pauses.total_s - paused_s
        counts["calls"] += 1
        counts["longest"][kind] = max(took_s, counts["longest"].get(kind, 0.0))
        return answer

    written_at = 0.0
    while True:
        chosen = rng.sample(range(KEYS), BATCH)
        keys = [corpus.keys[index] for index in chosen]
        kind = rng.choices(("get", "set", "exists", "remove"), (60, 25, 13, 2))[0]
        if kind == "get":
            for buffer in buffers:
                buffer[:8] = buffer[-8:] = 0xA5  # A hit that wrote nothing is noticed.
            hits = timed(kind, lambda keys=keys: client.batch_get(keys, buffers))
            for index, buffer, hit in zip(chosen, buffers, hits, strict=True):
                right = np.array_equal(buffer, corpus.pages[index])
                assert not hit or right, f"wrong bytes under {corpus.keys[index]}"
            counts["hits"] += sum(hits)
            counts["misses"] += BATCH - sum(hits)
        elif kind == "set":
            pages = [corpus.pages[index] for index in chosen]
            stored = timed(kind, lambda keys=keys, pages=pages: client.batch_set(keys, pages))
            counts["stored"] += sum(stored)
        elif kind == "exists":
            timed(kind, lambda keys=keys: client.batch_exists(keys))
        else:
            timed(kind, lambda keys=keys: client.remove(keys[:2]))
        if time.monotonic() - written_at > FIGURES_S:
            written_at = time.monotonic()
            part = figures.with_suffix(".part")
            part.write_text(json.dumps(counts))
            os.replace(part, figures)  # noqa: PTH105 - the same


if __name__ == "__main__":
    main()
