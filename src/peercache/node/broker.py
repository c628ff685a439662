"""The broker: asks members what this node wants to know of them, and gathers their answers.

Owns    the numbers of this node's questions to members, with the member that alone may answer each
        one; and the questions of others that wait for such answers.
Hears   `ask` and `answer_later`, from `gathering` and `overlaps`; `take`, from links to members.
Says    questions, to members; answers, to others along their own connections.
Keeps   the answer to a question is the first that its member gives to that number.
Limits  the timeouts of each question; questions of others of one kind, as many as its asker allows.

The removal actor asks members by itself: it is a state machine that never awaits, it adds answers
up as they come, and it waits no longer for a member that has left the view.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias, final

import attrs
import trio

from peercache.actors.effects import Effect, Send
from peercache.actors.origin import Origin
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import ReportOverlap, RequestOverlap
from peercache.wire.messages.membership import ReportStatus, RequestCluster, RequestStatus
from peercache.wire.messages.session import Refused

BUSY = "busy"

Told: TypeAlias = ReportStatus | ReportOverlap
"""What another node answers to a question of the node itself."""


@attrs.define(eq=False)
class _Asked:
    """A question that waits for the answer of this member."""

    member: int
    told: Told | None = None
    answered: trio.Event = attrs.field(factory=trio.Event)


@final
class MemberBroker:
    """Asks members questions, on the node's loop."""

    def __init__(self, perform: Callable[[Effect], None]) -> None:
        """Send by `perform`."""
        self._perform = perform
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}
        self._askers: Counter[type[Message]] = Counter()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Answer the questions of others until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def ask(
        self, member: int, question: RequestStatus | RequestOverlap, *timeouts_s: float
    ) -> Told | None:
        """Return what a member answers, None for no answer in time.

        The question is sent as often as there are timeouts, which may be once.
        """
        number, asked = next(self._numbers), _Asked(member)
        self._waiting[number] = asked
        try:
            for timeout_s in timeouts_s:
                self._perform(Send(member, attrs.evolve(question, request=number)))
                with trio.move_on_after(timeout_s):
                    await asked.answered.wait()
                if asked.told is not None:
                    break
        finally:
            del self._waiting[number]
        return asked.told

    def take(self, sender: int, told: Told) -> None:
        """Take what a node answers; of other senders and to other questions nothing."""
        asked = self._waiting.get(told.request)
        if asked is not None and asked.member == sender and asked.told is None:
            asked.told = told
            asked.answered.set()

    def answer_later(
        self,
        sender: Origin,
        question: RequestCluster | RequestOverlap,
        answer: Callable[[], Awaitable[Message]],
        *,
        at_once_max: int,
        what: str,
    ) -> Refused | None:
        """Answer a question of another when `answer` knows it; or refuse it.

        at_once_max: questions of this kind that wait at the same time.
        what: the asker wants to know, for the refusal.
        """
        kind = type(question)
        if self._nursery is None or self._askers[kind] >= at_once_max:
            return Refused(question.request, BUSY, f"too many ask this node {what}")
        self._askers[kind] += 1

        async def tell() -> None:
            try:
                self._perform(Send(sender, await answer()))
            finally:
                self._askers[kind] -= 1

        self._nursery.start_soon(tell)
        return None
