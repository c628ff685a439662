"""Gathering: how all members are, asked of each of them when a person looks.

Nothing is asked while nothing looks. What was gathered serves all who look within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import attrs
import trio

from peercache.actors.origin import Origin
from peercache.model.member import Member
from peercache.model.status import (
    UNAVAILABLE,
    MemberStatus,
    Status,
    decoded_status,
    encoded,
    unanswered,
)
from peercache.model.view import STATE_NAMES, is_live
from peercache.node.broker import MemberBroker
from peercache.wire.messages.declared import Message
from peercache.wire.messages.membership import (
    ReportCluster,
    ReportStatus,
    RequestCluster,
    RequestStatus,
)

ANSWER_S = 1.0
"""How long a member may take; a node that serves answers in milliseconds."""

ASK_AGAIN_S = 0.4
"""A question may be lost, as on a link that has just been made."""

AT_ONCE = 64
"""Members asked at the same time."""

FRESH_S = 1.0
"""How long a gathered answer serves."""

FRESH_STARTING_S = 0.1
"""How long one with a member that does not serve: most often it is starting, and soon does."""

ASKERS_MAX = 64
"""Questions of operators that wait at the same time; further ones are refused."""

TOLD_BYTES_MAX = 128 * 1024
"""Of statuses in one message; the others follow."""


@attrs.define(eq=False)
class _Gathered:
    at: float = float("-inf")
    fresh_s: float = FRESH_S
    members: tuple[MemberStatus, ...] = ()
    incarnations: tuple[int, ...] = ()
    lock: trio.Lock = attrs.field(factory=trio.Lock)


@final
class Gathering:
    """Asks members for their status, on the node's loop."""

    def __init__(
        self,
        *,
        own: int,
        status: Callable[..., Status],
        members: Callable[[], Sequence[Member]],
        broker: MemberBroker,
    ) -> None:
        """Ask for node `own`, whose status is `status(detail=…)`.

        members: the view, ended ones included.
        """
        self._own = own
        self._status = status
        self._members = members
        self._broker = broker
        self._kept = {False: _Gathered(), True: _Gathered()}
        """By whether it is with details."""
        self._limit = trio.CapacityLimiter(AT_ONCE)

    def ask(self, sender: Origin, asked: RequestCluster) -> Message | None:
        """Take an operator's question, which is answered once the members have; or refuse it."""

        async def answer() -> ReportCluster:
            gathered = await self._gathered(detail=asked.detail)
            behind = [
                member
                for incarnation, member in zip(gathered.incarnations, gathered.members, strict=True)
                if incarnation > asked.after
            ]
            return ReportCluster(asked.request, *portion(behind))

        return self._broker.answer_later(
            sender, asked, answer, at_once_max=ASKERS_MAX, what="how the cluster is"
        )

    async def statuses(self, *, detail: bool = False) -> tuple[MemberStatus, ...]:
        """Return every member of the view, by incarnation; at most FRESH_S old."""
        return (await self._gathered(detail=detail)).members

    async def _gathered(self, *, detail: bool) -> _Gathered:
        kept = self._kept[detail]
        async with kept.lock:  # One gathers, and the others wait for what it finds.
            if trio.current_time() - kept.at >= kept.fresh_s:
                members = sorted(self._members(), key=lambda member: member.incarnation)
                found: dict[int, MemberStatus] = {}
                async with trio.open_nursery() as nursery:
                    for member in members:
                        if member.incarnation != self._own and is_live(member):
                            nursery.start_soon(self._look, member, detail, found)
                # The own status is read last: it costs this loop's time, and nothing waits.
                found[self._own] = MemberStatus(
                    seen="alive", answers=True, status=self._status(detail=detail)
                )
                kept.incarnations = tuple([member.incarnation for member in members])
                kept.members = tuple([found.get(m.incarnation) or unanswered(m) for m in members])
                starts = any(each.status.state == UNAVAILABLE for each in kept.members)
                kept.fresh_s = FRESH_STARTING_S if starts else FRESH_S
                kept.at = trio.current_time()
        return kept

    async def _look(self, member: Member, detail: bool, found: dict[int, MemberStatus]) -> None:  # noqa: FBT001 - nursery
        """Ask one member, twice if need be."""
        async with self._limit:
            question = RequestStatus(0, detail)
            told = await self._broker.ask(
                member.incarnation, question, ASK_AGAIN_S, ANSWER_S - ASK_AGAIN_S
            )
        if not isinstance(told, ReportStatus):
            return
        # Bytes that are no status are no answer.
        with suppress(ValueError):
            found[member.incarnation] = MemberStatus(
                seen=STATE_NAMES[member.state], answers=True, status=decoded_status(told.status)
            )


def portion(members: Sequence[MemberStatus]) -> tuple[bytes, bool]:
    """Return the first of these, encoded, as many as fit; and whether there are more."""
    parts: list[bytes] = []
    size = 2
    for member in members:
        part = encoded((member,))[1:-1]
        size += len(part) + 1
        if parts and size > TOLD_BYTES_MAX:
            return b"[" + b",".join(parts) + b"]", True
        parts.append(part)
    return b"[" + b",".join(parts) + b"]", False
