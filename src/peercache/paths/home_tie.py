"""A client's connection to its home node: attached, lost, attached again; and the view from it.

Sans-IO, like the read and write paths: the requests, their order and the meaning of the answers are
here; the thread and the sockets are in `client.home`, the simulated task in `sims.client`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

from peercache.config.settings import Config
from peercache.errors import PeerCacheError, Rejected
from peercache.model.member import Member
from peercache.model.view import View
from peercache.net.breaker import Breakers
from peercache.observability.metrics import ClientReport
from peercache.paths.cluster import Cluster
from peercache.paths.read import Touches
from peercache.paths.steps import Ask, Greet, Post, Step
from peercache.paths.write import ClientReservations
from peercache.wire.messages.declared import Message
from peercache.wire.messages.membership import (
    ReportViewChanges,
    RequestView,
    RequestViewChanges,
    ShareView,
)
from peercache.wire.messages.pool import Granted, Touched
from peercache.wire.messages.session import Refused, Welcome

BEAT_S = 1.0
"""Pause between two checks of the home node: how old a client's view may be."""

VIEW_PARTS_MAX = 64
"""Parts of one view: more than those of the largest one, which has MEMBERS_MAX members."""

LOST_BEAT_S = 0.25
"""The same while the home node is lost: hits come back well within 5 s of its restart."""

VIEW_TIMEOUT_S = 0.2
"""How long to wait for a view: less than a stall. On an overloaded host a beat may go unanswered
although no call has waited for anything; one such silence must not open the breaker of the home
node, or any other, for the next call. The Hello after it waits longer, and any answer counts; the
request after that opens the breaker of a hung node."""

Memory = TypeVar("Memory")
Result = TypeVar("Result")
Path: TypeAlias = Generator[Step, Any, Result]


@attrs.frozen(eq=False)
class Attached(Generic[Memory]):
    """One home incarnation to which we write. memory: its published memory, mapped here."""

    incarnation: int
    memory: Memory
    reservations: ClientReservations


@attrs.define(eq=False, kw_only=True)
class Tie(Generic[Memory]):
    """A client's knowledge of its home node, and of the cluster.

    open_memory: maps the memory of a home node; None if that fails now and may work later.
    on_attached: called with the new attachment, and the one that it replaces.
    on_rejected: called with the reason why a lost home node refuses us now.
    on_view:     called with the cluster before and after a new view.
    attached: the home incarnation to which the client writes, None without one.
    cluster:  the latest view. Both are replaced, never modified: any thread may read them.
    """

    _url: str
    _config: Config
    _boot_id: str
    _breakers: Breakers
    _touches: Touches
    _report: ClientReport | None
    _clock: Callable[[], float]
    _open_memory: Callable[[Member], Memory | None]
    _on_attached: Callable[[Attached[Memory], Attached[Memory] | None], None]
    _on_rejected: Callable[[PeerCacheError], None]
    _on_view: Callable[[Cluster, Cluster], None]
    _view: View = attrs.field(factory=View.of, init=False)
    _newcomer: Member | None = attrs.field(default=None, init=False)
    """The attached home node, until it is in a view."""
    attached: Attached[Memory] | None = attrs.field(default=None, init=False)
    cluster: Cluster = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Start without a node."""
        self.cluster = self._cluster(0, 0.0)

    @property
    def has_view(self) -> bool:
        """Whether a node has sent its view yet."""
        return len(self._view) > 0

    def is_home(self, peer: int) -> bool:
        """Return whether the client writes to this incarnation."""
        attached = self.attached
        return attached is not None and attached.incarnation == peer

    def take_unasked(self, peer: int, message: Message) -> None:
        """Handle a message that answers no pending request: slots ahead of the home node."""
        attached = self.attached
        # For another incarnation, this number means another reservation.
        if isinstance(message, Granted) and attached is not None and attached.incarnation == peer:
            attached.reservations.granted(message)

    def beat(self) -> Path[bool]:
        """Check the home node once, reattach if it is lost; return whether it is attached."""
        is_well = yield from self.ask_view()
        if not is_well:
            try:
                yield from self.attach(self._clock() + BEAT_S)
            except PeerCacheError as error:
                self._on_rejected(error)
            is_well = yield from self.ask_view()
        attached = self.attached
        if attached is not None and is_well:
            yield from self.send_report(attached, self._clock())
        for holder, drops in self._touches.take().items():
            if holder in self.cluster.members and not self._breakers.is_open(holder):
                yield Post(((holder, Touched(drops)),))
        return is_well

    def send_report(self, attached: Attached[Memory], now: float) -> Path[None]:
        """Report the live reservations, and the increases of the counters since the last report."""
        yield Post(((attached.incarnation, attached.reservations.report(now)),))
        counted = self._report.take() if self._report is not None else None
        if counted is not None:
            yield Post(((attached.incarnation, counted),))

    def attach(self, until: float) -> Path[bool]:
        """Send Hello at the home address and map its memory; False without an answer."""
        answer = yield Greet(self._url, until)
        if isinstance(answer, Refused):
            raise Rejected(answer.reason, answer.detail)
        if not isinstance(answer, Welcome):
            return False
        member, old = answer.member, self.attached
        self._breakers.answered(member.incarnation)
        if old is not None and old.incarnation == member.incarnation:
            return True
        memory = self._open_memory(member)
        if memory is None:
            return False
        self._newcomer = None if member.incarnation in self._view else member
        self.attached = attached = Attached(member.incarnation, memory, ClientReservations())
        self.cluster = self._cluster(member.incarnation, self.cluster.handover_until)
        if self._report is not None:
            self._report.begin_again()
        self._on_attached(attached, old)
        return True

    def ask_view(self) -> Path[bool]:
        """Fetch the view from the home node, or from another member while the home node is lost."""
        attached = self.attached
        now = self._clock()
        if attached is not None and (yield from self._view_from(attached.incarnation)):
            return True
        for peer in self.cluster.members:
            if attached is not None and peer == attached.incarnation:
                continue
            if self._breakers.available(peer, now) and (yield from self._view_from(peer)):
                break
        return False

    def _view_from(self, peer: int) -> Path[bool]:
        """Update the view by the changes since, or else by the whole view."""
        if self.has_view:
            asked_changes = RequestViewChanges(0, self._view.digest())
            answer = (yield Ask(((peer, asked_changes),), self._clock() + VIEW_TIMEOUT_S))[0]
            if not isinstance(answer, ReportViewChanges):
                return False
            changed = changed_view(self._view, answer)
            if changed is not None:
                if changed is not self._view:
                    self._take(changed)
                return True
        return (yield from self._whole_view_from(peer))

    def _whole_view_from(self, peer: int) -> Path[bool]:
        asked = RequestView(0, self._view.digest())
        members: list[Member] = []
        for _ in range(VIEW_PARTS_MAX):
            answer = (yield Ask(((peer, asked),), self._clock() + VIEW_TIMEOUT_S))[0]
            if not isinstance(answer, ShareView):
                return False
            members += answer.view
            if not answer.more or not answer.view:
                break
            asked = attrs.evolve(asked, after=answer.view[-1].incarnation)
        if members:
            self._take(View.of(members))
        return True

    def _take(self, view: View) -> None:
        self._view = view
        before, attached = self.cluster, self.attached
        home = attached.incarnation if attached is not None else 0
        if home in view:
            self._newcomer = None
        cluster = self._cluster(home, before.handover_until)
        if cluster.ring.version != before.ring.version:
            until = self._clock() + self._config.handover_s
            cluster = attrs.evolve(cluster, handover_until=until)
        self.cluster = cluster
        self._on_view(before, cluster)

    def _cluster(self, home: int, handover_until: float) -> Cluster:
        return Cluster.of(
            {member.incarnation: member for member in self._view.members()},
            home=home,
            boot_id=self._boot_id,
            replicas=self._config.directory_replicas,
            virtual_nodes=self._config.virtual_nodes,
            handover_until=handover_until,
            newcomer=self._newcomer,
        )


def changed_view(view: View, changes: ReportViewChanges) -> View | None:
    """Return a client's view with these changes applied; None if they do not fit this view.

    The resulting view must have the announced digest: a missing entry, in the changes or in the
    view, is detected at once, and the whole view is requested.
    """
    if changes.base != view.digest():
        return None
    if changes.digest == changes.base:
        return view
    replaced = [*changes.gone, *(member.incarnation for member in changes.view)]
    changed = view.without(replaced).merge(changes.view)[0]
    return changed if changed.digest() == changes.digest else None
