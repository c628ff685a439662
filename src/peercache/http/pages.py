"""The pages that a node serves over HTTP: /metrics, /healthz and, for people, an overview.

A pure function from a request to an answer; it knows nothing of sockets.
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
"""Log event: a page could not be made, which is a bug of ours."""

HEALTH_FAILED = "http.health_failed"
"""Log event: the callable that tells the health raised, which is a bug of ours."""


@attrs.frozen
class Health:
    """How the node is, now.

    serving: whether a client that asks this node for its pages gets them.
    reason:  why not, in words for a person; "" while serving.
    facts:   what a person looks at next: members, pages, bytes …
    """

    serving: bool
    reason: str = ""
    facts: dict[str, int | float | str] = attrs.Factory(dict)


@attrs.frozen
class Answer:
    """A status, the type of the body, and the body."""

    status: int
    content_type: str
    body: bytes


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
            # A page that cannot be made is no reason for a node to stop serving others.
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
        if found.serving:
            return _told(200, {"status": "ok", **found.facts})
        return _told(503, {"status": "unavailable", "reason": found.reason, **found.facts})

    def _shown(self) -> Answer:
        """Show how the node is, also one that is not well: whoever looks is a person."""
        found, _ = self._health()
        page = overview(
            problem=found.reason,
            facts=found.facts,
            members=self.members(),
            registry=self.registry,
        )
        return Answer(200, "text/html; charset=utf-8", page.encode(errors="replace"))

    def _health(self) -> tuple[Health, str]:
        """Return how the node is, and the bug of ours that kept it from saying so, or ""."""
        try:
            return self.health(), ""
        except Exception as error:
            # A node that cannot say how it is must not be taken for a healthy one.
            get_logger().exception(HEALTH_FAILED)
            bug = f"{type(error).__name__}: {error}"
            return Health(serving=False, reason=bug), bug


def _told(status: int, facts: dict[str, object]) -> Answer:
    return Answer(status, "application/json", (json.dumps(facts) + "\n").encode())
