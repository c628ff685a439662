"""`peercache bench tax`: what a node that serves pages takes from a Python-bound thread.

The engine's thread is pinned to one processor and everything else to the others, the node's threads
in the engine's process included: what is measured is the interpreter's lock and not a fight for
cores. What is left of that fight (caches, memory, interrupts) is measured beside it: a raw stream
of the same rate between two threads of another process.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from peercache.cli.bench.local import EngineProcess, Plan
from peercache.cli.demo.processes import NodeProcesses
from peercache.errors import ConfigError

ROUNDS = 5
SERVED_GB_S = 1.0
"""What the node serves over tcp meanwhile: a tenth of a 100 Gbit/s link."""

SETTLE_S = 0.5


def run_tax(plan: Plan, progress: Callable[[str], None]) -> dict[str, float]:
    """Measure the embedded and the standalone shape; return shares of the thread's speed lost."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("bench", "wants two processors: one for the engine, one for the rest")
    figures: dict[str, float] = {}
    for shape in ("embedded", "standalone"):
        progress(shape)
        figures.update(_measure(plan, shape, cores))
    return figures


def _measure(plan: Plan, shape: str, cores: list[int]) -> dict[str, float]:
    with NodeProcesses(log_folder=None) as processes:
        settings = {
            "cluster": f"tax-{os.getpid()}-{time.time_ns()}",
            "listen": "127.0.0.1:0",
            "pool-size": str(2 * plan.pages * plan.page_bytes),
            "metrics-port": "0",
            "log-level": "warning",
        }
        node = processes.launch("a", settings)
        processes.await_ready(node)
        cluster, control = settings["cluster"], node.ready["control"]
        with EngineProcess(plan) as engine, EngineProcess(plan) as reader:
            for process in (node.process.pid, reader.pid):
                _pin(process, cores[1:])
            shared = {"cluster": cluster, "op_timeout_s": 30.0, "exists_timeout_s": 5.0}
            mine = (
                {"discovery_addr": control, "listen": "127.0.0.1:0", "advertise": "127.0.0.1"}
                | {"pool_size": 2 * plan.pages * plan.page_bytes}
                if shape == "embedded"
                else {"home": node.home}
            )
            engine.do("open", name="engine", settings={**shared, **mine})
            keys = engine.do("store", client="engine")["keys"]
            reader.do("open", name="tcp", settings={**shared, "home": node.home, "fabric": "tcp"})
            reader.do("adopt", client="tcp", keys=keys)
            # Now that the node's threads are there. A process's first thread has its number.
            _pin(engine.pid, cores[1:], besides=engine.pid)
            os.sched_setaffinity(engine.pid, cores[:1])
            return _spin(plan, shape, engine, reader)


def _spin(plan: Plan, shape: str, engine: EngineProcess, reader: EngineProcess) -> dict[str, float]:
    lost: list[float] = []
    floor: list[float] = []
    served: list[float] = []
    for _ in range(ROUNDS):
        alone = engine.do("spin", seconds=plan.seconds)["loops_a_second"]
        beside, answer = _spin_beside(plan, engine, reader, "get", client="tcp")
        if answer["missed"] or answer["wrong_bytes"]:
            raise RuntimeError(f"the reader missed {answer['missed']} pages")
        lost.append(1 - beside / alone)
        served.append(answer["wall_gb_s"])
        beside, _ = _spin_beside(plan, engine, reader, "stream")
        floor.append(1 - beside / alone)
    return {
        f"tax_{shape}": statistics.median(lost),
        f"tax_{shape}_floor": statistics.median(floor),
        f"tax_{shape}_served_gb_s": statistics.median(served),
    }


def _spin_beside(
    plan: Plan, engine: EngineProcess, reader: EngineProcess, action: str, **arguments: str
) -> tuple[float, dict[str, float]]:
    """Let the engine compute while the reader is busy; return its speed and the reader's answer."""
    answer: dict[str, float] = {}

    def read() -> None:
        seconds = plan.seconds + 2 * SETTLE_S
        answer.update(reader.do(action, seconds=seconds, at_most_gb_s=SERVED_GB_S, **arguments))

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(SETTLE_S)
    speed = engine.do("spin", seconds=plan.seconds)["loops_a_second"]
    reading.join()
    return speed, answer


def _pin(process: int, cores: list[int], *, besides: int = 0) -> None:
    """Let every thread of a process but one run on these processors only."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        if int(thread.name) != besides:
            os.sched_setaffinity(int(thread.name), cores)
