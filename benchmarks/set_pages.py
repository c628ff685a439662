"""`python -m benchmarks.set_pages`: the speed of sets, compared with memory copies of the same run.

Every figure is the median of sets that alternate with copies of the same bytes, so that a
temporarily slower machine affects both. A second column has the fastest fifth of both: on a shared
machine, it is more meaningful. Pages are read back and compared, outside the timed part.

Nodes are processes on this machine. By default each owns the record of every page, as on up to 8
hosts: a set waits for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

from benchmarks.engine import start_cluster
from peercache.cli.bench import limits
from peercache.cli.bench.engine import Engine, WorkingSet
from peercache.cli.processes import READY_TIMEOUT_S, NodeProcess, NodeProcesses
from peercache.client.bridge import Bridge
from peercache.client.client import Client
from peercache.net.requests import Talk
from peercache.paths.write import ClientReservations
from peercache.wire.messages.pool import Commit, Reserve

KIB, MIB = 2**10, 2**20

SIZES = (WorkingSet(MIB, 256, 128), WorkingSet(MIB, 64, 32), WorkingSet(64 * KIB, 256, 128))
"""Two batches each: SGLang's batch, a smaller one, and small pages."""

FRESH_BYTES = FULL_BYTES = 2048 * MIB
SMALL_BYTES = 16 * MIB
"""Pool sizes: of nodes that are set into, and of nodes that only own records. A 32nd of a pool may
be reserved ahead: two batches of 32 MiB. Larger pools, as engines have, are hardly faster."""

SETTLED_S = 2.5
"""Time until a new client has populated its page tables."""

WHOLE_BYTES = 2**62
"""The minimum size of a portion, so that there is only one."""

STOPPED_SETS = 6
"""Sets after the first one while a node is paused, before it counts as dead."""

VARIANTS = ("", "one portion", "no slots ahead")
"""Rows without one part, which alternate with the others, to measure the benefit of that part."""

STEPS = ("reserve_step_ms", "copy_step_ms", "commit_step_ms", "other_step_ms")


@attrs.define(eq=False)
class Row:
    """The samples of one row, in seconds. steps: of each set, by name; missed: when read back."""

    name: str
    sets: list[float] = attrs.field(factory=list)
    copies: list[float] = attrs.field(factory=list)
    steps: list[dict[str, float]] = attrs.field(factory=list)
    faults: list[int] = attrs.field(factory=list)
    missed: float = 0.0

    def figures(self, batch_bytes: int) -> dict[str, float]:
        """Return the figures to print."""
        found = {
            "set_ms": at(self.sets, 0.5) * 1e3,
            "copy_ms": at(self.copies, 0.5) * 1e3,
            "gb_s": batch_bytes / at(self.sets, 0.5) / 1e9,
            "ratio": at(self.copies, 0.5) / at(self.sets, 0.5),
            "ratio_fastest_fifth": at(self.copies, 0.2) / at(self.sets, 0.2),
            "set_p99_ms": at(self.sets, 0.99) * 1e3,
            "missed": self.missed,
            "page_faults": float(np.median(self.faults)),
        }
        for step in STEPS:
            found[step] = at([steps.get(step, 0.0) for steps in self.steps], 0.5) * 1e3
        return found


def at(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return limits.percentile(values, share)


class Steps:
    """How long each step of a set took, in the thread that waits for it."""

    def __init__(self) -> None:
        """Start without times."""
        self.took: dict[str, float] = {}
        self._names: dict[int, str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time the steps of every call within the block."""
        do, submit, collect = Bridge._do, Talk.send, Talk.collect  # noqa: SLF001

        def do_timed(bridge: Any, step: Any, segment: Any) -> Any:
            questions = getattr(step, "questions", ())
            name = self._named(questions[0][1]) if questions else "copy_step_ms"
            return self._timed(name, lambda: do(bridge, step, segment))

        def send_timed(talk: Any, peer: int, message: Any) -> int:
            name = self._named(message)
            number: int = self._timed(name, lambda: submit(talk, peer, message))
            self._names[number] = name
            return number

        def collect_timed(talk: Any, number: int, until: float) -> Any:
            return self._timed(self._names[number], lambda: collect(talk, number, until))

        patches = (
            (Bridge, "_do", do_timed, do),
            (Talk, "send", send_timed, submit),
            (Talk, "collect", collect_timed, collect),
        )
        try:
            for owner, name, timed, _ in patches:
                setattr(owner, name, timed)
            yield
        finally:
            for owner, name, _, right in patches:
                setattr(owner, name, right)

    def take(self, total_s: float) -> dict[str, float]:
        """Return the steps since the last call; the rest of `total_s` is the call's own time."""
        took, self.took = self.took, {}
        return {**took, "other_step_ms": total_s - sum(took.values())}

    def _named(self, message: Any) -> str:
        return {Reserve: "reserve_step_ms", Commit: "commit_step_ms"}.get(
            type(message), "other_step_ms"
        )

    def _timed(self, name: str, do: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return do()
        finally:
            if name != "other_step_ms":
                took_s = time.perf_counter() - started
                self.took[name] = self.took.get(name, 0.0) + took_s


class Cluster:
    """Nodes, and an engine of each size with a client at the fresh and at the full node."""

    def __init__(self, processes: NodeProcesses, count: int, replicas: str) -> None:
        """Start `count` nodes and wait until they see each other."""
        self.name = f"set-{os.getpid()}-{count}"
        self.count = count
        pools = {"fresh": FRESH_BYTES, "full": FULL_BYTES}
        pools |= {f"owner-{number}": SMALL_BYTES for number in range(count - 2)}
        owners = {"directory-replicas": replicas or str(count)}
        self.nodes = start_cluster(processes, self.name, pools, dict.fromkeys(pools, owners))
        self.owners: list[NodeProcess] = [
            node for name, node in self.nodes.items() if name.startswith("owner")
        ]
        self.replicas = replicas or count

    def engine(self, work: WorkingSet) -> Engine:
        """Return an engine with settled clients, and fill the full pool with its pages."""
        engine = Engine(work)
        for pool in ("fresh", "full"):
            engine.open(
                pool,
                {
                    "cluster": self.name,
                    "home": self.nodes[pool].home,
                    "directory_replicas": self.replicas,
                    "op_timeout_s": 30.0,
                    "exists_timeout_s": 5.0,
                },
            )
            until = time.monotonic() + READY_TIMEOUT_S
            while engine.clients[pool].stats().get("home_members_alive") != self.count:
                if time.monotonic() > until:
                    raise TimeoutError(f"{pool} does not see {self.count} members")
                time.sleep(0.05)
        time.sleep(SETTLED_S)
        for _ in range(2 * FULL_BYTES // work.total_bytes):
            engine.store("full")
        engine.store("fresh")
        return engine


@attrs.frozen
class Run:
    """One run: its rounds, its output, and its results. wrong_bytes: the sum over all rows."""

    rounds: int
    say: Callable[[str], None]
    variants: tuple[str, ...] = ("",)
    rows: dict[str, dict[str, float]] = attrs.field(factory=dict)
    steps: Steps = attrs.field(factory=Steps)

    def measure(self, cluster: Cluster, work: WorkingSet, suffix: str = "") -> None:
        """Measure sets into the fresh and the full pool, each set after a copy."""
        engine = cluster.engine(work)
        name = f"{work.batch} x {work.page_bytes // KIB} KiB, {cluster.count} nodes{suffix}"
        rows = {
            (pool, variant): Row(f"{name}, {pool}{variant and ', ' + variant}")
            for variant in self.variants
            for pool in ("fresh", "full")
        }
        wrong_bytes = 0.0
        for number in range(self.rounds):
            self.say(f"{name}: round {number + 1} of {self.rounds}")
            for (pool, variant), row in rows.items():
                if pool == "fresh":
                    engine.clients[pool].clear()
                keys = engine.new_keys()
                with varied(engine.clients[pool], variant):
                    if len(self.variants) > 1:
                        # The row before may have left slots ahead, which do not belong to this row.
                        self.one_set(engine, pool, engine.new_keys(), work.batches()[0], Row(""))
                    for some in work.batches():
                        self.one_set(engine, pool, keys, some, row)
                engine.stored = keys
                read = engine.get(pool, seconds=0.0)
                wrong_bytes += read["wrong_bytes"]
                row.missed += read["missed"]
        for row in rows.values():
            self.rows[row.name] = row.figures(work.batch * work.page_bytes)
            self.rows[row.name]["wrong_bytes"] = wrong_bytes
        engine.close()

    def measure_stopped(self, cluster: Cluster, work: WorkingSet) -> None:
        """Measure sets while one of the owners is paused, the first of them separately."""
        engine = cluster.engine(work)
        name = f"{work.batch} x {work.page_bytes // KIB} KiB, {cluster.count} nodes, one stopped"
        first, then = Row(f"{name}, first set"), Row(f"{name}, fresh")
        for node in cluster.owners[: max(1, self.rounds // 2)]:
            self.say(f"{name}: {node.name}")
            engine.clients["fresh"].clear()
            node.process.send_signal(signal.SIGSTOP)
            try:
                for number in range(1 + STOPPED_SETS):
                    some = work.batches()[number % len(work.batches())]
                    row = then if number else first
                    self.one_set(engine, "fresh", engine.new_keys(), some, row)
                    if number % 2:
                        engine.clients["fresh"].clear()
            finally:
                node.process.send_signal(signal.SIGCONT)
            time.sleep(SETTLED_S)
        for row in (first, then):
            self.rows[row.name] = row.figures(work.batch * work.page_bytes)
        engine.close()

    def one_set(self, engine: Engine, pool: str, keys: list[str], some: slice, row: Row) -> None:
        """Copy one batch, then set it."""
        work = engine.work
        span = slice(some.start * work.page_bytes, some.stop * work.page_bytes)
        batch_bytes = span.stop - span.start
        rate = limits.copy_gb_s(engine.source[span], engine.target[span], work.page_bytes)
        row.copies.append(batch_bytes / rate / 1e9)
        runs = work.runs(engine.source, some)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.steps.take(0.0)
        started = time.perf_counter()
        engine.clients[pool].batch_set_from(keys[some], runs)
        took_s = time.perf_counter() - started
        row.sets.append(took_s)
        row.steps.append(self.steps.take(took_s))
        row.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


@contextmanager
def varied(client: Client, variant: str) -> Iterator[None]:
    """Take one part out of every set within the block; "" takes none out."""
    writer = client._wiring.writer  # noqa: SLF001
    changes: dict[str, list[tuple[Any, str, Any]]] = {
        "": [],
        "one portion": [(writer, "_portion_bytes", WHOLE_BYTES)],
        "no slots ahead": [
            (ClientReservations, "ask_ahead", lambda *_: ()),
            (ClientReservations, "take_ahead", lambda *_: None),
        ],
    }
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes[variant]]
    for owner, name, value in changes[variant]:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, right in before:
            setattr(owner, name, right)


def measure_all(
    rounds: int,
    replicas: str,
    nodes: int,
    say: Callable[[str], None],
    variants: tuple[str, ...] = ("",),
) -> dict[str, dict[str, float]]:
    """Measure every row; return the figures of each by its name."""
    run = Run(rounds, say, variants)
    with run.steps.watched():
        with NodeProcesses() as processes:
            three = Cluster(processes, 3, replicas)
            for work in SIZES:
                run.measure(three, work)
        with NodeProcesses() as processes:
            many = Cluster(processes, nodes, replicas)
            run.measure(many, SIZES[0])
            run.measure_stopped(many, SIZES[0])
    return run.rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return the rows as readable text."""
    head = f"{'ms':<62}{'set':>8}{'copy':>8}{'ratio':>8}{'fastest':>9}{'p99':>8}"
    lines = [head + "".join(f"{step.removesuffix('_step_ms'):>9}" for step in STEPS)]
    for name, row in rows.items():
        shown = f"{row['set_ms']:8.1f}{row['copy_ms']:8.1f}{row['ratio']:8.2f}"
        shown += f"{row['ratio_fastest_fifth']:9.2f}{row['set_p99_ms']:8.1f}"
        lines.append(f"{name:<62}{shown}" + "".join(f"{row[step]:9.2f}" for step in STEPS))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.set_pages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of two sets a row; 20")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the larger cluster; 8")
    parser.add_argument("--replicas", default="", help="owners of a record; every node")
    parser.add_argument(
        "--variants", action="store_true", help="and without portions, and without slots ahead"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    rows = measure_all(
        arguments.rounds,
        arguments.replicas,
        arguments.nodes,
        variants=VARIANTS if arguments.variants else VARIANTS[:1],
        say=lambda text: print(f"\r{text:<70}", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
