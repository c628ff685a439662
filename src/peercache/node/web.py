"""The HTTP side of a node: its pages and the access to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import trio

from peercache.config.settings import Config
from peercache.http.access import Access
from peercache.http.history import Watching
from peercache.http.pages import Health, IndexParts, Pages
from peercache.http.server import serve_http
from peercache.installation.library import version
from peercache.manager.engine_follower import EngineFollower
from peercache.node.questions import Gathering
from peercache.observability.latency import OBJECTIVES
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing


@final
class Web:
    """The HTTP server of a node."""

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
        index: IndexParts,
    ) -> None:
        """Raise ConfigError for settings that cannot be served. own: this node's HOST:PORT."""
        metrics.describe_process(version())
        metrics.describe_objectives(
            {each.name: getattr(config, f"objective_{each.name}_s") for each in OBJECTIVES}
        )
        if tls is not None:
            metrics.certificate_days.set_function(lambda: tls.days_left)
        self._access = Access(config, sharing=sharing, tls=tls, metrics=metrics, log=log)
        self._watching = Watching(gathering.statuses)
        self._engines = config.engine_events
        self._gpu = index.gpu
        self._pages = Pages(metrics.registry, health, own, self._watching, index)

    async def serve(
        self, nursery: trio.Nursery, address: tuple[str, int], connections_max: int
    ) -> str:
        """Serve in the nursery; return HOST:PORT."""
        nursery.start_soon(self._watching.run)
        nursery.start_soon(self._access.follow)
        if self._engines:
            nursery.start_soon(self._follow, EngineFollower(self._engines, self._gpu))
        application = self._pages.application()
        serve = partial(
            serve_http,
            *address,
            application=application,
            access=self._access,
            connections_max=connections_max,
        )
        return str(await nursery.start(serve))

    @staticmethod
    async def _follow(follower: EngineFollower) -> None:
        try:
            await trio.sleep_forever()
        finally:
            follower.close()
