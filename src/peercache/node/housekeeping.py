"""Housekeeping: what a node does once a second, independent of messages.

It ends the reservations of clients that exited and the queue pairs of clients that left, closes
connections that never sent Hello, ends links to lost addresses, and logs and counts the states of
the members. If descriptors become scarce, it checks connections more often. `OwnersWatch` counts
the directory owners that lag behind this node, and logs when they start to lag and when they catch
up.

`keep` restarts a node's watchers after exceptions. A watcher checks something again and again:
members, certificates, connections. If it fails now, for lack of a descriptor or a thread, it can
succeed later; meanwhile the node continues to serve.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, final

import attrs
import trio

from peercache.actors.directory.holdings import ShardAuthority
from peercache.actors.effects import Notify, NotifyPool, NotifyRdma
from peercache.actors.mailboxes import ClientGone, ClientsConnected
from peercache.actors.publisher.actor import Publisher
from peercache.config.settings import Config
from peercache.model.ids import name_of
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.process import DescriptorShares, descriptors_max
from peercache.model.view import STATE_NAMES
from peercache.net.handshakes import FailedHandshakes, HalfHandshakes
from peercache.net.sockets import Listener
from peercache.node.admission import Admission
from peercache.node.switchboard import WARN_AGAIN_S, Links
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import SILENT

AGAIN_S = 1.0
"""Pause after an exception: a missing resource does not come back sooner."""


async def keep(name: str, watch: Callable[[], Awaitable[None]], log: Any) -> None:
    """Run a watcher until cancelled; log its exceptions, and restart it.

    name: the name of the watcher in the log.
    """
    while True:
        try:
            await watch()
        except Exception as error:
            log.error("node.watcher_failed", watcher=name, problem=repr(error), exc_info=True)
        else:
            return
        await trio.sleep(AGAIN_S)


@final
@attrs.define(eq=False)
class OwnersWatch:
    """Counts and logs why a stored page may not be found everywhere.

    publisher: that of this node, which knows the lagging owners and the followers.
    authority: that of this node's own shard.
    member_of: returns the member of an incarnation, if it is known.
    """

    publisher: Publisher
    authority: ShardAuthority
    member_of: Callable[[int], Member | None]
    metrics: Metrics
    log: Any
    _known: frozenset[int] = frozenset()
    _warn_once: WarnOnce = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Start without lagging owners."""
        self._warn_once = WarnOnce(self.log, repeat_s=WARN_AGAIN_S)

    def look(self) -> None:
        """Set the gauges, and log the owners that have started to lag or have caught up."""
        lagging = self.publisher.lagging()
        for owner in sorted(lagging - self._known):
            # An owner that lags again and again is logged once a minute.
            self._warn_once("directory.owner_lagged", owner, owner=self._name(owner))
        for owner in sorted(self._known - lagging):
            self.log.info("directory.owner_recovered", owner=self._name(owner))
        self._known = lagging
        self.metrics.directory_owners_lagging.set(len(lagging))
        self.metrics.followers.set(self.publisher.followers)
        self.metrics.directory_authority.set(bool(self.authority.ring))
        self.metrics.directory_holders_doubted.set(self.authority.doubted)

    def _name(self, owner: int) -> str:
        member = self.member_of(owner)
        return name_of(owner) if member is None else member.control


HOUSEKEEPING_S = 1.0
"""How soon the slots of a dead client are freed; a probe is one system call per client."""

ALONE_S = 2.0
"""How long a start may take to meet the first other node: names resolve for a second."""

OPENED_A_SECOND = 10_000
"""The most connections that strangers open in a second: more than nng accepts on one core."""

SOONEST_S = 0.01
"""The shortest pause between two checks of connections."""


@final
@attrs.define(eq=False, kw_only=True)
class Housekeeping:
    """The periodic work of one node.

    looks:  called each time, to log and count changes.
    shares: returns the current limits of connections of each kind.
    """

    _config: Config = attrs.field(kw_only=False)
    _own_address: Callable[[], str]
    _admission: Admission
    _listener: Listener
    _links: Links
    _notify: Callable[[Notify], None]
    _members: Callable[[], Sequence[Member]]
    _dialled: Callable[[], frozenset[str]]
    _looks: Sequence[Callable[[], None]]
    _shares: Callable[[], DescriptorShares] = lambda: DescriptorShares.of(descriptors_max())
    _metrics: Metrics
    _log: Any
    _failed: FailedHandshakes | None = attrs.field(init=False)
    _warn_once: WarnOnce = attrs.field(init=False)
    _known: dict[int, int] = attrs.field(factory=dict, init=False)
    """The state of each member at the last check."""
    _alone_at: float = attrs.field(init=False)
    """When a node that knows no other node logs that it is alone."""
    last_at: float = attrs.field(factory=time.monotonic, init=False)
    """When the last round ended: this shows a loop that lags."""

    def __attrs_post_init__(self) -> None:
        """Count failed handshakes from now on."""
        self._failed = FailedHandshakes() if self._config.has_tls else None
        self._warn_once = WarnOnce(self._log, repeat_s=WARN_AGAIN_S)
        self._alone_at = time.monotonic() + ALONE_S

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._end_exited_clients()
            self._follow_members(self._members())
            for look in self._looks:
                look()
            self.last_at = time.monotonic()
            await trio.sleep(HOUSEKEEPING_S)

    async def bound_connections(self) -> None:
        """Close excess or slow connections of the control plane, until cancelled."""
        if self._failed is None:
            while True:
                self._close_unauthenticated()
                await trio.sleep(HOUSEKEEPING_S)
        with HalfHandshakes(self._listener.tcp_ports) as halves:
            while True:
                self._close_unauthenticated()
                await self._follow_handshakes(self._failed, halves)
                # nng accepts all connections. The fewer descriptors are free, the sooner is the
                # next check: strangers cannot take half of them in between.
                free = descriptors_max() - halves.files
                soon_s = max(SOONEST_S, free / 2 / OPENED_A_SECOND)
                await trio.sleep(min(HOUSEKEEPING_S, soon_s))

    def _end_exited_clients(self) -> None:
        for client in self._admission.exited():
            self._log.info("client.exited", client=name_of(client))
            self._notify(NotifyPool(ClientGone(client)))
        connected = frozenset(session.identity for session in self._admission.sessions.values())
        self._notify(NotifyRdma(ClientsConnected(connected)))

    def _follow_members(self, members: Sequence[Member]) -> None:
        """Log and count the members' states, and close the links to addresses without a member."""
        heads = self._config.discovery_addr
        for member in members:
            is_new = self._known.get(member.incarnation) != member.state
            if is_new and member.control != self._own_address():
                state, name = STATE_NAMES[member.state], name_of(member.incarnation)
                self._log.info(
                    "membership.member_changed", member=name, state=state, at=member.control
                )
        self._log_alone(members)
        self._known = {member.incarnation: member.state for member in members}
        kept = {m.control for m in members if m.state in (ALIVE, SUSPECT)}
        # A link to a head shows whether it answers; one to a candidate waits for its Welcome.
        always = set(heads) | self._dialled()
        self._links.keep(kept | always, always=always)
        for number, word in enumerate(STATE_NAMES):
            self._metrics.members.labels(word).set(sum(m.state == number for m in members))

    def _log_alone(self, members: Sequence[Member]) -> None:
        """Log once that the nodes to join do not answer; a normal join takes less than ALONE_S."""
        heads = self._config.discovery_addr
        if len(members) > 1 or not heads:
            self._alone_at = math.inf
        elif time.monotonic() >= self._alone_at:
            self._alone_at = math.inf
            self._log.info("node.started_alone", asked=list(heads))

    def _close_unauthenticated(self) -> None:
        """Close connections that never sent Hello, after a while or when there are too many."""
        pipes = self._listener.pipes()
        self._admission.connections_max = self._shares().control
        closing = self._admission.overstaying(pipes, time.monotonic())
        for pipe in closing:
            self._listener.disconnect(pipe)
        self._metrics.connections.labels("control").set(len(pipes) - len(closing))
        if closing:
            self._metrics.messages_dropped.labels("no_hello").inc(len(closing))

    async def _follow_handshakes(self, failed: FailedHandshakes, halves: HalfHandshakes) -> None:
        """Count the handshakes that failed since the last check, and close hanging ones."""
        for reason, count in failed.news().items():
            self._refused(reason, "", count)
        settled, most = self._listener.remotes(), self._shares().halves
        # Not on the loop: each needs some system calls.
        silent = await trio.to_thread.run_sync(lambda: halves.end_silent(settled, most=most))
        for host, count in Counter(silent).items():
            self._refused(SILENT, host, count)

    def _refused(self, reason: str, host: str, count: int) -> None:
        self._metrics.messages_dropped.labels(reason).inc(count)
        self._warn_once(
            "node.handshakes_refused", (reason, host), reason=reason, at=host, count=count
        )
