"""The stores of `tests.faults.peers`, each as an owner of bytes and three clients, on loopback.

Only processes that were started here are signalled, each by its own pid; all end with the run.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs

from benchmarks.peers_clusters import StoreFailed, _await_port, _end, _free_port, _serve
from benchmarks.peers_install import Environment, environment
from peercache.cli.processes import LOCAL, NodeProcess, NodeProcesses, _die_with_parent
from tests.faults.history import Life
from tests.faults.recorder import EXISTS, GET, REMOVE, SET

ROOT = Path(__file__).parents[2]
READY_S = 60.0
MIB = 2**20
PAGE_BYTES = 256 * 1024
POOL_BYTES = 64 * MIB
"""Mooncake refuses segments that are much smaller."""
TIMEOUT_S = 2.0
"""Of a call: where a store takes no deadline, it is judged by it all the same."""
WRITER, READERS = 0, (1, 2)
KILLED, PAUSED, EVICTED = SCENARIOS = "killed", "paused", "evicted"


def plan_of(number: int, *, is_evicting: bool, exists_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the plan of a client: 24 MiB of pages, with eviction 256 MiB, four times the pool."""
    if number == WRITER:
        weights = (10, 80, 5, 5) if is_evicting else (20, 60, 10, 10)
    else:
        weights = (80, 0, 20, 0)
    limits_s = {GET: TIMEOUT_S, SET: TIMEOUT_S, REMOVE: TIMEOUT_S, EXISTS: exists_s}
    return {
        "count": 1024 if is_evicting else 96, "hot": 64 if is_evicting else 16,
        "weights": weights, "limits_s": limits_s,
        "rest_s": 0.0 if is_evicting else 0.02 if number == WRITER else 0.002,
    }  # fmt: skip


class Child:
    """A process of peers_stores."""

    def __init__(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> None:
        """Start it. number: its process in the history."""
        self.number = number
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                env={**environ, "PYTHONPATH": str(ROOT)}, cwd=log.parent, start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no lock
            )  # fmt: skip
        self._log = log
        self._answers: queue.Queue[str] = queue.Queue()
        self._pending = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def await_ready(self) -> None:
        """Wait until it works. Raises StoreFailed."""
        try:
            if self._answers.get(timeout=READY_S):
                return
        except queue.Empty:
            pass
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
        raise StoreFailed(f"a client did not start: {self.process.poll()}\n{end}")

    def ask(self, asked: Mapping[str, Any], within_s: float) -> Any:
        """Have it do something that a worker serves; return its answer, None if there is none."""
        until = time.monotonic() + within_s
        try:
            while self._pending:  # Of questions that took too long.
                if not self._answers.get(timeout=max(0.0, until - time.monotonic())):
                    return None
                self._pending -= 1
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            self._pending += 1
            line = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except (queue.Empty, OSError):
            return None
        if not line:
            return None
        self._pending -= 1
        return json.loads(line)

    def close(self) -> None:
        """End it at once: what it recorded is in its file."""
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except OSError:  # Data that was written for a process that has ended.
            return

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")


@attrs.define(eq=False)
class StoreCluster:
    """One store: an owner, a writer, and two readers. lives: of processes that hold bytes."""

    folder: Path
    seed: int
    is_evicting: bool
    clients: list[Child] = attrs.Factory(list)
    lives: list[Life] = attrs.Factory(list)
    killed_clients: set[int] = attrs.Factory(set)
    scenarios: ClassVar[Sequence[str]] = SCENARIOS
    _ends: list[Callable[[], object]] = attrs.Factory(list)
    _started: int = 0

    def start(self) -> None:
        """Start the owner and the clients."""
        self.start_owner()
        for number in (WRITER, *READERS):
            self.clients.append(self.client(number))
        for client in self.clients:
            client.await_ready()

    def start_owner(self) -> None:
        """Start the owner, at its former address if it has had one; return when it serves."""
        raise NotImplementedError

    def owner(self) -> subprocess.Popen[Any]:
        """Return the owner's process."""
        raise NotImplementedError

    def client(self, number: int) -> Child:
        """Start a client."""
        raise NotImplementedError

    def evicted(self) -> int:
        """Return how many pages the owner has evicted, -1 if it does not show that."""
        return -1

    def owner_died(self) -> None:
        """Wait until the kernel has removed the owner, which was killed."""
        self.owner().wait()
        self._life_ends()

    def close(self) -> None:
        """End every process."""
        for client in self.clients:
            client.close()
        for end in self._ends:
            end()
        for life in self.lives:
            self._life_ends(life.host)

    def child(
        self, number: int | None, store: str, settings: dict[str, Any], plan: dict[str, Any] | None,
        python: str = sys.executable, environ: Mapping[str, str] = os.environ, host: str = "owner",
    ) -> Child:  # fmt: skip
        """Start a process of peers_stores. number: of a client; None only holds memory."""
        self._started += 1
        process = self._started * 10 + (number if number is not None else 9)
        name = "owner" if number is None else f"client-{process}"
        text = json.dumps(
            {"store": store, "settings": settings, "plan": plan, "page_bytes": PAGE_BYTES}
        )
        command = [
            python, "-m", "tests.faults.peers_stores", str(process), host,
            str(self.seed * 1000 + process), f"{self.folder}/{name}.jsonl", text,
        ]  # fmt: skip
        return Child(process, command, environ, self.folder / f"{name}.log")

    def _life_begins(self, incarnation: str = "", host: str = "owner") -> None:
        name = incarnation or f"{host}-{len(self.lives)}"
        self.lives.append(Life(host=host, incarnation=name, began=time.monotonic()))

    def _life_ends(self, host: str = "owner") -> None:
        for index, life in enumerate(self.lives):
            if life.host == host and life.ended > time.monotonic():
                self.lives[index] = attrs.evolve(life, ended=time.monotonic())


@attrs.define(eq=False)
class Ours(StoreCluster):
    """Three nodes. The writer's home is the owner; the readers' homes are the other two."""

    fabric: str = "auto"
    _processes: NodeProcesses = attrs.field(init=False)
    _ports: tuple[int, int] = attrs.Factory(lambda: (_free_port(), _free_port()))
    _nodes: dict[str, NodeProcess] = attrs.Factory(dict)

    def start(self) -> None:
        """Start the other nodes first: the owner finds them again after its death."""
        self._processes = NodeProcesses(log_folder=str(self.folder))
        self._ends.append(self._processes.close)
        for host in ("b", "c"):
            self._start_node(host, {})
        StoreCluster.start(self)

    def start_owner(self) -> None:
        """Start the owner's node at the same ports."""
        self._start_node(
            "owner", {"listen": f"127.0.0.1:{self._ports[0]}", "data-port": str(self._ports[1])}
        )

    def owner(self) -> subprocess.Popen[Any]:
        """Return the owner's node."""
        return self._nodes["owner"].process

    def client(self, number: int) -> Child:
        """Start a client at its home node."""
        host = ("owner", "b", "c")[number]
        plan = plan_of(number, is_evicting=self.is_evicting, exists_s=0.5)
        settings = {
            "cluster": self._name, "home": self._nodes[host].home, "fabric": self.fabric,
        }  # fmt: skip
        return self.child(number, "ours", settings, plan, host=host)

    @property
    def _name(self) -> str:
        return f"faults-{self.folder.name}"

    def _start_node(self, host: str, more: dict[str, str]) -> None:
        settings = {**LOCAL, "cluster": self._name, "pool-size": str(POOL_BYTES), **more}
        if "b" in self._nodes:
            settings["discovery-addr"] = self._nodes["b"].ready["control"]
        began = time.monotonic()
        self._nodes[host] = node = self._processes.launch(host, settings)
        self._processes.await_ready(node)
        self.lives.append(Life(host=host, incarnation=node.ready["node"], began=began))


@attrs.define(eq=False)
class OursOverTcp(Ours):
    """The same, with reads over tcp as between hosts, and not through shared memory."""

    fabric: str = "tcp"


@attrs.define(eq=False)
class Redis(StoreCluster):
    """One server without persistence, with the policy allkeys-lru."""

    home: Environment = attrs.Factory(lambda: environment("redis"))
    port: int = attrs.Factory(_free_port)
    _server: subprocess.Popen[bytes] = attrs.field(init=False)

    def start_owner(self) -> None:
        """Start the server."""
        self._server = _serve(
            self.home, self.folder / "owner.log", self.home.command("redis-server"),
            "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--maxmemory", str(POOL_BYTES), "--maxmemory-policy", "allkeys-lru",
        )  # fmt: skip
        self._ends.append(partial(_end, self._server))
        self._life_begins()
        _await_port(self.port, self._server)

    def owner(self) -> subprocess.Popen[Any]:
        """Return the server."""
        return self._server

    def client(self, number: int) -> Child:
        """Start a client."""
        settings = {"port": self.port, "timeout_s": TIMEOUT_S}
        plan = plan_of(number, is_evicting=self.is_evicting)
        return self.child(number, "redis", settings, plan, self.home.python, self.home.environ)

    def evicted(self) -> int:
        """Return what INFO shows."""
        with socket.create_connection(("127.0.0.1", self.port), 0.3) as line:
            line.sendall(b"INFO stats\r\n")
            text = line.recv(2**16).decode()
        found = [row.partition(":")[2] for row in text.split() if row.startswith("evicted_keys:")]
        return int(found[0]) if found else -1


@attrs.define(eq=False)
class Mooncake(StoreCluster):
    """A master, a process that lends its memory, and clients that lend none."""

    is_upsert: bool = False
    home: Environment = attrs.Factory(lambda: environment("mooncake"))
    _ports: tuple[int, ...] = attrs.Factory(lambda: tuple(_free_port() for _ in range(6)))
    _master: subprocess.Popen[bytes] = attrs.field(init=False)
    _owner: Child = attrs.field(init=False)

    def start(self) -> None:
        """Start the master first, with its defaults."""
        self._master = _serve(
            self.home, self.folder / "master.log", self.home.command("mooncake_master"),
            "-rpc_address=127.0.0.1", f"-rpc_port={self._ports[0]}", "-metrics_host=127.0.0.1",
            f"-metrics_port={self._ports[1]}", "-logtostderr=true",
        )  # fmt: skip
        self._ends.append(partial(_end, self._master))
        _await_port(self._ports[0], self._master)
        StoreCluster.start(self)

    def start_owner(self) -> None:
        """Start the process with the memory."""
        self._owner = self._client(None, self._ports[2], POOL_BYTES, None)
        self._ends.append(self._owner.close)
        self._life_begins()
        self._owner.await_ready()

    def owner(self) -> subprocess.Popen[Any]:
        """Return the process with the memory."""
        return self._owner.process

    def client(self, number: int) -> Child:
        """Start a client without memory for others."""
        plan = plan_of(number, is_evicting=self.is_evicting)
        return self._client(number, self._ports[3 + number], 0, plan)

    def _client(
        self, number: int | None, port: int, pool_bytes: int, plan: dict[str, Any] | None
    ) -> Child:
        environ = {**self.home.environ, "GLOG_minloglevel": "1",
                   "MC_TCP_BIND_ADDRESS": "127.0.0.1"}  # fmt: skip
        settings = {
            "master": f"127.0.0.1:{self._ports[0]}", "address": f"127.0.0.1:{port}",
            "pool_bytes": pool_bytes, "upsert": self.is_upsert,
        }  # fmt: skip
        return self.child(number, "mooncake", settings, plan, self.home.python, environ)

    def evicted(self) -> int:
        """Return what the master's metrics show."""
        address = f"http://127.0.0.1:{self._ports[1]}/metrics"
        with urllib.request.urlopen(address, timeout=0.3) as page:
            rows = page.read().decode().splitlines()
        found = [row.rpartition(" ")[2] for row in rows
                 if row.startswith("master_evicted_key_count")]  # fmt: skip
        return int(float(found[0])) if found else -1


@attrs.define(eq=False)
class MooncakeUpsert(Mooncake):
    """The same with `batch_upsert_from`: a set replaces the bytes of a key."""

    is_upsert: bool = True
    scenarios: ClassVar[Sequence[str]] = (EVICTED,)


@attrs.define(eq=False)
class PublicPeerCache(StoreCluster):
    """Three nodes, embedded in the clients. A set stores in its own node, the writer's."""

    home: Environment = attrs.Factory(lambda: environment("peercache-0.8.4"))
    port: int = attrs.Factory(_free_port)

    def start(self) -> None:
        """Start the readers first: one of them serves discovery."""
        readers = [self.client(number) for number in READERS]
        self.clients = [readers[0], *readers]
        time.sleep(1.0)
        self.start_owner()
        for reader in readers:
            reader.await_ready()

    def start_owner(self) -> None:
        """Start the writer."""
        self.clients[WRITER] = self.client(WRITER)
        self._life_begins()
        self.clients[WRITER].await_ready()

    def owner(self) -> subprocess.Popen[Any]:
        """Return the writer."""
        return self.clients[WRITER].process

    def owner_died(self) -> None:
        """Its calls end with it."""
        self.killed_clients.add(self.clients[WRITER].number)
        StoreCluster.owner_died(self)
        self.clients[WRITER].close()

    def client(self, number: int) -> Child:
        """Start a client with its node."""
        settings = {"discovery": f"127.0.0.1:{self.port}", "pool_bytes": POOL_BYTES, "members": 3}
        plan = plan_of(number, is_evicting=self.is_evicting)
        return self.child(
            number, "peercache-0.8.4", settings, plan, self.home.python, self.home.environ
        )


STARTS: dict[str, type[StoreCluster]] = {
    "ours": Ours,
    "ours tcp": OursOverTcp,
    "mooncake": Mooncake,
    "mooncake upsert": MooncakeUpsert,
    "peercache-0.8.4": PublicPeerCache,
    "redis": Redis,
}


def version(store: str) -> str:
    """Return the version of a store; install it first where it is missing. Raises NotInstalled."""
    name = store.partition(" ")[0]
    return "" if name == "ours" else environment(name).version
