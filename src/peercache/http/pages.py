"""The pages that a node serves over HTTP: /metrics, /healthz and, for people, an overview.

It maps a request to an answer, and knows no sockets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from peercache.http.overview import overview
from peercache.model.member import Member
from peercache.observability.log import get_logger

PAGE_FAILED = "http.page_failed"
"""Log event: making a page failed, which is a bug of ours."""

UNAUTHORIZED = 401

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


@attrs.frozen
class Answer:
    """A status, the type of the body, and the body."""

    status: int
    content_type: str
    body: bytes


def unauthorized(problem: str) -> Answer:
    """Return the answer to a client that may not read a page; it tells nothing of the node."""
    return _told(UNAUTHORIZED, {"error": problem})


@attrs.frozen(eq=False)
class Pages:
    """The pages of one node."""

    registry: CollectorRegistry
    health: Callable[[], Health]
    members: Callable[[], Sequence[Member]]

    def answer(self, method: str, target: str, accept: str) -> Answer:
        """Answer a request; `accept` is its Accept header, which chooses the exposition format."""
        try:
            return self._answer(method, target.partition("?")[0], accept)
        except Exception as error:
            # A node goes on serving when one of its pages cannot be made.
            get_logger().exception(PAGE_FAILED, page=target)
            return _told(500, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, method: str, path: str, accept: str) -> Answer:
        if method not in ("GET", "HEAD"):
            return _told(405, {"error": "only GET and HEAD"})
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return Answer(200, content_type, encode(self.registry))
        if path == "/healthz":
            return self._judged()
        if path == "/":
            return self._shown()
        return _told(404, {"error": "there are /, /metrics and /healthz"})

    def _judged(self) -> Answer:
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

    def _shown(self) -> Answer:
        """Answer 200 with the overview, also of a node that does not serve: a person reads it."""
        found, _ = self._health()
        page = overview(
            problem=found.reason,
            degraded=found.degraded,
            facts=found.facts,
            members=self.members(),
            registry=self.registry,
        )
        return Answer(200, "text/html; charset=utf-8", page.encode(errors="replace"))

    def _health(self) -> tuple[Health, str]:
        """Return the health, and the bug of ours that kept the node from judging it, or ""."""
        try:
            return self.health(), ""
        except Exception as error:
            # A node that cannot judge its health is not healthy.
            get_logger().exception(HEALTH_FAILED)
            bug = f"{type(error).__name__}: {error}"
            return Health(serving=False, reason=bug), bug


def _told(status: int, facts: dict[str, object]) -> Answer:
    return Answer(status, "application/json", (json.dumps(facts) + "\n").encode())
