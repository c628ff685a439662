"""Envelopes: this node's control messages as bytes, and the count of those that are dropped."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, final

from peercache.errors import LocalProtocolError
from peercache.model.ids import name_of
from peercache.observability.log import WarnOnce, call_of
from peercache.observability.metrics import Metrics
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message

WARN_AGAIN_S = 60.0
"""How often the log tells of a peer that is refused again and again."""


@final
class Envelopes:
    """Makes and reads envelopes for both directions; drops are counted and logged here."""

    def __init__(self, *, incarnation: int, cluster: str, metrics: Metrics, log: Any) -> None:
        """Send as the node of this incarnation."""
        self.incarnation = incarnation
        self.cluster = cluster
        self.metrics = metrics
        self.log = log
        # A refused node says Hello again every second.
        self.warn_once = WarnOnce(log, repeat_s=WARN_AGAIN_S)

    def encode(self, target: int, message: Message) -> bytes:
        """Return the bytes of a message; none of one that is too large for any peer."""
        try:
            return encode(Envelope(self.incarnation, target, message), cluster=self.cluster)
        except LocalProtocolError as error:
            # A bug of this node costs this message, and not the node.
            self.metrics.messages_dropped.labels("too_large").inc()
            self.log.error("node.message_too_large", detail=str(error))
            return b""

    def decode(self, raw: bytes) -> Envelope:
        """Return what came; raise RemoteProtocolError for anything that is no message to us."""
        return decode(raw, cluster=self.cluster)

    def drop(
        self, reason: str, detail: str = "", sender: int = 0, message: Message | None = None
    ) -> None:
        """Count and log a message that goes no further."""
        self.metrics.messages_dropped.labels(reason).inc()
        call, client = call_number(message), name_of(sender)
        self.log.debug(
            "node.message_dropped", reason=reason, detail=detail, client=client, call=call
        )

    def attempt(self, take: Callable[..., None], *message: object) -> None:
        """Take a message in; what goes wrong in an answer costs that answer, and not the node."""
        try:
            take(*message)
        except Exception as error:
            self.drop("failed", detail=repr(error))
            # Where it was raised: a peer that repeats the message must not fill the log.
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            at = f"{frame.f_code.co_filename}:{line}"
            self.warn_once("node.message_failed", at, problem=repr(error), at=at)


def call_number(message: Message | None) -> int:
    """Return the number of the client's batch call that a message belongs to, 0 for none."""
    return call_of(getattr(message, "request", 0))
