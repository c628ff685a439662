"""The index of an open disk, and what follows from its changes: index rows go, the pool is told."""

from __future__ import annotations

from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.index import DiskIndex, Gone
from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import DiskIndexed, PagesForgotten, PagesSpilled
from peercache.actors.storage_port import DiskOpened, Forget
from peercache.actors.tenant_metrics import TenantMetrics
from peercache.actors.tenants import Tenants
from peercache.model.quotas import QuotaRule
from peercache.model.runs import I64, U64
from peercache.observability.metrics import Metrics

PLACES_A_FORGET_MAX: Final = 4096
"""Places of one Forget: some milliseconds of the store's index."""

NAMES_MAX: Final = 1024
"""Namespaces whose names are kept while there is no disk."""


@final
@attrs.define(eq=False)
class OpenIndex:
    """What all parts of the disk actor share.

    index: None before the store is open, and after it has ended.
    """

    metrics: Metrics | None = None
    quotas: tuple[QuotaRule, ...] = ()
    index: DiskIndex | None = None
    _names: dict[str, None] = attrs.field(factory=dict)
    """Namespaces whose names are known, the latest ones."""
    _tenant_metrics: TenantMetrics | None = None
    _jobs: int = 0
    _unix_s: float = 0.0

    def open(self, index: DiskIndex, *, unix_s: int, now: float) -> None:
        """Begin; unix_s: the wall clock's time at `now`."""
        self.index = index
        self._unix_s = unix_s - now
        tenants = Tenants(self.quotas, whole=index.capacity_bytes, disk=True)
        for name in self._names:
            tenants.named(name)
        index.share_between(tenants)
        if self.metrics is not None:
            self._tenant_metrics = TenantMetrics(self.metrics, tenants, "disk", 1)

    def name(self, name: str) -> None:
        """Note that there is a namespace of this name."""
        self._names.pop(name, None)
        self._names[name] = None
        if len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]
        index = self.index
        if index is not None and index.tenants.named(name) is not None:
            index.share_between(index.tenants)
            if self._tenant_metrics is not None:
                self._tenant_metrics.renew()

    def unix_s(self, now: float) -> int:
        """Return the wall clock's time."""
        return int(self._unix_s + now)

    def next_job(self) -> int:
        """Return a number that no other job of the store had."""
        self._jobs += 1
        return self._jobs

    def spilled(self, keys: bytes, lengths: I64) -> list[Effect]:
        """Tell the pool that these pages are on disk."""
        return [TellPool(PagesSpilled(keys, lengths))] if keys else []

    def forgotten(self, gone: Gone, *, job: int = 0) -> list[Effect]:
        """Delete the rows of entries that are gone, and tell the pool. job: for ForgetDone."""
        effects = self.rows_gone(gone.places, job=job)
        if gone.keys:
            effects.append(TellPool(PagesForgotten(gone.keys)))
        return effects

    def rows_gone(self, places: U64, *, job: int = 0) -> list[Effect]:
        """Delete the rows of these places. job: for ForgetDone."""
        if not len(places) and not job:
            return []
        cuts = range(PLACES_A_FORGET_MAX, len(places), PLACES_A_FORGET_MAX)
        parts = np.split(places, list(cuts))
        # The store keeps their order, so the last one tells when all rows are gone.
        return [*(Forget(part) for part in parts[:-1]), Forget(parts[-1], job)]

    def count_evicted(self, gone: Gone) -> None:
        """Count pages that left the disk to make room."""
        self.count_lost("evicted", gone.count)
        if gone.count and self.index is not None and self._tenant_metrics is not None:
            self._tenant_metrics.count_evicted(self.index.tenants.counted(gone.namespaces))

    def count_lost(self, reason: str, count: int) -> None:
        """Count pages that left the disk."""
        if count and self.metrics is not None:
            self.metrics.disk_pages_lost.labels(reason).inc(count)


def indexed_of(opened: DiskOpened) -> DiskIndexed:
    """Make the index of what lies on disk; takes seconds, so a thread calls it, not the loop."""
    index = DiskIndex(capacity_bytes=opened.usable_bytes, slab_bytes=opened.slab_bytes)
    index.load(opened.entries)
    return DiskIndexed(opened, index)
