"""Hints that a node takes over HTTP: retain, demote, prefetch and share, as its clients do.

Owns    the numbers of its questions to the removal actor and the promote actor of this node.
Takes   hints from the HTTP server; Retained and Promoted, from the switchboard.
Sends   Retain and Demote, to the removal actor; Promote, to the promote actor.
Keeps   each page has one outcome. A prefetch loads pages from this node's disk; pages of other
        hosts are copied by clients only, and count as refused.
Limits  PART_KEYS keys of a message, ANSWER_S for all of a hint.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, final

import attrs
import numpy as np
import trio

from peercache.actors.mailboxes import ITSELF
from peercache.actors.origin import Origin
from peercache.model.keys import PageKeys, Tag
from peercache.model.prefix import Overlap
from peercache.model.records import ON_DISK, RESIDENT
from peercache.observability import reasons
from peercache.observability.metrics import Metrics
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    LATER,
    LOST,
    NOT_HERE,
    OVER_QUOTA,
    PROMOTED,
    RETAIN_MAX_S,
    RETAINED,
    Demote,
    Promote,
    Promoted,
    Retain,
    Retained,
)

PART_KEYS: Final = 1024
"""Keys of one message, as of a client."""

ANSWER_S: Final = 2.0
"""How long a hint may take: the HTTP server waits a second longer."""

MEMBERS_FRACTION: Final = 0.8
"""The fraction of that time that the removal actor waits for members."""

_STATES: Final = {NOT_HERE: reasons.MISSING, OVER_QUOTA: reasons.FORBIDDEN, RETAINED: reasons.DONE}
_LOADED: Final = {PROMOTED: reasons.DONE, LATER: reasons.UNANSWERED, LOST: reasons.MISSING}


@attrs.define(eq=False)
class _Asked:
    reply: Retained | Promoted | None = None
    answered: trio.Event = attrs.field(factory=trio.Event)


@final
class NodeHints:
    """Obeys hints, on the node's loop."""

    def __init__(
        self,
        put: Callable[[Origin, Retain | Demote | Promote], None],
        overlap: Callable[[PageKeys], Awaitable[Overlap]],
        incarnation: int,
        metrics: Metrics,
    ) -> None:
        """Send with `put`. overlap: which members hold pages; incarnation: that of this node."""
        self._put = put
        self._overlap = overlap
        self._incarnation = incarnation
        self._pages = metrics.hint_pages
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}

    async def hint(
        self, hint: str, keys: PageKeys, namespace: Tag, seconds: float
    ) -> Mapping[str, int]:
        """Obey a hint for pages of a namespace; return how many had which outcome."""
        outcomes: Counter[str] = Counter()
        with trio.move_on_after(ANSWER_S):
            if hint in {reasons.RETAIN, reasons.DEMOTE}:
                await self._change(hint, keys, namespace, seconds, outcomes)
            else:
                await self._look(hint, keys, outcomes)
        outcomes[reasons.UNANSWERED] += len(keys) - outcomes.total()
        found = {outcome: count for outcome, count in outcomes.items() if count}
        for outcome, count in found.items():
            self._pages.labels(hint, outcome).inc(count)
        return found

    def take(self, message: Message) -> None:
        """Take an answer of an actor; ignore those to earlier questions."""
        if isinstance(message, Retained | Promoted):
            asked = self._waiting.get(message.request)
            if asked is not None:
                asked.reply = message
                asked.answered.set()

    async def _change(
        self, hint: str, keys: PageKeys, namespace: Tag, seconds: float, outcomes: Counter[str]
    ) -> None:
        timeout_s = ANSWER_S * MEMBERS_FRACTION
        time_s = float(min(seconds, RETAIN_MAX_S)) if seconds > 0 else 0.0
        for part in _parts(keys):
            question = (
                Retain(0, namespace, part, time_s, timeout_s)
                if hint == reasons.RETAIN
                else Demote(0, namespace, part, timeout_s)
            )
            reply = await self._ask(question)
            for state, outcome in _STATES.items():
                outcomes[outcome] += reply.states.count(state)

    async def _look(self, hint: str, keys: PageKeys, outcomes: Counter[str]) -> None:
        found = await self._overlap(keys)
        anywhere = np.bitwise_or.reduce(found.flags, axis=0, initial=0) != 0
        if not found.whole:
            # A page without a holder may have one that did not answer.
            keys = keys[anywhere]
        else:
            outcomes[reasons.MISSING] += int((~anywhere).sum())
        if hint == reasons.SHARE:
            outcomes[reasons.ALREADY] += int(anywhere.sum())
            return
        here = np.zeros(found.flags.shape[1], np.uint8)
        if self._incarnation in found.holders:
            here = found.flags[found.holders.index(self._incarnation)]
        is_resident = (here & RESIDENT) != 0
        on_disk = ~is_resident & ((here & ON_DISK) != 0)
        outcomes[reasons.ALREADY] += int(is_resident.sum())
        outcomes[reasons.FORBIDDEN] += int((anywhere & ~is_resident & ~on_disk).sum())
        for part in _parts(keys[on_disk[anywhere] if not found.whole else on_disk]):
            reply = await self._ask(Promote(0, part, ANSWER_S / 2))
            for state, outcome in _LOADED.items():
                outcomes[outcome] += reply.states.count(state)

    async def _ask(self, question: Retain | Demote | Promote) -> Retained | Promoted:
        number, asked = next(self._numbers), _Asked()
        self._waiting[number] = asked
        try:
            self._put(ITSELF, attrs.evolve(question, request=number))
            await asked.answered.wait()
        finally:
            del self._waiting[number]
        assert asked.reply is not None, "an answer sets the event"
        return asked.reply


def _parts(keys: PageKeys) -> list[bytes]:
    return [keys[at : at + PART_KEYS].tobytes() for at in range(0, len(keys), PART_KEYS)]
