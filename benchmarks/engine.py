"""Shared parts of developers' benchmarks: clusters of processes, and an engine process."""

from __future__ import annotations

import math
import multiprocessing
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import secured
from peercache.cli.bench import limits
from peercache.cli.bench.engine import Engine, WorkingSet
from peercache.cli.processes import LOCAL, NodeProcess, NodeProcesses
from peercache.errors import PeerCacheError

END_S = 10.0


class BusyEngine(Engine):
    """An engine that also sets, streams, and computes in Python at the same time."""

    def __init__(self, work: WorkingSet) -> None:
        """Make the working set."""
        super().__init__(work)
        self._busy = threading.Event()

    def copy(self) -> dict[str, float]:
        """Measure the memory copy."""
        return {"gb_s": limits.copy_gb_s(self.source, self.target, self.work.page_bytes)}

    def send_stream(self, port: int) -> None:
        """Feed a raw tcp stream."""
        limits.send_stream(port, self.source, self.work.page_bytes)

    def send_tls_stream(self, port: int, settings: dict[str, str]) -> None:
        """Feed an encrypted stream, without PeerCache."""
        secured.send_stream(port, self.source, settings)

    def stream(self, *, seconds: float) -> None:
        """Load the machine with a raw tcp stream, without PeerCache."""
        paced_stream(self.source, self.target, page_bytes=self.work.page_bytes, seconds=seconds)

    def set(self, client: str, *, seconds: float, clear: bool) -> dict[str, float]:
        """Set working sets of new keys; `clear` empties the pool between them, not timed."""
        cache = self.clients[client]
        times: list[float] = []
        refused = 0
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            keys = self.new_keys()
            for some in self.work.batches():
                runs = self.work.runs(self.source, some)
                started = time.perf_counter()
                stored = cache.batch_set_from(keys[some], runs)
                times.append(time.perf_counter() - started)
                refused += stored.count(False)
            self.stored = keys
            if clear and time.perf_counter() < until:
                cache.clear()
        return {**self._rate(times), "refused": refused}

    def busy(self, *, on: bool) -> None:
        """Start or stop a thread that computes in Python, like an engine's scheduler."""
        if on:
            self._busy.set()
            threading.Thread(target=self._spin, daemon=True).start()
        else:
            self._busy.clear()

    def _spin(self) -> None:
        count = 0
        while self._busy.is_set():
            for _ in range(1000):
                count += 1


class EngineProcess:
    """An engine in a process of its own; a context manager."""

    def __init__(self, work: WorkingSet, kind: type[Engine] = BusyEngine) -> None:
        """Start it and wait until its working set is ready."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, kind, work), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    @property
    def pid(self) -> int:
        """The id of the process, and of its first thread, which executes the driver's calls."""
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> EngineProcess:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def do(self, action: str, **arguments: Any) -> Any:
        """Call a method of the engine; return what it returns."""
        self._pipe.send((action, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(END_S)
            status = self._process.exitcode
            raise PeerCacheError(f"the engine ended with status {status}") from None


def _obey(pipe: Connection, kind: type[Engine], work: WorkingSet) -> None:
    """Execute the driver's calls in this process, until it closes the pipe."""
    engine = kind(work)
    pipe.send(None)
    while True:
        try:
            action, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(engine, action)(**arguments))


def start_cluster(
    processes: NodeProcesses,
    name: str,
    pools: dict[str, int],
    more: dict[str, dict[str, str]] | None = None,
) -> dict[str, NodeProcess]:
    """Start a cluster on this machine. pools: the size of the pool of each node, by name.

    more: further settings of some of the nodes.
    """
    nodes: dict[str, NodeProcess] = {}
    for node, pool_bytes in pools.items():
        settings = {
            **LOCAL,
            "cluster": name,
            "pool-size": str(pool_bytes),
            "log-level": "warning",
            **(more or {}).get(node, {}),
        }
        if nodes:
            settings["discovery-addr"] = next(iter(nodes.values())).ready["control"]
        nodes[node] = processes.launch(node, settings)
        processes.await_ready(nodes[node])
    return nodes


def paced_stream(
    source: limits.Memory,
    target: limits.Memory,
    *,
    page_bytes: int,
    seconds: float,
    at_most_gb_s: float = math.inf,
) -> float:
    """Move the working set again and again over one raw connection; return the GB/s reached.

    It shows the load of the machine itself, without code of PeerCache.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()

    def send() -> None:
        view = source.data
        began = time.perf_counter()
        sent = 0
        with stream:
            while time.perf_counter() < began + seconds:
                begin = sent % len(view)
                sent += len(view[begin : begin + page_bytes])
                stream.sendall(view[begin : begin + page_bytes])
                time.sleep(max(0.0, began + sent / at_most_gb_s / 1e9 - time.perf_counter()))

    sending = threading.Thread(target=send)
    started = time.perf_counter()
    sending.start()
    done = 0
    with accepted:
        view = target.data
        while count := accepted.recv_into(view[done % len(view) :]):
            done += count
    sending.join()
    return done / (time.perf_counter() - started) / 1e9
