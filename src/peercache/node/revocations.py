"""Distribution of the list of revoked certificates to every node of a cluster.

The node that reads a newer list from its file notifies every member at once. Each node also sends
it to a random member from time to time, so that the list reaches nodes that were unreachable. A
list is valid only with the signature of an authority, so it does not matter which node sends it.

A node that is notified of a revoked certificate drops the pages that it has from other nodes, in
memory and on disk: pages that the owner of the certificate served or handed over may be among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import final

import attrs
import trio

from peercache.actors.effects import Send
from peercache.errors import Rejected
from peercache.model.keys import COPIES
from peercache.model.member import Member
from peercache.model.view import is_live
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls
from peercache.wire.messages.pool import Clear
from peercache.wire.messages.session import ReportRevocations

SPREAD_S = 10.0
"""Pause between two lists that a node sends without a request: one kilobyte, to one member."""

VOID_S = 10.0
"""How long after a revocation copies in progress are dropped: by then nodes have closed the
connections of the certificate's owner, and its waiting offers are gone."""

TAKE_S = 0.5
"""Pause between two lists that a node verifies: a member may send many, and each costs some ms."""


@final
@attrs.define(eq=False, kw_only=True)
class RevocationSpread:
    """Sends the lists of this node to others, and adopts newer ones.

    own: this node's incarnation.
    """

    _tls: LiveTls = attrs.field(kw_only=False)
    _own: int
    _members: Callable[[], Sequence[Member]]
    _perform: Callable[[Send], None]
    _notify_clients: Callable[[ReportRevocations], None]
    _rng: random.Random
    _metrics: Metrics
    _clock: Callable[[], float] = trio.current_time
    _numbers: tuple[int, ...] = attrs.field(init=False)
    _is_taking: bool = attrs.field(default=False, init=False)
    _next_take_at: float = attrs.field(default=0.0, init=False)
    _serials: frozenset[int] = attrs.field(default=frozenset(), init=False)

    def __attrs_post_init__(self) -> None:
        """Distribute the lists of `tls`."""
        self._numbers = self._tls.revocations.numbers
        self._drop_copies()
        self._tls.on_change(self._changed)

    async def run(self) -> None:
        """Send the lists to one member from time to time, until cancelled."""
        while True:
            await trio.sleep(SPREAD_S * self._rng.uniform(0.5, 1.5))
            others = self._others()
            if others:
                self._send_list(self._rng.choice(others))

    def take(self, message: ReportRevocations) -> None:
        """Adopt the lists of another node, if they are newer and signed by an authority."""
        if message.lists == self._tls.revocations.pem.encode():
            return
        if self._clock() < self._next_take_at:
            self._metrics.messages_dropped.labels("revocations_often").inc()
            return
        self._next_take_at = self._clock() + TAKE_S
        self._is_taking = True
        try:
            self._tls.take_list(message.lists.decode("ascii"))
        except (Rejected, UnicodeDecodeError):
            self._metrics.messages_dropped.labels("revocation_list").inc()
        finally:
            self._is_taking = False

    def _changed(self, tls: LiveTls) -> None:
        """Send the lists to this node's clients, and to every member if they come from its file."""
        if tls.revocations.numbers == self._numbers:
            return
        self._numbers = tls.revocations.numbers
        self._drop_copies()
        notice = message_of(tls)
        if notice is not None:
            self._notify_clients(notice)
        if not self._is_taking:
            for member in self._others():
                self._send_list(member)

    def _drop_copies(self) -> None:
        """Drop the pages that this node has from other nodes, when a certificate is revoked.

        Pages do not record the certificates by which they came. This is also done at the start if
        there is a list: a certificate on it may have been valid when a page on disk was copied.
        """
        if not self._tls.revocations.serials <= self._serials:
            self._serials = self._tls.revocations.serials
            self._perform(Send(self._own, Clear(0, COPIES, VOID_S)))

    def _others(self) -> list[Member]:
        return [
            member
            for member in self._members()
            if is_live(member) and member.incarnation != self._own
        ]

    def _send_list(self, member: Member) -> None:
        notice = message_of(self._tls)
        if notice is not None:
            self._perform(Send(member.incarnation, notice))


def message_of(tls: LiveTls) -> ReportRevocations | None:
    """Return the lists that a process knows, as a message; None if there are none."""
    text = tls.revocations.pem
    return ReportRevocations(text.encode()) if text else None
