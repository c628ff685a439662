"""What quotas promise: which pages of one namespace may be evicted for those of another one."""

from __future__ import annotations

from collections import Counter
from typing import final

import attrs

from peercache.actors.pool.actor import Pool
from peercache.actors.tenants import Tenant
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

    @classmethod
    def of(cls, pool: Pool, message: object) -> Shares:
        """Look at a pool with quotas, if pages of others may be evicted by this message."""
        tenants = pool.tenants
        if not tenants.are_several or not isinstance(message, (Reserve, ReserveMirror)):
            return cls(None)
        keys: dict[Tenant, list[bytes]] = {tenant: [] for tenant in tenants.all()}
        for page in pool.pages._by_key.values():
            keys[tenants.of(page.namespace)].append(page.key)
        before = tuple([Share(one, one.taken, frozenset(keys[one])) for one in keys])
        return cls(tenants.of(message.namespace), before)

    def judge(self, pool: Pool) -> Counter[str]:
        """Fail if a page has gone that was sure of its place; return who gave how many pages."""
        gave: Counter[str] = Counter()
        wanting = self.wanting
        if wanting is None:
            return gave
        had = {share.tenant: share.taken for share in self.before}
        find = pool.pages.find
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
