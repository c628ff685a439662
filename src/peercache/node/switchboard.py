"""The switchboard: routes the control messages of a node between its connections and its actors.

`Envelopes` encodes and decodes messages, and counts dropped ones. `NodeMailboxes` has one mailbox
for each actor. `Inbound` has the connections from others to this node, `Links` those from this node
to others. `Switchboard` does what needs both, and performs the effects of actors.

Every message from others passes `Inbound` once: it must decode, its sender must be known, it must
be for this incarnation, and it must be allowed. Then it goes to its actor's mailbox, or the node
answers it. Other messages are dropped and counted, and an unknown sender is asked to send Hello. A
message class states its receiver (`wire.messages.declared`); mypy refuses an internal message
without a mailbox.

A link is made when there is something to send, and closed when it is not used or no member is at
its address any more. It receives only answers: to the Hello, and to requests of the node itself. In
a cluster of thousands a node sends Hello to every member once, and afterwards sends to the masters,
to the owners of its records, and rarely to others.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, final

import attrs
import trio
from trio import to_thread

from peercache.actors.effects import (
    BuildRing,
    Effect,
    LocalEffect,
    Notify,
    NotifyMembership,
    NotifyPool,
    NotifyRing,
    Send,
    SendTo,
)
from peercache.actors.mailboxes import (
    ITSELF,
    DirectoryMessage,
    DiskMessage,
    MembershipMessage,
    NamespaceNamed,
    PeerAnswered,
    PlacementMessage,
    PoolMessage,
    PromoteMessage,
    PublisherMessage,
    RdmaMessage,
    RemovalMessage,
    RingBuilt,
    RingMessage,
)
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF, Mailbox, Turn
from peercache.errors import LocalProtocolError, Rejected, RemoteProtocolError
from peercache.model.hash_ring import HashRing
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.net.link import Link
from peercache.net.peers import ControlTls, Gate, Peer, control_url
from peercache.net.sockets import Listener
from peercache.node.addresses import Reach
from peercache.node.admission import Admission
from peercache.node.questions import Answer
from peercache.observability.log import WarnOnce, call_of
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import EXPIRED
from peercache.trust.rights import INVENTED, Session, is_invented, refusal
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.declared import Message, Receiver, Role
from peercache.wire.messages.directory import ReportKeys, ReportOverlap
from peercache.wire.messages.membership import (
    Heartbeat,
    Join,
    ReportDrainState,
    ReportStatus,
    ShareView,
)
from peercache.wire.messages.session import (
    Hello,
    HelloRequired,
    Refused,
    ReportRevocations,
    Welcome,
)

WARN_AGAIN_S = 60.0
"""How often a peer that is refused again and again is logged."""


@final
@attrs.frozen(eq=False, kw_only=True)
class Envelopes:
    """Encodes and decodes envelopes for both directions; counts and logs dropped messages.

    incarnation: that of this node, the sender.
    """

    incarnation: int
    cluster: str
    metrics: Metrics
    log: Any
    warn_once: WarnOnce = attrs.field(init=False)

    @warn_once.default
    def _seldom(self) -> WarnOnce:
        # A refused node sends Hello again every second.
        return WarnOnce(self.log, repeat_s=WARN_AGAIN_S)

    def encode(self, target: int, message: Message) -> bytes:
        """Return the bytes of a message; b"" for one that is too large for any peer."""
        try:
            return encode(Envelope(self.incarnation, target, message), cluster=self.cluster)
        except LocalProtocolError as error:
            # A bug of this node must cost this message, not the node.
            self.metrics.messages_dropped.labels("too_large").inc()
            self.log.error("node.message_too_large", detail=str(error))
            return b""

    def decode(self, raw: bytes) -> Envelope:
        """Return the envelope; raise RemoteProtocolError unless it is a message to us."""
        return decode(raw, cluster=self.cluster)

    def drop(
        self, reason: str, detail: str = "", sender: int = 0, message: Message | None = None
    ) -> None:
        """Count and log a dropped message."""
        self.metrics.messages_dropped.labels(reason).inc()
        call, client = call_number(message), name_of(sender)
        self.log.debug(
            "node.message_dropped", reason=reason, detail=detail, client=client, call=call
        )

    def attempt(self, take: Callable[..., None], *message: object) -> None:
        """Call `take` with a message; an error in an answer must cost that answer, not the node."""
        try:
            take(*message)
        except Exception as error:
            self.drop("failed", detail=repr(error))
            # By the place of the exception: a peer that repeats the message must not fill the log.
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            at = f"{frame.f_code.co_filename}:{line}"
            self.warn_once("node.message_failed", at, problem=repr(error), at=at)


def call_number(message: Message | None) -> int:
    """Return the number of the client's batch call that a message belongs to, 0 for none."""
    return call_of(getattr(message, "request", 0))


@final
@attrs.frozen(eq=False)
class NodeMailboxes:
    """One mailbox for each actor of a node.

    The order of the fields is the order in which a turn handles them. The publisher is before the
    directory: it answers a Commit, and sending to other nodes takes time.
    """

    membership: Mailbox[MembershipMessage] = attrs.field(factory=Mailbox, init=False)
    ring: Mailbox[RingMessage] = attrs.field(factory=Mailbox, init=False)
    publisher: Mailbox[PublisherMessage] = attrs.field(factory=Mailbox, init=False)
    directory: Mailbox[DirectoryMessage] = attrs.field(factory=Mailbox, init=False)
    pool: Mailbox[PoolMessage] = attrs.field(factory=Mailbox, init=False)
    disk: Mailbox[DiskMessage] = attrs.field(factory=Mailbox, init=False)
    promote: Mailbox[PromoteMessage] = attrs.field(factory=Mailbox, init=False)
    rdma: Mailbox[RdmaMessage] = attrs.field(factory=Mailbox, init=False)
    removal: Mailbox[RemovalMessage] = attrs.field(factory=Mailbox, init=False)
    placement: Mailbox[PlacementMessage] = attrs.field(factory=Mailbox, init=False)
    turn: Turn = attrs.field(init=False)

    @turn.default
    def _of_all(self) -> Turn:
        return Turn(tuple(self.named().values()))

    def named(self) -> dict[str, Mailbox[Any]]:
        """Return every mailbox by the name of its actor."""
        names = [field.name for field in attrs.fields(NodeMailboxes)]
        return {name: getattr(self, name) for name in names if name != "turn"}

    def deliver(self, wanted: Notify) -> None:
        """Put a message from inside the node into its receiver's mailbox."""
        mailbox: Mailbox[Any] = getattr(self, wanted.actor)
        mailbox.put(SELF, wanted.fact)

    def offer(self, sender: Origin, message: Message, size_bytes: int) -> bool:
        """Put a message from the network into its receiver's mailbox; False if that is full.

        `trust.rights` admits only messages for actors.
        """
        declared = message.declared
        # Messages of a node have no pipe: this one concerns this node's own pages.
        receiver = declared.to if sender.pipe else declared.of_node or declared.to
        if receiver is Receiver.NODE:
            raise LocalProtocolError(f"the switchboard answers {type(message).__name__}")
        if receiver is Receiver.ASKER:
            raise LocalProtocolError(f"a node sends {type(message).__name__}, and takes none")
        mailbox: Mailbox[Any] = getattr(self, receiver.value)
        return mailbox.offer(sender, message, size_bytes)


BURST_MESSAGES = 16
"""Messages read from the socket, and handled, before other tasks get a turn: some milliseconds."""

STRANGER_BYTES_MAX = 64 * 1024
"""Longest message accepted from a connection that has not sent Hello: the longest Hello fits, while
decoding a megabyte would cost this node a second for any connection."""


@final
@attrs.define(eq=False, kw_only=True)
class Inbound:
    """Admits connections, checks their messages, and answers over them.

    answer:  answers messages for the node itself.
    has_tls: whether incarnations are derived from certificates, so that forged ones are detected.
    names_writers: whether the pool receives the namespaces of writers, for quotas with patterns.
    """

    _envelopes: Envelopes
    listener: Listener
    _admission: Admission
    _mailboxes: NodeMailboxes
    _member_of: Callable[[int], Member | None]
    _answer: Callable[[Origin, Message], Message | None]
    _reach: Reach
    _segment_bytes: int
    _has_tls: bool = False
    _revocations: Callable[[], ReportRevocations | None] = lambda: None
    _names_writers: bool = False
    # By message type: the counter of its series. Looking up the series takes longer.
    _received: dict[type[Message], Callable[[], None]] = attrs.field(factory=dict, init=False)
    _uncounted: type[Message] | None = attrs.field(default=None, init=False)

    async def run(self) -> None:
        """Handle messages until cancelled."""
        while True:
            self._take_and_handle(*await self.listener.receive())
            for _ in range(BURST_MESSAGES):
                taken = self.listener.receive_now()
                if taken is None:
                    break
                self._take_and_handle(*taken)
            else:
                await trio.lowlevel.checkpoint()

    def _take_and_handle(self, pipe: int, raw: bytes) -> None:
        """Handle one message, and all internal messages that follow from it."""
        self._mailboxes.turn.handle(self._envelopes.attempt, self.take, pipe, raw)
        # After the answers: their receivers are already working.
        self._count_received()

    def take(self, pipe: int, raw: bytes) -> None:
        """Check one message, and put it into its actor's mailbox."""
        if len(raw) > STRANGER_BYTES_MAX and pipe not in self._admission.sessions:
            self._envelopes.drop("stranger", detail=f"{len(raw)} bytes")
            self.reply(pipe, 0, HelloRequired(self._envelopes.incarnation))
            return
        try:
            envelope = self._envelopes.decode(raw)
        except WrongVersion as error:
            self._refuse(pipe, Rejected("wire_version", error.what), 0)
            return
        except WrongCluster as error:
            if error.is_question:
                # An operator's first message: the envelope of any answer names our cluster.
                self._envelopes.drop("unknown_cluster", sender=error.sender)
                self.reply(pipe, error.sender, Refused(0, "cluster", error.what))
            else:
                self._refuse(pipe, Rejected("cluster", error.what), 0, error.sender)
            return
        except RemoteProtocolError as error:
            self._envelopes.drop("malformed", detail=error.what)
            return
        message = envelope.message
        if isinstance(message, Hello):
            self._greet(pipe, envelope.sender, message)
            return
        session = self._admission.sessions.get(pipe)
        if session is None or session.identity != envelope.sender:
            self._envelopes.drop("stranger")
            self.reply(pipe, envelope.sender, HelloRequired(self._envelopes.incarnation))
            return
        if envelope.target not in (0, self._envelopes.incarnation):
            # It is for a predecessor at this address: this incarnation must not act on it.
            self._envelopes.drop("other_incarnation")
            self.reply(pipe, envelope.sender, HelloRequired(self._envelopes.incarnation))
            return
        self._route(pipe, session, message, len(raw))

    def _route(self, pipe: int, session: Session, message: Message, size_bytes: int) -> None:
        origin = Origin(session.identity, 0 if session.role is Role.NODE else pipe)
        reason = refusal(session, message)
        if not reason and self._has_tls:
            message, reason = self._verified(message)
        if reason:
            self._not_allowed(pipe, session, message, reason)
            return
        self._uncounted = type(message)
        if self._envelopes.log.isEnabledFor(logging.DEBUG) and (call := call_number(message)):
            what, name = type(message).__name__, name_of(session.identity)
            self._envelopes.log.debug(
                "node.question_received", client=name, call=call, message=what
            )
        if message.declared.to is Receiver.NODE:
            # Over the pipe, also to a node: it asks for a status over its own link.
            answer = self._answer(Origin(session.identity, pipe), message)
            if answer is not None:
                self.reply(pipe, session.identity, answer)
        elif not self._mailboxes.offer(origin, message, size_bytes):
            self._envelopes.drop("mailbox_full", type(message).__name__, session.identity, message)

    def _count_received(self) -> None:
        """Count an admitted message, if any."""
        kind, self._uncounted = self._uncounted, None
        if kind is None:
            return
        count = self._received.get(kind)
        if count is None:
            count = self._envelopes.metrics.messages_received.labels(kind.__name__).inc
            self._received[kind] = count
        count()

    def _verified(self, message: Message) -> tuple[Message, str]:
        """Return a message without members that no certificate can have, and the reason."""
        match message:
            case Join(member) | Heartbeat(member):
                return message, INVENTED if is_invented(self._envelopes.cluster, member) else ""
            case ShareView(_, view):
                verified = tuple([m for m in view if not is_invented(self._envelopes.cluster, m)])
                if len(verified) < len(view):
                    self._envelopes.metrics.messages_refused.labels(INVENTED, "ShareView").inc()
                return attrs.evolve(message, view=verified), ""
        return message, ""

    def _not_allowed(self, pipe: int, session: Session, message: Message, reason: str) -> None:
        what, role = type(message).__name__, session.role.value
        self._envelopes.drop("not_allowed", what, session.identity, message)
        self._envelopes.metrics.messages_refused.labels(reason, what).inc()
        name = name_of(session.identity)
        self._envelopes.warn_once(
            "node.message_refused", (session.identity, reason), peer=name,
            at=self._address_of(pipe, session.identity), role=role, reason=reason, message=what,
        )  # fmt: skip
        detail = f"this {role} may not send this {what}: {reason}"
        refused = Refused(getattr(message, "request", 0), reason, detail)
        self.reply(pipe, session.identity, refused)

    def _address_of(self, pipe: int, sender: int) -> str:
        """Return the HOST:PORT of a node, or the host of another sender; "" on a home address."""
        member = self._member_of(sender)
        if member is not None:
            return member.control
        peer = self.listener.peer(pipe)
        return peer.remote[0] if peer is not None else ""

    def _greet(self, pipe: int, sender: int, hello: Hello) -> None:
        peer = self.listener.peer(pipe)
        if peer is None:
            # Its end was reported already: a session that starts now would never end.
            self._envelopes.drop("pipe_gone", detail="Hello")
            return
        try:
            session = self._admission.admit(pipe, peer, sender, hello)
        except Rejected as rejected:
            self._refuse(pipe, rejected, hello.request, sender)
            return
        if hello.is_node:
            self._reach.connected(peer.local[0])
        elif session.role is Role.WRITER and self._names_writers:
            # Before its first Reserve: both reach the pool via this object.
            self._mailboxes.deliver(NotifyPool(NamespaceNamed(session.namespace)))
        me = self._member_of(self._envelopes.incarnation)
        assert me is not None, "the view of a node has the node itself"
        wire = min(WIRE_VERSION, hello.wire_newest)
        self.reply(pipe, sender, Welcome(hello.request, wire, me, self._segment_bytes))
        revoked = None if hello.is_node else self._revocations()
        if revoked is not None:
            self.reply(pipe, sender, revoked)

    def _refuse(self, pipe: int, rejected: Rejected, request: int, sender: int = 0) -> None:
        self._envelopes.metrics.messages_dropped.labels(rejected.reason).inc()
        peer = self.listener.peer(pipe)
        host = peer.remote[0] if peer is not None else ""
        # By address: a stranger may claim a new identity with each Hello.
        self._envelopes.warn_once(
            "node.peer_refused", (host or sender, rejected.reason), peer=name_of(sender),
            at="" if peer is None else peer.place(), reason=rejected.reason, detail=rejected.detail,
        )  # fmt: skip
        self.reply(pipe, sender, Refused(request, rejected.reason, rejected.detail))

    # --- answers ----------------------------------------------------------------------------------

    def reply(self, pipe: int, target: int, message: Message) -> None:
        """Send over a connection."""
        raw = self._envelopes.encode(target, message)
        if raw and not self.listener.reply(pipe, raw):
            self._envelopes.drop("pipe_gone", detail=type(message).__name__)

    def notify_clients(self, message: Message) -> None:
        """Send a message to every connected client."""
        for pipe, session in self._admission.sessions.items():
            if session.role is not Role.NODE:
                self.reply(pipe, session.identity, message)

    # --- certificates -----------------------------------------------------------------------------

    def end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        """End the sessions of peers for which `is_over` is true."""
        for pipe in self._admission.of_peers(is_over):
            session = self._admission.sessions[pipe]
            self._envelopes.drop(reason, detail=name_of(session.identity))
            self.listener.disconnect(pipe)

    def disconnect(self) -> None:
        """Close every connection: the peers reconnect, and are verified again."""
        for pipe in self.listener.pipes():
            self.listener.disconnect(pipe)


LINKS_MAX = 4096
"""Links of one node, if its process may have enough descriptors."""

LINK_DESCRIPTORS = 5
"""Descriptors of a link: its connection, and two pipes of nng."""

LINK_SHARE = 0.25
"""The fraction of a process's descriptors for links; the rest is for its listeners and files."""

LINKS_MIN = 32
"""Links of a process with few descriptors: masters, heads, and the owners of its newest records."""

IDLE_S = 15.0
"""How long an unused link is kept: heartbeats and streams use theirs every few seconds, and a new
connection costs milliseconds."""

SETTLE_S = 2.0
"""How long a new link is kept, even above the limit: it may not have been answered yet."""


def links_that_fit(descriptors: float) -> int:
    """Return how many links a process with this many descriptors may have."""
    fitting = descriptors * LINK_SHARE / LINK_DESCRIPTORS
    return int(min(LINKS_MAX, max(LINKS_MIN, fitting)))


@final
class LinkUse:
    """When each link was last used, by its address. Pure."""

    def __init__(self, *, links_max: int) -> None:
        """Keep about `links_max` links: the last used ones."""
        self.links_max = links_max
        self._used: dict[str, float] = {}  # least recently used first

    def __len__(self) -> int:
        """Return how many links are in use."""
        return len(self._used)

    def used(self, address: str, now: float) -> None:
        """Record that a message is sent to an address."""
        self._used.pop(address, None)
        self._used[address] = now

    def ended(self, address: str) -> None:
        """Record that a link was closed."""
        self._used.pop(address, None)

    def surplus(self, now: float, *, kept: Collection[str]) -> list[str]:
        """Return the links to close: idle ones, and the least recently used of too many.

        kept: addresses with links that stay, such as those of discovery.
        """
        too_many = len(self._used) - self.links_max
        found: list[str] = []
        for address, at in self._used.items():
            if now - at < (SETTLE_S if len(found) < too_many else IDLE_S):
                # All further ones were used later.
                break
            if address not in kept:
                found.append(address)
        return found


@attrs.define(eq=False)
class _Dialled:
    """A link, and what is known of its peer.

    expected: the name of the node that should be there; None: any node.
    peer: the process that has answered there.
    wire: the wire version that it uses with us.
    """

    expected: str | None = None
    peer: Peer | None = None
    wire: int = WIRE_VERSION
    link: Link = attrs.field(init=False)


@final
@attrs.define(eq=False, kw_only=True)
class Links:
    """Sends to addresses, and handles answers; never blocks.

    nursery:   the nursery of the links.
    me:        this node as it started; its name and nonce never change.
    on_answer: called with the answers to requests of the node itself.
    open_link: creates a link; a simulation uses its own kind.
    links_max: about this many are kept.
    """

    _envelopes: Envelopes
    _mailboxes: NodeMailboxes
    _nursery: trio.Nursery
    _me: Member
    _granule: int
    _gate: Gate
    _reach: Reach
    _on_answer: Callable[[int, Answer], None]
    _tls: ControlTls | None = None
    _open_link: Callable[..., Link] = Link
    _links_max: int = LINKS_MAX
    _use: LinkUse = attrs.field(init=False)
    _dialled: dict[str, _Dialled] = attrs.field(factory=dict, init=False)

    @_use.default
    def _not_used(self) -> LinkUse:
        return LinkUse(links_max=self._links_max)

    def __len__(self) -> int:
        """Return the number of links."""
        return len(self._dialled)

    # --- sending ----------------------------------------------------------------------------------

    def send(self, member: Member, message: Message) -> None:
        """Send to a member, at the address in its entry."""
        self._send_now(member.control, member.incarnation, message, expected=member.name)

    def send_to(self, address: str, message: Message) -> None:
        """Send to the node at an address, whichever node that is."""
        # Another process may be there by now, and only a Welcome identifies it.
        self.greet_again((address,))
        self._send_now(address, 0, message, expected=None)

    def _send_now(
        self, address: str, target: int, message: Message, *, expected: str | None
    ) -> None:
        dialled = self._dialled.get(address) or self._dial(address)
        if dialled is None:
            # All links are new, and may not have been answered yet.
            self._envelopes.drop("links_full", detail=type(message).__name__)
            return
        dialled.expected = expected
        if message.declared.since > dialled.wire:
            # The previous release would drop it as invalid; it can do without messages that it does
            # not know.
            self._envelopes.drop("wire_version", detail=type(message).__name__)
            return
        if raw := self._envelopes.encode(target, message):
            dialled.link.send(raw)
        # After the send: its receiver is already working.
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
        """Verify the process that has answered at an address; called on a thread of nng."""
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
        """Handle an answer on a link."""
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
            self._mailboxes.deliver(NotifyMembership(PeerAnswered(address, self._me)))
        elif isinstance(message, Welcome):
            self._reach.welcomed(address)
            dialled.wire = message.wire
            if dialled.peer is not None:
                self._reach.connected(dialled.peer.local[0])
            self._welcomed(address, dialled, message.member)
        elif isinstance(message, ReportDrainState):
            self._mailboxes.placement.put(Origin(envelope.sender), message)
        elif isinstance(message, (ReportStatus, ReportOverlap, ReportKeys)):
            self._on_answer(envelope.sender, message)
        elif isinstance(message, Refused):
            self._reach.refused(address, f"{message.reason}: {message.detail}")
            key = (address, message.reason)
            self._envelopes.warn_once(
                "node.join_rejected", key, at=address, reason=message.reason, detail=message.detail
            )

    def _welcomed(self, address: str, dialled: _Dialled, member: Member) -> None:
        """Notify the membership which process has answered at an address that this node dialled."""
        expected = dialled.expected
        is_other = bool(expected) and member.name != expected
        if is_other or is_invented(self._envelopes.cluster, member):
            self._envelopes.drop("identity", detail=f"Welcome of {address}")
            return
        self._mailboxes.deliver(NotifyMembership(PeerAnswered(address, member)))

    # --- all links --------------------------------------------------------------------------------

    def keep(self, addresses: set[str], *, always: Collection[str] = ()) -> None:
        """Close the links to addresses without a member, and those that are not used.

        always: addresses with links that stay although they are not used.
        """
        self._end([address for address in self._dialled if address not in addresses])
        self._end(self._use.surplus(trio.current_time(), kept=always))

    def _end(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._dialled.pop(address).link.stop()
            self._use.ended(address)

    def greet_again(self, addresses: Iterable[str]) -> None:
        """Send Hello again over existing links to these addresses, to see whether they answer."""
        for address in addresses:
            if address in self._dialled:
                self._dialled[address].link.greet_again()

    def renew_tls(self) -> None:
        """Use new certificates for new connections."""
        for dialled in self._dialled.values():
            dialled.link.renew_tls()

    def end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        """Close the connections to such peers; each link reconnects, and verifies the peer."""
        for address, dialled in self._dialled.items():
            if dialled.peer is not None and is_over(dialled.peer):
                self._envelopes.drop(reason, detail=address)
                dialled.link.disconnect()

    def disconnect(self) -> None:
        """Close every connection; each link reconnects, and verifies the peer again."""
        for dialled in self._dialled.values():
            dialled.link.disconnect()

    async def flush(self, timeout_s: float) -> None:
        """Wait, for a bounded time, until every link has sent its messages."""
        with trio.move_on_after(timeout_s):
            # nng has no event for it, so the node polls.
            while not all(each.link.is_empty for each in self._dialled.values()):  # noqa: ASYNC110
                await trio.sleep(timeout_s / 20)


@final
@attrs.frozen(eq=False, kw_only=True)
class Switchboard:
    """Performs the effects of actors, and ends connections in both directions.

    perform_local: performs effects on this node's memory, disk and devices.
    take_answer: takes the answers to what the node itself asks its actors.
    in_thread: runs a function in a thread; a simulation runs it in its own time.
    """

    _envelopes: Envelopes
    _mailboxes: NodeMailboxes
    _inbound: Inbound
    _links: Links
    _nursery: trio.Nursery
    _gate: Gate
    _member_of: Callable[[int], Member | None]
    _perform_local: Callable[[LocalEffect], None]
    _take_answer: Callable[[Message], None] = lambda _: None
    _in_thread: Callable[[Callable[[], HashRing]], Awaitable[HashRing]] = to_thread.run_sync

    def deliver(self, wanted: Notify) -> None:
        """Send an internal message to an actor, and handle all that follows from it."""
        self._mailboxes.turn.handle(self._mailboxes.deliver, wanted)

    def perform(self, effect: Effect) -> None:
        """Perform an effect of an actor; never blocks."""
        if isinstance(effect, Send):
            self._send(effect.to, effect.message)
        elif isinstance(effect, Notify):
            self._mailboxes.deliver(effect)
        elif isinstance(effect, SendTo):
            self._links.send_to(effect.address, effect.message)
        elif isinstance(effect, BuildRing):
            self._nursery.start_soon(self._build_ring, effect)
        else:
            self._perform_local(effect)

    def _send(self, to: int | Origin, message: Message) -> None:
        if to == ITSELF:
            self._take_answer(message)
            return
        if isinstance(to, Origin) and to.pipe:
            self._inbound.reply(to.pipe, to.identity, message)
            return
        target = to.identity if isinstance(to, Origin) else to
        if target == self._envelopes.incarnation:
            # One of this node's actors sends it to every member.
            if not self._mailboxes.offer(Origin(target), message, 0):
                self._envelopes.drop("mailbox_full", detail=type(message).__name__)
            return
        member = self._member_of(target)
        if member is None:
            self._envelopes.drop("unknown_member", detail=type(message).__name__)
        else:
            self._links.send(member, message)

    async def _build_ring(self, build: BuildRing) -> None:
        """Build a ring in a thread: numpy releases the GIL while it sorts."""
        ring = await self._in_thread(build.build)
        self.deliver(NotifyRing(RingBuilt(ring)))

    # --- certificates -----------------------------------------------------------------------------

    def renew_tls(self) -> None:
        """Use new certificates, and close connections with invalid ones."""
        self._inbound.listener.renew_tls()
        self._links.renew_tls()
        self.judge_again()

    def judge_again(self) -> None:
        """End the sessions and links of peers that are no longer admitted."""
        self._end_those(lambda peer: not self._gate.admits(peer), "revoked")

    def end_expired(self) -> None:
        """End the sessions and links of peers with expired certificates."""
        self._end_those(Peer.has_expired, EXPIRED)

    def _end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        self._inbound.end_those(is_over, reason)
        self._links.end_those(is_over, reason)

    def connect_again(self) -> None:
        """Close every connection, so that each peer presents its certificate again."""
        self._inbound.disconnect()
        self._links.disconnect()
