"""How the list of revoked certificates reaches every node of a cluster.

The node that reads a newer list from its file tells every member at once. Each node also tells one
member now and then, chosen at random: so the list reaches nodes that were away. A list counts only
with the signature of an authority, so it does not matter which node tells it.

A node that learns of a revoked certificate drops the pages that it has from other nodes, in memory
and on disk: what the owner of the certificate served or handed over may be among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import final

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
"""Between two lists that a node tells unasked: one kilobyte, to one member."""

VOID_S = 10.0
"""How long after a revocation no copy that is under way is kept: by then nodes have hung up on the
owner of the certificate, and offers of it that wait are gone."""

TAKE_S = 0.5
"""Between two lists that a node verifies: a member may send any number, and each costs some ms."""


@final
class RevocationSpread:
    """Tells other nodes the lists that this node knows, and takes newer ones."""

    def __init__(
        self,
        tls: LiveTls,
        *,
        own: int,
        members: Callable[[], Sequence[Member]],
        perform: Callable[[Send], None],
        tell_clients: Callable[[ReportRevocations], None],
        rng: random.Random,
        metrics: Metrics,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """Spread what `tls` knows. own: this node's incarnation."""
        self._tls = tls
        self._own = own
        self._members = members
        self._perform = perform
        self._tell_clients = tell_clients
        self._rng = rng
        self._dropped = metrics.messages_dropped
        self._clock = clock
        self._numbers = tls.revocations.numbers
        self._is_taking = False
        self._next_take_at = 0.0
        self._serials = frozenset[int]()
        self._drop_copies()
        tls.on_change(self._changed)

    async def run(self) -> None:
        """Tell one member now and then, until cancelled."""
        while True:
            await trio.sleep(SPREAD_S * self._rng.uniform(0.5, 1.5))
            others = self._others()
            if others:
                self._tell(self._rng.choice(others))

    def take(self, message: ReportRevocations) -> None:
        """Take the lists of another node, where they are newer and an authority signed them."""
        if message.lists == self._tls.revocations.pem.encode():
            return
        if self._clock() < self._next_take_at:
            self._dropped.labels("revocations_often").inc()
            return
        self._next_take_at = self._clock() + TAKE_S
        self._is_taking = True
        try:
            self._tls.take_list(message.lists.decode("ascii"))
        except (Rejected, UnicodeDecodeError):
            self._dropped.labels("revocation_list").inc()
        finally:
            self._is_taking = False

    def _changed(self, tls: LiveTls) -> None:
        """Tell this node's clients, and every member what it has read from its file."""
        if tls.revocations.numbers == self._numbers:
            return
        self._numbers = tls.revocations.numbers
        self._drop_copies()
        told = message_of(tls)
        if told is not None:
            self._tell_clients(told)
        if not self._is_taking:
            for member in self._others():
                self._tell(member)

    def _drop_copies(self) -> None:
        """Drop the pages that this node has from other nodes, when a certificate is revoked.

        No page keeps by which certificates it came. At the start too, while there is a list: a
        certificate on it may have been good when a page on disk was copied.
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

    def _tell(self, member: Member) -> None:
        told = message_of(self._tls)
        if told is not None:
            self._perform(Send(member.incarnation, told))


def message_of(tls: LiveTls) -> ReportRevocations | None:
    """Return the lists that a process knows, as a message; None where it knows none."""
    text = tls.revocations.pem
    return ReportRevocations(text.encode()) if text else None
