"""Promote: brings pages from this node's disk back into its pool, for readers that ask.

Owns    the waiters, with their questions and their patience; the pages that are wanted, and the
        loads in flight with their reservations in the pool; what is promoted and not read yet.
Hears   Promote, from readers; PoolGrew, Granted and Committed, from the pool; PagesFound,
        PagesLoaded, LateEnded and DiskEnded, from the disk actor.
Says    PagesSought, Reserve, Commit and PromoteAnswered to the pool, which answers readers with its
        records of the moment; LoadWanted to the disk actor.
Keeps   each question has one answer, within its patience. A page is loaded once however many
        readers wait. A slot that the store may still write to stays reserved.
Limits  WAITERS_MAX questions, WANTED_MAX pages, LOADS_MAX loads of LOAD_BYTES_MAX; half of the pool
        for what is loading or unread; `wish_rate` bytes a second for questions without patience.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import (
    PagesFound,
    PagesLoaded,
    PagesSought,
    PoolGrew,
    PromoteHears,
)
from peercache.actors.origin import Origin
from peercache.actors.promote.promotions import Promotions, WantedPage
from peercache.actors.promote.waiters import Waiter, Waiters
from peercache.actors.storage_port import DiskEnded, LateEnded
from peercache.model.keys import KEY_BYTES, split_keys
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import Committed, Granted
from peercache.wire.messages.promote import LATER, LOST, PROMOTED, Promote

PATIENCE_MAX_S: Final = 60.0

ASKED_MAX: Final = 2048
"""Pages of one question that are looked up: what a reader asks for, and 112 KiB of answer."""


@final
@attrs.frozen(eq=False)
class _Question:
    """A Promote whose pages the pool and the disk actor are looking up."""

    origin: Origin
    message: Promote
    asked_at: float


@final
@attrs.define(kw_only=True, eq=False)
class Promoter:
    """The promote actor of one node.

    wish_rate: bytes a second that are loaded for questions without patience.
    """

    wish_rate: int
    metrics: Metrics | None = None
    waiters: Waiters = attrs.field(init=False)
    promotions: Promotions = attrs.field(init=False)
    _questions: dict[int, _Question] = attrs.field(factory=dict)
    _last: int = 0
    _allowance: float = 0.0
    _allowed_at: float = -inf

    def __attrs_post_init__(self) -> None:
        """Start without waiters."""
        self.waiters = Waiters(self.metrics)
        self.promotions = Promotions(self.waiters, self.metrics)

    def on_message(self, sender: Origin, message: PromoteHears, now: float) -> list[Effect]:
        """Take one message; the effects must be performed in the order of the list."""
        self.waiters.now = self.promotions.now = now
        return [*self._apply(sender, message), *self.promotions.pump()]

    def on_tick(self, now: float) -> list[Effect]:
        """Answer the waiters whose patience is over, and begin loads that have room now."""
        self.waiters.now = self.promotions.now = now
        return [*self.waiters.expire(), *self.promotions.pump()]

    def deadline(self) -> float:
        """Return when a patience is over, or there may be room for a load."""
        return min(self.waiters.deadline(), self.promotions.deadline())

    def check(self) -> None:
        """Assert the sums, in constant time."""
        self.promotions.check()

    def _apply(self, sender: Origin, message: PromoteHears) -> list[Effect]:
        match message:
            case Promote():
                return self._ask(sender, message)
            case PagesFound():
                return self._found(message)
            case Granted():
                return self.promotions.granted(message)
            case PagesLoaded():
                return self.promotions.loaded(message)
            case LateEnded(job, indices):
                return self.promotions.late_ended(job, indices)
            case Committed():
                return self.promotions.committed(message)
            case PoolGrew(usable_bytes):
                self.promotions.pool_bytes = usable_bytes
                return []
            case DiskEnded():
                return self.promotions.stop()
        assert_never(message)

    def _ask(self, origin: Origin, message: Promote) -> list[Effect]:
        """Look up a question's pages: in the pool first, then on disk."""
        # A reader that asks for more has read its portion.
        self.promotions.unread.read_by(origin.identity)
        self._last += 1
        self._questions[self._last] = _Question(origin, message, self.waiters.now)
        return [TellPool(PagesSought(self._last, message.keys[: KEY_BYTES * ASKED_MAX]))]

    def _found(self, found: PagesFound) -> list[Effect]:
        """Queue what a question needs from disk, and let its reader wait for it."""
        question = self._questions.pop(found.number)
        message = question.message
        keys = split_keys(message.keys)
        lengths: list[int] = found.lengths.tolist()
        states = bytearray(
            PROMOTED if is_resident else LATER if length else LOST
            for is_resident, length in zip(found.resident, lengths, strict=True)
        )
        on_disk = np.flatnonzero(np.frombuffer(states, np.uint8) == LATER).tolist()
        is_wish = message.patience_s <= 0
        bytes_max = float(self.promotions.portion_bytes)
        if is_wish:
            bytes_max = min(bytes_max, self._allowed())
            if bytes_max <= 0:
                return []
        count = self.promotions.portion(on_disk, [lengths[at] for at in on_disk], bytes_max)
        wanted = on_disk[:count]
        for at in wanted:
            page = WantedPage(lengths[at], int(found.namespaces[at]))
            if self.promotions.want(keys[at], page) and is_wish:
                self._allowance -= page.length
        if is_wish:
            return []
        states += bytes((LATER,)) * (len(keys) - len(states))
        until = question.asked_at + min(message.patience_s, PATIENCE_MAX_S)
        waiter = Waiter(question.origin, message.request, keys, states, question.asked_at, until)
        return self.waiters.admit(waiter, wanted)

    def _allowed(self) -> float:
        """Return how many bytes may be loaded for questions without patience."""
        passed_s = min(1.0, self.waiters.now - self._allowed_at)
        self._allowance = min(self._allowance + self.wish_rate * passed_s, float(self.wish_rate))
        self._allowed_at = self.waiters.now
        return self._allowance
