"""The switchboard: messages from sockets to mailboxes, and effects to sockets and memory.

Everything that comes in passes here once: decoded, its sender known, meant for this incarnation,
and allowed; else it is dropped and counted, and an unknown sender is told to say Hello.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import trio

from peercache.actors.effects import Effect, SendTo, StoreWords, Tell
from peercache.actors.origin import Origin
from peercache.actors.rdma_port import DropPair, OpenPair, RdmaEffect, ServeMemory
from peercache.actors.runtime import TURN_MESSAGES
from peercache.actors.storage_port import DiskEffect, Forget, Load, NoteUse, Spill
from peercache.errors import Rejected, RemoteProtocolError
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.net.link import Link
from peercache.net.sockets import Listener
from peercache.node.admission import Admission, Session
from peercache.node.routing import NodeMailboxes
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics
from peercache.wire.codec import WrongCluster, WrongVersion, decode, encode
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope, Message
from peercache.wire.messages.session import (
    Counted,
    Hello,
    Refused,
    SayHello,
    StatsAsked,
    Welcome,
)

BURST_MESSAGES = 16
"""Messages taken from the socket, and handled, before other tasks get a turn: some milliseconds."""

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
        credentials: str,
        segment_bytes: int,
        listener: Listener,
        mailboxes: NodeMailboxes,
        store_words: Callable[[StoreWords], None],
        member_of: Callable[[int], Member | None],
        answer: Callable[[Message], Message | None],
        metrics: Metrics,
        log: Any,
        open_link: Callable[..., Link] = Link,
        perform_disk: Callable[[DiskEffect], None] | None = None,
        perform_rdma: Callable[[RdmaEffect], None] | None = None,
    ) -> None:
        """Take everything from `node.Node`, which owns it; a simulation opens links of its own."""
        self._me = me
        self._cluster = cluster
        self._admission = admission
        self._granule = granule
        self._credentials = credentials
        self._segment_bytes = segment_bytes
        self._listener = listener
        self._mailboxes = mailboxes
        self._store_words = store_words
        self._member_of = member_of
        self._answer = answer
        self._metrics = metrics
        self._log = log
        self._open_link = open_link
        self._perform_disk = perform_disk
        self._perform_rdma = perform_rdma
        self._links: dict[str, Link] = {}
        # A refused node says Hello again every second.
        self._warn_once = WarnOnce(log)
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
        with self._serving():
            self._take(pipe, raw)

    def tell(self, told: Tell) -> None:
        """Hand an actor a fact that no message brought, and all that follows from it."""
        with self._serving():
            self._mailboxes.tell(told)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Have what is put into mailboxes meanwhile handled at the end, without waking a task."""
        mailboxes = self._mailboxes.in_order
        for mailbox in mailboxes:
            mailbox.is_attended = True
        try:
            yield
            for _ in range(TURN_MESSAGES):
                # Most messages concern one actor, and most mailboxes are empty.
                if not sum([mailbox.serve() for mailbox in mailboxes if mailbox.waiting]):
                    break
        finally:
            for mailbox in mailboxes:
                mailbox.is_attended = False
                if mailbox.waiting:
                    mailbox.wake()

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
        origin = Origin(session.identity, 0 if session.role.value == "node" else pipe)
        if not self._admission.may_send(session, message):
            self._drop("not_allowed", detail=type(message).__name__)
            self._reply_refused(pipe, session, message)
            return
        self._metrics.messages_received.labels(type(message).__name__).inc()
        if isinstance(message, (StatsAsked, Counted)):
            answer = self._answer(message)
            if answer is not None:
                self._reply(pipe, session.identity, answer)
        elif not self._mailboxes.offer(origin, message, size_bytes):
            self._drop("mailbox_full", detail=type(message).__name__)

    def _reply_refused(self, pipe: int, session: Session, message: Message) -> None:
        what = type(message).__name__
        refused = Refused(
            getattr(message, "request", 0), "role", f"a {session.role.value} may not send {what}"
        )
        self._reply(pipe, session.identity, refused)

    def _greet(self, pipe: int, sender: int, hello: Hello) -> None:
        if not self._listener.is_open(pipe):
            # Its end has been told already: a session begun now would never end.
            self._drop("pipe_gone", detail="Hello")
            return
        try:
            self._admission.admit(pipe, sender, hello)
        except Rejected as refusal:
            self._refuse(pipe, refusal, hello.request, sender)
            return
        self._reply(
            pipe, sender, Welcome(hello.request, WIRE_VERSION, self._me, self._segment_bytes)
        )

    def _refuse(self, pipe: int, refusal: Rejected, request: int, sender: int = 0) -> None:
        self._metrics.messages_dropped.labels(refusal.reason).inc()
        key, name = (sender, refusal.reason), name_of(sender)
        self._warn_once(
            "node.peer_refused", key, peer=name, reason=refusal.reason, detail=refusal.detail
        )
        self._reply(pipe, sender, Refused(request, refusal.reason, refusal.detail))

    def _drop(self, reason: str, detail: str = "") -> None:
        self._metrics.messages_dropped.labels(reason).inc()
        self._log.debug("node.message_dropped", reason=reason, detail=detail)

    # --- out --------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        """Do what an actor returned; never blocks."""
        if isinstance(effect, Tell):
            self._mailboxes.tell(effect)
        elif isinstance(effect, StoreWords):
            self._store_words(effect)
        elif isinstance(effect, (Spill, Load, Forget, NoteUse)):
            assert self._perform_disk is not None, "a disk tier that was never opened says nothing"
            self._perform_disk(effect)
        elif isinstance(effect, (OpenPair, DropPair, ServeMemory)):
            assert self._perform_rdma is not None, "the rdma actor of a node without devices"
            self._perform_rdma(effect)
        elif isinstance(effect, SendTo):
            self._say(effect.address, 0, effect.message)
        elif isinstance(effect.to, Origin) and effect.to.pipe:
            self._reply(effect.to.pipe, effect.to.identity, effect.message)
        else:
            target = effect.to.identity if isinstance(effect.to, Origin) else effect.to
            member = self._member_of(target)
            if member is None:
                self._drop("unknown_member", detail=type(effect.message).__name__)
            else:
                self._say(member.control, target, effect.message)

    def _reply(self, pipe: int, target: int, message: Message) -> None:
        if not self._listener.reply(pipe, self._encode(target, message)):
            self._drop("pipe_gone", detail=type(message).__name__)

    def _say(self, address: str, target: int, message: Message) -> None:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._open_link(
                f"tcp://{address}",
                hello=self._hello,
                on_answer=lambda raw: self._answered(address, raw),
                on_dropped=self._metrics.messages_dropped.labels("outbox_full").inc,
            )
            assert self._nursery is not None, "effects are performed after run() has started"
            self._nursery.start_soon(link.run)
        link.send(self._encode(target, message))

    def keep_links(self, addresses: set[str]) -> None:
        """End the links to addresses that no member has any more."""
        for address in [address for address in self._links if address not in addresses]:
            self._links.pop(address).stop()

    async def flush(self, timeout_s: float) -> None:
        """Wait, for a bounded time, until every link has handed over what it had."""
        with trio.move_on_after(timeout_s):
            # nng tells no event for it, so the node polls.
            while not all(link.is_empty for link in self._links.values()):  # noqa: ASYNC110
                await trio.sleep(timeout_s / 20)

    def _hello(self) -> bytes:
        hello = Hello(
            0, WIRE_VERSION_OLDEST, WIRE_VERSION, self._cluster, is_node=True,
            granule=self._granule, credentials=self._credentials,
            namespace="", geometry="", lock="",
        )  # fmt: skip
        return self._encode(0, hello)

    def _answered(self, address: str, raw: bytes) -> None:
        """Take what came back on a link: only the answers to its Hello are of interest."""
        try:
            message = decode(raw, cluster=self._cluster).message
        except RemoteProtocolError as error:
            self._drop("malformed", detail=error.what)
            self._warn_once("node.join_rejected", address, at=address, reason=error.what)
            return
        if isinstance(message, SayHello) and address in self._links:
            self._links[address].greet_again()
        elif isinstance(message, Refused):
            key = (address, message.reason)
            self._warn_once(
                "node.join_rejected", key, at=address, reason=message.reason, detail=message.detail
            )

    def _encode(self, target: int, message: Message) -> bytes:
        return encode(Envelope(self._me.incarnation, target, message), cluster=self._cluster)
