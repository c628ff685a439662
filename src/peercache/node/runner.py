"""Runs a node: as a process of its own, or in a daemon thread of the engine's process.

A process raises limits, prints a ready line, ends after a signal, and reports its state to a
service manager (sd_notify). An embedded node has its own trio loop, and is replaced by a new node
after an error.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import trio

from peercache.config.settings import Config
from peercache.errors import ConfigError, DeadlineExceeded, PeerCacheError
from peercache.model.process import ForkGuard
from peercache.node.node import Node, Ready
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics

if sys.version_info < (3, 11):  # pragma: no cover - trio brings it there
    from exceptiongroup import BaseExceptionGroup

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str, log: Any, environment: Mapping[str, str] | None = None) -> None:
    """Send a state to the socket that systemd's `Type=notify` names; do nothing without one.

    state: READY or STOPPING. It never blocks and never raises: a service manager that receives
           nothing ends the wait by its own timeout.
    """
    address = (os.environ if environment is None else environment).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # "@" means the zero byte of an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as sender:
        try:
            sender.sendto(state.encode(), target)
        except OSError as error:
            log.warning("node.notify_failed", socket=address, problem=error.strerror)


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP means a closed terminal. It does not mean reload: new certificate files are used without a
signal."""

IGNORED = (signal.SIGUSR1, signal.SIGUSR2)
"""Log rotation and supervisors send them by mistake; by default they kill a process."""

DESCRIPTORS_MIN = 256
"""A node, its home clients and a few peers need this many descriptors; with fewer it refuses
connections at random."""


def run_standalone(config: Config, ready_file: str | None) -> None:
    """Run a node until one of STOPS; write its ready line to stdout, and to a file if named.

    Raises the error that keeps the node from serving, usually in an exception group.
    """
    if (descriptors := _use_every_descriptor()) < DESCRIPTORS_MIN:
        raise ConfigError(
            "ulimit -n",
            f"{descriptors} open files are too few for a node, which requires {DESCRIPTORS_MIN} at "
            "least: `ulimit -n 65536`  (systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536)",
        )
    trio.run(_serve, config, ready_file)


def _use_every_descriptor() -> float:
    """Raise the soft limit of descriptors to the hard one, and return it.

    Most systems start with 1024, for programs that use select(): a fifth of the connections for
    which this node is built.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def _calm_the_collector() -> None:
    """Keep Python's garbage collector from stopping the loop.

    With a pool of a quarter of a million pages one full collection takes 0.14 s and frees nothing:
    the actors' state has no cycles. Young objects are still collected, those from the start never.
    """
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000_000)


async def _serve(config: Config, ready_file: str | None) -> None:
    node = Node(config, in_process=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, node)
        ready: Ready = await nursery.start(node.run)
        _calm_the_collector()
        _announce(ready, ready_file)
        notify(READY, node.log)
        await node.stopped.wait()
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    node: Node, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*STOPS, *IGNORED) as signals:
        task_status.started()
        async for number in signals:
            if number in STOPS:
                notify(STOPPING, node.log)
                node.stop()
            else:
                node.log.warning("node.signal_ignored", signal=signal.Signals(number).name)


def _announce(ready: Ready, ready_file: str | None) -> None:
    line = json.dumps(ready.line())
    # The file is first, so that a program that has read the line finds the file.
    if ready_file:
        # Renamed into place, so that a program that waits for the file never reads a part of it.
        part = Path(f"{ready_file}.{os.getpid()}.part")
        try:
            part.write_text(line + "\n")
            part.replace(ready_file)
        except OSError as error:
            problem = f"cannot write {ready_file}: {error.strerror}"
            raise ConfigError("ready-file", problem) from error
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


START_S = 30.0
"""How long a start may take: the first 256 MiB of the pool, and the sockets."""

CLOSE_S = 3.0
"""How long `close` waits for the thread. It is a daemon: it ends with the process."""

AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 60.0
"""Back-off between the failure of a node and the start of the next one: a start fills memory, and
the next node may fail for the same reason."""


def describe(error: BaseException) -> list[BaseException]:
    """Return the errors to show to operators, from nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return [inner for group in error.exceptions for inner in describe(group)]
    return [error]


@final
class EmbeddedNode:
    """Runs a node in this process, restarts it after an error, and stops it within a bound."""

    def __init__(self, config: Config, *, metrics: Metrics) -> None:
        """Start and wait until it serves; raise the error if it fails."""
        self._config = config
        self._metrics = metrics
        self._fork = ForkGuard()
        self._token: trio.lowlevel.TrioToken | None = None
        self._node: Node | None = None
        self._ready: Ready | None = None
        self._failure: BaseException | None = None
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="peercache-node", daemon=True)
        self._thread.start()
        if not self._settled.wait(START_S):
            self.close()
            raise DeadlineExceeded("the start of the embedded node", START_S)
        if self._failure is not None:
            raise self._failure

    @property
    def ready(self) -> Ready:
        """The addresses of the node; its replacement has the same `home` and secret."""
        assert self._ready is not None, "the constructor has returned"
        return self._ready

    def figures(self) -> dict[str, int | float | str]:
        """Return the node's figures."""
        return self._node.figures() if self._node is not None else {}

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the cluster; returns within `timeout_s`, even if the loop hangs."""
        if self._fork.is_child:
            return
        self._closing.set()
        if self._token is not None:
            # Between two nodes, or after the last one, only `_closing` ends the thread.
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)
        self._thread.join(timeout_s)

    def _stop(self) -> None:
        if self._node is not None:
            self._node.stop()

    def _main(self) -> None:
        """Run nodes until one ends without an error: it was closed, or drained."""
        pause_s = AGAIN_MIN_S
        while True:
            began = time.monotonic()
            try:
                trio.run(self._run)
                return
            except BaseException as error:
                if self._ready is None:
                    # Passed to the thread that waits for it.
                    causes = describe(error)
                    known = [cause for cause in causes if isinstance(cause, PeerCacheError)]
                    self._failure = (known or causes)[0]
                    return
                self._log_end(error, pause_s)
            finally:
                self._settled.set()
            if time.monotonic() - began > AGAIN_MAX_S:
                pause_s = AGAIN_MIN_S  # It has served for a while.
            if self._closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, AGAIN_MAX_S)

    def _log_end(self, error: BaseException, pause_s: float) -> None:
        problem = "; ".join(map(repr, describe(error)))
        log = get_logger()
        log.error("node.embedded_failed", problem=problem, again_s=pause_s, exc_info=error)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._node = Node(self._config, metrics=self._metrics, in_process=True, before=self._ready)
        if self._closing.is_set():
            return
        async with trio.open_nursery() as nursery:
            self._ready = await nursery.start(self._node.run)
            self._settled.set()
