"""Which pages a pool offers to other nodes ahead of their eviction, and what room it reports.

A node that lacks room for what its clients store next offers pages that are nearly as old as its
coldest one, not the coldest. So it keeps pages of all ages, as the others do, and what clients
store beyond the free room costs pages that are about as cold as those that the others evict. It
offers as many as an offer may have, though less is lacking: a prompt on several nodes is lost with
the first of its parts.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from math import ceil, exp, expm1, inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.mailboxes import ColdPages
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.size_classes import touch_of
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant
from peercache.model.records import Records

SPILL_AHEAD_DIVISOR: Final = 8
"""At most 1/8 of a pool is kept free for what clients will store: prompts are stored at once, and
what they need beyond the free room evicts pages that no node was offered."""

DEMAND_DECAY: Final = 0.97
"""What is left of a second's demand in the next one: half of it after 23 s."""

DEMAND_LEAST: Final = 0.5
"""Less of a granule is no demand: a node whose clients have stopped storing needs no room, and
offers no pages."""

ROOMY_DIVISOR: Final = 4
"""Where clients store, room is offered to others while 1/4 of the pool is free."""

LATELY_S: Final = 1800.0
"""What clients stored so long ago counts 1/e of what they store now."""

LIFETIME_SHARE: Final = 0.3
"""A node that offers pages counts its coldest page as at least so old, compared with how long a
page lasts there. For a moment one of two equal nodes has older pages than the other: to move pages
then only scatters prompts (ADR 0037)."""

SPILL_AGE: Final = 0.75
"""How old a page is when it is offered, compared with the coldest one. In a pool with more than
SPILL_LOOK pages that are so old it may be older."""

SPILL_BYTES: Final = 32 * 2**20
"""Bytes that are named at once, unless one page has more."""

SPILL_PAGES: Final = 64
"""Pages that are named at once. Each offer is compared with the pages of the others again."""

SPILL_LOOK: Final = 16384
"""Pages that are looked at for it: a millisecond or two."""

OWN_NEED_S: Final = 60.0
"""How long after its last set a namespace that has used its quota up gives pages to other nodes: it
evicts its own."""

SPILL_AGAIN_S: Final = 2.0
"""How soon a page is named again that no node took. Meanwhile it counts as one that may go."""


@final
@attrs.define(eq=False)
class Demand:
    """How much clients store, in granules: within a second at most, and on average.

    What is long ago counts less.
    """

    _second: float = -inf
    _sum: int = 0
    _peak: float = 0.0
    _lately: float = 0.0
    _began_at: float = inf
    _noted_at: float = 0.0

    def note(self, granules: int, now: float) -> None:
        """Count what a client stores."""
        self.peak(now)
        self._sum += granules
        self._began_at = min(self._began_at, now)
        self._lately *= exp((self._noted_at - now) / LATELY_S)
        self._lately, self._noted_at = self._lately + granules, now

    def rate(self, now: float) -> float:
        """Return how much is stored in a second, on the average of the last half hour or so."""
        if self._began_at >= now:
            return 0.0
        lately = self._lately * exp((self._noted_at - now) / LATELY_S)
        return lately / LATELY_S / -expm1((self._began_at - now) / LATELY_S)

    def peak(self, now: float) -> int:
        """Return the most that was stored within a second lately."""
        if now >= self._second + 1.0:
            passed = min(now - self._second, 1000.0)
            self._peak = max(self._peak, self._sum) * DEMAND_DECAY**passed
            self._second, self._sum = now, 0
        most = max(self._peak, self._sum)
        return ceil(most) if most >= DEMAND_LEAST else 0


@final
@attrs.define(eq=False)
class SpillOrder:
    """The pages of one pool that are offered next. granule: bytes."""

    slots: SlotAllocator
    pages: PageTable
    granule: int
    demand: Demand = attrs.field(factory=Demand)
    after: int = 0
    """Pages with no greater generation are not named."""

    def stored(self, granules: int, tenant: Tenant, now: float) -> None:
        """Note that a client of a tenant stores so much."""
        self.demand.note(granules, now)
        tenant.stored_at = now

    def spare(self, now: float) -> int:
        """Return the granules that are free beyond what clients may store; negative: lacking."""
        most = -(-self.slots.usable // SPILL_AHEAD_DIVISOR)
        return self.slots.free_granules - min(self.demand.peak(now), most)

    def room(self, now: float, *, is_copy: bool) -> tuple[int, float]:
        """Return what another node may hope for here: free granules, and the age of a page (s).

        For second copies that is all, and the coldest page. For pages that the other node evicts
        it is less. Where clients store, free room counts only while there is much of it: to move it
        from node to node helps none of them. And the page is the last one to go when they store as
        much again as lately: what comes here should outlive that. Nor is it older than a page gets
        here that nothing reads: what comes here lasts no longer.
        """
        spare, demand = max(self.spare(now), 0), 0 if is_copy else self.demand.peak(now)
        if demand and self.slots.free_granules * ROOMY_DIVISOR < self.slots.usable:
            spare = 0
        coldest = self.slots.coldest_touched()
        below = demand - self.slots.moved_granules()
        if below > 0:
            coldest = None
            for slot in islice(self.slots.coldest_held(), SPILL_LOOK):
                coldest, below = slot.touched, below - slot.extent.size_class.granules
                if below <= 0:
                    break
        age_s = 0.0 if coldest is None else self.slots.ages.age(coldest, now)
        return spare, age_s if is_copy else min(age_s, self._lifetime_s(now))

    def _lifetime_s(self, now: float) -> float:
        """Return how long a page lasts that nothing reads: until clients have stored a pool."""
        rate = self.demand.rate(now)
        return self.slots.usable / rate if rate else inf

    def next(self, now: float, *, only_new: bool = False) -> ColdPages:
        """Return pages to offer now, coldest first.

        only_new: never name what is here now.
        """
        if only_new:
            self.withhold()
        givers = self._givers(now)
        lacking, coldest = -self.spare(now), self.slots.coldest_touched(givers)
        if coldest is None or lacking <= 0:
            return ColdPages((), 0.0)
        coldest_age_s = self.slots.ages.age(coldest, now)
        named = self._named(lacking, coldest_age_s, givers, now)
        groups: dict[int, list[Page]] = {}
        for page in reversed(named):
            groups.setdefault(page.namespace, []).append(page)
        records = self.pages.records
        return ColdPages(
            tuple((tag, records(some), self._ages(some, now)) for tag, some in groups.items()),
            max(coldest_age_s, self._lifetime_s(now) * LIFETIME_SHARE),
        )

    def withhold(self) -> None:
        """Never name what is here now: this node may have missed its removal."""
        self.after = self.pages.newest

    def given(self, drops: Records) -> list[Page]:
        """Return those of these pages that another node has now and nothing touched since."""
        keys, generations = drops["key"].tolist(), drops["generation"].tolist()
        return [
            page
            for page, generation in zip(map(self.pages.find, keys), generations, strict=True)
            if page is not None
            and page.generation == generation
            and page.slot.touched == page.named_touched
            and self.slots.is_cold(page.slot)
        ]

    def _named(
        self, lacking: int, coldest_age_s: float, givers: dict[Tenant, float], now: float
    ) -> list[Page]:
        """Name pages that are nearly as old as the coldest one, the youngest first."""
        looked = list(islice(self.slots.coldest_held(givers), SPILL_LOOK))
        newest = self.slots.ages.clock_at(now - coldest_age_s * SPILL_AGE)
        old = looked[: bisect_right(looked, newest, key=touch_of)]
        room, named = max(SPILL_BYTES // self.granule, 1), list[Page]()
        for slot in reversed(old):
            is_enough = lacking <= 0 and not named
            if is_enough or room <= 0 or len(named) >= SPILL_PAGES:
                break
            size_class = slot.extent.size_class
            granules, tenant = size_class.granules, size_class.tenant
            if givers[tenant] <= 0:
                continue
            lacking -= granules
            (page,) = self.pages.in_slots([slot])
            # What has a copy elsewhere is not lost with its place here.
            is_single = not page.slot.copy_at
            if is_single and page.generation > self.after and page.named_at + SPILL_AGAIN_S <= now:
                page.named_at, page.named_touched = now, slot.touched
                named.append(page)
                room -= granules
                givers[tenant] -= granules
        return named

    def _givers(self, now: float) -> dict[Tenant, float]:
        """Return the tenants whose pages are evicted for what clients store, and how much may go.

        A tenant within its quota loses no page to other tenants, only to its own clients.
        """
        tenants, givers = self.slots.tenants, dict[Tenant, float]()
        if not tenants.are_several:
            return {tenants.others: inf}
        for tenant in tenants.all():
            is_own_need = now - tenant.stored_at <= OWN_NEED_S
            if tenant.is_over or (is_own_need and not tenant.may_have(self.slots.unit)):
                givers[tenant] = inf if is_own_need else tenant.taken - tenant.quota
        return givers

    def _ages(self, pages: list[Page], now: float) -> npt.NDArray[np.float64]:
        ages = np.array([self.slots.ages.age(page.slot.touched, now) for page in pages])
        on_disk = np.array([page.slot.disk_length > 0 for page in pages])
        # What is on disk is not lost with its place in memory: nothing is evicted for it.
        return np.where(on_disk, -np.maximum(ages, 0.001), ages)
