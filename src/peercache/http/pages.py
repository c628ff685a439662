"""The pages that a node serves over HTTP: /metrics and /healthz.

A pure function from a request to an answer; it knows nothing of sockets.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from peercache.observe import get_logger

HEALTH_FAILED = "health.failed"
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

    def answer(self, method: str, target: str, accept: str) -> Answer:
        """Answer a request; `accept` is its Accept header, which chooses the exposition format."""
        path = target.partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _told(405, {"error": "only GET and HEAD"})
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return Answer(200, content_type, encode(self.registry))
        if path == "/healthz":
            return self._judged()
        return _told(404, {"error": "there are /metrics and /healthz"})

    def _judged(self) -> Answer:
        """Answer 200 only while the node truly serves."""
        try:
            found = self.health()
        except Exception as error:
            # A node that cannot say how it is must not be taken for a healthy one.
            get_logger().exception(HEALTH_FAILED)
            reason = f"{type(error).__name__}: {error}"
            return _told(503, {"status": "unknown", "reason": reason})
        if found.serving:
            return _told(200, {"status": "ok", **found.facts})
        return _told(503, {"status": "unavailable", "reason": found.reason, **found.facts})


def _told(status: int, facts: dict[str, object]) -> Answer:
    return Answer(status, "application/json", (json.dumps(facts) + "\n").encode())
