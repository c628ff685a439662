"""The planted bugs of quotas and of retained pages: which pages are evicted for which others.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from peercache.actors.disk.index import EvictionQueues
from peercache.actors.pool import slots
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant, Tenants

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _every_tenant(_: Any) -> Any:
    return property(lambda self: self.taken > 0)


def _least_window(_: Any) -> Any:
    def payable(self: Any, keys: Any, units: int, size_class: Any) -> Any:
        return self._least_window(keys, units, size_class.granules)

    return payable


def _whatever_its_priority(right: Any) -> Any:
    def debtors(classes: Any, size_class: Any, wanted: int) -> Any:
        found = right(classes, size_class, wanted)
        tenant = size_class.tenant
        rest = {
            other: None for other in classes if other.tenant is not tenant and other.tenant.is_over
        }
        return [*found, rest]

    return debtors


QUOTA_IGNORED: Patches = (
    (Tenant, "is_over", _every_tenant),
    (SlotAllocator, "_payable_window", _least_window),
)

PRIORITY_IGNORED: Patches = ((slots, "debtors", _whatever_its_priority),)


def _blocks_nothing(right: Any) -> Any:
    def count_retained(self: Any, slot: Any, sign: int) -> None:
        right(self, slot, sign)
        slot.extent.retained = 0

    return count_retained


RETAINED_RECLAIMED: Patches = ((SlotAllocator, "_count_retained", _blocks_nothing),)


def _as_much_as_asked(_: Any) -> Any:
    return lambda *_: True


RETAINED_WITHOUT_BOUND: Patches = ((Tenants, "may_retain", _as_much_as_asked),)


def _of_no_higher_priority(right: Any) -> Any:
    def refill(self: Any, blocks: int, queue: Any, tenant: Any) -> None:
        tenants, self._tenants = self._tenants, Tenants(whole=0)
        try:
            right(self, blocks, queue, tenant)
        finally:
            self._tenants = tenants
        owners = tenants.numbers(self._entries.rows["namespace"][queue.entries])
        priorities = np.array([owner.priority for owner in tenants.all()])
        can_go = priorities[owners] <= tenant.priority
        queue.entries, queue.touched = queue.entries[can_go], queue.touched[can_go]

    return refill


DISK_QUOTA_IGNORED: Patches = ((EvictionQueues, "_refill", _of_no_higher_priority),)


def _all_who_owe(_: Any) -> Any:
    def debtors(self: Any, tenant: Any, blocks: int) -> list[Tenant]:
        del blocks
        return [one for one in self._tenants.all() if one is not tenant and one.is_over]

    return debtors


DISK_PRIORITY_IGNORED: Patches = ((EvictionQueues, "_debtors", _all_who_owe),)
