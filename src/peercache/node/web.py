"""The HTTP side of a node: its pages and the access to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from peercache.config.settings import Config
from peercache.http.access import Access
from peercache.http.history import Watching
from peercache.http.pages import Health, Pages
from peercache.http.server import serve_http
from peercache.installation.library import version
from peercache.manager.engine_follower import EngineFollower
from peercache.manager.gpu_blocks import IndexParts
from peercache.node.questions import Gathering
from peercache.observability.latency import OBJECTIVES
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing


async def serve_web(
    config: Config,
    nursery: trio.Nursery,
    address: tuple[str, int],
    connections_max: int,
    *,
    sharing: Sharing,
    tls: LiveTls | None,
    metrics: Metrics,
    log: Any,
    health: Callable[[], Health],
    own: Callable[[], str],
    gathering: Gathering,
    index: IndexParts,
) -> str:
    """Serve the pages of a node in the nursery; return HOST:PORT. own: its control address.

    Raises ConfigError for settings that cannot be served.
    """
    metrics.describe_process(version())
    metrics.describe_objectives(
        {each.name: getattr(config, f"objective_{each.name}_s") for each in OBJECTIVES}
    )
    if tls is not None:
        metrics.certificate_days.set_function(lambda: tls.days_left)
    access = Access(config, sharing=sharing, tls=tls, metrics=metrics, log=log)
    watching = Watching(gathering.statuses)
    pages = Pages(metrics.registry, health, own, watching, index)
    nursery.start_soon(watching.run)
    nursery.start_soon(access.follow)
    if config.engine_events:
        nursery.start_soon(_follow, EngineFollower(config.engine_events, index.gpu))
    serve = partial(
        serve_http,
        *address,
        application=pages.application(),
        access=access,
        connections_max=connections_max,
    )
    return str(await nursery.start(serve))


async def _follow(follower: EngineFollower) -> None:
    try:
        await trio.sleep_forever()
    finally:
        follower.close()
