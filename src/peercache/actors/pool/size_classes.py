"""Size classes: all slots of one size that a tenant has, and which sizes give room to which.

Plain values; `slots.SlotAllocator` alone changes them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final, final

import attrs

from peercache.actors.tenants import Tenant
from peercache.model.eviction import COLDER_FACTOR

MIRROR_AGE_FACTOR: Final = 4
"""A mirrored page counts as so many times as old as it is: its bytes are elsewhere too. Yet one
that is read all the time outlives pages that nothing reads, in a pool that is always full."""

FREE, RESERVED, HELD = 0, 1, 2

NEVER_TOUCHED: Final = -1


@final
@attrs.define(eq=False)
class Slot:
    """Room for one page. first: its first granule, which is also the index of its word.

    retained_until: 0 while its page is retained no longer than others.
    """

    first: int
    extent: Extent
    state: int = FREE
    touched: int = NEVER_TOUCHED
    is_mirror: bool = False
    retained_until: float = 0.0


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
    extents: dict[int, Extent] = attrs.field(factory=dict)
    free: deque[Slot] = attrs.field(factory=deque)
    """Freed slots, oldest first. Those of extents that are gone are skipped when met."""
    held: OrderedDict[int, Slot] = attrs.field(factory=OrderedDict)
    """By first granule, least recently touched first; without mirrored and retained ones."""
    mirrors: OrderedDict[int, Slot] = attrs.field(factory=OrderedDict)
    """The same of mirrored pages."""
    retained: OrderedDict[int, Slot] = attrs.field(factory=OrderedDict)
    """The same of retained pages, which are not evicted: nothing that looks for room meets them."""
    cutting: Extent | None = None
    """The newest extent, while it has slots that were never used."""
    evictions: int = 0
    searched: int = -1
    """The version of the unit map in which no unassigned window was found."""

    def coldest(self, clock: int, untouched_since: int) -> Slot | None:
        """Return the held slot to evict first, None if all were touched after `untouched_since`.

        The least recently touched; mirrored pages count as older than they are.
        """
        own = next(iter(self.held.values()), None)
        if own is not None and own.touched > untouched_since:
            own = None
        if not self.mirrors:
            return own
        mirror = next(iter(self.mirrors.values()))
        if mirror.touched > untouched_since:
            return own
        is_older = own is None or (
            (clock - mirror.touched) * MIRROR_AGE_FACTOR >= clock - own.touched
        )
        return mirror if is_older else own

    def held_as(self, slot: Slot) -> OrderedDict[int, Slot]:
        """Return where a held slot stands."""
        if slot.retained_until:
            return self.retained
        return self.mirrors if slot.is_mirror else self.held


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
