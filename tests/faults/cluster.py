"""The cluster of a run: five hosts in namespaces with a node each, and six clients.

Each process has a supervisor, as with systemd: a thread that starts it, notes its life, and starts
it again. A process that ends though no fault has ended it is a violation.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tests.certificates import Certificates
from tests.faults.history import History, Life, read_calls
from tests.faults.schedule import CLIENTS, HOSTS, Plan
from tests.faults.wire import mac_of
from tests.pace import TIMEOUT_S
from tests.system.previous import make_previous_build
from tests.system.separate_hosts import Host, ip, separate_hosts

ROOT = Path(__file__).parents[2]
HOME = "ipc:///run/peercache/home.ipc"
AGAIN_S, ANSWERS_S = 0.5, 10.0
NEWER = ("spill", "copies")
"""Settings that the build before does not have."""
ENDS_MAX = 3
"""Ends by itself after which a process is not started again: the run has failed."""
MEMORY_BYTES, DISK_BYTES = 128 * 2**20, 96 * 2**20
"""File systems of a host: of its /dev/shm, and of its disk."""


@attrs.define(eq=False)
class Process:
    """One role on a host, which is started again whenever it has ended.

    command: returns the shell command of a start, by its number. is_excused: whether its end is
    the work of a fault.
    """

    name: str
    host: Host
    command: Callable[[int], str]
    on_life: Callable[[dict[str, str], float, float], None]
    may_run: threading.Event = attrs.field(factory=threading.Event)
    is_excused: bool = False
    problems: list[str] = attrs.field(factory=list)
    current: subprocess.Popen[str] | None = None
    ready: dict[str, str] = attrs.field(factory=dict)
    since: float = 0.0
    is_ready: bool = False
    answers: queue.Queue[str] = attrs.field(factory=queue.Queue)
    _is_over: bool = False
    _thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Start it."""
        self.may_run.set()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The number of the process that runs; 0 if none does."""
        return self.current.pid if self.current is not None and self.current.poll() is None else 0

    def signal(self, number: signal.Signals) -> int:
        """Send it a signal; return its number, 0 if it does not run."""
        process = self.current
        if process is None or not self.pid:
            return 0
        process.send_signal(number)
        return process.pid

    def ask(self, kind: str, keys: list[str]) -> list[bool]:
        """Have a client make a call; return its answers, [] if it does not answer."""
        process = self.current
        if process is None or process.stdin is None or not self.is_ready:
            return []
        with contextlib.suppress(OSError, queue.Empty):
            process.stdin.write(json.dumps({"kind": kind, "keys": keys}) + "\n")
            process.stdin.flush()
            answer: list[bool] = json.loads(self.answers.get(timeout=ANSWERS_S))
            return answer
        return []

    def end(self) -> None:
        """End it for good."""
        self._is_over = self.is_excused = True
        self.may_run.set()
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._thread.join(TIMEOUT_S)

    def _supervise(self) -> None:
        number = 0
        while self.may_run.wait() and not self._is_over and len(self.problems) < ENDS_MAX:
            self.since, number = time.monotonic(), number + 1
            self.current = process = self.host.start(self.command(number))
            assert process.stdout is not None
            line = process.stdout.readline()
            if line:
                self.ready, self.is_ready = json.loads(line), True
                for answer in process.stdout:
                    self.answers.put(answer)
            status = process.wait()
            was_ready, self.is_ready = self.is_ready, False
            if was_ready:
                self.on_life(self.ready, self.since, time.monotonic())
                if not self.is_excused:
                    self.problems.append(f"{self.name} ended by itself, with {status}")
            time.sleep(AGAIN_S)


@attrs.define(eq=False)
class Cluster:
    """Everything of one run. folder: where its files are; nodes and clients by host and number."""

    plan: Plan
    folder: Path
    hosts: dict[str, Host]
    wire: subprocess.Popen[str]
    nodes: dict[str, Process] = attrs.field(factory=dict)
    clients: dict[str, Process] = attrs.field(factory=dict)
    lives: list[Life] = attrs.field(factory=list)
    older: str = ""
    """The Python of the build before, with which nodes start in a run of upgrades."""
    began: float = 0.0

    def set_link(self, source: str, target: str, options: dict[str, Any]) -> None:
        """Replace what happens between two hosts, in one direction."""
        assert self.wire.stdin is not None
        assert self.wire.stdout is not None
        line = {"from": HOSTS.index(source), "to": HOSTS.index(target), **options}
        self.wire.stdin.write(json.dumps(line) + "\n")
        self.wire.stdin.flush()
        assert self.wire.stdout.readline() == "{}\n"

    def file(self, host: str, name: str) -> Path:
        """Return a file by which faults control a host's processes."""
        return self.folder / f"{host}.{name}"

    def is_whole(self) -> bool:
        """Return whether every process is ready."""
        return all(each.is_ready for each in (*self.nodes.values(), *self.clients.values()))

    def problems(self) -> list[str]:
        """Return which processes have ended by themselves."""
        return [
            f"process: {problem}"
            for each in (*self.nodes.values(), *self.clients.values())
            for problem in each.problems
        ]

    def history(self) -> History:
        """Return what clients recorded, and the lives of nodes that are over or go on."""
        calls, sights = read_calls(self.folder.glob("client-*.jsonl"))
        return History(calls=calls, sights=sights, lives=sorted(self.lives, key=lambda a: a.began))

    def start(self) -> None:
        """Start the nodes, and when they serve the clients."""
        authority = Certificates(self.folder / "pki", "faults")
        for name, host in self.hosts.items():
            self.nodes[name] = self._node(host, authority.node(name))
        for number in range(CLIENTS):
            name = HOSTS[number % len(HOSTS)]
            certificate = authority.client(f"client-{number}")
            self.clients[str(number)] = self._client(number, self.hosts[name], certificate)

    def _node(self, host: Host, certificate: dict[str, str]) -> Process:
        flags = {
            "listen": "0.0.0.0:31998",
            "data-port": "31999",
            "advertise": host.address,
            "discovery-addr": "host-a:31998,host-b:31998",
            "home": HOME,
            "metrics-port": "0",
            "log-format": "json",
            "disk-enabled": "true",
            "disk-path": str(self.folder / f"{host.name}.disk"),
            **{name.replace("_", "-"): value for name, value in certificate.items()},
            **self.plan.settings,
        }

        def command(number: int) -> str:
            is_older = self.older and number == 1
            given = {name: it for name, it in flags.items() if not (is_older and name in NEWER)}
            said = shlex.join([f"--{name}={value}" for name, value in given.items()])
            python = self._python(host, self.older if is_older else sys.executable)
            return f"{python} -m peercache.node {said}"

        def on_life(ready: dict[str, str], began: float, ended: float) -> None:
            self.lives.append(
                Life(host=host.name, incarnation=ready["node"], began=began, ended=ended)
            )

        return Process(f"the node of {host.name}", host, command, on_life)

    def _client(self, number: int, host: Host, certificate: dict[str, str]) -> Process:
        settings = {"home": HOME, "fabric": "auto", **certificate, **self.plan.client_settings}

        def command(start: int) -> str:
            process = number + CLIENTS * start
            words = [
                str(process), host.name, str(host.clock_s), str(self.plan.seed * 1000 + process),
                str(self.folder / f"client-{process}.jsonl"), json.dumps(settings),
            ]  # fmt: skip
            return (
                f"{self._python(host, sys.executable)} -m tests.faults.client {shlex.join(words)}"
            )

        return Process(f"client {number}", host, command, lambda *_: None)

    def _python(self, host: Host, interpreter: str) -> str:
        """Return an interpreter, with the shims of the host's clock and disk."""
        variables = {
            "LD_PRELOAD": f"{self.folder}/clock.so:{self.folder}/disk.so",
            "FAULTS_CLOCK": str(self.file(host.name, "clock")),
            "PEERCACHE_FAULTS": str(self.file(host.name, "slabs")),
        }
        said = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return f"env -C {ROOT} {said} {interpreter}"


def compile_shims(folder: Path) -> None:
    """Compile what is preloaded."""
    sources = {"clock": "tests/faults/clock.c", "disk": "tests/system/storage/faults.c"}
    for name, source in sources.items():
        library, path = str(folder / f"{name}.so"), str(ROOT / source)
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, path, "-ldl"]
        subprocess.run(command, check=True)


@contextlib.contextmanager
def running(plan: Plan, folder: Path) -> Iterator[Cluster]:
    """Make hosts, and start their processes; end everything with the block.

    The caller has a mount namespace of its own: what is mounted here goes with it.
    """
    compile_shims(folder)
    with contextlib.ExitStack() as stack:
        wires: list[subprocess.Popen[str]] = []

        def plug(switch: str, host: Host, number: int) -> None:
            if not wires:
                wires.append(stack.enter_context(_wire(switch, plan.seed)))
            ip(f"-n {switch} link set tap{number} netns {host.namespace} name eth0")
            ip(f"-n {host.namespace} link set eth0 address {mac_of(number)} mtu 9000")
            host.clock_s = int(plan.clocks[host.name])

        hosts, _ = stack.enter_context(separate_hosts(*HOSTS, network="10.98.0", plug=plug))
        for host in hosts:
            mounted(host.path("/dev/shm"), MEMORY_BYTES)
            mounted(folder / f"{host.name}.disk", DISK_BYTES)
        older = make_previous_build(folder / "older") if plan.upgrades else ""
        cluster = Cluster(plan, folder, {host.name: host for host in hosts}, wires[0], older=older)
        cluster.start()
        try:
            yield cluster
        finally:
            for each in (*cluster.clients.values(), *cluster.nodes.values()):
                each.end()
            for host in hosts:
                for place in (host.path("/dev/shm"), folder / f"{host.name}.disk"):
                    subprocess.run(["umount", "--lazy", str(place)], check=False)


@contextlib.contextmanager
def _wire(switch: str, seed: int) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", switch, sys.executable, "-m", "tests.faults.wire"]
    wire = subprocess.Popen([*command, str(seed), str(len(HOSTS))], cwd=ROOT, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert wire.stdout is not None
    assert "ready" in wire.stdout.readline()
    try:
        yield wire
    finally:
        wire.kill()
        wire.communicate()


def mounted(folder: Path, size: int = 2**30) -> None:
    """Mount a file system in memory, of so many bytes, in the namespace of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(command, check=True)
