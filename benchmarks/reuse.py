"""`python -m benchmarks.reuse TRACE`: how exact the estimate of hit rates is, and what it costs.

A trace is as `peercache.cli.traces` describes it. A row for each size of memory, in blocks, up to
one that holds all of them: the share of blocks that an LRU of that size has, the deepest block of
a prompt first to go; the estimate from a sample, and its error; and the share of the leading runs
of an LRU that touches the blocks of a prompt in their order. In the first LRU the leading run is
all that it has of a prompt.

Then the time of a message of 128 pages in a pool, the actor alone, and what of it the sample takes:
of a set (Reserve and Commit) and of a read (Touched), in processor time, in the fastest of ten
rounds. The pool is full, and so is the sample.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.eviction import BATCH, RealPool
from peercache.actors.origin import Origin
from peercache.cli.operate.size import SIZES, reuse_of_trace
from peercache.cli.traces import LRU, Prompt, hit_rate, requests_of
from peercache.model.reuse import MEMORY, WAITING_MAX

POOL_PAGES = 65_536
ROUNDS = 10
TURNS = WAITING_MAX // BATCH
"""Batches of a round: the sample takes as many together."""
BATCHES_A_SECOND = 20
CLIENTS = 64


def print_errors(requests: Sequence[Prompt]) -> None:
    """Print a row for each size."""
    sample, held = reuse_of_trace(requests)
    print(f"{'blocks':>8} {'LRU':>7} {'estimate':>9} {'error':>7} {'in order':>9}")
    for step in reversed(range(SIZES)):
        room = held >> step
        exact = hit_rate(requests, LRU(room, is_deepest_first=True))
        (estimate,), in_order = sample.hit_rates([room]), hit_rate(requests, LRU(room))
        print(
            f"{room:8} {exact:7.3f} {estimate:9.3f} {estimate - exact:7.3f} {in_order:9.3f}",
            flush=True,
        )


class Timed:
    """A sample, and how long it was used."""

    def __init__(self, sample: Any) -> None:
        """Count from here."""
        self.sample, self.seconds = sample, 0.0
        for _ in range(TURNS):
            self._add(lambda: None)
        self.clock, self.seconds = self.seconds / TURNS, 0.0

    def use(self, *arguments: Any) -> None:
        """Use it."""
        self._add(self.sample.use, *arguments)

    def _add(self, function: Callable[..., None], *arguments: Any) -> None:
        began = time.thread_time()
        function(*arguments)
        self.seconds += time.thread_time() - began


def print_costs() -> None:
    """Print the time of a set and of a read, and what of it the sample takes."""
    pool, rng = RealPool(POOL_PAGES), np.random.default_rng(0)
    timed: Any = Timed(pool.pool.reuse)
    pool.pool.reuse = timed
    batches: list[Prompt] = []

    def ask(blocks: list[int]) -> None:
        # Within two seconds a client uses a page once.
        pool.client = Origin(1 + len(batches) % CLIENTS, 1)
        batches.append(Prompt(len(batches) / BATCHES_A_SECOND, blocks))
        pool.ask(batches[-1])

    def store() -> None:
        ask(rng.integers(0, 2**62, BATCH).tolist())

    def read() -> None:
        ask(batches[-1 - int(rng.integers(0, POOL_PAGES // BATCH // 2))].blocks)

    for _ in range(int(MEMORY[-1]) * POOL_PAGES // BATCH):
        store()
    for name, act in (("set", store), ("read", read)):
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            began, before = time.thread_time(), timed.seconds
            for _ in range(TURNS):
                act()
            rounds.append((time.thread_time() - began, timed.seconds - before))
        whole, part = (
            (min(times) / TURNS - timed.clock) * 1e6 for times in zip(*rounds, strict=True)
        )
        print(f"{name:>8} {whole:7.0f} µs, sample {part:5.1f} µs, {part / whole:.1%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reuse", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="*")
    for path in parser.parse_args(arguments).trace:
        print(path.name)
        print_errors(requests_of(path))
    print_costs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
