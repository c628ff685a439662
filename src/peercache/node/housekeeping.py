"""Housekeeping: what a node does once a second, whatever messages come.

It ends the reservations of clients that exited and the queue pairs of clients that left, closes
connections that never said Hello, ends links to lost addresses, and logs and counts the states of
the members.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import trio

from peercache.actors.effects import TellPool, TellRdma
from peercache.actors.mailboxes import ClientGone, ClientsConnected
from peercache.config.settings import Config
from peercache.model.ids import name_of
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.view import STATE_NAMES
from peercache.net.sockets import Listener
from peercache.net.statistics import refused_handshakes
from peercache.node.admission import Admission
from peercache.node.switchboard import WARN_AGAIN_S, Switchboard
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics

HOUSEKEEPING_S = 1.0
"""How soon the slots of a client that died come back; a probe is one system call a client."""

CONTROL_SHARE = 0.25
"""Part of this process's descriptors for connections of the control plane: half are for the data
port, and links and files need some. Beyond it, connections without a Hello are closed."""


@final
class Housekeeping:
    """The periodic work of one node."""

    def __init__(
        self,
        config: Config,
        *,
        own_address: Callable[[], str],
        admission: Admission,
        listener: Listener,
        switchboard: Switchboard,
        members: Callable[[], Sequence[Member]],
        dialled: Callable[[], frozenset[str]],
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Take the parts of the node that it looks after."""
        self._config = config
        self._own_address = own_address
        self._admission = admission
        self._listener = listener
        self._switchboard = switchboard
        self._members = members
        self._dialled = dialled
        self._metrics = metrics
        self._log = log
        self._handshakes_refused = refused_handshakes() if config.has_tls else 0
        self._warn_once = WarnOnce(log, repeat_s=WARN_AGAIN_S)
        self._known: dict[int, int] = {}
        """The state of each member at the last look."""
        self.last_at = time.monotonic()
        """When the last round ended: a loop that is late shows here."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._end_exited_clients()
            self._follow_members(self._members())
            self._close_unauthenticated()
            self._count_handshakes()
            self.last_at = time.monotonic()
            await trio.sleep(HOUSEKEEPING_S)

    def _end_exited_clients(self) -> None:
        for client in self._admission.exited():
            self._log.info("client.exited", client=name_of(client))
            self._switchboard.tell(TellPool(ClientGone(client)))
        connected = frozenset(session.identity for session in self._admission.sessions.values())
        self._switchboard.tell(TellRdma(ClientsConnected(connected)))

    def _follow_members(self, members: Sequence[Member]) -> None:
        """Log and count the members' states, and end the links to addresses without a member."""
        heads = self._config.discovery_addr
        for member in members:
            is_new = self._known.get(member.incarnation) != member.state
            if is_new and member.control != self._own_address():
                state, name = STATE_NAMES[member.state], name_of(member.incarnation)
                self._log.info(
                    "membership.member_changed", member=name, state=state, at=member.control
                )
        if not self._known and len(members) == 1 and heads:
            self._log.info("node.started_alone", asked=list(heads))
        self._known = {member.incarnation: member.state for member in members}
        kept = {m.control for m in members if m.state in (ALIVE, SUSPECT)}
        self._switchboard.keep_links(kept | set(heads) | self._dialled())
        for number, word in enumerate(STATE_NAMES):
            self._metrics.members.labels(word).set(sum(m.state == number for m in members))

    def _close_unauthenticated(self) -> None:
        """Close connections that never said Hello, after a while or when there are too many."""
        pipes = self._listener.pipes()
        files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = int(files_max * CONTROL_SHARE) if files_max != resource.RLIM_INFINITY else len(pipes)
        closing = self._admission.overstaying(pipes, time.monotonic(), connections_max=room)
        for pipe in closing:
            self._listener.disconnect(pipe)
        self._metrics.connections.labels("control").set(len(pipes) - len(closing))
        if closing:
            self._metrics.messages_dropped.labels("no_hello").inc(len(closing))

    def _count_handshakes(self) -> None:
        """Count the connections that TLS has refused since the last look."""
        if not self._config.has_tls:
            return
        refused = refused_handshakes()
        new, self._handshakes_refused = refused - self._handshakes_refused, refused
        if new > 0:
            self._metrics.messages_dropped.labels("handshake").inc(new)
            self._warn_once("node.handshakes_refused", "", count=new)
