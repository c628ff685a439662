"""A node on a trio loop of its own, in a daemon thread of the engine's process."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import final

import trio

from peercache.config.settings import Config
from peercache.errors import DeadlineExceeded, PeerCacheError
from peercache.model.process import ForkGuard
from peercache.node.keeping import describe
from peercache.node.node import Node
from peercache.node.ready import Ready
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics

START_S = 30.0
"""How long a start may take: the first 256 MiB of the pool, and the sockets."""

CLOSE_S = 3.0
"""How long `close` waits for the thread. It is a daemon: an engine that exits takes it along."""

AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 60.0
"""Back-off between the end of a node by an error and the start of the next one: a start fills
memory, and what has ended one node may end the next."""


@final
class EmbeddedNode:
    """Runs a node in this process, and another one after an error; stops it within a bound."""

    def __init__(self, config: Config, *, metrics: Metrics) -> None:
        """Start and wait until it serves; raise what kept it from doing so."""
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
        """Where the node serves; another one in its place has the same `home` and secret."""
        assert self._ready is not None, "the constructor has returned"
        return self._ready

    def figures(self) -> dict[str, int | float | str]:
        """Return the node's figures."""
        return self._node.figures() if self._node is not None else {}

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the cluster; returns within `timeout_s`, whatever the loop does."""
        if self._fork.is_child:
            return
        self._closing.set()
        if self._token is not None:
            # Between two nodes, or behind the last, `_closing` alone ends the thread.
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)
        self._thread.join(timeout_s)

    def _stop(self) -> None:
        if self._node is not None:
            self._node.stop()

    def _main(self) -> None:
        """Run nodes until one ends in good order: it was closed, or drained."""
        pause_s = AGAIN_MIN_S
        while True:
            began = time.monotonic()
            try:
                trio.run(self._run)
                return
            except BaseException as error:
                if self._ready is None:
                    # Handed to the thread that waits for it.
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
