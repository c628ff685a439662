"""How each fault of a plan is done and undone. Each returns what it really did, for the log."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tests.faults.cluster import Cluster, Process
from tests.faults.history import Span
from tests.faults.schedule import HOST_KINDS, HOSTS, PAIR_KINDS, Fault
from tests.system.nodes import state_of

CGROUPS = Path("/sys/fs/cgroup/memory")
MIB = 2**20
FILL_BYTES = 256 * 1024
BETWEEN_STALLS_S = 0.1
"""Between two stalls: the node does most of its work then."""
OF_DISKS = {"disk_error": "5", "disk_slow": "slow", "disk_hangs": "hang", "disk_flips": "flip"}
"""What the shim of disks is to do, with an errno for errors."""

Undo = Callable[[], None]


@attrs.define(eq=False)
class Injection:
    """Does the faults of a plan at their time; `spans` is what was done, and when it was undone."""

    cluster: Cluster
    spans: list[Span] = attrs.field(factory=list)
    _network: list[Fault] = attrs.field(factory=list)
    _links: dict[tuple[str, str], dict[str, Any]] = attrs.field(factory=dict)

    def run(self) -> None:
        """Do and undo every fault, each at its time; end early where a process ended by itself."""
        events = [(fault.at_s, 1, n, fault) for n, fault in enumerate(self.cluster.plan.faults)]
        events += [(fault.until_s, 0, n, fault) for _, _, n, fault in events]
        undo: dict[int, tuple[float, str, Undo]] = {}
        for at_s, is_begin, number, fault in sorted(events, key=lambda each: each[:3]):
            if not self._sleep_until(at_s):
                return
            if is_begin:
                began = time.monotonic()
                effect, undoes = self._do(fault)
                undo[number] = began, effect, undoes
            else:
                began, effect, undoes = undo.pop(number)
                undoes()
                ended = time.monotonic()
                self.spans.append(Span(kind=fault.kind, targets=fault.to, began=began, ended=ended,
                                       effect=effect))  # fmt: skip
                since_s = began - self.cluster.began
                print(f"{since_s:6.1f} s to {ended - self.cluster.began:6.1f} s: {fault.kind} "
                      f"{' '.join(fault.to)}: {effect}", flush=True)  # fmt: skip
        self._sleep_until(self.cluster.plan.seconds)

    def _sleep_until(self, at_s: float) -> bool:
        """Wait until a moment of the run; return False where it has failed before."""
        while (left_s := self.cluster.began + at_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.2))
            if self.cluster.problems():
                return False
        return True

    def _do(self, fault: Fault) -> tuple[str, Undo]:
        if fault.kind in PAIR_KINDS + HOST_KINDS:
            return self._do_network(fault)
        to = fault.to[0]
        process = self.cluster.clients[to] if to.isdigit() else self.cluster.nodes[to]
        match fault.kind:
            case "kill_node" | "kill_client":
                return _ended(process, signal.SIGKILL)
            case "restart_node":
                return _ended(process, signal.SIGTERM)
            case "pause_node" | "pause_client":
                pid = process.signal(signal.SIGSTOP)
                return f"SIGSTOP {pid}", lambda: _continue(pid)
            case "stall_node":
                return _stalled(process, fault.options["stall_s"])
            case "memory_limit":
                return _limit_memory(process, int(fault.options["left"].removesuffix("KiB")))
            case "few_descriptors":
                return _limit_files(process, fault.options["left"])
            case "clock_jump":
                return _controlled(self.cluster.file(to, "clock"), str(fault.options["by_s"]))
            case "disk_full":
                return _filled(self.cluster.folder / f"{to}.disk")
            case "shm_full":
                return _filled(self.cluster.hosts[to].path("/dev/shm"))
            case _:
                text = f"{fault.options['way']} {OF_DISKS[fault.kind]}"
                return _controlled(self.cluster.file(to, "slabs"), text)

    def _do_network(self, fault: Fault) -> tuple[str, Undo]:
        self._network.append(fault)
        self._set_links()

        def undo() -> None:
            self._network.remove(fault)
            self._set_links()

        return str(dict(fault.options)), undo

    def _set_links(self) -> None:
        """Have each link do what all faults of it say; a cut wins."""
        links: dict[tuple[str, str], dict[str, Any]] = {}
        for fault in self._network:
            for link in links_of(fault):
                options = {k: it for k, it in fault.options.items() if k != "way"}
                if fault.kind in HOST_KINDS:
                    options = {"is_cut": True}
                links.setdefault(link, {}).update(options)
        for link in self._links.keys() | links.keys():
            if links.get(link, {}) != self._links.get(link, {}):
                self.cluster.set_link(*link, links.get(link, {}))
        self._links = links


def links_of(fault: Fault) -> Iterator[tuple[str, str]]:
    """Yield the directions that a fault of the network is about."""
    here = set(fault.to)
    for source in HOSTS:
        for target in HOSTS:
            match fault.kind:
                case "one_way":
                    is_meant = (source, target) == fault.to
                case "partition":
                    is_meant = (source in here) != (target in here)
                case "silence":
                    end = source if fault.options["way"] == "out" else target
                    is_meant = end in here
                case _:
                    is_meant = {source, target} == here
            if is_meant and source != target:
                yield source, target


def _ended(process: Process, number: signal.Signals) -> tuple[str, Undo]:
    process.may_run.clear()
    process.is_excused = True
    pid = process.signal(number)

    def undo() -> None:
        if process.pid == pid != 0:  # A graceful stop may take longer.
            process.signal(signal.SIGKILL)
        while pid and process.pid == pid:
            time.sleep(0.01)
        time.sleep(0.1)  # Its supervisor notes its end.
        process.is_excused = False
        process.may_run.set()

    return f"{number.name} {pid}", undo


def _stalled(process: Process, stall_s: float) -> tuple[str, Undo]:
    """Stop a process for a moment again and again, as a collection of garbage stalls its loop."""
    is_over = threading.Event()

    def stall() -> None:
        while not is_over.wait(BETWEEN_STALLS_S):
            pid = process.signal(signal.SIGSTOP)
            time.sleep(stall_s)
            _continue(pid)

    thread = threading.Thread(target=stall, daemon=True)
    thread.start()

    def undo() -> None:
        is_over.set()
        thread.join()

    return f"SIGSTOP for {stall_s} s, again and again", undo


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid and state_of(Path(f"/proc/{pid}")) == "T":
            os.kill(pid, signal.SIGCONT)


def _limit_memory(process: Process, left_kib: int) -> tuple[str, Undo]:
    """Let a process have so much more memory than now: it dies of the kernel's OOM killer."""
    pid = process.pid
    if not CGROUPS.is_dir() or not pid:
        return "nothing: no cgroup of memory here", lambda: None
    group = CGROUPS / f"peercache-faults-{os.getpid()}-{process.host.namespace}"
    group.mkdir(exist_ok=True)
    process.is_excused = True
    # What it has stays charged elsewhere.
    (group / "cgroup.procs").write_text(str(pid))
    (group / "memory.limit_in_bytes").write_text(str(left_kib * 1024))

    def undo() -> None:
        (group / "memory.limit_in_bytes").write_text("-1")
        with contextlib.suppress(OSError):
            (CGROUPS / "cgroup.procs").write_text(str(pid))
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.01)
        time.sleep(0.1)
        process.is_excused = False

    return f"{left_kib} KiB for {pid}", undo


def _limit_files(process: Process, left: int) -> tuple[str, Undo]:
    pid = process.pid
    if not pid:
        return "nothing: it does not run", lambda: None
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = len(list(Path(f"/proc/{pid}/fd").iterdir())) + left
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))

    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    return f"at most {limit} descriptors for {pid}", undo


def _filled(folder: Path) -> tuple[str, Undo]:
    """Fill a file system to the last block."""
    file, size = folder / "filler", 0
    with file.open("wb") as out, contextlib.suppress(OSError):
        while True:
            size += os.write(out.fileno(), bytes(FILL_BYTES))
    return f"{size / MIB:.0f} MiB more in {folder.name}", lambda: file.unlink(missing_ok=True)


def _controlled(file: Path, text: str) -> tuple[str, Undo]:
    """Write to a file that a shim reads; empty again afterwards."""
    part = file.with_suffix(".part")

    def put(now: str) -> None:
        part.write_text(now)
        part.replace(file)

    put(text)
    return text, lambda: put("")
