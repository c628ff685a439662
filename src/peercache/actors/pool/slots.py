"""Slots: how the page memory is cut into slots, and which of them are free, reserved or held.

Page memory is cut into *units* of equal size. A *size class* is a slot size in granules; it gets
*extents*, a few neighbouring units each, when it needs them, and cuts them into slots. A slot is
free, reserved (a client may be writing to it) or held (it has a page). When nothing is free, a
class evicts its own least recently touched slot, unless another class is much colder: then it
takes an extent of that one. So the classes follow the demand, one odd page size costs the pool an
extent and not everything, and a class that has nothing always finds room.

Each *tenant* (`actors.tenants`) has size classes, and so extents, of its own. A tenant takes room
that is free, then, up to its quota, extents of tenants that are over theirs, those of the lowest
priority first. Extents of a tenant within its quota are never taken by another one.

A slot may hold a *mirrored* page: a copy of what another host holds. Mirrored pages take no more
than a share of the pool, never the place of what was touched lately, and age faster than others.

A *retained* page is not evicted before its time, and blocks its extent for other sizes and tenants
(`page_table` says for how long, and `actors.tenants` how much of it there may be).

Pages are evicted least recently touched first, but what was touched within a *period* of some
seconds counts as touched at once: of it pages go first whose bytes are elsewhere too, on this
node's disk or on another node, and of these, or else of the others, the pages stored last
(ADR 0036). So a prompt loses its deepest pages first, however many batches it came in: they are
useless without those before them.

A *demoted* page is the next of its size to be evicted, until it is touched again.

A page that another node has *moved* here keeps its age: it was last touched at the moment that its
former holder names.

Pure: no words, no keys. Age is counted in touches: `clock` advances with each; `Ages` says what the
clock showed when.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import merge
from typing import Final, final

import numpy as np
import numpy.typing as npt

from peercache.actors.pool.size_classes import (
    FREE,
    HELD,
    NEVER_TOUCHED,
    RESERVED,
    Ages,
    Extent,
    SizeClass,
    Slot,
    colder_classes,
    debtors,
    donor_groups,
    touch_of,
)
from peercache.actors.tenants import Tenant, Tenants
from peercache.model.room import DONOR_CHECK_EVERY

UNITS_ABOUT: Final = 256
"""Units a pool is cut into: one more size costs 1/256 of it, and a search looks at 512 at most."""

WASTE_DIVISOR: Final = 8
"""An extent grows until at most 1/8 of it is left over; 8 slots always suffice for that."""

PERIOD_S: Final = 5.0
"""How long what is touched counts as touched at once: an engine computes and stores a long prompt
within some seconds. By public traces (ADR 0036) a longer period loses hits."""

_BLOCKED: Final = 2**62


@final
class SlotAllocator:
    """The slots of one page memory. All sizes in granules."""

    def __init__(
        self,
        *,
        granules: int,
        usable: int,
        units_about: int = UNITS_ABOUT,
        tenants: Tenants | None = None,
    ) -> None:
        """Start with everything unassigned; only the first `usable` granules may be given out.

        tenants: in granules; without them there is one, which has everything.
        """
        assert granules >= 1, granules
        self.granules: Final = granules
        self.unit: Final = max(1, granules // units_about)
        self.usable = 0
        self.clock = 0
        """Touches so far; a slot touched after a given moment has a greater `touched`."""
        self.held_granules = 0
        self.reserved_granules = 0
        self.mirror_granules = 0
        """Held by mirrored pages, and reserved for them."""
        self._unused_granules = 0
        """Of extents: what their slots leave over."""
        self.held_count = 0
        self.retained_count = 0
        self.reclaims = 0
        self.tenants: Final = tenants or Tenants(whole=granules)
        self.ages: Final = Ages()
        self._classes: dict[tuple[Tenant, int], SizeClass] = {}
        self._units: list[Extent | None] = []
        self._batch = 0
        self._period_ends = self.now = -math.inf
        self._is_period_empty = True
        self._freed: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """By unit: when it became unassigned, _BLOCKED while a class has it."""
        self._unassigned = 0
        self._fresh = 0
        """From here on no unit was ever assigned: a pool that fills needs no search."""
        self._version = 0
        self.grow(usable)

    @property
    def class_count(self) -> int:
        """Return the number of sizes that have room of their own."""
        return len(self._classes)

    @property
    def free_granules(self) -> int:
        """Return how much pages may still have, in whatever pieces."""
        taken = self.held_granules + self.reserved_granules
        return self.usable - taken - self._unused_granules

    def grow(self, usable: int) -> None:
        """Let the first `usable` granules be given out; never takes anything back."""
        assert usable <= self.granules, f"{usable} of {self.granules} granules"
        self.usable = max(self.usable, usable)
        # The last unit is short where the size is no multiple; it counts once all of it is there.
        whole = self.usable == self.granules
        units = -(-self.granules // self.unit) if whole else self.usable // self.unit
        added = units - len(self._units)
        self._units += [None] * added
        self._freed = np.concatenate((self._freed, np.zeros(added, np.int64)))
        self._unassigned += added
        self._version += 1

    def take(
        self,
        granules: int,
        *,
        untouched_since: int,
        evicted: list[Slot],
        tenant: Tenant | None = None,
    ) -> Slot | None:
        """Return a slot for a tenant (None: the others), now reserved, or None without room.

        Evicted slots are appended to `evicted`; nothing touched after the clock showed
        `untouched_since` goes, and nothing reserved.
        """
        tenant = tenant or self.tenants.others
        size_class = self._classes.get((tenant, granules))
        if size_class is None:
            size_class = self._classes[tenant, granules] = SizeClass(granules, tenant, self.ages)
        slot = self._free_slot(size_class)
        if slot is None:
            slot = self._make_room(size_class, untouched_since, evicted)
        if slot is None:
            self._forget_if_empty(size_class)
            return None
        assert slot.state == FREE, f"slot {slot.first} was given out in state {slot.state}"
        slot.state = RESERVED
        slot.extent.reserved += 1
        self.reserved_granules += granules
        return slot

    def take_many(
        self,
        granules: int,
        count: int,
        *,
        untouched_since: int,
        evicted: list[Slot],
        tenant: Tenant | None = None,
    ) -> list[Slot]:
        """Return slots of one size, as that many calls of `take` do; fewer where there is no room.

        Free slots, and evictions that need no look at other sizes, are taken without a step a slot.
        """
        taken: list[Slot] = []
        tenant = tenant or self.tenants.others
        while len(taken) < count:
            size_class = self._classes.get((tenant, granules))
            some = size_class and self._take_simply(
                size_class, count - len(taken), untouched_since, evicted
            )
            if some:
                taken += some
                continue
            slot = self.take(
                granules, untouched_since=untouched_since, evicted=evicted, tenant=tenant
            )
            if slot is None:
                break
            taken.append(slot)
        return taken

    def _take_simply(
        self, size_class: SizeClass, most: int, untouched_since: int, evicted: list[Slot]
    ) -> list[Slot]:
        """Take slots that are free or cut, else the coldest ones until `take` must look further."""
        taken: list[Slot] = []
        while size_class.free and len(taken) < most:
            if (slot := size_class.free.popleft()).extent.live:
                assert slot.state == FREE, f"slot {slot.first} was given out in state {slot.state}"
                taken.append(slot)
        if len(taken) < most and size_class.cutting is not None:
            taken += self._cut(size_class.cutting, most - len(taken))
        if not taken and not self._may_assign(size_class) and not size_class.mirrors:
            # The next look at other sizes is due after so many evictions.
            most = min(most, -size_class.evictions % DONOR_CHECK_EVERY)
            taken = size_class.pop_coldest(most, untouched_since)
            for slot in taken:
                slot.extent.held -= 1
            size_class.evictions += len(taken)
            evicted += taken
            self.held_granules -= size_class.granules * len(taken)
            self.held_count -= len(taken)
        for slot in taken:
            slot.state = RESERVED
            slot.extent.reserved += 1
        self.reserved_granules += size_class.granules * len(taken)
        return taken

    def _cut(self, extent: Extent, most: int) -> list[Slot]:
        """Return new slots of an extent that has some left to cut."""
        granules, begin = extent.size_class.granules, len(extent.slots)
        end = min(begin + most, extent.slots_max)
        places = range(
            extent.first_granule + begin * granules, extent.first_granule + end * granules, granules
        )
        cut = [Slot(first, extent) for first in places]
        extent.slots += cut
        if end == extent.slots_max:
            extent.size_class.cutting = None
        return cut

    def take_mirror(
        self,
        granules: int,
        *,
        most: int,
        untouched_since: int,
        evicted: list[Slot],
        tenant: Tenant | None = None,
    ) -> Slot | None:
        """Return a slot for a mirrored page, now reserved, or None if there is no room for one.

        most: granules that mirrored pages may have. With no more of them left, the page takes the
        place of a colder mirrored page of its size.
        """
        if self.mirror_granules + granules <= most:
            slot = self.take(
                granules, untouched_since=untouched_since, evicted=evicted, tenant=tenant
            )
            if slot is not None:
                slot.is_mirror = True
                self.mirror_granules += granules
            return slot
        size_class = self._classes.get((tenant or self.tenants.others, granules))
        coldest = next(iter(size_class.mirrors.values()), None) if size_class else None
        if coldest is None or coldest.touched > untouched_since:
            return None
        self._evict(coldest, evicted)
        coldest.is_mirror = True
        coldest.state = RESERVED
        coldest.extent.reserved += 1
        self.reserved_granules += granules
        self.mirror_granules += granules
        return coldest

    def pass_time(self, now: float) -> None:
        """Note what time it is (s): a period that is over settles the order of what it touched."""
        before, self.now = self.now, now
        if now >= self._period_ends:
            self._period_ends, self._is_period_empty = now + PERIOD_S, True
            # What was touched last was touched by the message before this one.
            upto, self.clock = self.clock, self.ages.mark(before, now, self.clock)
            for size_class in self._classes.values():
                if size_class.recent:
                    size_class.settle(upto)

    def begin_batch(self) -> None:
        """Note that the slots held from now on hold pages that were stored together."""
        self._batch += 1

    def adopt(self, slot: Slot) -> None:
        """Let a mirrored page be like any other: a client of this node has set it."""
        assert slot.state == HELD, f"slot {slot.first} adopted in state {slot.state}"
        size_class = slot.extent.size_class
        size_class.held[slot.first] = size_class.mirrors.pop(slot.first)
        self._no_longer_mirror(slot)
        self.touch(slot)

    def retain(self, slot: Slot, until: float) -> bool:
        """Keep a held slot from eviction until `let_go`; return False if that is too much.

        until: not 0. A mirrored page is then like any other.
        """
        assert slot.state == HELD, f"slot {slot.first} retained in state {slot.state}"
        if slot.retained_until:
            slot.retained_until = until
            return True
        extent = slot.extent
        size_class, blocked = extent.size_class, 0
        tenant, granules = size_class.tenant, size_class.granules
        if not extent.retained:
            blocked = self._extent_granules(extent)
        if not self.tenants.may_retain(tenant, granules, blocked):
            return False
        del size_class.held_as(slot)[slot.first]
        self._no_longer_mirror(slot)
        slot.retained_until = until
        size_class.retained[slot.first] = slot
        self._count_retained(slot, 1)
        return True

    def let_go(self, slot: Slot) -> None:
        """Let a retained slot be the hottest of those that may be evicted."""
        assert slot.retained_until, f"slot {slot.first} is not retained"
        size_class = slot.extent.size_class
        size_class.held[slot.first] = size_class.retained.pop(slot.first)
        self._count_retained(slot, -1)
        slot.retained_until = 0.0
        self.touch(slot)

    def hold(self, slots: Sequence[Slot]) -> None:
        """Let reserved slots have pages: the last of them the hottest one."""
        clock, batch, granules = self.clock, self._batch, 0
        for slot in slots:
            assert slot.state == RESERVED, f"slot {slot.first} held from state {slot.state}"
            extent = slot.extent
            size_class = extent.size_class
            slot.state = HELD
            extent.reserved -= 1
            extent.held += 1
            clock += 1
            slot.touched = extent.touched = clock
            slot.batch = batch
            slot.disk_length = slot.copy_at = 0
            granules += size_class.granules
            (size_class.mirrors if slot.is_mirror else size_class.recent)[slot.first] = slot
        self.clock = clock
        self.reserved_granules -= granules
        self.held_granules += granules
        self.held_count += len(slots)

    def touch(self, slot: Slot) -> None:
        """Make a held slot the hottest one."""
        assert slot.state == HELD, f"slot {slot.first} touched in state {slot.state}"
        self.clock += 1
        slot.touched = slot.extent.touched = self.clock
        size_class = slot.extent.size_class
        if slot.retained_until:
            size_class.retained.move_to_end(slot.first)
        elif slot.is_mirror:
            size_class.mirrors.move_to_end(slot.first)
        elif slot.first not in size_class.recent:
            del size_class.held_as(slot)[slot.first]
            size_class.recent[slot.first] = slot
            if self._is_period_empty:
                # It begins now, so that no period ends while the batches of a prompt follow.
                self._period_ends, self._is_period_empty = self.now + PERIOD_S, False

    def demote(self, slot: Slot) -> bool:
        """Let a held slot be the next of its size to be evicted; return False if it is retained."""
        assert slot.state == HELD, f"slot {slot.first} demoted in state {slot.state}"
        if slot.retained_until:
            return False
        slot.extent.size_class.demote(slot)
        return True

    def move_in(self, slot: Slot, touched: int) -> None:
        """Let a page that was stored just now be as old as another node says."""
        slot.extent.size_class.move_in(slot, touched)

    def expired(self, now: float, most: int) -> list[Slot]:
        """Return up to so many slots whose tenant's time to live is over; free all of them."""
        found: list[Slot] = []
        for size_class in self._classes.values():
            if size_class.tenant.ttl_s and len(found) < most:
                upto = self.ages.clock_at(now - size_class.tenant.ttl_s)
                found += size_class.expired(upto, most - len(found))
        return found

    def coldest_touched(self, of: Container[Tenant] | None = None) -> int | None:
        """Return when the page that goes next was touched; None: no page may go.

        of: tenants; None: all.
        """
        own = [each.coldest_own() for each in self._classes_of(of)]
        return min((slot.touched for slot in own if slot is not None), default=None)

    def moved_granules(self) -> int:
        """Return how much holds pages that other nodes have moved here and nothing read since."""
        return sum(one.granules * len(one.moved) for one in self._classes.values())

    def is_cold(self, slot: Slot) -> bool:
        """Return whether a held slot is among those that `coldest_held` names."""
        return slot.first in slot.extent.size_class.held

    def coldest_held(self, of: Container[Tenant] | None = None) -> Iterator[Slot]:
        """Iterate over the slots to evict next, without mirrors and what came from other nodes.

        of: tenants; None: all.
        """
        queues = [size_class.held.values() for size_class in self._classes_of(of)]
        return merge(*queues, key=touch_of)

    def release(self, slot: Slot) -> None:
        """Free a reserved or held slot; an extent that is wholly free is unassigned again."""
        extent = slot.extent
        size_class = extent.size_class
        if slot.state == HELD:
            self._no_longer_held(slot)
        else:
            assert slot.state == RESERVED, f"slot {slot.first} freed twice"
            extent.reserved -= 1
            self.reserved_granules -= size_class.granules
            self._no_longer_mirror(slot)
        slot.state = FREE
        size_class.free.append(slot)
        if not extent.reserved and not extent.held:
            self._dissolve(extent)
            self._forget_if_empty(size_class)

    def coldest_first(self) -> list[Iterable[Slot]]:
        """Return the slots of each size that may be evicted, coldest first, without mirrors."""
        return [size_class.in_order() for size_class in self._classes.values()]

    def own_coldest_first(self) -> list[Iterable[Slot]]:
        """Return the held slots of each size, coldest first, no mirrors; retained ones first."""
        retained = [one.retained.values() for one in self._classes.values() if one.retained]
        return [*retained, *self.coldest_first()]

    def pages_of_tenants(self) -> dict[Tenant, int]:
        """Return how many pages each tenant has."""
        pages = dict.fromkeys(self.tenants.all(), 0)
        for size_class in self._classes.values():
            some = size_class.held, size_class.recent, size_class.moved
            more = size_class.mirrors, size_class.retained
            pages[size_class.tenant] += sum(map(len, (*some, *more)))
        return pages

    def check(self) -> None:
        """Assert the sums, in time that does not grow with the pool."""
        taken = self.held_granules + self.reserved_granules
        assert self.held_granules >= 0, f"{self.held_granules} granules held"
        assert self.reserved_granules >= 0, f"{self.reserved_granules} granules reserved"
        assert 0 <= self.retained_count <= self.held_count, f"{self.retained_count} retained"
        assert 0 <= self.mirror_granules <= taken, f"{self.mirror_granules} granules of mirrors"
        assert taken <= self.usable, f"{taken} granules taken of {self.usable}"
        assert 0 <= self._unassigned <= len(self._units), f"{self._unassigned} units unassigned"
        assert bool(taken) == bool(self._classes), f"{taken} granules in {self.class_count} classes"

    def _classes_of(self, tenants: Container[Tenant] | None) -> list[SizeClass]:
        classes = self._classes.values()
        return [one for one in classes if tenants is None or one.tenant in tenants]

    # --- finding room ----------------------------------------------------------------------------

    def _free_slot(self, size_class: SizeClass) -> Slot | None:
        free = size_class.free
        while free:
            slot = free.popleft()
            if slot.extent.live:
                return slot
        extent = size_class.cutting
        return self._cut(extent, 1)[0] if extent is not None else None

    def _make_room(
        self, size_class: SizeClass, untouched_since: int, evicted: list[Slot]
    ) -> Slot | None:
        """Return a free slot of the class: in unassigned units, another's place, or its own."""
        if self._assign_free(size_class):
            return self._free_slot(size_class)
        if not size_class.held:
            size_class.settle(untouched_since)
        size_class.copies_first()
        own = size_class.coldest(self.clock, untouched_since)
        if own is None:
            # This size has nothing that can go: without a donor it could fail forever.
            for donors in donor_groups(self._classes.values(), size_class, self._least(size_class)):
                if self._reclaim(size_class, untouched_since, donors, evicted):
                    return self._free_slot(size_class)
            return None
        if size_class.evictions % DONOR_CHECK_EVERY == 0:
            for donors in self._donors(size_class, own):
                if self._reclaim(size_class, untouched_since, donors, evicted):
                    return self._free_slot(size_class)
        size_class.evictions += 1
        self._evict(own, evicted)
        return own

    def _donors(self, size_class: SizeClass, own: Slot) -> list[dict[SizeClass, None]]:
        """Return the sizes that should give rather than this one evict its coldest slot."""
        classes = self._classes.values()
        must: list[dict[SizeClass, None]] = []
        if self.tenants.are_several:
            must = debtors(classes, size_class, self._least(size_class))
        colder = colder_classes(classes, size_class, own, self.clock)
        return [*must, colder] if colder else must

    def _least(self, size_class: SizeClass) -> int:
        """Return the granules of the smallest extent of a class."""
        return -(-size_class.granules // self.unit) * self.unit

    def _may_assign(self, size_class: SizeClass) -> bool:
        """Return whether unassigned units may hold an extent of this class."""
        least = -(-size_class.granules // self.unit)
        return self._unassigned >= least and size_class.searched != self._version

    def _assign_free(self, size_class: SizeClass) -> bool:
        """Give the class an extent of unassigned units, the longest unassigned first."""
        least = -(-size_class.granules // self.unit)
        if not self._may_assign(size_class):
            return False
        wanted = self._units_wanted(size_class.granules)
        if self._fits(self._fresh, wanted, size_class.granules):
            self._assign(size_class, self._fresh, wanted)
            return True
        for units in dict.fromkeys((wanted, least)):
            start = self._least_window(self._freed, units, size_class.granules)
            if start is not None:
                self._assign(size_class, start, units)
                return True
        # Fragments are not looked at again, a page at a time, until the map has changed.
        size_class.searched = self._version
        return False

    def _reclaim(
        self,
        size_class: SizeClass,
        untouched_since: int,
        donors: Container[SizeClass],
        evicted: list[Slot],
    ) -> bool:
        """Take the least recently touched window from the donors."""
        temperature: list[int] = []
        for extent in self._units:
            if extent is None:
                temperature.append(NEVER_TOUCHED)
            elif (
                extent.reserved
                or extent.retained
                or extent.touched > untouched_since
                or extent.size_class not in donors
            ):
                temperature.append(_BLOCKED)
            else:
                temperature.append(extent.touched)
        least = -(-size_class.granules // self.unit)
        for units in dict.fromkeys((self._units_wanted(size_class.granules), least)):
            start = self._payable_window(np.array(temperature), units, size_class)
            if start is not None:
                self._clear_window(start, units, evicted)
                self._assign(size_class, start, units)
                self.reclaims += 1
                return True
        return False

    def _payable_window(
        self, keys: npt.NDArray[np.int64], units: int, size_class: SizeClass
    ) -> int | None:
        """Return the start of the least window of which no extent comes from a tenant's quota."""
        while True:
            start = self._least_window(keys, units, size_class.granules)
            if start is None or not self.tenants.are_several:
                return start
            given: dict[Tenant, int] = {}
            for extent in dict.fromkeys(self._units[start : start + units]):
                if extent is None or (owner := extent.size_class.tenant) is size_class.tenant:
                    continue
                if owner.taken - given.get(owner, 0) <= owner.quota:
                    keys[extent.first_unit : extent.first_unit + extent.units] = _BLOCKED
                    break
                given[owner] = given.get(owner, 0) + self._extent_granules(extent)
            else:
                return start

    def _extent_granules(self, extent: Extent) -> int:
        return self._window_granules(extent.first_unit, extent.units)

    def _unused(self, extent: Extent) -> int:
        return self._extent_granules(extent) - extent.slots_max * extent.size_class.granules

    def _units_wanted(self, granules: int) -> int:
        """Return how many units an extent should span: the fewest with little left over."""
        least = -(-granules // self.unit)
        spans = range(least, min(max(least, WASTE_DIVISOR), len(self._units)) + 1)
        for units in spans:
            if units * self.unit % granules * WASTE_DIVISOR <= units * self.unit:
                return units
        return min(spans, key=lambda units: units * self.unit % granules / units, default=least)

    def _least_window(self, keys: npt.NDArray[np.int64], units: int, granules: int) -> int | None:
        """Return the start of the window whose greatest key is least, then whose sum is."""
        if units > len(keys):
            return None
        start = int(keys.argmin())
        if units == 1 and keys[start] < _BLOCKED and self._fits(start, units, granules):
            # The common case: many small pages to a unit, and one look instead of eight.
            return start
        windows = np.lib.stride_tricks.sliding_window_view(keys, units)
        greatest = windows.max(axis=1)
        if not self._fits(len(keys) - units, units, granules):
            greatest[-1] = _BLOCKED  # the last unit is short, and this page does not fit in
        least = greatest.min()
        if least >= _BLOCKED:
            return None
        candidates = np.flatnonzero(greatest == least)
        return int(candidates[np.argmin(windows[candidates].sum(axis=1))])

    def _fits(self, start: int, units: int, granules: int) -> bool:
        """Return whether these units exist and hold a slot of this size: the last may be short."""
        there = start + units <= len(self._units)
        return there and self._window_granules(start, units) >= granules

    def _window_granules(self, start: int, units: int) -> int:
        return min((start + units) * self.unit, self.granules) - start * self.unit

    # --- extents come and go ---------------------------------------------------------------------

    def _assign(self, size_class: SizeClass, start: int, units: int) -> None:
        slots_max = self._window_granules(start, units) // size_class.granules
        assert slots_max >= 1, f"no slot of {size_class.granules} in {units} units at {start}"
        assert not any(self._units[start : start + units]), f"units at {start} are taken"
        extent = Extent(size_class, start, units, start * self.unit, slots_max)
        self._units[start : start + units] = [extent] * units
        self._freed[start : start + units] = _BLOCKED
        self._unassigned -= units
        size_class.tenant.taken += self._extent_granules(extent)
        self._unused_granules += self._unused(extent)
        self._fresh = max(self._fresh, start + units)
        self._version += 1
        size_class.extents[start] = extent
        size_class.cutting = extent

    def _clear_window(self, start: int, units: int, evicted: list[Slot]) -> None:
        for extent in self._units[start : start + units]:
            # An extent met a second time is gone already.
            if extent is not None and extent.live:
                size_class = extent.size_class
                for slot in extent.slots:
                    if slot.state == HELD:
                        self._evict(slot, evicted)
                self._dissolve(extent)
                self._forget_if_empty(size_class)

    def _dissolve(self, extent: Extent) -> None:
        assert not extent.reserved, f"{extent.reserved} slots at {extent.first_granule} reserved"
        assert not extent.held, f"{extent.held} slots at {extent.first_granule} held"
        size_class = extent.size_class
        extent.live = False
        del size_class.extents[extent.first_unit]
        if size_class.cutting is extent:
            size_class.cutting = None
        self._version += 1
        span = slice(extent.first_unit, extent.first_unit + extent.units)
        self._units[span] = [None] * extent.units
        self._freed[span] = self._version
        self._unassigned += extent.units
        size_class.tenant.taken -= self._extent_granules(extent)
        self._unused_granules -= self._unused(extent)

    def _evict(self, slot: Slot, evicted: list[Slot]) -> None:
        self._no_longer_held(slot)
        slot.state = FREE
        evicted.append(slot)

    def _no_longer_held(self, slot: Slot) -> None:
        del slot.extent.size_class.held_as(slot)[slot.first]
        self._no_longer_mirror(slot)
        if slot.retained_until:
            self._count_retained(slot, -1)
            slot.retained_until = 0.0
        slot.extent.held -= 1
        self.held_granules -= slot.extent.size_class.granules
        self.held_count -= 1

    def _count_retained(self, slot: Slot, sign: int) -> None:
        extent = slot.extent
        tenant, before = extent.size_class.tenant, extent.retained
        extent.retained += sign
        self.retained_count += sign
        tenant.retained += sign * extent.size_class.granules
        if not before or not extent.retained:
            tenant.blocked += sign * self._extent_granules(extent)

    def _no_longer_mirror(self, slot: Slot) -> None:
        if slot.is_mirror:
            slot.is_mirror = False
            self.mirror_granules -= slot.extent.size_class.granules

    def _forget_if_empty(self, size_class: SizeClass) -> None:
        if not size_class.extents:
            self._classes.pop((size_class.tenant, size_class.granules), None)
