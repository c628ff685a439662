"""The metrics of tenants, only where there are quotas; gauges are computed when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from peercache.actors.tenants import Tenant, Tenants
from peercache.observability.metrics import Metrics


@final
class TenantMetrics:
    """The metrics of the tenants of one tier."""

    def __init__(self, metrics: Metrics, tenants: Tenants, tier: str, unit_bytes: int) -> None:
        """Show the tenants that there are. unit_bytes: of what they count."""
        self._metrics = metrics
        self._tenants = tenants
        self._tier = tier
        self._unit_bytes = unit_bytes
        self._shown: dict[str, None] = {}
        if tenants.are_several:
            self.renew()

    def renew(self) -> None:
        """Show the tenants that there are now, and no other."""
        now = {tenant.name: tenant for tenant in self._tenants.all()}
        for name in [name for name in self._shown if name not in now]:
            self._metrics.namespace_bytes.remove(name, self._tier)
            self._metrics.namespace_quota_bytes.remove(name, self._tier)
            self._metrics.namespace_pages_evicted.remove(name, self._tier)
            if self._tier == "pool":
                self._metrics.namespace_retained_bytes.remove(name, self._tier)
        for name in [name for name in now if name not in self._shown]:
            self._show(now[name])
        self._shown = dict.fromkeys(now)

    def count_evicted(self, pages: Mapping[Tenant, int]) -> None:
        """Count evicted pages. pages: how many each tenant lost."""
        if self._shown:
            for tenant, count in pages.items():
                self._metrics.namespace_pages_evicted.labels(tenant.name, self._tier).inc(count)

    def _show(self, tenant: Tenant) -> None:
        taken = self._metrics.namespace_bytes.labels(tenant.name, self._tier)
        taken.set_function(lambda: tenant.taken * self._unit_bytes)
        if self._tier == "pool":
            retained = self._metrics.namespace_retained_bytes.labels(tenant.name, self._tier)
            retained.set_function(lambda: tenant.retained * self._unit_bytes)
        quota = self._metrics.namespace_quota_bytes.labels(tenant.name, self._tier)
        quota.set(tenant.quota * self._unit_bytes)
        # Shown at 0 from the start: a rate would leave out the first value of a counter.
        self._metrics.namespace_pages_evicted.labels(tenant.name, self._tier)
