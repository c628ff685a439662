"""The pages that a node serves over HTTP: an ASGI application, which knows no sockets.

/metrics and /healthz for machines, and for people an overview.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from peercache.http.gateway import Application
from peercache.http.overview import overview, template
from peercache.model.member import Member
from peercache.observability.log import get_logger

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_FILES = {"dashboard.css": "text/css; charset=utf-8"}
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
    """The pages of one node."""

    registry: CollectorRegistry
    health: Callable[[], Health]
    members: Callable[[], Sequence[Member]]

    def application(self) -> Application:
        """Return what answers requests. All that it needs is loaded here, and not by a request."""
        # Only nodes with an HTTP port pay for Starlette and Jinja2.
        from starlette.applications import Starlette  # noqa: PLC0415 - as said above
        from starlette.routing import Route  # noqa: PLC0415

        template()
        routes = {
            "/": self._shown,
            "/metrics": self._measured,
            "/healthz": self._judged,
            **{f"/files/{name}": _filed(name) for name in _FILES},
        }
        application = Starlette(
            routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()],
            exception_handlers={404: _absent, 405: _refused, Exception: _failed},
        )
        # A path with a slash at its end is another one: no redirect sends a client to a host that
        # only its own Host header names.
        application.router.redirect_slashes = False
        return application

    async def _measured(self, request: Request) -> Response:
        """Answer with the samples of this node; the Accept header chooses the exposition format."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return _whole(200, content_type, encode(self.registry))

    async def _judged(self, _: Request) -> Response:
        """Answer 200 only while the node truly serves."""
        found, bug = self._health()
        if bug:
            return _told(503, {"status": "unknown", "reason": bug})
        if found.serving and found.degraded:
            # 200: a node that is restarted for its disk would lose its memory too.
            told = {"status": "degraded", "reason": found.degraded}
            return _told(200, {**told, **found.facts})
        if found.serving:
            return _told(200, {"status": "ok", **found.facts})
        return _told(503, {"status": "unavailable", "reason": found.reason, **found.facts})

    async def _shown(self, _: Request) -> Response:
        """Answer 200 with the overview, also of a node that does not serve: a person reads it."""
        found, _bug = self._health()
        page = overview(
            problem=found.reason,
            degraded=found.degraded,
            facts=found.facts,
            members=self.members(),
            registry=self.registry,
        )
        return _whole(200, "text/html; charset=utf-8", page.encode(errors="replace"))

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
    body = files(__package__ or "").joinpath("files", name).read_bytes()

    async def answer(_: Request) -> Response:
        return _whole(200, _FILES[name], body)

    return answer


async def _absent(_: Request, __: Exception) -> Response:
    return _told(404, {"error": "there are /, /metrics and /healthz"})


async def _refused(_: Request, __: Exception) -> Response:
    return _told(405, {"error": "only GET and HEAD"})


async def _failed(_: Request, error: Exception) -> Response:
    """Answer 500; Starlette raises the error again, and the gateway logs it."""
    return _told(500, {"error": f"{type(error).__name__}: {error}"})


def _told(status: int, facts: dict[str, object]) -> Response:
    return _whole(status, "application/json", (json.dumps(facts) + "\n").encode())


def _whole(status: int, content_type: str, body: bytes) -> Response:
    from starlette.responses import Response  # noqa: PLC0415 - loaded by `application`

    # As a header: a media type of Prometheus names its own charset.
    return Response(body, status, headers={"content-type": content_type})
