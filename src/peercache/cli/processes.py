"""Nodes as processes, for the demo and the benchmarks: they are started, killed, and always ended.

Only processes that were started here are signalled, each by its own pid.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from peercache.errors import PeerCacheError

READY_TIMEOUT_S = 60.0
"""Python starts and imports in a second; a loaded machine may need twenty."""

LEAVE_TIMEOUT_S = 3.0
"""A graceful leave takes half a second; a node that has not ended after this is killed."""

SOCKET_PATH_MAX = 90
"""A unix socket's path has at most 107 bytes, and the temporary folder of some systems is long."""

POLL_S = 0.02

LOG_LINES = 12
"""Of the log of a node that failed, the last ones."""

PR_SET_PDEATHSIG = 1  # prctl(2)

LOCAL = {"listen": "127.0.0.1:0", "advertise": "127.0.0.1", "metrics-port": "0"}
"""Settings of a node that only this machine reaches."""


@attrs.define(eq=False)
class NodeFailed(PeerCacheError):
    """A node ended, or did not start to serve."""

    name: str
    problem: str
    log: str

    def __str__(self) -> str:
        """Return the error message, and the end of the node's log."""
        return f"node {self.name} {self.problem}; the end of its log:\n{self.log}".rstrip()


@attrs.define(eq=False)
class NodeProcess:
    """One node. ready: its ready line, once it serves."""

    name: str
    process: subprocess.Popen[bytes]
    home: str
    ready_file: Path
    log: Path
    ready: dict[str, str] = attrs.Factory(dict)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill it as a crash would, and wait until the kernel has removed it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def failed(self, problem: str) -> NodeFailed:
        """Return an error with the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return NodeFailed(self.name, problem, "\n".join(lines[-LOG_LINES:]))


class NodeProcesses:
    """The nodes of one run, and the folder of their sockets and logs; a context manager."""

    def __init__(
        self, command: Sequence[str] | None = None, *, log_folder: str | None = None
    ) -> None:
        """Run `command` for each node, by default this Python's peercache.node."""
        self._command = list(command or (sys.executable, "-m", "peercache.node"))
        self._log_folder = Path(log_folder) if log_folder else None
        self._processes: list[subprocess.Popen[bytes]] = []
        folder = tempfile.mkdtemp(prefix="peercache-")
        if len(folder) > SOCKET_PATH_MAX - len("/a.ipc"):
            Path(folder).rmdir()
            folder = tempfile.mkdtemp(prefix="peercache-", dir="/tmp")
        self.folder = Path(folder)

    def __enter__(self) -> NodeProcesses:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the nodes that still run."""
        self.close()

    def launch(self, name: str, settings: dict[str, str]) -> NodeProcess:
        """Start a node without waiting for it; a name used again keeps its home address."""
        logs = self._log_folder or self.folder
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}.log"
        home = f"ipc://{self.folder / name}.ipc"
        ready_file = self.folder / f"{name}.{len(self._processes)}.ready"
        flags = {**settings, "home": home, "ready-file": str(ready_file)}
        command = [*self._command, *(f"--{flag}={value}" for flag, value in flags.items())]
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own flags
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal reaches this process alone, which then ends its nodes.
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call that takes no lock
            )
        self._processes.append(process)
        return NodeProcess(name, process, home, ready_file, log)

    def await_ready(self, node: NodeProcess, check: Callable[[str], None] = lambda _: None) -> None:
        """Wait until a node serves; raise NodeFailed with the end of its log if it does not.

        check: called while waiting; an exception of it ends the wait.
        """
        until = time.monotonic() + READY_TIMEOUT_S
        while not node.ready_file.exists():
            if not node.is_running:
                raise node.failed(f"ended with status {node.process.returncode}")
            if time.monotonic() > until:
                raise node.failed(f"did not serve within {READY_TIMEOUT_S} s")
            check(f"starting {node.name}")
            time.sleep(POLL_S)
        node.ready = json.loads(node.ready_file.read_text())

    def close(self) -> None:
        """End every process that was started here, then remove the folder."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + LEAVE_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203 - a handful of nodes
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_libc = ctypes.CDLL(None)  # Loaded before any fork: nothing may be loaded between fork and exec.


def _die_with_parent() -> None:
    """Have the kernel kill this process if its parent is killed and cannot end its nodes."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
