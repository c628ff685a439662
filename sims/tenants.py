"""The guarantees of quotas: which pages of one namespace may be evicted for those of another.

And the guarantees of retaining: no page is evicted before its time, and no quota is blocked.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import attrs

from peercache.actors.disk.index import DiskIndex, EvictionQueues
from peercache.actors.mailboxes import TakeOver
from peercache.actors.pool.actor import Pool
from peercache.actors.tenants import Tenant
from peercache.model.runs import I64
from peercache.wire.messages.pool import Reserve, ReserveMirror
from sims.trace import Violation


@attrs.frozen(eq=False)
class Share:
    """A tenant before a step. taken: granules of its extents; keys: its pages."""

    tenant: Tenant
    taken: int
    keys: frozenset[bytes]


@final
@attrs.frozen(eq=False)
class Shares:
    """All tenants of a pool before a message; `judge` compares them with those after it."""

    wanting: Tenant | None
    before: tuple[Share, ...] = ()
    retained: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, pool: Pool, message: object) -> Shares:
        """Record a pool with quotas, if this message may evict pages of others."""
        tenants = pool.tenants
        if isinstance(message, TakeOver):
            message = message.reserve
        if not tenants.are_several or not isinstance(message, (Reserve, ReserveMirror)):
            return cls(None)
        keys: dict[Tenant, list[bytes]] = {tenant: [] for tenant in tenants.all()}
        for page in pool.pages._by_key.values():
            keys[tenants.of(page.namespace)].append(page.key)
        before = tuple([Share(one, one.taken, frozenset(keys[one])) for one in keys])
        pages = pool.pages._by_key.values()
        retained = frozenset([page.key for page in pages if page.slot.retained_until])
        return cls(tenants.of(message.namespace), before, retained)

    def judge(self, pool: Pool) -> Counter[str]:
        """Fail if a guaranteed page was evicted; return how many pages each tenant lost."""
        gave: Counter[str] = Counter()
        wanting = self.wanting
        if wanting is None:
            return gave
        had = {share.tenant: share.taken for share in self.before}
        find = pool.pages.find
        if gone := [key for key in self.retained if find(key) is None]:
            detail = f"{len(gone)} pages went for {wanting.name} before their time"
            raise Violation("retained", detail)
        self._judge_blocked(pool)
        extent_max = max((e.units for e in pool._slots._units if e), default=1) * pool._slots.unit
        for share in self.before:
            owner = share.tenant
            lost = sum(find(key) is None for key in share.keys)
            if owner is wanting or not lost:
                continue
            gave[owner.name] += lost
            detail = f"{lost} pages of {owner.name} went for {wanting.name}"
            if share.taken <= owner.quota:
                raise Violation("quota", f"{detail}: it had {share.taken} of {owner.quota}")
            if owner.taken + extent_max <= owner.quota:
                raise Violation("quota", f"{detail}: {owner.taken} of {owner.quota} are left")
            if had[wanting] > wanting.quota and owner.priority > wanting.priority:
                raise Violation("priority", f"{detail}, of a lower priority and over its quota")
        return gave

    def _judge_blocked(self, pool: Pool) -> None:
        """Fail if retained pages occupy more of the pool than their namespace is guaranteed."""
        blocked: Counter[Tenant] = Counter()
        for extent in dict.fromkeys(pool._slots._units):
            if extent is not None and any(slot.retained_until for slot in extent.slots):
                blocked[extent.size_class.tenant] += pool._slots._extent_granules(extent)
        for owner, granules in blocked.items():
            if owner is not pool.tenants.others and granules > owner.quota:
                detail = f"{owner.name} blocks {granules} granules of {owner.quota}"
                raise Violation("retained", detail)


@final
class WatchedQueues:
    """The eviction queues of one disk: checks the pages that they choose."""

    def __init__(self, index: DiskIndex, queues: EvictionQueues) -> None:
        """Watch these queues of this index."""
        self._index = index
        self._queues = queues

    @classmethod
    def watch(cls, index: DiskIndex) -> None:
        """Watch the queues of an index from now on."""
        if not isinstance(index._eviction, cls):
            index._eviction = cls(index, index._eviction)  # type: ignore[assignment]

    def choose(self, blocks: int, count: int, clock: int, tenant: Tenant) -> I64:
        """Return what the queues choose; fail if one of them is guaranteed its place."""
        victims = self._queues.choose(blocks, count, clock, tenant)
        if self._index.tenants.are_several:
            self._judge(victims, tenant)
        return victims

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the queues."""
        return getattr(self._queues, name)

    def _judge(self, victims: I64, wanting: Tenant) -> None:
        entries = self._index._entries
        numbers = self._index.tenants.numbers(entries.rows["namespace"][victims])
        for number, owner in enumerate(self._index.tenants.all()):
            theirs = victims[numbers == number]
            if owner is wanting or not len(theirs):
                continue
            given = entries.slot_bytes(theirs)
            slot = given // len(theirs)  # All are of one size.
            detail = f"{len(theirs)} pages of {owner.name} on disk go for {wanting.name}"
            if owner.taken <= owner.quota:
                raise Violation("disk-quota", f"{detail}: it has {owner.taken} of {owner.quota}")
            if owner.taken - given + slot <= owner.quota:
                left = owner.taken - given
                raise Violation("disk-quota", f"{detail}: {left} of {owner.quota} are left")
            if wanting.taken > wanting.quota and owner.priority > wanting.priority:
                detail += ", of a lower priority and over its quota"
                raise Violation("disk-priority", detail)
