"""`python -m benchmarks.eviction TRACE`: how much of a trace is in a pool when it is asked for.

A trace is as `peercache.cli.traces` describes it. Each request reads the leading run of its
blocks that the pool has, then sets the rest, in batches of 128, at the trace's own times. The pool
is the real actor, in this process, without slots ahead; a block is one granule.

Columns: blocks that the pool has room for; the share of all asked blocks that were hits, of the
pool, of an idealised LRU (each block of a prompt is touched in its order) and of an idealised LRU
that touches the deepest block of a prompt first. `pool/LRU` is the first by the second.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.cli.traces import LRU, Prompt, hit_rate, requests_of
from peercache.model.ids import Incarnation
from peercache.model.records import DROP
from peercache.wire.messages.pool import Commit, Granted, Reserve, Touched

BATCH = 128
BLOCKS = (500, 1_000, 2_000, 4_000, 8_000, 16_000)
BLOCK_BYTES = 4096


class RealPool:
    """The pool of a node, and one client of it."""

    def __init__(self, room: int) -> None:
        """Make a pool of so many blocks."""
        self.client = Origin(7, 1)
        self.pool = Pool(
            incarnation=Incarnation(1),
            granule=BLOCK_BYTES,
            page_bytes=room * BLOCK_BYTES,
            usable_bytes=room * BLOCK_BYTES,
            client_uncommitted_max=0,
            rng=random.Random(1),  # noqa: S311 - not for secrets
        )
        self.sequence = 0

    def ask(self, request: Prompt) -> int:
        """Read and store."""
        keys = [one.to_bytes(16, "big") for one in request.blocks]
        pages = [self.pool.pages.find(key) for key in keys]
        run = next((n for n, page in enumerate(pages) if page is None), len(pages))
        for begin in range(0, run, BATCH):
            read = pages[begin : min(begin + BATCH, run)]
            drops = np.zeros(len(read), DROP)
            for index, page in enumerate(read):
                assert page is not None
                drops[index] = np.void(page.key), page.generation
            self.pool.on_message(self.client, Touched(drops.tobytes()), request.at)
        for begin in range(run, len(keys), BATCH):
            self._set(keys[begin : begin + BATCH], request.at)
        return run

    def _set(self, keys: Sequence[bytes], at: float) -> None:
        self.sequence += 1
        count = len(keys)
        lengths = np.full(count, BLOCK_BYTES, "<u8").tobytes()
        effects = self.pool.on_message(
            self.client, Reserve(1, self.sequence, 1, b"".join(keys), lengths), at
        )
        granted = effects[-1].message  # type: ignore[union-attr]
        assert isinstance(granted, Granted), granted
        written = bytes(state == 0 for state in granted.states)
        self.pool.on_message(
            self.client, Commit(2, self.sequence, written, bytes(8 * count), 0.5), at
        )


def rows(requests: Sequence[Prompt], rooms: Sequence[int]) -> Iterator[tuple[int, list[float]]]:
    """Yield the shares of each size."""
    for room in rooms:
        caches = (RealPool(room), LRU(room), LRU(room, is_deepest_first=True))
        yield room, [hit_rate(requests, cache) for cache in caches]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row a size."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--requests", type=int, help="the first so many; default: all")
    chosen = parser.parse_args(arguments)
    print(f"{'blocks':>8} {'pool':>7} {'LRU':>7} {'deepest':>8} {'pool/LRU':>9}")
    for room, (pool, lru, deepest) in rows(
        requests_of(chosen.trace, chosen.requests), chosen.blocks
    ):
        ratio = pool / lru if lru else float("nan")
        print(f"{room:8} {pool:7.3f} {lru:7.3f} {deepest:8.3f} {ratio:9.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
