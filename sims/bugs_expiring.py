"""The planted bugs of times to live: pages that stay beyond their time, or go in use.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from peercache.actors.disk.expiry import DiskExpiry
from peercache.actors.pool.size_classes import SizeClass
from sims.canary import Canary
from sims.expiring import expire


def _none(_: Any) -> Any:
    def expired(self: Any, upto: int, most: int) -> list[Any]:
        del self, upto, most
        return []

    return expired


def _counts_as_used(right: Any) -> Any:
    def take(self: Any, answer: Any, now: float) -> Any:
        return right(self, attrs.evolve(answer, ages=np.zeros_like(answer.ages)), now)

    return take


def _without_the_pool(right: Any) -> Any:
    def take(self: Any, answer: Any, now: float) -> Any:
        return right(self, attrs.evolve(answer, ages=np.full_like(answer.ages, np.inf)), now)

    return take


CANARIES: tuple[Canary, ...] = (
    Canary(
        "never-expires",
        "a page that nothing uses stays in memory beyond its time to live",
        5,
        patches=((SizeClass, "expired", _none),),
        story=expire,
    ),
    Canary(
        "never-expires-on-disk",
        "a page on disk that nothing uses counts as used when its time is over",
        5,
        patches=((DiskExpiry, "take", _counts_as_used),),
        story=expire,
    ),
    Canary(
        "expires-in-use",
        "a page that is read in memory expires on disk, as the disk does not ask the pool",
        5,
        patches=((DiskExpiry, "take", _without_the_pool),),
        story=expire,
    ),
)
