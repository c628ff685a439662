"""`python -m benchmarks.peers`: PeerCache compared with other stores that install on this machine.

Three nodes and three engines of each store are processes of their own on one machine. The stores
take turns at each step, in an order that rotates, and the machine's memory copy is measured in the
same rounds: so a temporary slowdown of the machine affects all of them. Every byte that a get
returns is compared with what was set.

`make peers` keeps the figures for the documentation.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks import peers_report
from benchmarks.peers_clusters import (
    Cluster,
    NotInstalled,
    Overdue,
    Size,
    StoreFailed,
    start,
    version,
)
from benchmarks.peers_install import LEFT_OUT, RECIPES
from peercache.cli.bench.limits import percentile
from peercache.cli.main import run
from peercache.cli.terminal import show_progress
from peercache.errors import PeerCacheError

MIB = 2**20
OURS = "ours"

ASKED_PAGE_BYTES = 16 * 1024
"""Size of pages that are only looked up, so that their bytes do not matter."""

HUNG_S = 15.0
"""The longest wait for a call with a dead or paused node."""

TURN_S = 0.2
"""The shortest time between rounds of set, exists and get with such a node."""

BUSY_ROUNDS = 3
"""Each takes seconds."""

FAULT_S = 15.0
"""How long the turns with a dead or paused node may take, without the last call."""

SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}

FAULTS = ("stopped", "killed")

NO_FAULT = "running"
"""The same calls with three nodes that run: what the times with a failed node are compared with."""

POOL_BYTES = 1024 * MIB
"""Of each node, so that the pools and engines of four stores fit into 24 GB. Mooncake refuses
segments below 64 MiB."""


@attrs.frozen
class Plan:
    """How much to measure. calls: of each exists; known_calls: with keys that are stored."""

    sizes: tuple[Size, ...]
    asked: Size
    rounds: int
    calls: int
    fault_rounds: int
    fault_turns: int
    busy_s: float
    faults: tuple[str, ...] = FAULTS

    @property
    def known_calls(self) -> int:
        """The number of batches of 128 keys in the pages of `asked`."""
        return min(self.calls, self.asked.total_bytes // self.asked.page_bytes // 128)


def full_plan() -> Plan:
    """Return the plan of the documentation: about nine minutes."""
    total = 256 * MIB
    shapes = ((MIB, 32), (MIB, 128), (128 * 1024, 32), (64 * 1024, 128))
    return Plan(
        sizes=tuple(Size(page_bytes, batch, total) for page_bytes, batch in shapes),
        asked=Size(ASKED_PAGE_BYTES, 128, 64 * MIB),
        rounds=5, calls=100, fault_rounds=2, fault_turns=16, busy_s=2.5,
    )  # fmt: skip


def quick_plan() -> Plan:
    """Return a small plan, to test that everything works; its figures are meaningless."""
    return Plan(
        sizes=(Size(64 * 1024, 32, 8 * MIB),), asked=Size(ASKED_PAGE_BYTES, 128, 4 * MIB),
        rounds=1, calls=10, fault_rounds=1, fault_turns=3, busy_s=0.5,
    )  # fmt: skip


@attrs.define(eq=False)
class Samples:
    """What was measured: the figures of each round, by row and by column."""

    figures: dict[str, dict[str, list[float]]] = attrs.Factory(dict)
    problems: list[str] = attrs.Factory(list)
    wrong: dict[str, int] = attrs.Factory(dict)
    short: dict[str, dict[str, list[float]]] = attrs.Factory(dict)

    def add(self, row: str, column: str, figure: float) -> None:
        """Record the figure of a round."""
        self.figures.setdefault(row, {}).setdefault(column, []).append(figure)

    def add_share(self, row: str, column: str, answer: dict[str, Any]) -> None:
        """Record which share of the pages was stored, found or fetched."""
        self.wrong[column] = self.wrong.get(column, 0) + answer.get("wrong", 0)
        share = answer["done"] / max(1, answer["pages"])
        self.short.setdefault(row, {}).setdefault(column, []).append(share)

    def problem(self, text: str) -> None:
        """Record a problem, once."""
        if text not in self.problems:
            self.problems.append(text)
            show_progress(text)

    def summary(self) -> dict[str, Any]:
        """Return the median, minimum and maximum of each figure, and the share of the pages."""
        rows: dict[str, Any] = {}
        for row, columns in self.figures.items():
            rows[row] = {
                column: {
                    "median": statistics.median(values), "least": min(values),
                    "greatest": max(values),
                }
                for column, values in columns.items()
            }  # fmt: skip
            for column, shares in self.short.get(row, {}).items():
                rows[row][column]["share"] = statistics.mean(shares)
        return rows


def column(cluster: Cluster, fabric: str = "") -> str:
    """Return the column of a store: ours has one for each fabric."""
    return f"{OURS} {fabric}" if fabric else cluster.store


class Measuring:
    """One run: a plan, the stores that take turns, and what was measured."""

    def __init__(self, plan: Plan, stores: list[str], folder: Path) -> None:
        """Start without figures."""
        self.plan, self.stores, self.folder = plan, list(stores), folder
        self.samples = Samples()
        self.seconds: dict[str, float] = {}
        """The duration of each part."""
        self._counts = False
        """Whether the round is measured, not a warm-up."""

    def run(self, parts: tuple[str, ...]) -> None:
        """Measure these parts."""
        for part in parts:
            began_s = time.monotonic()
            getattr(self, f"_{part}_part")()
            self.seconds[part] = time.monotonic() - began_s

    def _pages_part(self) -> None:
        for size in self.plan.sizes:
            show_progress(f"set and get, {size.name}")
            self._in_rounds(size, self.plan.rounds, self._moving, ("set", "get"), ("full",))

    def _exists_part(self) -> None:
        show_progress("exists")
        self._in_rounds(self.plan.asked, self.plan.rounds, self._asking, ASKING)

    def _busy_part(self) -> None:
        show_progress("exists while a node serves at full rate")
        rounds = min(BUSY_ROUNDS, self.plan.rounds)
        self._in_rounds(self._first_size(), rounds, self._busy, ("prepare", "busy"))

    def _faults_part(self) -> None:
        for fault in self.plan.faults:
            for number in range(self.plan.fault_rounds):
                show_progress(f"with a {fault} node, round {number + 1}")
                for store in self._turns(number):
                    self._with_fault(fault, store)

    def _first_size(self) -> Size:
        return self.plan.sizes[0]

    def _turns(self, number: int) -> list[str]:
        """Return the stores in the order of a round: each is first in its turn."""
        first = number % len(self.stores)
        return self.stores[first:] + self.stores[:first]

    def _start(self, store: str, size: Size, more_bytes: int = 0) -> Cluster | None:
        pool_bytes = max(POOL_BYTES, size.total_bytes * 2 + more_bytes)
        try:
            return start(store, size, pool_bytes, self.folder)
        except (StoreFailed, OSError, NotInstalled) as error:
            self.samples.problem(f"{store} did not start: {error}")
            return None

    def _in_rounds(
        self,
        size: Size,
        rounds: int,
        measure: Callable[[Cluster, Size, str], None],
        *phases: tuple[str, ...],
    ) -> None:
        """Let the stores take turns at each step; the first round of a phase warms them up."""
        with ExitStack() as stack:
            clusters: dict[str, Cluster] = {}
            for store in self.stores:
                cluster = self._start(store, size)
                if cluster is not None:
                    stack.callback(cluster.close)
                    clusters[store] = cluster
            for steps in phases:
                for number in range(rounds + 1):
                    self._counts = number > 0
                    if self._counts and clusters:
                        copier = next(iter(clusters.values())).writer
                        self.samples.add(f"copy {size.name}", "machine", copier.do("copy"))
                    for step in steps:
                        for store in self._turns(number):
                            if store in clusters:
                                self._guarded(clusters, store, measure, size, step)

    def _guarded(
        self,
        clusters: dict[str, Cluster],
        store: str,
        measure: Callable[[Cluster, Size, str], None],
        size: Size,
        step: str,
    ) -> None:
        try:
            measure(clusters[store], size, step)
        except StoreFailed as error:
            clusters[store].is_hung = True
            del clusters[store]
            self.samples.problem(f"{store}, {size.name}, {step}: {error}; not asked further")

    # --- set and get ------------------------------------------------------------------------------

    def _moving(self, cluster: Cluster, size: Size, step: str) -> None:
        if step == "set":
            cluster.writer.do("clear")
            answer = cluster.writer.do("set", generation=cluster.next_generation())
            self._rate(f"set {size.name}", column(cluster), size, answer)
        elif step == "get":
            for fabric in cluster.fabrics:
                answer = cluster.reader.do("get", generation=cluster.generation, fabric=fabric)
                self._rate(f"get {size.name}", column(cluster, fabric), size, answer)
        else:
            sets = 1 if self._counts else math.ceil(1.1 * cluster.capacity / size.total_bytes)
            for _ in range(sets):  # The first round fills the pool.
                answer = cluster.writer.do("set", generation=cluster.next_generation())
            self._rate(f"set full {size.name}", column(cluster), size, answer)

    def _rate(self, row: str, name: str, size: Size, answer: dict[str, Any]) -> None:
        """Record the rate of the median call; pages that were refused or missed do not count."""
        if self._counts:
            done = answer["done"] / max(1, answer["pages"])
            median_s = statistics.median(answer["seconds"])
            self.samples.add(row, name, done * size.batch_bytes / median_s / 1e9)
            self.samples.add_share(row, name, answer)

    # --- exists -----------------------------------------------------------------------------------

    def _asking(self, cluster: Cluster, size: Size, step: str) -> None:
        del size
        calls, known_calls = self.plan.calls, self.plan.known_calls
        generation = cluster.generation
        if step == "prepare":
            cluster.writer.do("clear")
            cluster.writer.do("set", generation=cluster.next_generation())
            return
        if step == "exists known":
            answer = cluster.reader.do("exists_known", generation=generation, calls=known_calls)
        elif step == "exists hot":
            answer = cluster.reader.do("exists_hot", generation=generation, calls=calls)
        else:
            how = step.split(maxsplit=1)[0]
            answer = cluster.reader.do("exists_unknown", calls=calls, how=how)
        if self._counts and answer["seconds"]:
            self._times(step, column(cluster), answer)

    def _times(self, row: str, name: str, answer: dict[str, Any]) -> None:
        seconds = answer["seconds"]
        self.samples.add(row, name, statistics.median(seconds) * 1e6)
        self.samples.add(f"{row} p99", name, percentile(seconds, 0.99) * 1e6)
        self.samples.add_share(row, name, answer)

    def _busy(self, cluster: Cluster, size: Size, step: str) -> None:
        """Ask from a third engine while the writer's node serves the reader over tcp."""
        if step == "prepare":
            cluster.writer.do("clear")
            cluster.writer.do("set", generation=cluster.next_generation())
            return
        seconds, fabric = self.plan.busy_s, cluster.fabrics[-1]
        cluster.reader.begin(
            "get_for", generation=cluster.generation, fabric=fabric, seconds=seconds
        )
        try:
            time.sleep(seconds / 10)
            calls = max(1, int(seconds * 0.8 / 0.005 / 2))
            answer = cluster.third.do("exists_unknown", calls=calls, pause_s=0.005)
        finally:
            served = cluster.reader.finish()
        if self._counts:
            self._times("exists busy", column(cluster), answer)
            self.samples.add("served busy", column(cluster), served["gb_s"])
        del size

    # --- with a node that died, or is paused ------------------------------------------------------

    def _with_fault(self, fault: str, store: str) -> None:
        size = attrs.evolve(self._first_size(), total_bytes=self._first_size().total_bytes // 4)
        # Sets in the meantime do not evict pages that are read.
        cluster = self._start(store, size, self.plan.fault_turns * size.batch_bytes)
        if cluster is None:
            return
        try:
            kept = cluster.next_generation()
            cluster.writer.do("set", generation=kept)
            for fabric in cluster.fabrics:  # A slow first call is not caused by the fault.
                cluster.reader.do("get", generation=kept, fabric=fabric)
            cluster.reader.do("exists_unknown", calls=10)
            if fault in SIGNALS:
                cluster.third_node(SIGNALS[fault])
            self._calls_with_fault(fault, cluster, size, kept)
        except StoreFailed as error:
            cluster.is_hung = True
            self.samples.problem(f"{store}, with a {fault} node: {error}")
        finally:
            cluster.close()

    def _calls_with_fault(self, fault: str, cluster: Cluster, size: Size, kept: int) -> None:
        """Set, get and ask in turn for some seconds after the fault; record the longest calls."""
        name = column(cluster)
        answers: dict[str, list[dict[str, Any]]] = {"set": [], "get": [], "exists": []}
        until = time.monotonic() + FAULT_S
        for number in range(self.plan.fault_turns):
            began_s = time.monotonic()
            if began_s > until:
                break
            for call, ask in self._calls(cluster, kept, number):
                try:
                    answers[call].append(ask())
                except Overdue:  # noqa: PERF203 - some dozens of calls
                    self.samples.add(f"{fault} {call} longest", name, HUNG_S * 1e3)
                    raise
            time.sleep(max(0.0, began_s + TURN_S - time.monotonic()))
        for call, taken in answers.items():
            seconds = [answer["seconds"][0] for answer in taken]
            row = f"{fault} {call} longest"
            self.samples.add(row, name, max(seconds) * 1e3)
            both = {key: sum(answer[key] for answer in taken) for key in ("done", "pages")}
            both["wrong"] = sum(answer.get("wrong", 0) for answer in taken)
            self.samples.add_share(row, name, both)
            median_s = statistics.median(seconds)
            if call == "exists":
                self.samples.add(f"{fault} exists", name, median_s * 1e6)
            else:
                done = both["done"] / max(1, both["pages"])
                rate = done * size.batch_bytes / median_s / 1e9
                self.samples.add(f"{fault} {call}", name, rate)

    @staticmethod
    def _calls(
        cluster: Cluster, kept: int, number: int
    ) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield the calls of one turn; each is timed by the engine."""
        generation = cluster.next_generation()
        one: dict[str, Any] = {"count": 1, "limit_s": HUNG_S}
        fabric = cluster.fabrics[-1]
        yield "set", lambda: cluster.writer.do("set", generation=generation, first=number, **one)
        yield "exists", lambda: cluster.reader.do("exists_unknown", calls=1, limit_s=HUNG_S)
        yield (
            "get",
            lambda: cluster.reader.do(
                "get", generation=kept, fabric=fabric, first=number, ask=False, **one
            ),
        )


ASKING = ("prepare", "exists known", "exists hot", "exists unknown", "contains unknown")

PARTS = ("pages", "exists", "busy", "faults")


def measure(plan: Plan, stores: list[str], parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Measure PeerCache and these stores; return figures as peers_report shows them."""
    versions: dict[str, str] = {}
    missing = dict(LEFT_OUT)
    for store in [OURS, *stores]:
        try:
            versions[store] = version(store)
        except NotInstalled as error:  # noqa: PERF203 - a handful of stores
            missing[store] = f"cannot be installed here: {error}"
    started = time.monotonic()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="peercache-peers-") as folder:
        measuring = Measuring(plan, list(versions), Path(folder))
        measuring.run(parts)
    samples = measuring.samples
    return {
        "rows": samples.summary(),
        "versions": versions,
        "missing": missing,
        "problems": samples.problems,
        "wrong_pages": samples.wrong,
        "rounds": plan.rounds,
        "fault_rounds": plan.fault_rounds,
        "sizes": [attrs.asdict(size) | {"name": size.name} for size in plan.sizes],
        "hung_ms": HUNG_S * 1e3,
        "processors": len(os.sched_getaffinity(0)),
        "machine": _processor(),
        "load_average": load,
        "minutes": (time.monotonic() - started) / 60,
        "seconds": {part: round(took) for part, took in measuring.seconds.items()},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@click.command
@click.option("--quick", is_flag=True, help="Little data, one round: to see that it works.")
@click.option(
    "--compare", type=click.Choice([*RECIPES, "none"]), multiple=True,
    help="Measure only these stores in comparison, or none; default: all of them.",
)  # fmt: skip
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True,
    help="Measure these parts only; default: all of them.",
)  # fmt: skip
@click.option(
    "--fault", "faults", type=click.Choice([*FAULTS, NO_FAULT]), multiple=True,
    help="What the third node does in the part `faults`; default: it is stopped, and killed.",
)  # fmt: skip
@click.option("--fault-rounds", type=click.IntRange(1), help="Rounds of the part `faults`.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures into this file too.",
)  # fmt: skip
def peers(
    *,
    quick: bool,
    compare: tuple[str, ...],
    parts: tuple[str, ...],
    faults: tuple[str, ...],
    fault_rounds: int | None,
    json_file: Path | None,
) -> None:
    """Compare PeerCache with the other stores that install here."""
    stores = [store for store in compare or RECIPES if store != "none"]
    plan = quick_plan() if quick else full_plan()
    plan = attrs.evolve(
        plan, faults=faults or plan.faults, fault_rounds=fault_rounds or plan.fault_rounds
    )
    figures = measure(plan, stores, parts or PARTS)
    print(peers_report.text(figures))
    if any(count for name, count in figures["wrong_pages"].items() if name.startswith(OURS)):
        raise PeerCacheError("a page of PeerCache had other bytes than were set")
    if any(problem.startswith(OURS) for problem in figures["problems"]):
        raise PeerCacheError("PeerCache did not do what was asked, as it says above")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(run(peers, "benchmarks.peers", sys.argv[1:]))
