"""A page server on a trio loop in a thread of its own, as the node runs it next to its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import trio

from peercache.config.quantities import format_address
from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.client import TcpFabric
from peercache.fabric.tcp.server import serve_pages
from peercache.fabric.tcp.serving import PageSource
from peercache.fabric.tcp.sockets import open_listeners
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing
from tests.pace import TIMEOUT_S

CLUSTER = "tests"


class PageServer:
    """Serves a source until `close`; `between` may be set at any time.

    address: HOST:PORT. metrics: the server's own.
    """

    def __init__(
        self,
        source: PageSource,
        *,
        incarnation: int,
        granule: int,
        port: int = 0,
        tls: LiveTls | None = None,
        sharing: Sharing | None = None,
        **options: Any,
    ) -> None:
        """Start, and return when clients can connect."""
        self.metrics = Metrics()
        self.between: Callable[[], None] = lambda: None
        self._source = source
        self._admission = DataAdmission(
            cluster=CLUSTER, granule=granule, incarnation=incarnation, tls=tls, sharing=sharing
        )
        self._port = port
        self._options = options
        self._ready = threading.Event()
        # A test that fails before `close` must not keep the process of all others from ending.
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)

    def close(self) -> None:
        """Stop serving: every connection is closed when this returns."""
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    def refusals(self, reason: str) -> float:
        """Return how often a client was refused for that reason."""
        value = self.metrics.registry.get_sample_value(
            "peercache_tcp_refused_total", {"reason": reason}
        )
        return value or 0.0

    def _act(self) -> None:
        self.between()

    def connections(self) -> float:
        """Return how many connections are open."""
        labels = {"port": "data"}
        return self.metrics.registry.get_sample_value("peercache_connections", labels) or 0.0

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            listeners = await open_listeners("127.0.0.1", self._port)
            self.port = listeners[0].socket.getsockname()[1]
            self.address = format_address("127.0.0.1", self.port)
            async with trio.open_nursery() as nursery:
                await nursery.start(self._serve, listeners)
                self._ready.set()

    async def _serve(
        self, listeners: list[trio.SocketListener], *, task_status: trio.TaskStatus[None]
    ) -> None:
        await serve_pages(
            listeners,
            self._source,
            admission=self._admission,
            metrics=self.metrics,
            between_bytes_and_words=self._act,
            task_status=task_status,
            **self._options,
        )


def fabric_for(granule: int, **options: Any) -> TcpFabric:
    """Return a client side that the server above admits, unless `options` say otherwise.

    Its timeout outlasts a busy machine: tests of silence set their own.
    """
    known: dict[str, Any] = {
        "cluster": CLUSTER,
        "granule": granule,
        "max_channels_per_peer": 4,
        "stall_s": TIMEOUT_S,
        "connect_timeout_s": TIMEOUT_S,
        **options,
    }
    return TcpFabric(**known)
