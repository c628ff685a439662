"""Child processes of the tests: standalone nodes, and programs that speak JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.system.nodes import Closing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STOP_S = 60.0
ANSWER_S = 300.0
"""No child that works takes so long, on no machine."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child: it finds our sources and the stand-ins for a CPU.

    PYTHONPATH_FIRST names a folder that comes before all others.
    """
    ours = (HERE / "cpu_engine", ROOT, ROOT / "src")
    paths = [more.pop("PYTHONPATH_FIRST", ""), *map(str, ours), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def greets_in_clear_text(address: str) -> bool:
    """Return whether the control port at an address answers without TLS."""
    host, _, port = address.rpartition(":")
    greeting = b"\0SP\0\0\x11\0\0"
    with socket.create_connection((host, int(port)), ANSWER_S) as stranger:
        stranger.sendall(greeting)
        with contextlib.suppress(ConnectionResetError):
            return stranger.recv(len(greeting)) == greeting
    return False


class Child(Closing):
    """A program that reads one JSON line and answers with one, until its stdin ends."""

    def __init__(self, *arguments: str, **more_environment: str) -> None:
        """Start it."""
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(**more_environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._received = b""

    def ask(self, request: dict[str, Any], timeout_s: float = ANSWER_S) -> Any:
        """Send a request; return the answer."""
        self.send(request)
        return self.receive(timeout_s)

    def send(self, request: dict[str, Any]) -> None:
        """Send a request without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """Return the next line that the child writes; fail if it ends or takes too long."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"no answer of {self._process.args!r} in {timeout_s} s"
            piece = os.read(descriptor, 1 << 20)
            assert piece, f"{self._process.args!r} ended: {self._process.wait()}"
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process.poll() is not None

    def send_signal(self, number: int) -> None:
        """Send it a signal: SIGSTOP pauses it, SIGCONT go on."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> int:
        """End its stdin; return its exit status, killing it if it does not end."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()


class StandaloneNode(Child):
    """`python -m peercache.node` on the loopback interface."""

    def __init__(
        self,
        folder: Path,
        *,
        discovery: str = "",
        pool_size: str = "128MiB",
        metrics_port: int = 0,
        more: Sequence[str] = (),
    ) -> None:
        """Start it; `ready` is its ready line. more: flags, which override others."""
        home = f"ipc://{folder}/home.ipc"
        flags = {
            "--listen": "127.0.0.1:0",
            "--home": home,
            "--pool-size": pool_size,
            "--metrics-port": str(metrics_port),
            "--log-level": "warning",
            **({"--discovery": discovery} if discovery else {}),
        }
        super().__init__(
            "-m", "peercache.node", *(part for flag in flags.items() for part in flag), *more
        )
        self.ready = self.receive()
        self.home = str(self.ready["home"])
        self.control = str(self.ready["control"])
        if os.environ.get("PEERCACHE_TEST_TLS") == "1":
            assert not greets_in_clear_text(self.control)

    def close(self) -> int:
        """Ask it to leave; return its exit status."""
        self._process.terminate()
        return super().close()
