"""A slot allocator with a record of all that was taken from it."""

from __future__ import annotations

from collections import OrderedDict

from peercache.actors.pool.size_classes import Extent, Slot
from peercache.actors.pool.slots import UNITS_ABOUT, SlotAllocator
from peercache.actors.tenants import Tenant, Tenants


class Rig:
    """An allocator and everything that was taken from it, by first granule."""

    def __init__(
        self,
        granules: int,
        usable: int | None = None,
        units_about: int = UNITS_ABOUT,
        tenants: Tenants | None = None,
    ) -> None:
        """Start with an empty pool."""
        self.slots = SlotAllocator(
            granules=granules,
            usable=granules if usable is None else usable,
            units_about=units_about,
            tenants=tenants,
        )
        self.held: OrderedDict[int, Slot] = OrderedDict()
        self.reserved: dict[int, Slot] = {}
        self.evicted: list[int] = []

    def take(
        self, granules: int, untouched_since: int | None = None, tenant: Tenant | None = None
    ) -> Slot | None:
        """Take a slot, as new as can be."""
        gone: list[Slot] = []
        since = self.slots.clock if untouched_since is None else untouched_since
        slot = self.slots.take(granules, untouched_since=since, evicted=gone, tenant=tenant)
        for victim in gone:
            del self.held[victim.first]
        self.evicted += [victim.first for victim in gone]
        if slot is not None:
            self.reserved[slot.first] = slot
        self.slots.check()
        return slot

    def hold(self, slot: Slot) -> None:
        """Let a slot have a page."""
        self.slots.hold([slot])
        self.held[slot.first] = self.reserved.pop(slot.first)

    def put(self, granules: int, tenant: Tenant | None = None) -> Slot:
        """Take and hold."""
        slot = self.take(granules, tenant=tenant)
        assert slot is not None
        self.hold(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Free a slot."""
        self.slots.release(slot)
        (self.held if slot.first in self.held else self.reserved).pop(slot.first)
        self.slots.check()

    def check(self) -> None:
        """Compare with a slow count: no overlap, right sums."""
        self.slots.check()
        owner: dict[int, int] = {}
        for slot in [*self.held.values(), *self.reserved.values()]:
            size = slot.extent.size_class.granules
            assert slot.first + size <= self.slots.usable
            for granule in range(slot.first, slot.first + size):
                assert owner.setdefault(granule, slot.first) == slot.first, "two slots overlap"
        assert self.slots.held_count == len(self.held)
        for count, slots in (
            (self.slots.held_granules, self.held),
            (self.slots.reserved_granules, self.reserved),
        ):
            assert count == sum(s.extent.size_class.granules for s in slots.values())

    def extents(self) -> list[tuple[Extent, int]]:
        """Return the extents, and how many granules each takes."""
        slots = self.slots
        found = [extent for extent in dict.fromkeys(slots._units) if extent is not None]
        return [(extent, slots._extent_granules(extent)) for extent in found]

    def count(self, granules: int) -> int:
        """Return how many slots of a size are held."""
        return sum(s.extent.size_class.granules == granules for s in self.held.values())
