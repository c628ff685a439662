"""The clusters of `benchmarks.peers`: three nodes of one store, and three engines that use them.

The first engine writes, the second one reads, and the third node is the one that is killed or
paused. Only processes that were started here are signalled, each by its own pid.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engine import start_cluster
from benchmarks.peers_install import Environment, NotInstalled, environment
from peercache.cli.processes import NodeProcesses, _die_with_parent
from peercache.errors import PeerCacheError

ENGINE = Path(__file__).with_name("peers_engine.py")

NODES = 3
ANSWER_S = 60.0
END_S = 5.0
START_S = 30.0


class StoreFailed(PeerCacheError):
    """A store did not start, or did not do what was requested."""


class Overdue(StoreFailed):
    """A call of a store did not return within its limit."""


@attrs.frozen
class Size:
    """Page size, batch size, and the bytes of the working set."""

    page_bytes: int
    batch: int
    total_bytes: int

    @property
    def batch_bytes(self) -> int:
        """The bytes of one call."""
        return min(self.batch * self.page_bytes, self.total_bytes)

    @property
    def name(self) -> str:
        """The size as shown in tables."""
        mib = self.page_bytes / 2**20
        page = f"{mib:g} MiB" if mib >= 1 else f"{self.page_bytes // 1024} KiB"
        return f"{self.batch} x {page}"


class Engine:
    """A process in a store's environment that runs peers_engine."""

    def __init__(self, python: str, environ: dict[str, str], log: Path) -> None:
        """Start it."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter that we installed
                [python, str(ENGINE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environ,
                cwd=log.parent,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no lock
            )
        self._log = log
        self._left = b""

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def do(self, action: str, *, limit_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Call a method of the engine; return its answer. Raises Overdue and StoreFailed."""
        self.begin(action, **arguments)
        return self.finish(limit_s)

    def begin(self, action: str, **arguments: Any) -> None:
        """Call a method without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([action, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise StoreFailed(self._ended()) from None

    def finish(self, limit_s: float = ANSWER_S) -> Any:
        """Return the answer to a call of `begin`."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        until = time.monotonic() + limit_s
        while b"\n" not in self._left:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Overdue(f"a call took more than {limit_s:.0f} s")
            part = os.read(pipe, 2**16)
            if not part:
                raise StoreFailed(self._ended())
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise StoreFailed(answer["error"])
        return answer["answer"]

    def signal(self, number: int) -> None:
        """Pause, continue or kill it."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def close(self, *, gently: bool = True) -> None:
        """End it: by its own close, or by a kill."""
        try:
            if gently and self._process.poll() is None:
                self.do("close", limit_s=END_S)
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(END_S)
        except (StoreFailed, OSError, subprocess.TimeoutExpired):
            pass
        self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # Data that was written for a process that has ended.
                    pipe.close()

    def _ended(self) -> str:
        self._process.wait()
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
        return f"the engine ended with status {self._process.returncode}\n{end}"


@attrs.define(eq=False)
class Cluster:
    """Three nodes of a store and three engines. capacity: the bytes that a set can fill."""

    store: str
    fabrics: tuple[str, ...]
    engines: list[Engine]
    third_node: Callable[[int], None]
    capacity: int
    end: Callable[[], None]
    generation: int = 0
    is_hung: bool = False
    """Whether a call is overdue, so that no more calls are possible."""

    @property
    def writer(self) -> Engine:
        """The engine that sets, with the first node as home."""
        return self.engines[0]

    @property
    def reader(self) -> Engine:
        """The engine that gets and asks, with the second node as home."""
        return self.engines[1]

    @property
    def third(self) -> Engine:
        """The engine with the third node as home."""
        return self.engines[2]

    def close(self) -> None:
        """End every process."""
        self.third_node(signal.SIGCONT)
        for engine in self.engines:
            # The others' memory ends with their processes.
            engine.close(gently=self.store == "ours" and not self.is_hung)
        self.end()

    def next_generation(self) -> int:
        """Return a generation number of which no page was set."""
        self.generation += 1
        return self.generation


def start(store: str, size: Size, pool_bytes: int, folder: Path) -> Cluster:
    """Start a store's cluster with nodes of pool_bytes each. Raises StoreFailed, NotInstalled."""
    return STARTS[store](size, pool_bytes, folder)


def _engines(python: str, environ: dict[str, str], folder: Path, name: str) -> list[Engine]:
    return [Engine(python, environ, folder / f"{name}-{number}.log") for number in range(NODES)]


def _open(store: str, engines: list[Engine], size: Size, settings: list[dict[str, Any]]) -> None:
    try:
        for engine, own in zip(engines, settings, strict=True):
            engine.do("open", store=store, settings=own, **attrs.asdict(size))
        for engine in engines:
            engine.do("await_nodes", count=NODES)
    except BaseException:
        for engine in engines:
            engine.close(gently=False)
        raise


def _start_ours(size: Size, pool_bytes: int, folder: Path) -> Cluster:
    processes = NodeProcesses(log_folder=str(folder))
    cluster = f"peers-{os.getpid()}-{time.time_ns()}"
    try:
        nodes = start_cluster(processes, cluster, dict.fromkeys(("a", "b", "c"), pool_bytes))
        engines = _engines(sys.executable, dict(os.environ), folder, "ours")
        settings = [{"cluster": cluster, "home": node.home} for node in nodes.values()]
        _open("ours", engines, size, settings)
    except BaseException:
        processes.close()
        raise
    node = nodes["c"].process

    def signal_node(number: int) -> None:
        if node.poll() is None:
            node.send_signal(number)

    return Cluster("ours", ("shm", "tcp"), engines, signal_node, pool_bytes, processes.close)


def _start_mooncake(size: Size, pool_bytes: int, folder: Path) -> Cluster:
    home = environment("mooncake")
    port, metrics = _free_port(), _free_port()
    master = _serve(
        home, folder / "mooncake-master.log", home.command("mooncake_master"),
        "-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_host=127.0.0.1",
        f"-metrics_port={metrics}", "-logtostderr=true",
    )  # fmt: skip
    try:
        _await_port(port, master)
        environ = {**home.environ, "GLOG_minloglevel": "2", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
        engines = _engines(home.python, environ, folder, "mooncake")
        settings = {"master": f"127.0.0.1:{port}", "pool_bytes": pool_bytes}
        own = [{**settings, "address": f"127.0.0.1:{_free_port()}"} for _ in engines]
        _open("mooncake", engines, size, own)
    except BaseException:
        _end(master)
        raise
    return Cluster(
        "mooncake", ("",), engines, engines[2].signal, NODES * pool_bytes, lambda: _end(master)
    )


def _start_public(size: Size, pool_bytes: int, folder: Path) -> Cluster:
    home = environment("peercache-0.8.4")
    engines = _engines(home.python, home.environ, folder, "peercache-0.8.4")
    settings = {"discovery": f"127.0.0.1:{_free_port()}", "pool_bytes": pool_bytes}
    _open("peercache-0.8.4", engines, size, [settings] * NODES)
    return Cluster("peercache-0.8.4", ("",), engines, engines[2].signal, pool_bytes, lambda: None)


def _start_redis(size: Size, pool_bytes: int, folder: Path) -> Cluster:
    home = environment("redis")
    ports = [_free_port() for _ in range(NODES)]
    servers: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for server in servers:
            _end(server)

    try:
        for port in ports:
            server = _serve(
                home,
                folder / f"redis-{port}.log",
                home.command("redis-server"),
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--maxmemory",
                str(pool_bytes),
                "--maxmemory-policy",
                "allkeys-lru",
            )
            servers.append(server)
        for port, server in zip(ports, servers, strict=True):
            _await_port(port, server)
        engines = _engines(home.python, home.environ, folder, "redis")
        _open("redis", engines, size, [{"ports": ports}] * NODES)
    except BaseException:
        end()
        raise

    def signal_server(number: int) -> None:
        if servers[2].poll() is None:
            servers[2].send_signal(number)

    return Cluster("redis", ("",), engines, signal_server, NODES * pool_bytes, end)


STARTS: dict[str, Callable[[Size, int, Path], Cluster]] = {
    "ours": _start_ours,
    "mooncake": _start_mooncake,
    "peercache-0.8.4": _start_public,
    "redis": _start_redis,
}


def version(store: str) -> str:
    """Return a store's version; create its environment if it is missing. Raises NotInstalled."""
    return "" if store == "ours" else environment(store).version


def _serve(home: Environment, log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - a command that we installed
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=home.environ,
            cwd=log.parent,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no lock
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError as error:  # noqa: PERF203 - it waits between attempts
            if process.poll() is not None or time.monotonic() > until:
                raise StoreFailed(f"a server did not start: {error}") from None
            time.sleep(0.05)
        else:
            return


__all__ = [
    "Cluster",
    "Engine",
    "NotInstalled",
    "Overdue",
    "Size",
    "StoreFailed",
    "start",
    "version",
]
