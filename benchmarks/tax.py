"""`python -m benchmarks.tax`: how much a node that serves pages slows a Python-bound thread.

The engine's thread is pinned to one processor and every other thread to the others, also the node's
threads in the engine's process. So the loss is caused by the GIL, not by competition for cores. The
remaining competition (caches, memory, interrupts) is measured separately: a raw stream of the same
rate between two threads of another process.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.engine import EngineProcess, paced_stream, start_cluster
from peercache.cli.bench.engine import POISON, Engine, WorkingSet
from peercache.cli.main import run
from peercache.cli.options import SizeType, json_option
from peercache.cli.processes import NodeProcesses
from peercache.cli.terminal import print_json, show_progress
from peercache.errors import ConfigError, PeerCacheError

ROUNDS = 5
SERVED_GB_S = 1.0
"""The rate that the node serves over tcp meanwhile: a tenth of a 100 Gbit/s link."""

SETTLE_S = 0.5


class TaxEngine(Engine):
    """An engine that computes in Python, and one that reads at a fixed rate."""

    def spin(self, *, seconds: float) -> float:
        """Return the turns a second of a Python loop, without the time it waited for a processor.

        That time was used by other processes of the machine, not by the node.
        """
        count = 0
        waited_s = _waited_s()
        began_s = now_s = time.perf_counter()
        while now_s < began_s + seconds:
            for _ in range(1000):
                count += 1
            now_s = time.perf_counter()
        # The real time, not the requested one: the last turns may have waited for long.
        return count / (now_s - began_s - (_waited_s() - waited_s))

    def get_paced(self, client: str, *, seconds: float) -> float:
        """Get the stored pages again and again, at SERVED_GB_S at most; return the rate."""
        cache, work = self.clients[client], self.work
        began = time.perf_counter()
        moved = 0
        while time.perf_counter() < began + seconds:
            self.target[:] = POISON
            hits: list[bool] = []
            for some in work.batches():
                hits += cache.batch_get_into(self.stored[some], work.runs(self.target, some))
                moved += (some.stop - some.start) * work.page_bytes
                due_s = moved / SERVED_GB_S / 1e9
                time.sleep(max(0.0, began + due_s - time.perf_counter()))
            if not all(hits) or self.wrong_bytes(hits):
                raise PeerCacheError(f"the reader missed {hits.count(False)} pages")
        return moved / (time.perf_counter() - began) / 1e9

    def stream_paced(self, *, seconds: float) -> float:
        """Move the working set over a raw stream, at SERVED_GB_S at most; return the rate."""
        return paced_stream(
            self.source,
            self.target,
            page_bytes=self.work.page_bytes,
            seconds=seconds,
            at_most_gb_s=SERVED_GB_S,
        )


def _waited_s() -> float:
    """Return how long this thread has waited for a processor, 0 if the kernel hides it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def run_tax(work: WorkingSet, seconds: float, progress: Callable[[str], None]) -> dict[str, float]:
    """Measure an embedded and a standalone node; return the lost shares of the thread's speed."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("bench", "requires two processors: one for the engine, one for the rest")
    figures: dict[str, float] = {}
    for shape in ("embedded", "standalone"):
        progress(shape)
        figures.update(_measure(work, seconds, shape, cores))
    return figures


def _measure(work: WorkingSet, seconds: float, shape: str, cores: list[int]) -> dict[str, float]:
    cluster = f"tax-{os.getpid()}-{time.time_ns()}"
    pool_bytes = 2 * work.total_bytes
    with NodeProcesses() as processes:
        node = start_cluster(processes, cluster, {"a": pool_bytes})["a"]
        with EngineProcess(work, TaxEngine) as engine, EngineProcess(work, TaxEngine) as reader:
            for process in (node.process.pid, reader.pid):
                _pin(process, cores[1:])
            shared: dict[str, Any] = {"cluster": cluster, "op_timeout_s": 30.0}
            shared["exists_timeout_s"] = 5.0
            mine: dict[str, Any] = {"home": node.home}
            if shape == "embedded":
                mine = {"embedded": True, "discovery_addr": node.ready["control"]}
                mine |= {"listen": "127.0.0.1:0", "advertise": "127.0.0.1", "pool_size": pool_bytes}
            engine.do("open", name="engine", settings={**shared, **mine})
            engine.do("store", client="engine")
            reader.do("open", name="tcp", settings={**shared, "home": node.home, "fabric": "tcp"})
            reader.do("adopt", client="tcp")
            # Now the node's threads exist. A process's first thread has its number.
            _pin(engine.pid, cores[1:], other_than=engine.pid)
            os.sched_setaffinity(engine.pid, cores[:1])
            return _in_rounds(seconds, shape, engine, reader)


def _in_rounds(
    seconds: float, shape: str, engine: EngineProcess, reader: EngineProcess
) -> dict[str, float]:
    lost: list[float] = []
    floor: list[float] = []
    served: list[float] = []
    for _ in range(ROUNDS):
        alone = engine.do("spin", seconds=seconds)
        spun, rate = _spin_next_to(seconds, engine, reader, "get_paced", client="tcp")
        lost.append(1 - spun / alone)
        served.append(rate)
        spun, _ = _spin_next_to(seconds, engine, reader, "stream_paced")
        floor.append(1 - spun / alone)
    return {
        f"tax_{shape}": statistics.median(lost),
        f"tax_{shape}_floor": statistics.median(floor),
        f"tax_{shape}_served_gb_s": statistics.median(served),
    }


def _spin_next_to(
    seconds: float, engine: EngineProcess, reader: EngineProcess, action: str, **arguments: str
) -> tuple[float, float]:
    """Let the engine compute while the reader is busy; return its speed and the reader's rate."""
    rates: list[float] = []

    def read() -> None:
        rates.append(reader.do(action, seconds=seconds + 2 * SETTLE_S, **arguments))

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(SETTLE_S)
    speed: float = engine.do("spin", seconds=seconds)
    reading.join()
    if not rates:
        raise PeerCacheError("the reader failed, as it says above")
    return speed, rates[0]


def _pin(process: int, cores: list[int], *, other_than: int = 0) -> None:
    """Let every thread of a process but one run on these processors only."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        if int(thread.name) != other_than:
            os.sched_setaffinity(int(thread.name), cores)


@click.command
@click.option("--page-bytes", type=SizeType(multiple_of=8), default="1MiB", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--pages", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--seconds", type=float, default=2.0, show_default=True)
@json_option
def tax(page_bytes: int, batch: int, pages: int, seconds: float, *, as_json: bool) -> None:
    """Measure how much serving pages slows a Python-bound thread, embedded and standalone."""
    figures = run_tax(WorkingSet(page_bytes, pages, batch), seconds, show_progress)
    if as_json:
        print_json(figures)
        return
    for shape in ("embedded", "standalone"):
        lost, served = figures[f"tax_{shape}"], figures[f"tax_{shape}_served_gb_s"]
        floor = figures[f"tax_{shape}_floor"]
        print(f"  {shape:11} {lost:6.1%} of a Python thread, at {served:.2f} GB/s over tcp")
        print(f"  {'':11} {floor:6.1%} is lost to a raw stream of that rate elsewhere")


if __name__ == "__main__":
    sys.exit(run(tax, "benchmarks.tax", sys.argv[1:]))
