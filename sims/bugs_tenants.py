"""The planted bugs of quotas and of retained pages: who gives room to whom.

Each maker takes the right thing and returns the wrong one, close to how such a bug would look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
