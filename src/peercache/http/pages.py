"""The pages that a node serves over HTTP: an ASGI application, which knows no sockets.

/metrics, /healthz and /api/v1 for machines, and for people the dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from peercache.http.dashboard import (
    PageFacts,
    PageQuery,
    absent_page,
    cluster_page,
    node_page,
    templates,
)
from peercache.http.history import Watching
from peercache.http.server import Application
from peercache.manager.gpu_blocks import IndexParts
from peercache.model.status import MemberStatus, to_plain
from peercache.observability.log import get_logger

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

_FILES = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""What pages load: from the node itself, in `files/`."""

HEALTH_FAILED = "http.health_failed"
"""Log event: judging the health failed, which is a bug of ours."""


@attrs.frozen
class Health:
    """The health of the node, now.

    serving: whether a client that asks this node for its pages gets them.
    reason:  why not, in words for a person; "" while serving.
    degraded: what does not work although clients get their pages; "" for nothing.
    facts:   figures that a person looks at next: members, pages, bytes …
    """

    serving: bool
    reason: str = ""
    degraded: str = attrs.field(default="", kw_only=True)
    facts: dict[str, int | float | str] = attrs.Factory(dict)


@attrs.frozen(eq=False)
class Pages:
    """The pages of one node.

    own:   the name of this node, HOST:PORT of its control plane.
    index: what the prefix index is made of, if this node has one.
    """

    registry: CollectorRegistry
    health: Callable[[], Health]
    own: Callable[[], str]
    watching: Watching
    index: IndexParts | None = None

    def application(self) -> Application:
        """Return what answers requests. All that it needs is loaded here, and not by a request."""
        # Only nodes with an HTTP port pay for Starlette and Jinja2.
        from starlette.applications import Starlette  # noqa: PLC0415 - as said above
        from starlette.routing import Route  # noqa: PLC0415

        templates()
        routes = {
            "/": self._shown,
            "/nodes/{name}": self._shown_node,
            "/api/v1/status": self._status,
            "/api/v1/status/{name}": self._status_of_node,
            "/metrics": self._measured,
            "/healthz": self._judged,
            **{f"/files/{name}": _filed(name) for name in _FILES},
        }
        application = Starlette(
            routes=[
                *(Route(path, answer, methods=["GET"]) for path, answer in routes.items()),
                *self._prefix_routes(),
            ],
            exception_handlers={404: _absent, 405: _refused, Exception: _failed},
        )
        # A path with a slash at its end is another one: no redirect sends a client to a host that
        # only its own Host header names.
        application.router.redirect_slashes = False
        return application

    def _prefix_routes(self) -> Sequence[Route]:
        """Return the routes of the prefix index, or one that says what it lacks."""
        if self.index is None:
            return ()
        try:
            from peercache.http.prefix import PrefixIndex  # noqa: PLC0415 - only with the extra
        except ModuleNotFoundError as error:
            if error.name != "msgspec":
                raise
            from starlette.routing import Route  # noqa: PLC0415 - loaded by `application`

            return (Route("/api/v1/prefix/{what}", _not_installed, methods=["GET", "POST"]),)
        index = self.index
        return PrefixIndex(index.overlap, index.named, index.gpu, index.hint).routes()

    async def _measured(self, request: Request) -> Response:
        """Answer with the samples of this node; the Accept header chooses the exposition format."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return _whole(200, content_type, encode(self.registry))

    async def _judged(self, _: Request) -> Response:
        """Answer 200 only while the node truly serves."""
        found, bug = self._health()
        if bug:
            return _respond(503, {"status": "unknown", "reason": bug})
        if found.serving and found.degraded:
            # 200: a node that is restarted for its disk would lose its memory too.
            degraded = {"status": "degraded", "reason": found.degraded}
            return _respond(200, {**degraded, **found.facts})
        if found.serving:
            return _respond(200, {"status": "ok", **found.facts})
        return _respond(503, {"status": "unavailable", "reason": found.reason, **found.facts})

    async def _shown(self, request: Request) -> Response:
        """Answer with the cluster, also by a node that does not serve: a person reads it."""
        members = await self.watching.members()
        return _page(200, await cluster_page(self._view(members, request)))

    async def _shown_node(self, request: Request) -> Response:
        """Answer with one member of the cluster, and the details of its process."""
        name = request.path_params["name"]
        members = await self.watching.members(detail=True)
        view, found = self._view(members, request), _named(members, name)
        if found is None:
            return _page(404, await absent_page(view, name))
        return _page(200, await node_page(view, found))

    async def _status(self, _: Request) -> Response:
        """Answer with the statuses of all members, without the details of their processes."""
        members = await self.watching.members()
        return _respond(200, {"reported_by": self.own(), "members": to_plain(members)})

    async def _status_of_node(self, request: Request) -> Response:
        """Answer with the status of one member, and the details of its process."""
        name = request.path_params["name"]
        found = _named(await self.watching.members(detail=True), name)
        if found is None:
            return _respond(404, {"error": f"no member is called {name}: /api/v1/status lists all"})
        return _respond(200, to_plain(found))

    def _view(self, members: Sequence[MemberStatus], request: Request) -> PageFacts:
        at = datetime.now(timezone.utc).strftime("%H:%M:%S UTC")
        query = PageQuery.of(request.query_params)
        return PageFacts(self.own(), members, self.watching.history, at, self.watching.long, query)

    def _health(self) -> tuple[Health, str]:
        """Return the health, and the bug of ours that kept the node from judging it, or ""."""
        try:
            return self.health(), ""
        except Exception as error:
            # A node that cannot judge its health is not healthy.
            get_logger().exception(HEALTH_FAILED)
            bug = f"{type(error).__name__}: {error}"
            return Health(serving=False, reason=bug), bug


def _filed(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with a file, which is read now."""
    body = (files(__package__ or "") / "files" / name).read_bytes()

    async def answer(_: Request) -> Response:
        return _whole(200, _FILES[name], body)

    return answer


async def _absent(_: Request, __: Exception) -> Response:
    return _respond(
        404,
        {
            "error": "there are /, /nodes/NODE, /api/v1/status, /api/v1/prefix/openapi.json, "
            "/metrics and /healthz"
        },
    )


async def _refused(_: Request, error: Exception) -> Response:
    # Starlette's exception has the methods of the route.
    allowed = ", ".join(sorted(getattr(error, "headers", {})["Allow"].split(", ")))
    refusal = _respond(405, {"error": f"only {allowed.replace(', ', ' and ')}"})
    refusal.headers["allow"] = allowed
    return refusal


async def _not_installed(_: Request) -> Response:
    why = "this node lacks the prefix index: pip install msgspec where it runs"
    return _respond(501, {"error": why})


async def _failed(_: Request, error: Exception) -> Response:
    """Answer 500; Starlette raises the error again, and the gateway logs it."""
    return _respond(500, {"error": f"{type(error).__name__}: {error}"})


def _named(members: Sequence[MemberStatus], name: str) -> MemberStatus | None:
    return next((member for member in members if member.status.name == name), None)


def _page(status: int, page: str) -> Response:
    # A name may be no text that an encoding holds.
    return _whole(status, "text/html; charset=utf-8", page.encode(errors="replace"))


def _respond(status: int, facts: Any) -> Response:
    return _whole(status, "application/json", (json.dumps(facts) + "\n").encode())


def _whole(status: int, content_type: str, body: bytes) -> Response:
    from starlette.responses import Response  # noqa: PLC0415 - loaded by `application`

    # As a header: a media type of Prometheus names its own charset.
    return Response(body, status, headers={"content-type": content_type})
