"""Placement: a page leaves its holder for a spill only if it has another home by then."""

from __future__ import annotations

import math
from typing import final

import attrs
import numpy as np
import trio

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import PagesGiven
from peercache.actors.pool.actor import Pool
from peercache.model.records import DROP, keys_of
from peercache.wire.messages.membership import OfferSpill
from sims.memory import Truth
from sims.removals import Stay
from sims.trace import Violation


def note_offers(incarnation: int, effects: list[Effect], truth: Truth) -> None:
    """Record when a node offers pages that it evicts next."""
    if any(isinstance(e, Send) and isinstance(e.message, OfferSpill) for e in effects):
        truth.offered_at[incarnation] = trio.current_time()


@final
@attrs.frozen(eq=False)
class Given:
    """The pages that other nodes have taken, before their holder evicts them."""

    keys: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, pool: Pool, message: object) -> Given:
        """Record the pages that this message names and that are here."""
        if not isinstance(message, PagesGiven):
            return cls()
        keys = keys_of(np.asarray(message.drops, DROP))
        return cls(tuple(key for key in keys if pool.pages.find(key) is not None))

    def judge(self, pool: Pool, truth: Truth) -> None:
        """Fail if a page was evicted that no other node holds and publishes, or has held since.

        Another one that has evicted it because this node holds it does not count.
        """
        own = pool.pages._incarnation
        for key in self.keys:
            if pool.pages.find(key) is not None:
                continue
            stays = truth.stays.get(key, [])
            (mine,) = (s for s in stays if s.incarnation == own and s.until == math.inf)
            mine.is_given = True
            truth.spilled += 1
            others = [s for s in stays if s.incarnation != own and s.version == mine.version]
            if not any(_counts(stay, key, own, truth) for stay in others):
                detail = f"version {mine.version} of {key.hex()} left {own:016x}"
                raise Violation("spilled-lost", f"{detail}, and no other node has it")


def _counts(stay: Stay, key: bytes, giver: int, truth: Truth) -> bool:
    """Return whether a stay at another node is a home, or was one until a fault or a removal."""
    if stay.until < math.inf:
        return not stay.is_given and stay.until >= truth.offered_at[giver]
    if stay.incarnation not in truth.living:
        return True
    return stay.incarnation in truth.known.get(key, {})
