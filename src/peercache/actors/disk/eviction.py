"""Eviction from a full disk: the coldest pages of the same slot size, or a slab of a colder size.

To find the coldest entry costs time that grows with the entries, so one search finds many and keeps
them in a queue, coldest first. An entry that was touched meanwhile is skipped: all entries outside
the queue are younger than all in it, so the order is exact.

A tenant (`actors.tenants`) evicts its own pages, unless others are over their quotas and it is
within its own, or of a higher priority: then theirs, the lowest priority first. Pages of a tenant
within its quota go for its own pages only.
"""

from __future__ import annotations

from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.index_rows import EntryRows
from peercache.actors.disk.slabs import BLOCK_BYTES, UNBOUND, Slab, SlabAllocator
from peercache.actors.tenants import Tenant, Tenants
from peercache.model.eviction import COLDER_FACTOR, DONOR_CHECK_EVERY
from peercache.model.runs import I64, U64

QUEUE_PART: Final = 16
QUEUE_MIN: Final = 256
"""A queue has a sixteenth of a slot size's entries: each eviction costs the same few steps."""

DONORS_MAX: Final = 64
"""Slabs looked at closely then."""


@attrs.define(eq=False)
class _Queue:
    """The coldest entries of a slot size as they were, coldest first."""

    entries: I64 = attrs.field(factory=lambda: np.empty(0, np.int64))
    touched: U64 = attrs.field(factory=lambda: np.empty(0, np.uint64))
    at: int = 0
    batches: int = 0


@final
class EvictionQueues:
    """Chooses the entries to evict; changes neither entries nor slabs."""

    def __init__(self, entries: EntryRows, slabs: SlabAllocator) -> None:
        """Choose among these."""
        self._entries = entries
        self._slabs = slabs
        self._slab_touched = np.zeros(len(slabs.slabs), np.uint64)
        """The newest touch of each slab."""
        self._tenants = Tenants(whole=slabs.capacity_bytes)
        self._queues: dict[tuple[Tenant, int], _Queue] = {}

    def note_touch(self, entries: I64, stamps: U64) -> None:
        """Note touches, whose stamps ascend."""
        # The last of equal indices is the one that stays, and the newest.
        self._slab_touched[self._entries.slabs_of(entries)] = stamps

    def share_between(self, tenants: Tenants) -> None:
        """Choose among the pages of these tenants from now on."""
        self._tenants = tenants
        self._queues.clear()

    def choose(self, blocks: int, count: int, clock: int, tenant: Tenant) -> I64:
        """Return the entries to evict for `count` slots of a size; none if none can go.

        They are up to `count` entries of that size, or all of one slab of another. tenant: whose
        pages shall lie there.
        """
        self._forget_sizes_without_slabs(blocks)
        for debtor in self._debtors(tenant, blocks):
            owed = -(-(debtor.taken - debtor.quota) // (blocks * BLOCK_BYTES))
            found = self._coldest_of(blocks, min(count, owed), debtor)
            if len(found):
                return found
        own = self._coldest_of(blocks, count, tenant)
        if not len(own):
            # This size has nothing that can go: without a donor it could fail for ever.
            donors = self._donors(blocks, tenant)
            return donors[0].live_rows() if donors else own
        queue = self._queues[tenant, blocks]
        queue.batches += 1
        if queue.batches % DONOR_CHECK_EVERY == 1:
            oldest = int(self._entries.rows["touched"][own[0]])
            limit = clock - COLDER_FACTOR * (clock - oldest)
            slab = self._giving_slab(blocks, limit, tenant)
            if slab is not None:
                queue.at = 0  # those just found stay in line
                return slab.live_rows()
        return own

    def _coldest_of(self, blocks: int, count: int, tenant: Tenant) -> I64:
        queue = self._queues.setdefault((tenant, blocks), _Queue())
        for _ in range(2):
            while queue.at < len(queue.entries):
                upto = queue.at + count
                entries, touched = queue.entries[queue.at : upto], queue.touched[queue.at : upto]
                queue.at = upto
                # A touch since then, or another page in this entry, has another stamp.
                same = self._entries.rows["touched"][entries] == touched
                can_go = same & self._entries.can_go(entries) & self._frees_room(entries)
                if can_go.any():
                    found: I64 = entries[can_go]
                    return found
            self._refill(blocks, queue, tenant)
            if not len(queue.entries):
                break
        return np.empty(0, np.int64)

    def _refill(self, blocks: int, queue: _Queue, tenant: Tenant) -> None:
        size = self._slabs.sizes.get(blocks)
        slabs = size.slabs.values() if size is not None else ()
        rows = [slab.live_rows() for slab in slabs if not slab.closed]
        every = np.concatenate(rows) if rows else np.empty(0, np.int64)
        every = every[self._entries.can_go(every)]
        if self._tenants.are_several:
            numbers = self._tenants.numbers(self._entries.rows["namespace"][every])
            every = every[numbers == self._tenants.all().index(tenant)]
        length = max(QUEUE_MIN, len(every) // QUEUE_PART)
        queue.entries = self._entries.coldest(every, length)
        queue.touched = self._entries.rows["touched"][queue.entries]
        queue.at = 0

    def _frees_room(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Return which entries lie in slabs that take new pages."""
        slabs = self._slabs.slabs
        numbers = self._entries.slabs_of(entries).tolist()
        return np.array([not slabs[number].closed for number in numbers], np.bool_)

    def _debtors(self, tenant: Tenant, blocks: int) -> list[Tenant]:
        """Return the tenants that have to give to this one, the lowest priority first."""
        if not self._tenants.are_several:
            return []
        is_due = tenant.may_have(blocks * BLOCK_BYTES)
        over = [
            other
            for other in self._tenants.all()
            if other is not tenant
            and other.is_over
            and (is_due or other.priority < tenant.priority)
        ]
        return sorted(over, key=lambda other: other.priority)

    def _donors(self, blocks: int, tenant: Tenant) -> list[Slab]:
        """Return slabs of other slot sizes that could be taken whole, the coldest first."""
        others = [
            slab
            for slab in self._slabs.slabs
            if slab.blocks not in (UNBOUND, blocks) and not slab.closed
        ]
        if self._tenants.are_several:
            # Else the coldest ones, of a tenant within its quota, hide those that can go.
            others = self._without_kept(others, tenant)
        others.sort(key=lambda slab: int(self._slab_touched[slab.number]))
        return [slab for slab in others[:DONORS_MAX] if self._can_go(slab, tenant)]

    def _without_kept(self, slabs: list[Slab], tenant: Tenant) -> list[Slab]:
        """Leave out the slabs of which one page, looked at in each, says that they cannot go."""
        rows = np.array([slab.rows.max() for slab in slabs], np.int64)
        numbers = np.full(len(slabs), len(self._tenants.all()))
        named = rows >= 0
        numbers[named] = self._tenants.numbers(self._entries.rows["namespace"][rows[named]])
        owners = [*self._tenants.all(), None]
        return [
            slab
            for slab, number in zip(slabs, numbers.tolist(), strict=True)
            if (owner := owners[number]) is not None and _spares(owner, slab, 1, tenant)
        ]

    def _can_go(self, slab: Slab, tenant: Tenant) -> bool:
        rows = slab.live_rows()
        # A slot that was promised a moment ago, in this very batch, has no row yet.
        is_free = len(rows) == slab.taken and bool(self._entries.can_go(rows).all())
        return is_free and (not self._tenants.are_several or self._may_lose(slab, rows, tenant))

    def _may_lose(self, slab: Slab, rows: I64, tenant: Tenant) -> bool:
        """Return whether each tenant in a slab is this one, or can spare what it has there."""
        tenants = self._tenants.all()
        numbers = self._tenants.numbers(self._entries.rows["namespace"][rows])
        pages = zip(*np.unique(numbers, return_counts=True), strict=True)
        return all(_spares(tenants[number], slab, int(count), tenant) for number, count in pages)

    def _giving_slab(self, blocks: int, limit: int, tenant: Tenant) -> Slab | None:
        """Return the slab of another size that should give rather than this size its own pages.

        The coldest of tenants that have to give to this one, whatever its age; else one whose
        entries were touched before `limit`, on average.
        """
        debtors = self._debtors(tenant, blocks)
        if limit <= 0 and not debtors:
            return None
        donors = self._donors(blocks, tenant)
        owed = [slab for slab in donors if debtors and self._priority_in(slab, debtors) is not None]
        if owed:
            return min(owed, key=lambda slab: self._priority_in(slab, debtors) or 0)
        for slab in donors:
            if self._entries.rows["touched"][slab.live_rows()].mean() < limit:
                return slab
        return None

    def _priority_in(self, slab: Slab, debtors: list[Tenant]) -> int | None:
        """Return the highest priority in a slab, None unless all of it is of these tenants."""
        tenants = self._tenants.all()
        rows = self._entries.rows["namespace"][slab.live_rows()]
        owners = [tenants[number] for number in np.unique(self._tenants.numbers(rows)).tolist()]
        is_owed = all(owner in debtors for owner in owners)
        return max(owner.priority for owner in owners) if is_owed else None

    def _forget_sizes_without_slabs(self, wanted: int) -> None:
        for key in [key for key in self._queues if key[1] not in self._slabs.sizes]:
            if key[1] != wanted:
                del self._queues[key]


def _spares(owner: Tenant, slab: Slab, pages: int, tenant: Tenant) -> bool:
    """Return whether a tenant gives so many pages of a slab to another one, or to itself."""
    if owner is tenant:
        return True
    slot_bytes = slab.blocks * BLOCK_BYTES
    is_safe = owner.priority > tenant.priority and not tenant.may_have(slot_bytes)
    return not is_safe and owner.taken - pages * slot_bytes >= owner.quota
