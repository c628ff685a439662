"""Size classes: the slots of one size that one tenant has, and the order in which they are evicted.

A slot may hold a mirrored page, a retained one, or one that came from another node with its age
(moved); the others are held, or recent for a period of some seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from typing import Final, final

import attrs

from peercache.actors.tenants import Tenant
from peercache.model.room import COLDER_FACTOR

STALE_MIN: Final = 1024
"""So many stale entries are not worth a sweep."""

MIRROR_AGE_FACTOR: Final = 4
"""A mirrored page counts as so many times as old as it is: its bytes are elsewhere too. Yet one
that is read all the time outlives pages that nothing reads, in a pool that is always full."""

FREE, RESERVED, HELD = 0, 1, 2

NEVER_TOUCHED: Final = -1

_NOT_YET: Final = 2**62


HISTORY_S: Final = 4096
"""Seconds of the past, one mark each: pages of other nodes that are older when a node starts are of
one age."""

AGE_DIVISOR: Final = 256
"""Of what is longer ago, the distance of two marks is 1/256 of their age: a year has 2,300."""


@final
@attrs.define(eq=False)
class Ages:
    """What the clock of touches showed in each period of the past: marks, both lists rising.

    The clock advances once a period at least, so that a period that had no touch has a place in the
    order of eviction too: a page that comes from another node may have been touched in it.
    """

    _moments: list[float] = attrs.field(factory=list)
    _clocks: list[int] = attrs.field(factory=list)

    def mark(self, before: float, now: float, clock: int) -> int:
        """Mark the seconds up to now; return what the clock shows then.

        before: when anything was touched last; -inf: there is no past yet, so it is made up.
        """
        seconds = int(min(max(now - before, 1.0), HISTORY_S))
        begin = max(before, now - seconds)
        for second in range(seconds):
            self._moments.append(begin + second)
            self._clocks.append(clock + second)
        if len(self._moments) > 2 * HISTORY_S:
            self._thin_out(now)
        return clock + seconds

    def _thin_out(self, now: float) -> None:
        """Forget marks of what is long ago, but never the first."""
        kept: list[int] = []
        for at, moment in enumerate(self._moments):
            age = now - moment
            is_lately = age <= HISTORY_S
            if is_lately or not kept or moment - self._moments[kept[-1]] >= age / AGE_DIVISOR:
                kept.append(at)
        self._moments = [self._moments[at] for at in kept]
        self._clocks = [self._clocks[at] for at in kept]

    def age(self, touched: int, now: float) -> float:
        """Return how long ago (s) the clock showed this: up to the distance of two marks less."""
        at = bisect_left(self._clocks, touched)
        return max(0.0, now - self._moments[at]) if at < len(self._moments) else 0.0

    def began(self, touched: int) -> int:
        """Return what the clock showed before the period of a touch."""
        at = bisect_left(self._clocks, touched)
        return self._clocks[at - 1] if at else NEVER_TOUCHED

    def ended(self, touched: int) -> int:
        """Return what the clock showed after the period of a touch; _NOT_YET: it is not over."""
        at = bisect_left(self._clocks, touched)
        return self._clocks[at] if at < len(self._clocks) else _NOT_YET

    def clock_at(self, moment: float) -> int:
        """Return the last touch that was before a moment for certain."""
        at = bisect_right(self._moments, moment)
        return self._clocks[at - 1] if at else NEVER_TOUCHED


@final
@attrs.define(eq=False)
class Slot:
    """Room for one page. first: its first granule, which is also the index of its word.

    retained_until: 0 while its page is retained no longer than others.
    batch: the number of the batch that stored its page.
    disk_length: of its page on this node's disk; 0: not there. copy_at: the node that has a copy of
    its page; 0: none is known.
    """

    first: int
    extent: Extent
    state: int = FREE
    touched: int = NEVER_TOUCHED
    is_mirror: bool = False
    retained_until: float = 0.0
    batch: int = 0
    disk_length: int = 0
    copy_at: int = 0


@final
@attrs.define(eq=False)
class Extent:
    """Neighbouring units that one class cuts into slots."""

    size_class: SizeClass
    first_unit: int
    units: int
    first_granule: int
    slots_max: int
    slots: list[Slot] = attrs.field(factory=list)
    """The slots cut so far: cutting on demand keeps a new extent cheap, whatever its size."""
    reserved: int = 0
    held: int = 0
    retained: int = 0
    """How many of those held are retained: while any is, no other class gets the extent."""
    touched: int = NEVER_TOUCHED
    """When any of its pages was last touched."""
    live: bool = True


@final
@attrs.define(eq=False)
class SizeClass:
    """All slots of one size that one tenant has."""

    granules: int
    tenant: Tenant
    ages: Ages
    extents: dict[int, Extent] = attrs.field(factory=dict)
    free: deque[Slot] = attrs.field(factory=deque)
    """Freed slots, oldest first. Those of extents that are gone are skipped when met."""
    held: OrderedDict[int, Slot] = attrs.field(factory=OrderedDict)
    """By first granule, the next to be evicted first: without those of the next three."""
    recent: dict[int, Slot] = attrs.field(factory=dict)
    """Those that were touched since the period began; all are hotter than `held`."""
    moved: dict[int, Slot] = attrs.field(factory=dict)
    """Of pages that came from another node and were not touched here; `_moved_order` is a heap."""
    mirrors: OrderedDict[int, Slot] = attrs.field(factory=OrderedDict)
    """Of mirrored pages, the least recently touched first."""
    retained: OrderedDict[int, Slot] = attrs.field(factory=OrderedDict)
    """Of retained pages, which are not evicted: nothing that looks for room meets them."""
    cutting: Extent | None = None
    """The newest extent, while it has slots that were never used."""
    evictions: int = 0
    searched: int = -1
    """The version of the unit map in which no unassigned window was found."""
    _moved_order: list[tuple[int, int, Slot]] = attrs.field(factory=list)
    """(touched, number of the entry, slot) of what is or was in `moved`: a heap, in which entries
    that are stale are skipped."""
    _entries: int = 0
    _copies_first_upto: int = NEVER_TOUCHED
    """Up to this touch, those slots of each period go first whose page has a copy."""

    def coldest(self, clock: int, untouched_since: int) -> Slot | None:
        """Return the held slot to evict first, None if all were touched after `untouched_since`.

        The least recently touched; mirrored pages count as older than they are, and go before
        others of their period.
        """
        own = self.coldest_own()
        if own is not None and own.touched > untouched_since:
            own = None
        if not self.mirrors:
            return own
        mirror = next(iter(self.mirrors.values()))
        if mirror.touched > untouched_since:
            return own
        is_older = (
            own is None
            or own.touched > self.ages.began(mirror.touched)
            or (clock - mirror.touched) * MIRROR_AGE_FACTOR >= clock - own.touched
        )
        return mirror if is_older else own

    def coldest_own(self) -> Slot | None:
        """Return the slot without a mirrored page that goes first."""
        own = next(iter((self.held or self.recent).values()), None)
        moved = self._coldest_moved() if self.moved else None
        return own if moved is None or (own and own.touched <= moved.touched) else moved

    def _coldest_moved(self) -> Slot | None:
        order = self._moved_order
        while order:
            touched, _, slot = order[0]
            if self.moved.get(slot.first) is slot and slot.touched == touched:
                return slot
            heappop(order)
        return None

    def pop_coldest(self, most: int, untouched_since: int) -> list[Slot]:
        """Take out the slots to evict first, without mirrors and without what is recent."""
        popped: list[Slot] = []
        if not self.moved:
            # What nearly every pool has: one queue, in order. Of one period at a time.
            self.copies_first()
            last = min(untouched_since, self._copies_first_upto)
            for slot in islice(self.held.values(), most):
                if slot.touched > last:
                    break
                popped.append(slot)
            for _ in popped:
                self.held.popitem(last=False)
            return popped
        while len(popped) < most and (self.held or self.moved):
            self.copies_first()
            coldest = self.coldest_own()
            if coldest is None or coldest.touched > untouched_since or coldest.first in self.recent:
                break
            del self.held_as(coldest)[coldest.first]
            popped.append(coldest)
        return popped

    def expired(self, upto: int, most: int) -> list[Slot]:
        """Return the slots that were last touched when the clock showed `upto`, or before.

        Not those of retained pages. The caller frees all of them at once.
        """
        found: list[Slot] = []
        for queue in (self.held, self.mirrors):
            for slot in islice(queue.values(), most - len(found)):
                if slot.touched > upto:
                    break
                found.append(slot)
        came: dict[int, Slot] = {}
        while len(found) + len(came) < most and self.moved:
            moved = self._coldest_moved()
            if moved is None or moved.touched > upto:
                break
            heappop(self._moved_order)
            # It has two entries if another page of the same age was in it before.
            came[moved.first] = moved
        return [*found, *came.values()]

    def move_in(self, slot: Slot, touched: int) -> None:
        """Let a slot be one that was last touched then, on another node."""
        del self.held_as(slot)[slot.first]
        slot.touched = touched
        self.moved[slot.first] = slot
        self._entries += 1
        heappush(self._moved_order, (touched, self._entries, slot))
        if len(self._moved_order) > 2 * len(self.moved) + STALE_MIN:
            # A granule may have been in another extent before, and so in another slot.
            last = {s.first: n for _, n, s in self._moved_order if self.moved.get(s.first) is s}
            self._moved_order = [(s.touched, last[s.first], s) for s in self.moved.values()]
            heapify(self._moved_order)

    def demote(self, slot: Slot) -> None:
        """Let a held slot, not a retained one, be the next to be evicted.

        It counts as touched when the one that was next was: nothing else of the order changes.
        """
        self.copies_first()
        del self.held_as(slot)[slot.first]
        queue = self.mirrors if slot.is_mirror else self.held
        others = [next(iter(queue.values()))] if queue else []
        if not slot.is_mirror:
            others = others or list(self.recent.values())
            moved = self._coldest_moved() if self.moved else None
            others += [] if moved is None else [moved]
        slot.touched = min([slot.touched, *map(touch_of, others)])
        queue[slot.first] = slot
        queue.move_to_end(slot.first, last=False)

    def held_as(self, slot: Slot) -> dict[int, Slot]:
        """Return where a held slot stands."""
        if slot.retained_until:
            return self.retained
        if slot.is_mirror:
            return self.mirrors
        if slot.first in self.moved:
            return self.moved
        return self.recent if slot.first in self.recent else self.held

    def settle(self, upto: int) -> None:
        """Put recent slots, touched until the clock showed `upto`, behind `held`, in order.

        They share their times of touch among themselves, so that those rise from slot to slot.
        """
        settled = _in_order([slot for slot in self.recent.values() if slot.touched <= upto])
        _share_touches(settled)
        for slot in settled:
            del self.recent[slot.first]
            self.held[slot.first] = slot

    def copies_first(self) -> None:
        """Of the held slots that go next, of one period, let those go first whose page has a copy.

        Once for each period, when the first of its slots goes: until then most pages are written to
        disk, and a prompt that is there as a whole loses its deepest pages first.
        """
        coldest = next(iter(self.held.values()), None)
        if coldest is None or coldest.touched <= self._copies_first_upto:
            return
        end = self.ages.ended(coldest.touched)
        period: list[Slot] = []
        for slot in self.held.values():
            if slot.touched > end:
                break
            period.append(slot)
        self._copies_first_upto = period[-1].touched
        # Its page is not lost with its place here.
        copies = [slot for slot in period if slot.disk_length or slot.copy_at]
        if 0 < len(copies) < len(period):
            for slot in reversed(copies):
                self.held.move_to_end(slot.first, last=False)
            _share_touches(list(islice(self.held.values(), len(period))))

    def in_order(self) -> Iterator[Slot]:
        """Iterate over the slots that may be evicted, the next one first, without mirrors."""
        moved = sorted(self.moved.values(), key=touch_of)
        yield from merge(self.held.values(), moved, key=touch_of)
        yield from _in_order(self.recent.values())


def touch_of(slot: Slot) -> int:
    return slot.touched


def _share_touches(slots: list[Slot]) -> None:
    """Let the times of touch of these slots rise from slot to slot."""
    for slot, touched in zip(slots, sorted([slot.touched for slot in slots]), strict=True):
        slot.touched = touched
        slot.extent.touched = max(slot.extent.touched, touched)


def _in_order(touched_at_once: Iterable[Slot]) -> list[Slot]:
    """Return slots that were touched within one period: the batch stored last, its last page."""
    return sorted(touched_at_once, key=lambda slot: (-slot.batch, slot.touched))


def colder_classes(
    classes: Iterable[SizeClass], size_class: SizeClass, own: Slot, clock: int
) -> dict[SizeClass, None]:
    """Return the sizes that have so much older pages that they should give.

    own: the coldest slot of the size that wants room. Only sizes of the same tenant, and of others
    that borrow as it does, at one priority.
    """
    newest = clock - COLDER_FACTOR * (clock - own.touched)
    tenant = size_class.tenant
    donors: dict[SizeClass, None] = {}
    for other in classes:
        coldest = other.coldest(clock, clock)
        if other is size_class or coldest is None or coldest.touched >= newest:
            continue
        owner = other.tenant
        if owner is tenant or (
            owner.is_over and tenant.is_over and owner.priority == tenant.priority
        ):
            donors[other] = None
    return donors


def debtors(
    classes: Iterable[SizeClass], size_class: SizeClass, wanted: int
) -> list[dict[SizeClass, None]]:
    """Return the sizes of other tenants that must give to this one, whatever their age.

    Their tenants are over their quotas, and this one's is within its own with `wanted` granules
    more, or of a higher priority. The lowest priority comes first.
    """
    tenant = size_class.tenant
    is_due = tenant.may_have(wanted)
    groups: dict[int, dict[SizeClass, None]] = {}
    for other in classes:
        owner = other.tenant
        if owner is tenant or not owner.is_over:
            continue
        if is_due or owner.priority < tenant.priority:
            groups.setdefault(owner.priority, {})[other] = None
    return [groups[priority] for priority in sorted(groups)]


def donor_groups(
    classes: Iterable[SizeClass], size_class: SizeClass, wanted: int
) -> list[dict[SizeClass, None]]:
    """Return all sizes that may give to one that has nothing; what gives first comes first."""
    tenant, classes = size_class.tenant, list(classes)
    peers = {
        other: None
        for other in classes
        if other.tenant is tenant
        or (other.tenant.is_over and other.tenant.priority == tenant.priority)
    }
    return [*debtors(classes, size_class, wanted), peers]
