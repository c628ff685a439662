"""The switchboard: messages from sockets to mailboxes, and effects to sockets and memory.

Everything that comes in passes here once: decoded, its sender known, meant for this incarnation,
and allowed; else it is dropped and counted, and an unknown sender is told to say Hello.
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
    Pull,
    Send,
    StoreWords,
    Tell,
    TellMembership,
    TellPool,
    TellRing,
)
from peercache.actors.mailboxes import NamespaceNamed, PeerAnswered, RingBuilt
from peercache.actors.origin import Origin
from peercache.actors.rdma_port import DropPair, OpenPair, RdmaEffect, ServeMemory
from peercache.actors.storage_port import DiskEffect, Forget, Load, NoteUse, Spill
from peercache.errors import LocalProtocolError, Rejected, RemoteProtocolError
from peercache.model.hash_ring import HashRing
from peercache.model.ids import incarnation_of, name_of
from peercache.model.member import Member
from peercache.net.link import Link
from peercache.net.peers import Gate, Peer
from peercache.net.sockets import Listener
from peercache.net.tls import ControlTls, control_url
from peercache.node.admission import Admission
from peercache.node.broker import Told
from peercache.node.link_use import LINKS_MAX, LinkUse
from peercache.node.reach import Reach
from peercache.node.routing import NodeMailboxes
from peercache.observability.calls import call_of
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import EXPIRED
from peercache.trust.rights import INVENTED, Session, is_invented, refusal
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.declared import Message, Receiver, Role
from peercache.wire.messages.draining import DrainTold
from peercache.wire.messages.membership import Heartbeat, Join, ViewShared
from peercache.wire.messages.operations import StatusTold
from peercache.wire.messages.overlap import OverlapTold
from peercache.wire.messages.session import (
    Hello,
    Refused,
    RevocationsTold,
    SayHello,
    Welcome,
)

BURST_MESSAGES = 16
"""Messages taken from the socket, and handled, before other tasks get a turn: some milliseconds."""

WARN_AGAIN_S = 60.0
"""How often the log tells of a peer that is refused again and again."""

STRANGER_BYTES_MAX = 64 * 1024
"""Longest message taken from a connection that has not said Hello: a Hello of the longest texts
fits, and to decode a megabyte would cost this node a second for any connection."""


@final
class Switchboard:
    """Carries messages between this node's actors and the world."""

    def __init__(
        self,
        *,
        me: Member,
        cluster: str,
        admission: Admission,
        granule: int,
        segment_bytes: int,
        listener: Listener,
        mailboxes: NodeMailboxes,
        store_words: Callable[[StoreWords], None],
        member_of: Callable[[int], Member | None],
        answer: Callable[[Origin, Message], Message | None],
        metrics: Metrics,
        log: Any,
        gate: Gate,
        tls: ControlTls | None = None,
        reach: Reach | None = None,
        revocations: Callable[[], RevocationsTold | None] = lambda: None,
        open_link: Callable[..., Link] = Link,
        perform_disk: Callable[[DiskEffect], None] | None = None,
        perform_rdma: Callable[[RdmaEffect], None] | None = None,
        told: Callable[[int, Told], None] = lambda *_: None,
        perform_pull: Callable[[Pull], None] | None = None,
        in_thread: Callable[[Callable[[], HashRing]], Awaitable[HashRing]] = to_thread.run_sync,
        links_max: int = LINKS_MAX,
        names_writers: bool = False,
    ) -> None:
        """Take everything from `node.Node`, which owns it.

        names_writers: whether the pool is told the namespaces of writers, for quotas with patterns.
        A simulation opens links of its own, and runs in its own time what runs in threads here.
        """
        self._me = me
        self._cluster = cluster
        self._admission = admission
        self._granule = granule
        self._segment_bytes = segment_bytes
        self._listener = listener
        self._mailboxes = mailboxes
        self._store_words = store_words
        self._member_of = member_of
        self._answer = answer
        self._metrics = metrics
        self._log = log
        self._gate = gate
        self._tls = tls
        self._reach = reach if reach is not None else Reach((), clock=trio.current_time)
        self._revocations = revocations
        self._names_writers = names_writers
        # By the type of a message: what counts one. To look for its series takes longer.
        self._received: dict[type[Message], Callable[[], None]] = {}
        self._uncounted: type[Message] | None = None
        # By address: the process that has answered there.
        self._answering: dict[str, Peer] = {}
        # By address: the wire version that the process there speaks with us.
        self._spoken: dict[str, int] = {}
        self._open_link = open_link
        self._perform_disk = perform_disk
        self._perform_rdma = perform_rdma
        self._perform_pull = perform_pull
        self._in_thread = in_thread
        self._told = told
        self._links: dict[str, Link] = {}
        self._link_use = LinkUse(links_max=links_max)
        # By address: the name of the node that this node means to reach there; None: any node.
        self._expected: dict[str, str | None] = {}
        # A refused node says Hello again every second.
        self._warn_once = WarnOnce(log, repeat_s=WARN_AGAIN_S)
        self._nursery: trio.Nursery | None = None

    # --- in ---------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take messages until cancelled; links live in this task's nursery."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                self._take_and_serve(*await self._listener.receive())
                for _ in range(BURST_MESSAGES):
                    taken = self._listener.receive_now()
                    if taken is None:
                        break
                    self._take_and_serve(*taken)
                else:
                    await trio.lowlevel.checkpoint()

    def _take_and_serve(self, pipe: int, raw: bytes) -> None:
        """Take one message in, and all that follows from it within this node."""
        self._mailboxes.turn.handle(self._try, self._take, pipe, raw)
        # Behind the answers: their receivers are at work by now.
        self._count_received()

    def _try(self, take: Callable[..., None], *message: object) -> None:
        """Take a message in; what goes wrong in an answer costs that answer, and not the node."""
        try:
            take(*message)
        except Exception as error:
            self._drop("failed", detail=repr(error))
            # Where it was raised: a peer that repeats the message must not fill the log.
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            at = f"{frame.f_code.co_filename}:{line}"
            self._warn_once("node.message_failed", at, problem=repr(error), at=at)

    def tell(self, told: Tell) -> None:
        """Hand an actor a fact that no message brought, and all that follows from it."""
        self._mailboxes.turn.handle(self._mailboxes.tell, told)

    def _take(self, pipe: int, raw: bytes) -> None:
        if len(raw) > STRANGER_BYTES_MAX and pipe not in self._admission.sessions:
            self._drop("stranger", detail=f"{len(raw)} bytes")
            self._reply(pipe, 0, SayHello(self._me.incarnation))
            return
        try:
            envelope = decode(raw, cluster=self._cluster)
        except (WrongVersion, WrongCluster) as error:
            reason = "wire_version" if isinstance(error, WrongVersion) else "cluster"
            self._refuse(pipe, Rejected(reason, error.what), 0)
            return
        except RemoteProtocolError as error:
            self._drop("malformed", detail=error.what)
            return
        message = envelope.message
        if isinstance(message, Hello):
            self._greet(pipe, envelope.sender, message)
            return
        session = self._admission.sessions.get(pipe)
        if session is None or session.identity != envelope.sender:
            self._drop("stranger")
            self._reply(pipe, envelope.sender, SayHello(self._me.incarnation))
            return
        if envelope.target not in (0, self._me.incarnation):
            # Meant for a predecessor at this address: this incarnation must not act on it.
            self._drop("other_incarnation")
            self._reply(pipe, envelope.sender, SayHello(self._me.incarnation))
            return
        self._route(pipe, session, message, len(raw))

    def _route(self, pipe: int, session: Session, message: Message, size_bytes: int) -> None:
        origin = Origin(session.identity, 0 if session.role is Role.NODE else pipe)
        reason = refusal(session, message)
        if not reason and self._tls is not None:
            message, reason = self._believed(message)
        if reason:
            self._not_allowed(pipe, session, message, reason)
            return
        self._uncounted = type(message)
        if (call := _call_of(message)) and self._log.isEnabledFor(logging.DEBUG):
            what, name = type(message).__name__, name_of(session.identity)
            self._log.debug("node.question_received", client=name, call=call, message=what)
        if message.declared.to is Receiver.NODE:
            # Along the pipe, also to a node: a status is for who asks, over its own link.
            answer = self._answer(Origin(session.identity, pipe), message)
            if answer is not None:
                self._reply(pipe, session.identity, answer)
        elif not self._mailboxes.offer(origin, message, size_bytes):
            self._drop("mailbox_full", type(message).__name__, session.identity, message)

    def _count_received(self) -> None:
        """Count the message that was let in, if any."""
        kind, self._uncounted = self._uncounted, None
        if kind is None:
            return
        count = self._received.get(kind)
        if count is None:
            count = self._metrics.messages_received.labels(kind.__name__).inc
            self._received[kind] = count
        count()

    def _believed(self, message: Message) -> tuple[Message, str]:
        """Return a message without the members that no certificate can stand for, and why not."""
        match message:
            case Join(member) | Heartbeat(member):
                return message, INVENTED if is_invented(self._cluster, member) else ""
            case ViewShared(_, view):
                believed = tuple([m for m in view if not is_invented(self._cluster, m)])
                if len(believed) < len(view):
                    self._metrics.messages_refused.labels(INVENTED, "ViewShared").inc()
                return attrs.evolve(message, view=believed), ""
        return message, ""

    def _not_allowed(self, pipe: int, session: Session, message: Message, reason: str) -> None:
        what, role = type(message).__name__, session.role.value
        self._drop("not_allowed", what, session.identity, message)
        self._metrics.messages_refused.labels(reason, what).inc()
        name = name_of(session.identity)
        self._warn_once(
            "node.message_refused", (session.identity, reason), peer=name,
            at=self._address_of(pipe, session.identity), role=role, reason=reason, message=what,
        )  # fmt: skip
        detail = f"this {role} may not send this {what}: {reason}"
        refused = Refused(getattr(message, "request", 0), reason, detail)
        self._reply(pipe, session.identity, refused)

    def _address_of(self, pipe: int, sender: int) -> str:
        """Return the HOST:PORT of a node, the host of another sender; "" on a home address."""
        member = self._member_of(sender)
        if member is not None:
            return member.control
        peer = self._listener.peer(pipe)
        return peer.remote[0] if peer is not None else ""

    def _greet(self, pipe: int, sender: int, hello: Hello) -> None:
        peer = self._listener.peer(pipe)
        if peer is None:
            # Its end has been told already: a session begun now would never end.
            self._drop("pipe_gone", detail="Hello")
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
        me = self._member_of(self._me.incarnation) or self._me
        wire = min(WIRE_VERSION, hello.wire_newest)
        self._reply(pipe, sender, Welcome(hello.request, wire, me, self._segment_bytes))
        revoked = None if hello.is_node else self._revocations()
        if revoked is not None:
            self._reply(pipe, sender, revoked)

    def _refuse(self, pipe: int, rejected: Rejected, request: int, sender: int = 0) -> None:
        self._metrics.messages_dropped.labels(rejected.reason).inc()
        peer = self._listener.peer(pipe)
        host = peer.remote[0] if peer is not None else ""
        # By address: a stranger may claim another identity with each Hello.
        self._warn_once(
            "node.peer_refused", (host or sender, rejected.reason), peer=name_of(sender), at=host,
            reason=rejected.reason, detail=rejected.detail,
        )  # fmt: skip
        self._reply(pipe, sender, Refused(request, rejected.reason, rejected.detail))

    def _drop(
        self, reason: str, detail: str = "", sender: int = 0, message: Message | None = None
    ) -> None:
        self._metrics.messages_dropped.labels(reason).inc()
        call, client = _call_of(message), name_of(sender)
        self._log.debug(
            "node.message_dropped", reason=reason, detail=detail, client=client, call=call
        )

    # --- out --------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        """Do what an actor returned; never blocks."""
        if isinstance(effect, Send):
            self._send(effect.to, effect.message)
        elif isinstance(effect, Tell):
            self._mailboxes.tell(effect)
        elif isinstance(effect, StoreWords):
            self._store_words(effect)
        elif isinstance(effect, BuildRing):
            self._started().start_soon(self._build_ring, effect)
        elif isinstance(effect, (Spill, Load, Forget, NoteUse)):
            assert self._perform_disk is not None, "a disk tier that was never opened says nothing"
            self._perform_disk(effect)
        elif isinstance(effect, (OpenPair, DropPair, ServeMemory)):
            assert self._perform_rdma is not None, "the rdma actor of a node without devices"
            self._perform_rdma(effect)
        elif isinstance(effect, Pull):
            assert self._perform_pull is not None, "a node that reads from no other takes no pages"
            self._perform_pull(effect)
        else:
            self._expected[effect.address] = None
            if effect.address in self._links:
                # Another process may be there by now, and only a Welcome says which one.
                self._links[effect.address].greet_again()
            self._say(effect.address, 0, effect.message)

    def _send(self, to: int | Origin, message: Message) -> None:
        if isinstance(to, Origin) and to.pipe:
            self._reply(to.pipe, to.identity, message)
            return
        target = to.identity if isinstance(to, Origin) else to
        if target == self._me.incarnation:
            self._keep(message)
            return
        member = self._member_of(target)
        if member is None:
            self._drop("unknown_member", detail=type(message).__name__)
        else:
            self._expected[member.control] = member.name
            self._say(member.control, target, message)

    def _started(self) -> trio.Nursery:
        assert self._nursery is not None, "effects are performed after run() has started"
        return self._nursery

    async def _build_ring(self, build: BuildRing) -> None:
        """Make a ring in a thread: numpy gives up the interpreter's lock while it sorts."""
        ring = await self._in_thread(build.ring)
        self.tell(TellRing(RingBuilt(ring)))

    def _keep(self, message: Message) -> None:
        """Hand this node's actors a message that one of them sends to every member."""
        if not self._mailboxes.offer(Origin(self._me.incarnation), message, 0):
            self._drop("mailbox_full", detail=type(message).__name__)

    def _reply(self, pipe: int, target: int, message: Message) -> None:
        raw = self._encode(target, message)
        if raw and not self._listener.reply(pipe, raw):
            self._drop("pipe_gone", detail=type(message).__name__)

    def _say(self, address: str, target: int, message: Message) -> None:
        if message.declared.since > self._spoken.get(address, WIRE_VERSION):
            # The build that came before drops it as noise; what it does not know, it lives without.
            self._drop("wire_version", detail=type(message).__name__)
            return
        link = self._links.get(address)
        if link is None and len(self._links) >= self._link_use.links_max:
            self._end_links(self._link_use.surplus(trio.current_time(), kept=()))
            if len(self._links) >= 2 * self._link_use.links_max:
                # All are new, and none may have been answered yet.
                self._drop("links_full", detail=type(message).__name__)
                return
        if link is None:
            link = self._links[address] = self._open_link(
                control_url(address, self._tls),
                hello=self._hello,
                on_answer=lambda raw: self._try(self._answered, address, raw),
                on_dropped=self._metrics.messages_dropped.labels("outbox_full").inc,
                accepts=lambda peer: self._accepts(address, peer),
                tls=self._tls,
            )
            self._started().start_soon(link.run)
        if raw := self._encode(target, message):
            link.send(raw)
        # Behind the send: its receiver is at work by now.
        self._link_use.used(address, trio.current_time())

    def _accepts(self, address: str, peer: Peer) -> bool:
        """Judge the process that has answered at an address; comes on a thread of nng."""
        try:
            self._gate.check_node(peer, self._expected.get(address))
        except Rejected as rejected:
            self._metrics.messages_dropped.labels(rejected.reason).inc()
            self._warn_once(
                "node.listener_refused", (address, rejected.reason), at=address,
                reason=rejected.reason, detail=rejected.detail,
            )  # fmt: skip
            self._reach.refused(address, f"{rejected.reason}: {rejected.detail}")
            return False
        self._answering[address] = peer
        return True

    def renew_tls(self) -> None:
        """Follow new certificates, and end what is connected with those that are not valid now."""
        self._listener.renew_tls()
        for link in self._links.values():
            link.renew_tls()
        self.judge_again()

    def judge_again(self) -> None:
        """End the sessions and links whose other ends are not admitted any more."""
        self._end_those(lambda peer: not self._gate.admits(peer), "revoked")

    def end_expired(self) -> None:
        """End the sessions and links whose other ends' certificates have expired."""
        self._end_those(Peer.has_expired, EXPIRED)

    def _end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        for pipe in self._admission.of_peers(is_over):
            self._drop(reason, detail=name_of(self._admission.sessions[pipe].identity))
            self._listener.disconnect(pipe)
        for address, peer in list(self._answering.items()):
            if address in self._links and is_over(peer):
                self._drop(reason, detail=address)
                self._links[address].disconnect()

    def connect_anew(self) -> None:
        """End every connection, so that each other end shows its certificate again."""
        for pipe in self._listener.pipes():
            self._listener.disconnect(pipe)
        for link in self._links.values():
            link.disconnect()

    def tell_clients(self, message: Message) -> None:
        """Say something to every connected client."""
        for pipe, session in self._admission.sessions.items():
            if session.role is not Role.NODE:
                self._reply(pipe, session.identity, message)

    def keep_links(self, addresses: set[str], *, always: Collection[str] = ()) -> None:
        """End the links to addresses that no member has any more, and those that are not used.

        always: addresses whose links stay though they are not used.
        """
        self._end_links([address for address in self._links if address not in addresses])
        self._end_links(self._link_use.surplus(trio.current_time(), kept=always))

    def _end_links(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._links.pop(address).stop()
            self._link_use.ended(address)
            self._expected.pop(address, None)
            self._answering.pop(address, None)
            self._spoken.pop(address, None)

    def greet_again(self, addresses: Iterable[str]) -> None:
        """Say Hello once more to these addresses, as far as there are links: do they answer?"""
        for address in addresses:
            if address in self._links:
                self._links[address].greet_again()

    def moved(self, me: Member) -> None:
        """Tell peers that greet this node its new address."""
        self._me = me

    async def flush(self, timeout_s: float) -> None:
        """Wait, for a bounded time, until every link has handed over what it had."""
        with trio.move_on_after(timeout_s):
            # nng tells no event for it, so the node polls.
            while not all(link.is_empty for link in self._links.values()):  # noqa: ASYNC110
                await trio.sleep(timeout_s / 20)

    def _hello(self) -> bytes:
        hello = Hello(
            0, WIRE_VERSION_OLDEST, WIRE_VERSION, self._cluster, is_node=True,
            granule=self._granule, name=self._me.name, nonce=self._me.nonce,
            namespace="", geometry="", lock="", secret=b"",
        )  # fmt: skip
        return self._encode(0, hello)

    def _answered(self, address: str, raw: bytes) -> None:
        """Take what came back on a link: answers to its Hello, and the peer's status."""
        try:
            envelope = decode(raw, cluster=self._cluster)
        except RemoteProtocolError as error:
            self._drop("malformed", detail=error.what)
            self._warn_once("node.join_rejected", address, at=address, reason=error.what)
            self._reach.refused(address, error.what)
            return
        message = envelope.message
        if isinstance(message, SayHello) and address in self._links:
            self._links[address].greet_again()
        elif isinstance(message, Welcome) and message.member.incarnation == self._me.incarnation:
            self._reach.answered_itself(address)
            self._mailboxes.tell(TellMembership(PeerAnswered(address, self._me)))
        elif isinstance(message, Welcome):
            self._reach.welcomed(address)
            self._spoken[address] = message.wire
            if address in self._answering:
                self._reach.connected(self._answering[address].local[0])
            self._welcomed(address, message.member)
        elif isinstance(message, DrainTold):
            self._mailboxes.handover.tell(Origin(envelope.sender), message)
        elif isinstance(message, (StatusTold, OverlapTold)):
            self._told(envelope.sender, message)
        elif isinstance(message, Refused):
            self._reach.refused(address, f"{message.reason}: {message.detail}")
            key = (address, message.reason)
            self._warn_once(
                "node.join_rejected", key, at=address, reason=message.reason, detail=message.detail
            )

    def _welcomed(self, address: str, member: Member) -> None:
        """Tell the membership which process has answered at an address that this node dialled."""
        named = incarnation_of(self._cluster, member.name, member.nonce)
        expected = self._expected.get(address)
        if member.incarnation != named or (expected and member.name != expected):
            self._drop("identity", detail=f"Welcome of {address}")
            return
        self._mailboxes.tell(TellMembership(PeerAnswered(address, member)))

    def _encode(self, target: int, message: Message) -> bytes:
        """Return the bytes of a message; none of one that is too large for any peer."""
        try:
            return encode(Envelope(self._me.incarnation, target, message), cluster=self._cluster)
        except LocalProtocolError as error:
            # A bug of this node costs this message, and not the node.
            self._metrics.messages_dropped.labels("too_large").inc()
            self._log.error("node.message_too_large", detail=str(error))
            return b""


def _call_of(message: Message | None) -> int:
    """Return the number of the client's batch call that a message belongs to, 0 for none."""
    return call_of(getattr(message, "request", 0))
