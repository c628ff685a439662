"""`peercache bench local`: one machine, separate processes, every figure beside its limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import attrs
import numpy as np

from peercache.cli.bench import limits
from peercache.cli.demo.processes import READY_TIMEOUT_S, NodeProcess, NodeProcesses
from peercache.client.client import Client
from peercache.client.home import POPULATING
from peercache.model.keys import KEY_BYTES
from peercache.net.echo import round_trips_s, serve_echo
from peercache.wire.messages.directory import Located, Lookup

ROUNDS = 3
"""Each figure is the median of so many, taken in turn with its limit: machines are noisy."""

RTT_TRIPS = 500

ASK_S = 5.0
"""How long one question of the control plane may take."""


@attrs.frozen
class Plan:
    """What is measured. pages × page_bytes is the working set."""

    fabric: str
    page_bytes: int
    batch: int
    pages: int
    seconds: float


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        """Start it and wait until its working set is there."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peercache.cli.bench.engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._exchange({"page_bytes": plan.page_bytes, "pages": plan.pages, "batch": plan.batch})

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def __enter__(self) -> EngineProcess:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.close()

    def do(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Have one thing done; return what it measured."""
        return self._exchange({"do": action, **arguments})

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run_local(plan: Plan, progress: Callable[[str], None]) -> dict[str, float]:
    """Measure everything; return the figures by their names."""
    with NodeProcesses(log_folder=None) as processes:
        nodes = _start_nodes(processes, plan)
        engine = EngineProcess(plan)
        try:
            return _measure(plan, nodes, engine, progress)
        finally:
            engine.close()


def _start_nodes(processes: NodeProcesses, plan: Plan) -> list[NodeProcess]:
    """Start a node with room for two working sets, a small one, and one for half of a set."""
    working_set = plan.pages * plan.page_bytes
    cluster = f"bench-{os.getpid()}-{time.time_ns()}"
    pools = (2 * working_set, 64 * 2**20, working_set // 2)
    nodes: list[NodeProcess] = []
    for name, pool in zip("abc", pools, strict=True):
        settings = {
            "cluster": cluster,
            "listen": "127.0.0.1:0",
            "pool-size": str(pool),
            "metrics-port": "0",
            "log-level": "warning",
        }
        if nodes:
            settings["discovery-addr"] = nodes[0].ready["control"]
        node = processes.launch(name, settings)
        processes.await_ready(node)
        node.ready["cluster"] = cluster
        nodes.append(node)
    return nodes


def _measure(
    plan: Plan, nodes: list[NodeProcess], engine: EngineProcess, progress: Callable[[str], None]
) -> dict[str, float]:
    def settings(node: NodeProcess, **more: Any) -> dict[str, Any]:
        return {
            "cluster": node.ready["cluster"], "home": node.home, "fabric": plan.fabric,
            "op_timeout_s": 30.0, "exists_timeout_s": 5.0, **more,
        }  # fmt: skip

    first, second, third = nodes
    engine.do("open", name="writer", settings=settings(first))
    engine.do("open", name="reader", settings=settings(second))
    engine.do("open", name="full", settings=settings(third))
    engine.do("open", name="cold", settings=settings(second, location_cache_entries=0))
    engine.do("open", name="tcp", settings=settings(second, fabric="tcp"))
    _await_members(first, settings(first), 3)
    # The first pass over fresh memory measures the kernel's zeroing, not us.
    engine.do("copy")
    engine.do("store", client="writer")
    engine.do("set", client="full", seconds=0.0, clear=False)
    samples: dict[str, list[float]] = {}

    def sample(name: str, figure: float) -> None:
        samples.setdefault(name, []).append(figure)

    wrong_bytes = 0.0
    for number in range(ROUNDS):
        progress(f"round {number + 1} of {ROUNDS}")
        for busy in (False, True):
            suffix = "_busy" if busy else ""
            engine.do("busy", on=busy)
            if not busy:
                sample("limit_copy_gb_s", engine.do("copy")["gb_s"])
            answer = engine.do("set", client="writer", seconds=plan.seconds, clear=True)
            sample(f"set{suffix}_gb_s", answer["gb_s"])
            sample(f"set{suffix}_p99_ms", answer["p99_ms"])
            if not busy:
                full = engine.do("set", client="full", seconds=plan.seconds, clear=False)
                sample("set_full_gb_s", full["gb_s"])
                sample("limit_tcp_gb_s", _stream_gb_s(plan, engine))
            # What was measured while busy may have stopped in the middle of the working set.
            engine.do("store", client="writer")
            read = engine.do("get", client="reader", seconds=plan.seconds)
            sample(f"get{suffix}_gb_s", read["gb_s"])
            sample(f"get{suffix}_p99_ms", read["p99_ms"])
            sample("misses", read["missed"])
            wrong_bytes += read["wrong_bytes"]
        engine.do("busy", on=False)
        sample("limit_rtt_us", _rtt_us(first))
        sample("exists_cold_us", engine.do("exists", client="cold")["us"])
        hot = engine.do("exists", client="reader")
        sample("exists_hot_us", hot["us"])
        sample("exists_hot_p99_us", hot["p99_us"])
        reading = {"client": "tcp", "seconds": plan.seconds}
        sample("control_p99_ms", _control_p99_ms(engine, settings(first), "get", reading))
        streaming = {"seconds": plan.seconds}
        sample(
            "limit_control_p99_ms", _control_p99_ms(engine, settings(first), "stream", streaming)
        )
    figures = {name: statistics.median(values) for name, values in samples.items()}
    figures["wrong_bytes"] = wrong_bytes
    engine.do("close")
    return _with_ratios(plan, figures)


def _with_ratios(plan: Plan, figures: dict[str, float]) -> dict[str, float]:
    copy, tcp = figures["limit_copy_gb_s"], figures["limit_tcp_gb_s"]
    reading = tcp if plan.fabric == "tcp" else copy
    figures["get_ratio"] = figures["get_gb_s"] / reading
    figures["get_busy_ratio"] = figures["get_busy_gb_s"] / reading
    figures["set_ratio"] = figures["set_gb_s"] / copy
    figures["set_busy_ratio"] = figures["set_busy_gb_s"] / copy
    figures["set_full_ratio"] = figures["set_full_gb_s"] / copy
    figures["exists_hot_trips"] = figures["exists_hot_us"] / figures["limit_rtt_us"]
    figures["exists_cold_trips"] = figures["exists_cold_us"] / figures["limit_rtt_us"]
    return figures


def _await_members(node: NodeProcess, settings: dict[str, Any], count: int) -> None:
    with Client.open(**settings) as client:
        until = time.monotonic() + READY_TIMEOUT_S
        while client.stats().get("home_members_alive") != count:
            if time.monotonic() > until:
                raise RuntimeError(f"node {node.name} does not see {count} members")
            time.sleep(0.05)


def _stream_gb_s(plan: Plan, engine: EngineProcess) -> float:
    """Receive the engine's working set over one raw connection."""
    target = np.zeros(plan.pages * plan.page_bytes, np.uint8)
    target[:] = 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = threading.Thread(target=engine.do, args=("send_stream",), kwargs={"port": port})
        sender.start()
        rate = limits.receive_stream(listener, target)
        sender.join()
    return rate


def _rtt_us(node: NodeProcess) -> float:
    url = f"ipc://{node.home.removeprefix('ipc://')}.echo"
    server = multiprocessing.get_context("spawn").Process(target=serve_echo, args=(url,))
    server.start()
    try:
        time.sleep(0.5)
        return limits.median_us(round_trips_s(url, RTT_TRIPS))
    finally:
        server.terminate()
        server.join()


def _question_s(client: Client) -> float:
    """Ask the home node's directory for one page; return how long it took."""
    wiring = client._wiring  # noqa: SLF001 - the question alone, nothing of what a call adds
    home = wiring.home.tie.attached
    if home is None:
        raise RuntimeError("the home node was lost")
    question = ((home.incarnation, Lookup(0, bytes(KEY_BYTES))),)
    started = time.perf_counter()
    answer = wiring.asker.ask(question, time.monotonic() + ASK_S)[0]
    took_s = time.perf_counter() - started
    # No answer is one that took longer; another one would not have measured the directory.
    if answer is not None and not isinstance(answer, Located):
        raise RuntimeError(f"the home node answered {answer}")
    return took_s


def _await_populated() -> None:
    """Wait for what a new client does once: a second of the kernel's work on page tables."""
    for thread in threading.enumerate():
        if thread.name == POPULATING:
            thread.join(READY_TIMEOUT_S)


def _control_p99_ms(
    engine: EngineProcess, settings: dict[str, Any], action: str, arguments: dict[str, Any]
) -> float:
    """Ask the node while the engine is busy with something; return the p99 of its answers."""
    busy = threading.Thread(target=engine.do, args=(action,), kwargs=arguments)
    times: list[float] = []
    with Client.open(**{**settings, "location_cache_entries": 0}) as client:
        _await_populated()
        busy.start()
        while busy.is_alive():
            times.append(_question_s(client))
            time.sleep(0.002)
        busy.join()
    return limits.percentile(times, 0.99) * 1e3
