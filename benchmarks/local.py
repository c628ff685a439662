"""`python -m benchmarks.local`: one machine, separate processes, every figure with its limit."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import attrs
import click
import numpy as np

from benchmarks.echo import round_trips_s, serve_echo
from benchmarks.engine import EngineProcess, start_cluster
from benchmarks.secured import Secured, receive_stream
from peercache.cli.bench import limits
from peercache.cli.bench.command import WORKING_SET_BYTES, seconds, sizes, working_set
from peercache.cli.bench.engine import WorkingSet
from peercache.cli.bench.report import Figures, print_table
from peercache.cli.main import run
from peercache.cli.options import json_option
from peercache.cli.processes import READY_TIMEOUT_S, NodeProcess, NodeProcesses
from peercache.cli.terminal import print_json, show_progress
from peercache.client.client import Client
from peercache.client.home import POPULATING
from peercache.errors import ConfigError, PeerCacheError
from peercache.model.keys import KEY_BYTES
from peercache.wire.messages.directory import Located, Lookup

ROUNDS = 3
"""Each figure is the median of this many, in turn with its limit: machines are noisy."""

RTT_TRIPS = 500

ASK_S = 5.0
"""How long one request of the control plane may take."""

SMALL_POOL_BYTES = 64 * 2**20

PLOT_PAGE_BYTES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""Page sizes of a plot: from a small model's page to a large one's."""

ROWS = (
    ("get", "get_gb_s", "GB/s", "get_ratio"),
    ("get, busy Python thread", "get_busy_gb_s", "GB/s", "get_busy_ratio"),
    ("get, TLS", "tls_get_gb_s", "GB/s", "tls_get_ratio"),
    ("get, TLS, busy Python thread", "tls_get_busy_gb_s", "GB/s", "tls_get_busy_plain_ratio"),
    ("set", "set_gb_s", "GB/s", "set_ratio"),
    ("set into a full pool", "set_full_gb_s", "GB/s", "set_full_ratio"),
    ("set, busy Python thread", "set_busy_gb_s", "GB/s", "set_busy_ratio"),
    ("exists of 128, hot", "exists_hot_us", "µs", "exists_hot_trips"),
    ("exists of 128, cold", "exists_cold_us", "µs", "exists_cold_trips"),
    ("control round trip under tcp load, p99", "control_p99_ms", "ms", ""),
    ("the same with a raw stream, p99", "limit_control_p99_ms", "ms", ""),
    ("limit: memory copy", "limit_copy_gb_s", "GB/s", ""),
    ("limit: one tcp stream", "limit_tcp_gb_s", "GB/s", ""),
    ("limit: one stream of bare OpenSSL", "limit_tls_gb_s", "GB/s", ""),
    ("limit: nng round trip", "limit_rtt_us", "µs", ""),
)


@attrs.frozen
class Plan:
    """What to measure, over which fabric, for how long each time; tls: also the cost of TLS."""

    fabric: str
    work: WorkingSet
    seconds: float
    tls: bool = False


def run_local(plan: Plan, progress: Callable[[str], None]) -> dict[str, float]:
    """Measure everything; return the figures by their names."""
    cluster = f"bench-{os.getpid()}-{time.time_ns()}"
    # Room for two working sets, a node that only reads, and room for half of a set.
    pools = {"a": 2 * plan.work.total_bytes, "b": SMALL_POOL_BYTES, "c": plan.work.total_bytes // 2}
    with NodeProcesses() as processes:
        nodes = start_cluster(processes, cluster, pools)
        with EngineProcess(plan.work) as engine:
            measuring = _Measuring(plan, cluster, nodes, engine, progress)
            if plan.tls:
                measuring.add_tls(processes)
            return measuring.run()


class _Measuring:
    """One run: nodes, an engine, and the samples of each figure."""

    def __init__(
        self,
        plan: Plan,
        cluster: str,
        nodes: dict[str, NodeProcess],
        engine: EngineProcess,
        progress: Callable[[str], None],
    ) -> None:
        self._plan, self._cluster, self._nodes = plan, cluster, nodes
        self._engine, self._progress = engine, progress
        self._samples: dict[str, list[float]] = {}
        self._wrong_bytes = 0.0
        self._secured: Secured | None = None
        self._pair: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def add_tls(self, processes: NodeProcesses) -> None:
        """Start a second cluster of two nodes, with certificates."""
        secured = self._secured = Secured(processes.folder / "certificates", f"{self._cluster}-tls")
        self._pair = secured.pair()
        pools = {"tls-a": 2 * self._plan.work.total_bytes, "tls-b": SMALL_POOL_BYTES}
        more = {name: secured.node(name) for name in pools}
        self._nodes.update(start_cluster(processes, secured.cluster, pools, more))

    def run(self) -> dict[str, float]:
        """Measure in rounds; return medians."""
        self._open_clients()
        if self._secured is not None:
            self._open_tls_clients(self._secured)
        for number in range(ROUNDS):
            self._progress(f"round {number + 1} of {ROUNDS}")
            for busy in (False, True):
                self._set_and_get(busy=busy)
                if self._secured is not None:
                    self._get_with_tls(busy=busy)
            self._engine.do("busy", on=False)
            self._control()
        figures = {name: statistics.median(values) for name, values in self._samples.items()}
        figures["wrong_bytes"] = self._wrong_bytes
        self._engine.do("close")
        return _with_ratios(self._plan.fabric, figures)

    def _settings(self, node: str, **more: Any) -> dict[str, Any]:
        return {
            "cluster": self._cluster, "home": self._nodes[node].home, "fabric": self._plan.fabric,
            "op_timeout_s": 30.0, "exists_timeout_s": 5.0, **more,
        }  # fmt: skip

    def _open_clients(self) -> None:
        for name, node, more in (
            ("writer", "a", {}),
            ("reader", "b", {}),
            ("full", "c", {}),
            ("cold", "b", {"location_cache_entries": 0}),
            ("tcp", "b", {"fabric": "tcp"}),
        ):
            self._engine.do("open", name=name, settings=self._settings(node, **more))
        with Client.open(**self._settings("a")) as client:
            until = time.monotonic() + READY_TIMEOUT_S
            members = sum(not name.startswith("tls-") for name in self._nodes)
            while client.stats().get("home_members_alive") != members:
                if time.monotonic() > until:
                    raise PeerCacheError(f"node a does not see {members} members")
                time.sleep(0.05)
        # The first pass over fresh memory measures the kernel's zeroing.
        self._engine.do("copy")
        self._engine.do("store", client="writer")
        self._engine.do("set", client="full", seconds=0.0, clear=False)

    def _open_tls_clients(self, secured: Secured) -> None:
        for name, node, more in (
            ("tls-writer", "tls-a", {}),
            ("tls-reader", "tls-b", {}),
            ("tls-cold", "tls-b", {"location_cache_entries": 0}),
        ):
            settings = {**self._settings(node, **more), "cluster": secured.cluster}
            self._engine.do("open", name=name, settings={**settings, **secured.client(name)})

    def _get_with_tls(self, *, busy: bool) -> None:
        """Measure a get over TLS right after the one in clear text, and the bare stream."""
        do, seconds = self._engine.do, self._plan.seconds
        suffix = "_busy" if busy else ""
        do("store", client="tls-writer")
        read = do("get", client="tls-reader", seconds=seconds)
        self._sample(f"tls_get{suffix}_gb_s", read["gb_s"])
        self._sample("misses", read["missed"])
        self._wrong_bytes += read["wrong_bytes"]
        if not busy:
            self._sample("limit_tls_gb_s", self._tls_stream_gb_s())
            self._sample("tls_exists_cold_us", do("exists", client="tls-cold")["us"])

    def _set_and_get(self, *, busy: bool) -> None:
        """Measure set and get, with a busy Python thread in the engine or without."""
        do, seconds = self._engine.do, self._plan.seconds
        suffix = "_busy" if busy else ""
        do("busy", on=busy)
        if not busy:
            self._sample("limit_copy_gb_s", do("copy")["gb_s"])
        written = do("set", client="writer", seconds=seconds, clear=True)
        self._sample(f"set{suffix}_gb_s", written["gb_s"])
        self._sample(f"set{suffix}_p99_ms", written["p99_ms"])
        if not busy:
            full = do("set", client="full", seconds=seconds, clear=False)
            self._sample("set_full_gb_s", full["gb_s"])
            self._sample("limit_tcp_gb_s", self._stream_gb_s())
        # The last set may have been cleared.
        do("store", client="writer")
        read = do("get", client="reader", seconds=seconds)
        self._sample(f"get{suffix}_gb_s", read["gb_s"])
        self._sample(f"get{suffix}_p99_ms", read["p99_ms"])
        self._sample("misses", read["missed"])
        self._wrong_bytes += read["wrong_bytes"]

    def _control(self) -> None:
        """Measure exists, and the control plane during a get over tcp and during a raw stream."""
        seconds = self._plan.seconds
        self._sample("limit_rtt_us", _rtt_us(self._nodes["a"]))
        self._sample("exists_cold_us", self._engine.do("exists", client="cold")["us"])
        hot = self._engine.do("exists", client="reader")
        self._sample("exists_hot_us", hot["us"])
        self._sample("exists_hot_p99_us", hot["p99_us"])
        self._sample("control_p99_ms", self._control_p99_ms("get", client="tcp", seconds=seconds))
        self._sample("limit_control_p99_ms", self._control_p99_ms("stream", seconds=seconds))

    def _sample(self, name: str, figure: float) -> None:
        self._samples.setdefault(name, []).append(figure)

    def _stream_gb_s(self) -> float:
        """Receive the engine's working set over one raw connection."""
        target = np.ones(self._plan.work.total_bytes, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            sender = self._in_thread("send_stream", port=port)
            rate = limits.receive_stream(listener, target)
            sender.join()
        return rate

    def _tls_stream_gb_s(self) -> float:
        """Receive the engine's working set over a bare stream of Python's `ssl`."""
        target = np.ones(self._plan.work.total_bytes, np.uint8)
        sender, receiver = self._pair
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            sending = self._in_thread("send_tls_stream", port=port, settings=sender)
            rate = receive_stream(listener, target, receiver)
            sending.join()
        return rate

    def _control_p99_ms(self, action: str, **arguments: Any) -> float:
        """Ask node a while the engine is busy with something; return the p99 of its answers."""
        times: list[float] = []
        with Client.open(**self._settings("a", location_cache_entries=0)) as client:
            _await_populated()
            busy = self._in_thread(action, **arguments)
            while busy.is_alive():
                times.append(_question_s(client))
                time.sleep(0.002)
        return limits.percentile(times, 0.99) * 1e3

    def _in_thread(self, action: str, **arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=self._engine.do, args=(action,), kwargs=arguments)
        thread.start()
        return thread


def _with_ratios(fabric: str, figures: dict[str, float]) -> dict[str, float]:
    copy, tcp = figures["limit_copy_gb_s"], figures["limit_tcp_gb_s"]
    reading = tcp if fabric == "tcp" else copy
    figures["get_ratio"] = figures["get_gb_s"] / reading
    figures["get_busy_ratio"] = figures["get_busy_gb_s"] / reading
    for name in ("set", "set_busy", "set_full"):
        figures[f"{name}_ratio"] = figures[f"{name}_gb_s"] / copy
    if "tls_get_gb_s" in figures:
        figures["tls_get_ratio"] = figures["tls_get_gb_s"] / figures["limit_tls_gb_s"]
        for name in ("get", "get_busy"):
            figures[f"tls_{name}_plain_ratio"] = (
                figures[f"tls_{name}_gb_s"] / figures[f"{name}_gb_s"]
            )
        figures["tls_exists_cold_plain_ratio"] = (
            figures["tls_exists_cold_us"] / figures["exists_cold_us"]
        )
    for name in ("exists_hot", "exists_cold"):
        figures[f"{name}_trips"] = figures[f"{name}_us"] / figures["limit_rtt_us"]
    return figures


def _rtt_us(node: NodeProcess) -> float:
    url = f"{node.home}.echo"
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
    wiring = client._wiring  # noqa: SLF001 - only the request, without the overhead of a call
    home = wiring.home.tie.attached
    if home is None:
        raise PeerCacheError("the home node was lost")
    question = ((home.incarnation, Lookup(0, bytes(KEY_BYTES))),)
    started = time.perf_counter()
    answer = wiring.asker.ask(question, time.monotonic() + ASK_S)[0]
    took_s = time.perf_counter() - started
    # No answer counts as the full time; any other answer does not measure the directory.
    if answer is not None and not isinstance(answer, Located):
        raise PeerCacheError(f"the home node answered {answer}")
    return took_s


def _await_populated() -> None:
    """Wait until the kernel has made the page tables of a new client: a second, once."""
    for thread in threading.enumerate():
        if thread.name == POPULATING:
            thread.join(READY_TIMEOUT_S)


def require_plotting() -> None:
    """Raise ConfigError where matplotlib is missing, before minutes of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plot", "needs matplotlib: pip install matplotlib")


def draw(path: str, fabric: str, by_page_bytes: Sequence[tuple[int, Figures]]) -> None:
    """Draw throughput over page size, with the limits, into a PNG."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra that only this needs

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    sizes = [size / 1024 for size, _ in by_page_bytes]
    figure, axes = plt.subplots(figsize=(8, 5))
    lines = (
        ("get_gb_s", "get", "o-"),
        ("set_gb_s", "set", "s-"),
        ("set_full_gb_s", "set, pool full", "^-"),
        ("limit_copy_gb_s", "limit: memory copy", "k--"),
        ("limit_tcp_gb_s", "limit: one tcp stream", "k:"),
    )
    for key, label, style in lines:
        axes.plot(sizes, [figures[key] for _, figures in by_page_bytes], style, label=label)
    axes.set(xscale="log", xlabel="page size, KiB", ylabel="GB/s", title=f"fabric: {fabric}")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


@click.command
@click.option("--fabric", type=click.Choice(["shm", "tcp"]), default="shm", show_default=True)
@sizes(WORKING_SET_BYTES)
@seconds("each measurement")
@click.option("--tls", is_flag=True, help="Measure get over TLS too, and bare OpenSSL.")
@json_option
@click.option(
    "--plot",
    metavar="FILE.png",
    help="Measure four page sizes, from 64 KiB to 4 MiB, and draw them.",
)
def local(
    fabric: str,
    page_bytes: int,
    batch: int,
    pages: int | None,
    seconds: float,
    plot: str | None,
    *,
    tls: bool,
    as_json: bool,
) -> int:
    """Measure nodes and an engine as processes on this machine."""
    if tls and fabric != "tcp":
        raise ConfigError("tls", "goes with --fabric tcp: shared memory is not encrypted")
    if plot:
        if not plot.endswith(".png"):
            raise ConfigError("plot", f"{plot}: must be a name that ends in .png")
        require_plotting()
    results = []
    for size in PLOT_PAGE_BYTES if plot else (page_bytes,):
        work = working_set(size, batch, pages, WORKING_SET_BYTES)
        figures = run_local(Plan(fabric, work, seconds, tls), show_progress)
        results.append((size, figures))
        if as_json:
            print_json({"page_bytes": size, **figures})
            continue
        print_table(f"{fabric}, {batch} × {size // 1024} KiB", "of the limit", ROWS, figures)
        print(f"  {figures['wrong_bytes']:.0f} wrong bytes, {figures['misses']:.0f} misses")
    if plot:
        draw(plot, fabric, results)
        click.echo(f"  drawn: {plot}", err=True)
    return int(any(figures["wrong_bytes"] for _, figures in results))


if __name__ == "__main__":
    sys.exit(run(local, "benchmarks.local", sys.argv[1:]))
