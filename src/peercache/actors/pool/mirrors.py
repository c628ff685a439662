"""Mirrored pages: how much of the pool they may have, and what a removal means for them.

A client mirrors a page when it has read it from another host: it asks for a slot before it reads,
and commits the verified bytes after that. They may be older than a removal: the removal came to
this node first, and to the page's holder after the read. So a removal voids the mirrored pages of
its namespace that are being written, and those whose slot is asked for while other members may
still be removing. A removal tells each member for how long its sender waits for them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, final

import attrs

from peercache.actors.pool.granting import Shares
from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant
from peercache.model.keys import COPIES, space_of
from peercache.wire.messages.pool import REFUSED_FULL, RESERVED

LATELY_S: Final = 10.0
"""No mirrored page takes the place of a page that was read or stored within this time."""

LOOK_PART: Final = 1 / 8
"""How exact that is: the part of that time between two notes of the pool's count of touches."""

CLOCKS_DIFFER: Final = 1.2
"""A member that removes waits by its own clock, for an answer that takes time too."""

NEWCOMER_S: Final = 2.5
"""How long a new node mirrors nothing: removals of before its time, with the usual deadline of a
call, are under way elsewhere and come to this node no more."""

NAMESPACES_MAX: Final = 1024
"""Namespaces whose removals are kept apart; beyond that the oldest ones count for all."""


@final
@attrs.define(eq=False)
class Mirrors:
    """The rules for mirrored pages of one pool.

    granules_max: what all of them may have; lately_s: how long a page that was touched stays.
    """

    granules_max: int
    lately_s: float = LATELY_S
    _void_until: dict[int, float] = attrs.field(factory=dict)
    """By namespace: what is asked for until then is void."""
    _all_void_until: float = -math.inf
    _looks: deque[tuple[float, int]] = attrs.field(factory=deque)
    """When, and how many touches there had been."""

    def started(self, now: float) -> None:
        """Note that the node has begun to have room; only the first time counts."""
        if self._all_void_until == -math.inf:
            self._all_void_until = now + NEWCOMER_S

    def removed(self, namespace: int, patience_s: float, now: float) -> None:
        """Note that pages of a namespace are being removed by all members within `patience_s`."""
        until = now + max(patience_s, 0.0) * CLOCKS_DIFFER
        if namespace == COPIES:
            self._all_void_until = max(self._all_void_until, until)
            return
        until = max(until, self._void_until.pop(namespace, -math.inf))
        self._void_until[namespace] = until
        if len(self._void_until) > NAMESPACES_MAX:
            oldest = next(iter(self._void_until))
            self._all_void_until = max(self._all_void_until, self._void_until.pop(oldest))

    def is_void(self, namespace: int, asked_at: float) -> bool:
        """Return whether a page whose slot was asked for then may have been removed since."""
        # A name may have been cleared whole, by its space tag.
        tags = [namespace, space_of(namespace)]
        if namespace == space_of(namespace):
            # Of a page from another node no more is known: it may be of every geometry.
            tags += [tag for tag in self._void_until if space_of(tag) == namespace]
        until = max(self._void_until.get(tag, -math.inf) for tag in tags)
        return max(until, self._all_void_until) >= asked_at

    def begin(self, now: float, clock: int) -> int:
        """Return the touch after which a page counts as touched lately; clock: touches so far."""
        if not self._looks or self._looks[-1][0] + self.lately_s * LOOK_PART <= now:
            self._looks.append((now, clock))
        while len(self._looks) > 1 and self._looks[1][0] + self.lately_s <= now:
            self._looks.popleft()
        at, touches = self._looks[0]
        return touches if at + self.lately_s <= now else -1

    def take_slots(
        self,
        slots: SlotAllocator,
        states: bytearray,
        granules: list[int],
        *,
        own: int,
        shares: Shares,
        untouched_since: int,
        tenant: Tenant,
    ) -> tuple[list[Slot | None], list[Slot]]:
        """Return a slot for each page that is RESERVED, or make it REFUSED_FULL; and the evicted.

        granules: of each page; own: granules that this client has reserved already.
        untouched_since: no page that was touched later goes.
        """
        taken: list[Slot | None] = [None] * len(states)
        evicted: list[Slot] = []
        full: dict[int, None] = {}
        for index, state in enumerate(states):
            if state != RESERVED:
                continue
            size, slot = granules[index], None
            if size not in full and shares.allow(size, own=own, together=slots.reserved_granules):
                slot = slots.take_mirror(
                    size,
                    most=self.granules_max,
                    untouched_since=untouched_since,
                    evicted=evicted,
                    tenant=tenant,
                )
            if slot is None:
                states[index] = REFUSED_FULL
                full[size] = None
            else:
                taken[index] = slot
                own += size
        return taken, evicted
