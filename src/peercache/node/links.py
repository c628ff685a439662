"""Links: the connections from this node to others, by address, and what comes back on them.

A link is made when there is something to send, and ended when it is not used or its address has no
member any more. What comes back are answers: to the Hello, and to questions of the node itself.

A node dials what it needs when it needs it. In a cluster of thousands it greets every member once,
and afterwards sends to the masters, to the owners of its records, and rarely to others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import final

import attrs
import trio

from peercache.actors.effects import TellMembership
from peercache.actors.mailboxes import PeerAnswered
from peercache.actors.origin import Origin
from peercache.errors import Rejected, RemoteProtocolError
from peercache.model.ids import incarnation_of
from peercache.model.member import Member
from peercache.net.link import Link
from peercache.net.peers import ControlTls, Gate, Peer, control_url
from peercache.node.broker import Told
from peercache.node.envelopes import Envelopes
from peercache.node.reach import Reach
from peercache.node.routing import NodeMailboxes
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import ReportOverlap
from peercache.wire.messages.membership import ReportDrainState, ReportStatus
from peercache.wire.messages.session import Hello, HelloRequired, Refused, Welcome

LINKS_MAX = 4096
"""Links of one node, where its process may have descriptors enough."""

LINK_DESCRIPTORS = 5
"""Descriptors of a link: its connection, and two pipes of nng."""

LINK_SHARE = 0.25
"""Part of a process's descriptors for links; the rest is for its listeners and files."""

LINKS_MIN = 32
"""Links of a process with few descriptors: masters, heads, and the owners of its newest records."""

IDLE_S = 15.0
"""How long a link stays that is not used: heartbeats and streams use theirs every few seconds, and
another connection costs milliseconds."""

SETTLE_S = 2.0
"""How long a new link is left alone, whatever the bound: it may not have been answered yet."""


def links_that_fit(descriptors: float) -> int:
    """Return how many links a process may have that may have so many descriptors."""
    fitting = descriptors * LINK_SHARE / LINK_DESCRIPTORS
    return int(min(LINKS_MAX, max(LINKS_MIN, fitting)))


@final
class LinkUse:
    """When each link was used last, by its address. Pure."""

    def __init__(self, *, links_max: int) -> None:
        """Keep no more than about `links_max` links: the ones used last."""
        self.links_max = links_max
        self._used: dict[str, float] = {}  # least recently used first

    def __len__(self) -> int:
        """Return how many links are in use."""
        return len(self._used)

    def used(self, address: str, now: float) -> None:
        """Note that a message goes to an address."""
        self._used.pop(address, None)
        self._used[address] = now

    def ended(self, address: str) -> None:
        """Note that the link has been closed."""
        self._used.pop(address, None)

    def surplus(self, now: float, *, kept: Collection[str]) -> list[str]:
        """Return the links to close: idle ones, and the least recently used of too many.

        kept: addresses whose links stay, such as those of discovery.
        """
        too_many = len(self._used) - self.links_max
        found: list[str] = []
        for address, at in self._used.items():
            if now - at < (SETTLE_S if len(found) < too_many else IDLE_S):
                # All that follow were used later.
                break
            if address not in kept:
                found.append(address)
        return found


@attrs.define(eq=False)
class _Dialled:
    """A link, and what is known of the process at its other end.

    expected: the name of the node that this node means to reach; None: any node.
    peer: the process that has answered there.
    wire: the version that it speaks with us.
    """

    expected: str | None = None
    peer: Peer | None = None
    wire: int = WIRE_VERSION
    link: Link = attrs.field(init=False)


@final
@attrs.define(eq=False, kw_only=True)
class Links:
    """Sends to addresses, and takes what is answered; never blocks.

    nursery:   where links run.
    me:        this node as it began; its name and nonce never change.
    told:      takes the answers to questions of the node itself.
    open_link: makes a link; a simulation opens some of its own.
    links_max: about so many are kept.
    """

    _envelopes: Envelopes
    _mailboxes: NodeMailboxes
    _nursery: trio.Nursery
    _me: Member
    _granule: int
    _gate: Gate
    _reach: Reach
    _told: Callable[[int, Told], None]
    _tls: ControlTls | None = None
    _open_link: Callable[..., Link] = Link
    _links_max: int = LINKS_MAX
    _use: LinkUse = attrs.field(init=False)
    _dialled: dict[str, _Dialled] = attrs.field(factory=dict, init=False)

    @_use.default
    def _not_used(self) -> LinkUse:
        return LinkUse(links_max=self._links_max)

    def __len__(self) -> int:
        """Return how many links there are."""
        return len(self._dialled)

    # --- out --------------------------------------------------------------------------------------

    def send(self, member: Member, message: Message) -> None:
        """Send to a member, where its entry says that it is."""
        self._say(member.control, member.incarnation, message, expected=member.name)

    def send_to(self, address: str, message: Message) -> None:
        """Send to the node at an address, whichever it is."""
        # Another process may be there by now, and only a Welcome says which one.
        self.greet_again((address,))
        self._say(address, 0, message, expected=None)

    def _say(self, address: str, target: int, message: Message, *, expected: str | None) -> None:
        dialled = self._dialled.get(address) or self._dial(address)
        if dialled is None:
            # All are new, and none may have been answered yet.
            self._envelopes.drop("links_full", detail=type(message).__name__)
            return
        dialled.expected = expected
        if message.declared.since > dialled.wire:
            # The release before would drop it as noise; what it does not know, it lives without.
            self._envelopes.drop("wire_version", detail=type(message).__name__)
            return
        if raw := self._envelopes.encode(target, message):
            dialled.link.send(raw)
        # Behind the send: its receiver is at work by now.
        self._use.used(address, trio.current_time())

    def _dial(self, address: str) -> _Dialled | None:
        """Return a new link; None if there are too many."""
        if len(self._dialled) >= self._links_max:
            self._end(self._use.surplus(trio.current_time(), kept=()))
            if len(self._dialled) >= 2 * self._links_max:
                return None
        dialled = _Dialled()
        dialled.link = self._open_link(
            control_url(address, self._tls),
            hello=self._hello,
            on_answer=lambda raw: self._envelopes.attempt(self._answered, address, dialled, raw),
            on_dropped=self._envelopes.metrics.messages_dropped.labels("outbox_full").inc,
            accepts=lambda peer: self._accepts(address, dialled, peer),
            tls=self._tls,
        )
        self._dialled[address] = dialled
        self._nursery.start_soon(dialled.link.run)
        return dialled

    def _hello(self) -> bytes:
        hello = Hello(
            0, WIRE_VERSION_OLDEST, WIRE_VERSION, self._envelopes.cluster, is_node=True,
            granule=self._granule, name=self._me.name, nonce=self._me.nonce,
            namespace="", geometry="", lock="", secret=b"",
        )  # fmt: skip
        return self._envelopes.encode(0, hello)

    # --- answers ----------------------------------------------------------------------------------

    def _accepts(self, address: str, dialled: _Dialled, peer: Peer) -> bool:
        """Judge the process that has answered at an address; comes on a thread of nng."""
        try:
            self._gate.check_node(peer, dialled.expected)
        except Rejected as rejected:
            self._envelopes.metrics.messages_dropped.labels(rejected.reason).inc()
            self._envelopes.warn_once(
                "node.listener_refused", (address, rejected.reason), at=address,
                reason=rejected.reason, detail=rejected.detail,
            )  # fmt: skip
            self._reach.refused(address, f"{rejected.reason}: {rejected.detail}")
            return False
        dialled.peer = peer
        return True

    def _answered(self, address: str, dialled: _Dialled, raw: bytes) -> None:
        """Take what came back on a link."""
        try:
            envelope = self._envelopes.decode(raw)
        except RemoteProtocolError as error:
            self._envelopes.drop("malformed", detail=error.what)
            self._envelopes.warn_once("node.join_rejected", address, at=address, reason=error.what)
            self._reach.refused(address, error.what)
            return
        message = envelope.message
        if isinstance(message, HelloRequired):
            dialled.link.greet_again()
        elif isinstance(message, Welcome) and message.member.incarnation == self._me.incarnation:
            self._reach.answered_itself(address)
            self._mailboxes.tell(TellMembership(PeerAnswered(address, self._me)))
        elif isinstance(message, Welcome):
            self._reach.welcomed(address)
            dialled.wire = message.wire
            if dialled.peer is not None:
                self._reach.connected(dialled.peer.local[0])
            self._welcomed(address, dialled, message.member)
        elif isinstance(message, ReportDrainState):
            self._mailboxes.handover.tell(Origin(envelope.sender), message)
        elif isinstance(message, (ReportStatus, ReportOverlap)):
            self._told(envelope.sender, message)
        elif isinstance(message, Refused):
            self._reach.refused(address, f"{message.reason}: {message.detail}")
            key = (address, message.reason)
            self._envelopes.warn_once(
                "node.join_rejected", key, at=address, reason=message.reason, detail=message.detail
            )

    def _welcomed(self, address: str, dialled: _Dialled, member: Member) -> None:
        """Tell the membership which process has answered at an address that this node dialled."""
        named = incarnation_of(self._envelopes.cluster, member.name, member.nonce)
        expected = dialled.expected
        if member.incarnation != named or (expected and member.name != expected):
            self._envelopes.drop("identity", detail=f"Welcome of {address}")
            return
        self._mailboxes.tell(TellMembership(PeerAnswered(address, member)))

    # --- all of them ------------------------------------------------------------------------------

    def keep(self, addresses: set[str], *, always: Collection[str] = ()) -> None:
        """End the links to addresses that no member has any more, and those that are not used.

        always: addresses whose links stay though they are not used.
        """
        self._end([address for address in self._dialled if address not in addresses])
        self._end(self._use.surplus(trio.current_time(), kept=always))

    def _end(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._dialled.pop(address).link.stop()
            self._use.ended(address)

    def greet_again(self, addresses: Iterable[str]) -> None:
        """Say Hello once more to these addresses, as far as there are links: do they answer?"""
        for address in addresses:
            if address in self._dialled:
                self._dialled[address].link.greet_again()

    def renew_tls(self) -> None:
        """Show new certificates where a connection is made from now on."""
        for dialled in self._dialled.values():
            dialled.link.renew_tls()

    def end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        """End the connections to such peers; each link makes a new one, and judges its end."""
        for address, dialled in self._dialled.items():
            if dialled.peer is not None and is_over(dialled.peer):
                self._envelopes.drop(reason, detail=address)
                dialled.link.disconnect()

    def disconnect(self) -> None:
        """End every connection; each link makes a new one, and judges its end again."""
        for dialled in self._dialled.values():
            dialled.link.disconnect()

    async def flush(self, timeout_s: float) -> None:
        """Wait, for a bounded time, until every link has handed over what it had."""
        with trio.move_on_after(timeout_s):
            # nng tells no event for it, so the node polls.
            while not all(each.link.is_empty for each in self._dialled.values()):  # noqa: ASYNC110
                await trio.sleep(timeout_s / 20)
