"""The drain of a node: its pages are offered to the nodes that stay, hottest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.effects import Effect, NotifyPool, Send
from peercache.actors.mailboxes import (
    DrainChanged,
    PagesToGive,
    RequestGive,
)
from peercache.model.member import ALIVE, Member
from peercache.model.records import Records
from peercache.wire.messages.membership import (
    OfferPages,
    PagesTaken,
)
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
)

OFFER_PAGES: Final = 256
"""Pages of one offer: 14 KiB of records."""

OFFER_BYTES: Final = 32 * 2**20
"""Their bytes, unless one page has more: a quarter of a second of a slow network."""

OFFER_S: Final = 8.0
"""Silence after which a target is given up: longer than it may read (PULL_MAX_S). It has
died, or it is of the build before, which knows no offers."""

FULL_S: Final = 1.0
"""How soon a target without free room is asked again: it may have started just now, and not all of
its memory be there."""

FULL_MAX: Final = 4
"""How often in turn it may have no room, before it is given up."""

TRIES_MAX: Final = 2
"""How often a page is offered that was not read in time."""

UNFINISHED_S: Final = 2.5
"""How long sets that began before the drain are waited for: the deadline of a call."""

AGAIN_S: Final = 0.1

SERVING, HANDING_OVER, HANDED_OVER = "serving", "handing_over", "handed_over"


@attrs.frozen(eq=False)
class Batch:
    """Pages of one namespace that are offered together. tries: how often they were before."""

    namespace: int
    records: Records
    tries: int = 0


@attrs.define(eq=False)
class Recipient:
    """A node that may take pages. offer: the number of the one it has; 0 for none."""

    offer: int = 0
    rests_until: float = -inf
    times_full: int = 0
    is_given_up: bool = False

    def is_ready(self, now: float) -> bool:
        """Return whether it may have an offer now."""
        return not self.offer and not self.is_given_up and self.rests_until <= now


@attrs.define
class Progress:
    """How far a drain is, in pages and bytes.

    given: read by another node; there: it had them before. lost: not given, for want of free room
    or of time. left: still to be offered; of pages that the pool has not named yet the bytes of
    their slots are counted, which are a little more.
    """

    given: int = 0
    there: int = 0
    lost: int = 0
    left: int = 0
    given_bytes: int = 0
    there_bytes: int = 0
    lost_bytes: int = 0
    left_bytes: int = 0


@final
@attrs.define(eq=False)
class Giving:
    """The drain of one node: the pages to offer, the targets, and the offers that are under way."""

    may_give: Callable[[int], bool] = lambda _: True
    """Whether this node may hand over pages of a namespace, given its tag."""
    state: str = SERVING
    progress: Progress = attrs.field(factory=Progress)
    _until: float = inf
    _settle_until: float = -inf
    _ask_at: float = inf
    _targets: dict[int, Recipient] = attrs.field(factory=dict)
    _queue: deque[Batch] = attrs.field(factory=deque)
    _offers: dict[int, tuple[int, Batch, float]] = attrs.field(factory=dict)
    _is_asking: bool = False
    _is_dry: bool = False
    _behind: int = 0
    _behind_bytes: int = 0
    _last: int = 0

    @property
    def targets(self) -> int:
        """Return how many nodes may still take pages."""
        return sum(not target.is_given_up for target in self._targets.values())

    def follow(self, members: Sequence[Member], own: int, now: float) -> list[Effect]:
        """Offer to the live members, but to this node."""
        live = [m.incarnation for m in members if m.state == ALIVE and m.incarnation != own]
        for gone in [target for target in self._targets if target not in live]:
            self._retake(self._targets.pop(gone).offer)
        for target in live:
            self._targets.setdefault(target, Recipient())
        return self.go_on(now)

    def begin(self, until: float, now: float) -> list[Effect]:
        """Refuse new pages, and hand over those that are here; once it has begun, go on."""
        if self.state != SERVING:
            return []
        self.state, self.progress = HANDING_OVER, Progress()
        self._until, self._settle_until = until, now + UNFINISHED_S
        self._is_dry, self._is_asking = False, True
        self._behind = self._behind_bytes = 0
        for target in self._targets.values():
            target.is_given_up, target.times_full, target.rests_until = False, 0, -inf
        return [NotifyPool(DrainChanged(is_draining=True)), NotifyPool(RequestGive(again=True))]

    def cancel(self) -> list[Effect]:
        """Take new pages again; what other nodes have taken they keep."""
        if self.state == SERVING:
            return []
        self.state = SERVING
        self._forget()
        return [NotifyPool(DrainChanged(is_draining=False))]

    def offered(self, portion: PagesToGive, now: float) -> list[Effect]:
        """Take the next pages from the pool."""
        if self.state != HANDING_OVER or not self._is_asking:
            return []
        self._is_asking = False
        if portion.unfinished and now < self._settle_until:
            # Their pages are the hottest ones: begin again when they are there.
            self._ask_at = now + AGAIN_S
            return []
        self._settle_until = -inf
        self._is_dry = not portion.groups
        self._behind, self._behind_bytes = portion.left, portion.left_bytes
        for group in portion.groups:
            if self.may_give(group.namespace):
                self._queue += cut(Batch(group.namespace, group.records))
            else:
                # Every target would refuse the offer, and be given up for its silence.
                self.progress.lost += len(group.records)
                self.progress.lost_bytes += bytes_of(group.records)
        return self.go_on(now)

    def taken(self, target: int, message: PagesTaken, now: float) -> list[Effect]:
        """Note what a target has taken; offer the rest to another one."""
        offer = self._offers.get(message.number)
        if offer is None or offer[0] != target:
            return []  # Late, or not asked for.
        del self._offers[message.number]
        batch, node = offer[1], self._targets[target]
        node.offer = 0
        states = np.frombuffer(message.states, np.uint8)
        if len(states) != len(batch.records):
            node.is_given_up = True
            self._queue.appendleft(batch)
            return self.go_on(now)
        is_new, is_full, is_there = states == COMMITTED, states == REFUSED_FULL, states == HERE
        self.progress.given += int(is_new.sum())
        self.progress.there += int(is_there.sum())
        self.progress.given_bytes += bytes_of(batch.records[is_new])
        self.progress.there_bytes += bytes_of(batch.records[is_there])
        if is_full.any():
            node.times_full = 0 if is_new.any() else node.times_full + 1
            node.rests_until = now + FULL_S
            node.is_given_up = node.times_full >= FULL_MAX
            self._queue.appendleft(attrs.evolve(batch, records=batch.records[is_full]))
        again = states == ABORTED
        tries = batch.tries + 1
        if again.any() and tries < TRIES_MAX:
            self._queue.append(Batch(batch.namespace, batch.records[again], tries))
        else:
            self.progress.lost += int(again.sum())
            self.progress.lost_bytes += bytes_of(batch.records[again])
        return self.go_on(now)

    def on_tick(self, now: float) -> list[Effect]:
        """Give up the targets that are silent, and all of it when the time is over."""
        effects: list[Effect] = []
        if self._ask_at <= now:
            self._ask_at, self._is_asking = inf, True
            effects.append(NotifyPool(RequestGive(again=True)))
        late = [number for number, (_, _, until) in self._offers.items() if until <= now]
        for number in late:
            self._targets[self._offers[number][0]].is_given_up = True
            self._retake(number)
        # The time may be over at the same moment: what is due at a tick is done in it.
        return [*effects, *self.go_on(now)]

    def deadline(self, now: float) -> float:
        """Return when something is due."""
        if self.state != HANDING_OVER:
            return inf
        due = [self._until, self._ask_at, *(until for _, _, until in self._offers.values())]
        if self._queue:
            due += [
                t.rests_until
                for t in self._targets.values()
                if not t.offer and not t.is_given_up and t.rests_until > now
            ]
        return min(due)

    def go_on(self, now: float) -> list[Effect]:
        """Offer what there is to the targets that are ready; end when nothing more can be done."""
        if self.state != HANDING_OVER:
            return []
        effects: list[Effect] = []
        for name, target in self._targets.items():
            if self._queue and target.is_ready(now) and now < self._until:
                batch = self._queue.popleft()
                self._last += 1
                target.offer = self._last
                self._offers[self._last] = (name, batch, now + OFFER_S)
                records = batch.records.tobytes()
                effects.append(Send(name, OfferPages(self._last, batch.namespace, records)))
        is_waiting = self._is_asking or self._ask_at < inf
        if not self._queue and not self._is_dry and not is_waiting and self.targets:
            self._is_asking = True
            effects.append(NotifyPool(RequestGive(again=False)))
        waits_for_pages = self._is_asking or self._ask_at < inf or self._offers
        is_over = not self._queue and self._is_dry and not self._offers
        if is_over or now >= self._until or (not self.targets and not waits_for_pages):
            self.state = HANDED_OVER
            pages, size = self._waiting()
            self.progress.lost += pages
            self.progress.lost_bytes += size
            self._forget()
        self.progress.left, self.progress.left_bytes = self._waiting()
        return effects

    def check(self) -> None:
        """Assert the bound of the offers."""
        assert len(self._offers) <= len(self._targets), f"{len(self._offers)} offers"

    def _waiting(self) -> tuple[int, int]:
        """Return how many pages are still to be given, and their bytes."""
        waiting = [*self._queue, *(batch for _, batch, _ in self._offers.values())]
        pages = self._behind + sum(len(batch.records) for batch in waiting)
        return pages, self._behind_bytes + sum(bytes_of(batch.records) for batch in waiting)

    def _retake(self, number: int) -> None:
        """Have the pages of an offer without an answer offered to another target."""
        offer = self._offers.pop(number, None)
        if offer is None:
            return
        name, batch, _ = offer
        if name in self._targets:
            self._targets[name].offer = 0
        self._queue.appendleft(batch)

    def _forget(self) -> None:
        self._queue.clear()
        self._offers.clear()
        self._behind = self._behind_bytes = 0
        self._ask_at, self._is_asking = inf, False
        for target in self._targets.values():
            target.offer = 0


def bytes_of(records: Records) -> int:
    """Return the bytes of the pages of these records."""
    return int(records["length"].sum(dtype=np.uint64))


def cut(batch: Batch) -> list[Batch]:
    """Cut a batch into offers, in its order."""
    parts: list[Batch] = []
    begin = size = 0
    lengths: list[int] = batch.records["length"].tolist()
    for at, length in enumerate(lengths):
        if at > begin and (at - begin >= OFFER_PAGES or size + length > OFFER_BYTES):
            parts.append(Batch(batch.namespace, batch.records[begin:at]))
            begin, size = at, 0
        size += length
    parts.append(Batch(batch.namespace, batch.records[begin:]))
    return parts
