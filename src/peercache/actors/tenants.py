"""Tenants: the namespaces of a node that have quotas, and how much room each uses.

Pool and disk each have a `Tenants` of their own. Namespaces are identified by their space tags.
That is enough for a rule with an exact name; a rule with a pattern applies to a namespace once a
writer has sent its name. All namespaces without a rule are one tenant, which has no guarantee;
without any rule there is one tenant, which is guaranteed everything.

There are metrics of tenants only if there are quotas; gauges are computed on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.model.keys import Namespace, Tag, Tags, space_of
from peercache.model.room import Amount, QuotaRule, rule_of
from peercache.model.runs import I64
from peercache.observability.metrics import Metrics

TENANTS_MAX: Final = 64
"""Tenants of a node, without those that the settings name exactly: each takes a part of the pool,
and a line of each metric. Later namespaces share the room of those without a quota."""

RETAINED_DIVISOR: Final = 4
"""Namespaces without a quota may together retain 1/4 of a pool, and no part of a quota."""

BLOCKED_DIVISOR: Final = 2
"""Their retained pages may occupy at most 1/2 of its extents: the others can change size."""

OTHERS: Final = "(others)"
"""Stands for all namespaces that have no quota of their own."""


@final
@attrs.define(eq=False)
class Tenant:
    """One namespace, or all namespaces without a quota.

    quota:    its guarantee; taken: its current use. Both in the unit of their `Tenants`.
    retained: the size of its retained pages; blocked: the extents of those pages, which no other
              page gets before they expire.
    priority: of the tenants over their quotas, the one with the lowest priority loses pages first.
    ttl_s:    how long after their last use its pages expire; 0: never.
    stored_at: when a client stored pages of it last.
    """

    name: str
    quota: int
    priority: int = 0
    ttl_s: float = 0.0
    taken: int = 0
    retained: int = 0
    blocked: int = 0
    stored_at: float = -inf
    is_exact: bool = False

    @property
    def is_over(self) -> bool:
        """Return whether it uses borrowed room that others may take back."""
        return self.taken > self.quota

    def may_have(self, more: int) -> bool:
        """Return whether `more` is within its quota; with a quota, one piece always is."""
        return self.taken + more <= self.quota or (not self.taken and self.quota > 0)


@final
class Tenants:
    """The tenants of one pool or disk."""

    def __init__(
        self,
        rules: Iterable[QuotaRule] = (),
        *,
        whole: int,
        unit_bytes: int = 1,
        disk: bool = False,
        ttl_s: float = 0.0,
    ) -> None:
        """Create the tenants with exact names. whole: the total size, in pieces of `unit_bytes`.

        ttl_s: the time to live of those whose rule names none.
        """
        self._rules = tuple(rules)
        self._whole = whole
        self._unit_bytes = unit_bytes
        self._disk = disk
        self._ttl_s = ttl_s
        self.may_expire: Final = bool(ttl_s) or any(map(self._ttl_of, self._rules))
        """Whether the pages of any namespace have a time to live."""
        self._sure = 0
        """Sum of all quotas."""
        self.others = Tenant(OTHERS, 0 if self._rules else whole, ttl_s=ttl_s)
        self._by_space: dict[int, Tenant] = {}
        for rule in self._rules:
            if rule.is_exact:
                self._add(rule.pattern, rule)

    @property
    def are_several(self) -> bool:
        """Return whether there are rules."""
        return bool(self._rules)

    def all(self) -> list[Tenant]:
        """Return every tenant."""
        return [*self._by_space.values(), self.others]

    def of(self, namespace: Tag) -> Tenant:
        """Return the tenant of a namespace, given its tag or its space tag."""
        return self._by_space.get(space_of(namespace), self.others)

    def may_retain(self, tenant: Tenant, more: int, extent: int) -> bool:
        """Return whether a tenant may retain one more page.

        more: the size of the page; extent: that of its extent, 0 if another page there is retained.
        No tenant blocks the quota of another one: each retains within its own quota, or within room
        without a quota.
        """
        most = blocked_most = tenant.quota
        if tenant is self.others:
            unsure = self._whole - self._sure
            most = min(self._whole // RETAINED_DIVISOR, unsure)
            blocked_most = min(self._whole // BLOCKED_DIVISOR, unsure)
        return tenant.retained + more <= most and tenant.blocked + extent <= blocked_most

    def numbers(self, namespaces: Tags) -> I64:
        """Return the tenant of each namespace, by its place in `all`."""
        spaces = np.array(list(self._by_space), np.uint64)
        if not len(spaces):
            return np.zeros(len(namespaces), np.int64)
        order, wanted = np.argsort(spaces), namespaces["space"]
        at = np.searchsorted(spaces, wanted, sorter=order)
        found = order[np.minimum(at, len(spaces) - 1)]
        numbers: I64 = np.where(spaces[found] == wanted, found, len(spaces)).astype(np.int64)
        return numbers

    def counted(self, namespaces: Tags) -> dict[Tenant, int]:
        """Return how many of these pages each tenant has. namespaces: that of each page."""
        numbers, counts = np.unique(self.numbers(namespaces), return_counts=True)
        tenants = self.all()
        return {
            tenants[number]: count
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        }

    def named(self, name: str) -> Tenant | None:
        """Note that there is a namespace of this name; return its tenant if it is new."""
        if not self._rules or Namespace(name).space_tag() in self._by_space:
            return None
        rule = rule_of(self._rules, name)
        if rule is None:
            return None
        patterned = [space for space, one in self._by_space.items() if not one.is_exact]
        if len(patterned) >= TENANTS_MAX:
            idle = next((space for space in patterned if not self._by_space[space].taken), None)
            if idle is None:
                return None
            self._sure -= self._by_space.pop(idle).quota
        return self._add(name, rule)

    def _add(self, name: str, rule: QuotaRule) -> Tenant:
        amount: Amount = rule.disk if self._disk else rule.pool
        wanted = amount.of(self._whole * self._unit_bytes) // self._unit_bytes
        quota = min(wanted, self._whole - self._sure)
        self._sure += quota
        ttl_s = self._ttl_of(rule)
        tenant = Tenant(name, quota, rule.priority, ttl_s, is_exact=rule.is_exact)
        self._by_space[Namespace(name).space_tag()] = tenant
        return tenant

    def _ttl_of(self, rule: QuotaRule) -> float:
        ttl_s = rule.disk_ttl_s if self._disk else rule.ttl_s
        return self._ttl_s if ttl_s is None else ttl_s


@final
class TenantMetrics:
    """The metrics of the tenants of one tier."""

    def __init__(self, metrics: Metrics, tenants: Tenants, tier: str, unit_bytes: int) -> None:
        """Show the current tenants. unit_bytes: the unit in which they count."""
        self._metrics = metrics
        self._tenants = tenants
        self._tier = tier
        self._unit_bytes = unit_bytes
        self._shown: dict[str, None] = {}
        if tenants.are_several:
            self.renew()

    def renew(self) -> None:
        """Show exactly the current tenants."""
        now = {tenant.name: tenant for tenant in self._tenants.all()}
        for name in [name for name in self._shown if name not in now]:
            self._metrics.namespace_bytes.remove(name, self._tier)
            self._metrics.namespace_quota_bytes.remove(name, self._tier)
            self._metrics.namespace_pages_evicted.remove(name, self._tier)
            self._metrics.namespace_pages_expired.remove(name, self._tier)
            if self._tier == "pool":
                self._metrics.namespace_retained_bytes.remove(name, self._tier)
        for name in [name for name in now if name not in self._shown]:
            self._show(now[name])
        self._shown = dict.fromkeys(now)

    def count_evicted(self, pages: Mapping[Tenant, int]) -> None:
        """Count evicted pages. pages: the number that each tenant lost."""
        if self._shown:
            for tenant, count in pages.items():
                self._metrics.namespace_pages_evicted.labels(tenant.name, self._tier).inc(count)

    def count_expired(self, pages: Mapping[Tenant, int]) -> None:
        """Count expired pages. pages: the number of each tenant."""
        if self._shown:
            for tenant, count in pages.items():
                self._metrics.namespace_pages_expired.labels(tenant.name, self._tier).inc(count)

    def _show(self, tenant: Tenant) -> None:
        taken = self._metrics.namespace_bytes.labels(tenant.name, self._tier)
        taken.set_function(lambda: tenant.taken * self._unit_bytes)
        if self._tier == "pool":
            retained = self._metrics.namespace_retained_bytes.labels(tenant.name, self._tier)
            retained.set_function(lambda: tenant.retained * self._unit_bytes)
        quota = self._metrics.namespace_quota_bytes.labels(tenant.name, self._tier)
        quota.set(tenant.quota * self._unit_bytes)
        # Shown as 0 from the start: a rate ignores the first value of a counter.
        self._metrics.namespace_pages_evicted.labels(tenant.name, self._tier)
        self._metrics.namespace_pages_expired.labels(tenant.name, self._tier)
