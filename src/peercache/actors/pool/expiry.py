"""Expiry: the pages of a pool that were not used for the time to live of their namespace.

The queues of eviction are in the order of use, so a look finds what has expired at their heads, and
meets no other page. What expires is evicted like any page: its word goes odd, its record is
withdrawn, and it stays on disk if it is there.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Final, final

from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant, Tenants

LOOK_S: Final = 1.0
"""How often a pool looks for pages that have expired."""

EXPIRES_MAX: Final = 1024
"""Pages that expire in one tick: some milliseconds."""

EXPIRE_PAUSE_S: Final = 0.001
"""Pause after such a tick: the messages that wait come before the pages that are left."""


@final
class Expiry:
    """When a pool looks for pages that have expired."""

    def __init__(self, tenants: Tenants) -> None:
        """Look at once, if any namespace has a time to live."""
        self._due = 0.0 if tenants.may_expire else inf

    def expired(self, slots: SlotAllocator, now: float) -> list[Slot]:
        """Return slots of pages that have expired, EXPIRES_MAX at most; free all of them."""
        if self._due > now:
            return []
        expired = slots.expired(now, EXPIRES_MAX)
        self._due = now + (EXPIRE_PAUSE_S if len(expired) == EXPIRES_MAX else LOOK_S)
        return expired

    def deadline(self) -> float:
        """Return when the next look is due; inf if no page ever expires."""
        return self._due


def owners_of(slots: list[Slot]) -> Counter[Tenant]:
    """Return how many of these slots each tenant has."""
    return Counter(slot.extent.size_class.tenant for slot in slots)
