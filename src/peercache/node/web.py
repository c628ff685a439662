"""The HTTP side of a node: its pages and who may read them, put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import trio

from peercache.config.settings import Config
from peercache.http.access import Access
from peercache.http.pages import Health, Pages
from peercache.http.server import serve_http
from peercache.http.watching import Watching
from peercache.installation.distribution import version
from peercache.node.gathering import Gathering
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing


@final
class Web:
    """What a node serves over HTTP."""

    def __init__(
        self,
        config: Config,
        *,
        sharing: Sharing,
        tls: LiveTls | None,
        metrics: Metrics,
        log: Any,
        health: Callable[[], Health],
        own: Callable[[], str],
        gathering: Gathering,
    ) -> None:
        """Raise ConfigError for settings that cannot be served. own: this node's HOST:PORT."""
        metrics.describe_process(version())
        if tls is not None:
            metrics.certificate_days.set_function(lambda: tls.days_left)
        self._access = Access(config, sharing=sharing, tls=tls, metrics=metrics, log=log)
        self._watching = Watching(gathering.statuses)
        self._pages = Pages(metrics.registry, health, own, self._watching)

    async def serve(self, nursery: trio.Nursery, address: tuple[str, int]) -> str:
        """Serve in the nursery; return HOST:PORT."""
        nursery.start_soon(self._watching.run)
        application = self._pages.application()
        serve = partial(serve_http, *address, application=application, access=self._access)
        return str(await nursery.start(serve))
