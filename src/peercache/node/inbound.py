"""Inbound: the connections that others have made to this node, and what comes in on them.

Everything that others send passes here once: decoded, its sender known, meant for this incarnation,
and allowed; then it goes to its actor's mailbox, or the node answers it. All else is dropped and
counted, and an unknown sender is asked to say Hello.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

import attrs
import trio

from peercache.actors.effects import TellPool
from peercache.actors.mailboxes import NamespaceNamed
from peercache.actors.origin import Origin
from peercache.errors import Rejected, RemoteProtocolError
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.net.peers import Peer
from peercache.net.sockets import Listener
from peercache.node.admission import Admission
from peercache.node.envelopes import Envelopes, call_number
from peercache.node.reach import Reach
from peercache.node.routing import NodeMailboxes
from peercache.trust.rights import INVENTED, Session, is_invented, refusal
from peercache.wire.codec import WrongCluster, WrongVersion
from peercache.wire.envelope import WIRE_VERSION
from peercache.wire.messages.declared import Message, Receiver, Role
from peercache.wire.messages.membership import Heartbeat, Join, ShareView
from peercache.wire.messages.session import (
    Hello,
    HelloRequired,
    Refused,
    ReportRevocations,
    Welcome,
)

BURST_MESSAGES = 16
"""Messages taken from the socket, and handled, before other tasks get a turn: some milliseconds."""

STRANGER_BYTES_MAX = 64 * 1024
"""Longest message taken from a connection that has not said Hello: a Hello of the longest texts
fits, and to decode a megabyte would cost this node a second for any connection."""


@final
@attrs.define(eq=False, kw_only=True)
class Inbound:
    """Admits connections, judges what comes on them, and answers along them.

    answer:  answers what is for the node itself.
    has_tls: whether an incarnation follows from a certificate, so that invented ones show.
    names_writers: whether the pool is told the namespaces of writers, for quotas with patterns.
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
    # By the type of a message: what counts one. To look for its series takes longer.
    _received: dict[type[Message], Callable[[], None]] = attrs.field(factory=dict, init=False)
    _uncounted: type[Message] | None = attrs.field(default=None, init=False)

    async def run(self) -> None:
        """Take messages until cancelled."""
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
        """Take one message in, and all that follows from it within this node."""
        self._mailboxes.turn.handle(self._envelopes.attempt, self.take, pipe, raw)
        # Behind the answers: their receivers are at work by now.
        self._count_received()

    def take(self, pipe: int, raw: bytes) -> None:
        """Take one message as far as its actor's mailbox."""
        if len(raw) > STRANGER_BYTES_MAX and pipe not in self._admission.sessions:
            self._envelopes.drop("stranger", detail=f"{len(raw)} bytes")
            self.reply(pipe, 0, HelloRequired(self._envelopes.incarnation))
            return
        try:
            envelope = self._envelopes.decode(raw)
        except (WrongVersion, WrongCluster) as error:
            reason = "wire_version" if isinstance(error, WrongVersion) else "cluster"
            self._refuse(pipe, Rejected(reason, error.what), 0)
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
            # Meant for a predecessor at this address: this incarnation must not act on it.
            self._envelopes.drop("other_incarnation")
            self.reply(pipe, envelope.sender, HelloRequired(self._envelopes.incarnation))
            return
        self._route(pipe, session, message, len(raw))

    def _route(self, pipe: int, session: Session, message: Message, size_bytes: int) -> None:
        origin = Origin(session.identity, 0 if session.role is Role.NODE else pipe)
        reason = refusal(session, message)
        if not reason and self._has_tls:
            message, reason = self._believed(message)
        if reason:
            self._not_allowed(pipe, session, message, reason)
            return
        self._uncounted = type(message)
        if (call := call_number(message)) and self._envelopes.log.isEnabledFor(logging.DEBUG):
            what, name = type(message).__name__, name_of(session.identity)
            self._envelopes.log.debug(
                "node.question_received", client=name, call=call, message=what
            )
        if message.declared.to is Receiver.NODE:
            # Along the pipe, also to a node: a status is for who asks, over its own link.
            answer = self._answer(Origin(session.identity, pipe), message)
            if answer is not None:
                self.reply(pipe, session.identity, answer)
        elif not self._mailboxes.offer(origin, message, size_bytes):
            self._envelopes.drop("mailbox_full", type(message).__name__, session.identity, message)

    def _count_received(self) -> None:
        """Count the message that was let in, if any."""
        kind, self._uncounted = self._uncounted, None
        if kind is None:
            return
        count = self._received.get(kind)
        if count is None:
            count = self._envelopes.metrics.messages_received.labels(kind.__name__).inc
            self._received[kind] = count
        count()

    def _believed(self, message: Message) -> tuple[Message, str]:
        """Return a message without the members that no certificate can stand for, and why not."""
        match message:
            case Join(member) | Heartbeat(member):
                return message, INVENTED if is_invented(self._envelopes.cluster, member) else ""
            case ShareView(_, view):
                believed = tuple([m for m in view if not is_invented(self._envelopes.cluster, m)])
                if len(believed) < len(view):
                    self._envelopes.metrics.messages_refused.labels(INVENTED, "ShareView").inc()
                return attrs.evolve(message, view=believed), ""
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
        """Return the HOST:PORT of a node, the host of another sender; "" on a home address."""
        member = self._member_of(sender)
        if member is not None:
            return member.control
        peer = self.listener.peer(pipe)
        return peer.remote[0] if peer is not None else ""

    def _greet(self, pipe: int, sender: int, hello: Hello) -> None:
        peer = self.listener.peer(pipe)
        if peer is None:
            # Its end has been told already: a session begun now would never end.
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
            # Before its first Reserve: both go to the pool by way of here.
            self._mailboxes.tell(TellPool(NamespaceNamed(session.namespace)))
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
        # By address: a stranger may claim another identity with each Hello.
        self._envelopes.warn_once(
            "node.peer_refused", (host or sender, rejected.reason), peer=name_of(sender), at=host,
            reason=rejected.reason, detail=rejected.detail,
        )  # fmt: skip
        self.reply(pipe, sender, Refused(request, rejected.reason, rejected.detail))

    # --- answers ----------------------------------------------------------------------------------

    def reply(self, pipe: int, target: int, message: Message) -> None:
        """Send along a connection."""
        raw = self._envelopes.encode(target, message)
        if raw and not self.listener.reply(pipe, raw):
            self._envelopes.drop("pipe_gone", detail=type(message).__name__)

    def tell_clients(self, message: Message) -> None:
        """Send a message to every connected client."""
        for pipe, session in self._admission.sessions.items():
            if session.role is not Role.NODE:
                self.reply(pipe, session.identity, message)

    # --- certificates -----------------------------------------------------------------------------

    def end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        """End the sessions of such peers."""
        for pipe in self._admission.of_peers(is_over):
            session = self._admission.sessions[pipe]
            self._envelopes.drop(reason, detail=name_of(session.identity))
            self.listener.disconnect(pipe)

    def disconnect(self) -> None:
        """End every connection: each other end connects again, and is judged again."""
        for pipe in self.listener.pipes():
            self.listener.disconnect(pipe)
