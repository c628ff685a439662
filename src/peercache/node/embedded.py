"""A node on a trio loop of its own, in a daemon thread of the engine's process."""

from __future__ import annotations

import threading
from typing import final

import trio

from peercache.config.settings import Config
from peercache.errors import DeadlineExceeded, PeerCacheError
from peercache.model.fork_guard import ForkGuard
from peercache.node.keeping import describe
from peercache.node.node import Node, Ready
from peercache.observability.metrics import Metrics

START_S = 30.0
"""How long a start may take: the first 256 MiB of the pool, and the sockets."""

CLOSE_S = 3.0
"""How long `close` waits for the thread. It is a daemon: an engine that exits takes it along."""


@final
class EmbeddedNode:
    """Starts a node in this process, and stops it within a bound."""

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
        self._thread = threading.Thread(target=self._main, name="peercache-node", daemon=True)
        self._thread.start()
        if not self._settled.wait(START_S):
            self.close()
            raise DeadlineExceeded("the start of the embedded node", START_S)
        if self._failure is not None:
            raise self._failure

    @property
    def ready(self) -> Ready:
        """Where the node serves."""
        assert self._ready is not None, "the constructor has returned"
        return self._ready

    def figures(self) -> dict[str, int | float | str]:
        """Return the node's figures."""
        return self._node.figures() if self._node is not None else {}

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the cluster; returns within `timeout_s`, whatever the loop does."""
        if self._fork.is_child or self._token is None or self._node is None:
            return
        try:
            self._token.run_sync_soon(self._node.stop)
        except trio.RunFinishedError:
            return
        self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            trio.run(self._run)
        except BaseException as error:
            # Handed to the thread that waits for it.
            causes = describe(error)
            known = [cause for cause in causes if isinstance(cause, PeerCacheError)]
            self._failure = (known or causes)[0]
        finally:
            self._settled.set()

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._node = Node(self._config, metrics=self._metrics, in_process=True)
        async with trio.open_nursery() as nursery:
            self._ready = await nursery.start(self._node.run)
            self._settled.set()
