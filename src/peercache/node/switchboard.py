"""The switchboard: what a node's actors want done, and what becomes of its connections.

What comes in goes through `inbound`, what goes to other nodes through `links`; here is what needs
both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import attrs
import trio
from trio import to_thread

from peercache.actors.effects import BuildRing, Effect, LocalEffect, Send, SendTo, Tell, TellRing
from peercache.actors.mailboxes import RingBuilt
from peercache.actors.origin import Origin
from peercache.model.hash_ring import HashRing
from peercache.model.member import Member
from peercache.net.peers import Gate, Peer
from peercache.node.envelopes import Envelopes
from peercache.node.inbound import Inbound
from peercache.node.links import Links
from peercache.node.routing import NodeMailboxes
from peercache.observability.reasons import EXPIRED
from peercache.wire.messages.declared import Message


@final
@attrs.frozen(eq=False, kw_only=True)
class Switchboard:
    """Performs the effects of actors, and ends connections in both directions.

    perform_local: does what concerns this node's memory, disk and devices.
    in_thread: a simulation runs in its own time what runs in a thread here.
    """

    _envelopes: Envelopes
    _mailboxes: NodeMailboxes
    _inbound: Inbound
    _links: Links
    _nursery: trio.Nursery
    _gate: Gate
    _member_of: Callable[[int], Member | None]
    _perform_local: Callable[[LocalEffect], None]
    _in_thread: Callable[[Callable[[], HashRing]], Awaitable[HashRing]] = to_thread.run_sync

    def tell(self, told: Tell) -> None:
        """Hand an actor a fact that no message brought, and all that follows from it."""
        self._mailboxes.turn.handle(self._mailboxes.tell, told)

    def perform(self, effect: Effect) -> None:
        """Do what an actor returned; never blocks."""
        if isinstance(effect, Send):
            self._send(effect.to, effect.message)
        elif isinstance(effect, Tell):
            self._mailboxes.tell(effect)
        elif isinstance(effect, SendTo):
            self._links.send_to(effect.address, effect.message)
        elif isinstance(effect, BuildRing):
            self._nursery.start_soon(self._build_ring, effect)
        else:
            self._perform_local(effect)

    def _send(self, to: int | Origin, message: Message) -> None:
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
        """Make a ring in a thread: numpy gives up the interpreter's lock while it sorts."""
        ring = await self._in_thread(build.ring)
        self.tell(TellRing(RingBuilt(ring)))

    # --- certificates -----------------------------------------------------------------------------

    def renew_tls(self) -> None:
        """Follow new certificates, and end what is connected with those that are not valid now."""
        self._inbound.listener.renew_tls()
        self._links.renew_tls()
        self.judge_again()

    def judge_again(self) -> None:
        """End the sessions and links whose other ends are not admitted any more."""
        self._end_those(lambda peer: not self._gate.admits(peer), "revoked")

    def end_expired(self) -> None:
        """End the sessions and links whose other ends' certificates have expired."""
        self._end_those(Peer.has_expired, EXPIRED)

    def _end_those(self, is_over: Callable[[Peer], bool], reason: str) -> None:
        self._inbound.end_those(is_over, reason)
        self._links.end_those(is_over, reason)

    def connect_again(self) -> None:
        """End every connection, so that each other end shows its certificate again."""
        self._inbound.disconnect()
        self._links.disconnect()
