"""`peercache bench tax`: what a node that serves pages takes from a Python-bound thread.

The engine's thread is pinned to one processor and everything else to the others, so that what is
measured is the interpreter's lock and not a fight for cores.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from peercache.bench.local import EngineProcess, Plan
from peercache.demo.processes import NodeProcesses
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
            _pin([node.process.pid, reader.pid], cores[1:])
            _pin([engine.pid], cores[:1])
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
            return _spin(plan, shape, engine, reader)


def _spin(plan: Plan, shape: str, engine: EngineProcess, reader: EngineProcess) -> dict[str, float]:
    lost, served = [], []
    for _ in range(ROUNDS):
        alone = engine.do("spin", seconds=plan.seconds)["loops"]
        answer: dict[str, float] = {}

        def read(into: dict[str, float] = answer) -> None:
            into.update(
                reader.do(
                    "get",
                    client="tcp",
                    seconds=plan.seconds + 2 * SETTLE_S,
                    at_most_gb_s=SERVED_GB_S,
                )
            )

        reading = threading.Thread(target=read)
        reading.start()
        time.sleep(SETTLE_S)
        beside = engine.do("spin", seconds=plan.seconds)["loops"]
        reading.join()
        lost.append(1 - beside / alone)
        served.append(answer["wall_gb_s"])
        if answer["missed"] or answer["wrong_bytes"]:
            raise RuntimeError(f"the reader missed {answer['missed']} pages")
    return {
        f"tax_{shape}": statistics.median(lost),
        f"tax_{shape}_served_gb_s": statistics.median(served),
    }


def _pin(processes: Iterable[int], cores: list[int]) -> None:
    """Let every thread of these processes run on these processors only."""
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
