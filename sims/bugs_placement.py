"""The planted bugs of spilled pages: they are lost, or stay where they must not.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from peercache.actors.effects import Send
from peercache.actors.placement import takings
from peercache.actors.placement.takings import Takings
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.reservations import FromOther
from peercache.wire.messages.membership import PagesTaken
from peercache.wire.messages.pool import ABORTED, COMMITTED, RESERVED
from sims.canary import Canary
from sims.spilling import spill, spill_while

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _under_their_tag(_: Any) -> Any:
    def reserve(self: Any, origin: Any, reserve: Any, now: float, limits: Any = ()) -> Any:
        return self._reserve(origin, reserve, FromOther(now, limits))

    return reserve


def _whole(_: Any) -> Any:
    def space_of(namespace: int) -> int:
        return namespace

    return space_of


def _answered_at_once(right: Any) -> Any:
    def pulled(self: Any, done: Any) -> Any:
        taking = self.begun[done.job]
        states = np.frombuffer(taking.states, np.uint8).copy()
        arrived = np.frombuffer(done.arrived, np.uint8) == 1
        states[states == RESERVED] = np.where(arrived, COMMITTED, ABORTED)
        return [
            *right(self, done),
            Send(taking.origin, PagesTaken(taking.number, states.tobytes())),
        ]

    return pulled


def _owners_or_not(_: Any) -> Any:
    def kept(taking: Any, committed: Any) -> Any:
        del taking
        return committed.states

    return kept


def _whatever_was_answered(right: Any) -> Any:
    def give(self: Any, drops: Any) -> Any:
        for page in self.pages.of_keys(drops["key"].tolist()):
            page.named_touched = page.slot.touched
        return right(self, drops)

    return give


CANARIES: tuple[Canary, ...] = (
    Canary(
        "spilled-though-revoked",
        "a page that another node has spilled stays when the certificate of that node is revoked",
        20,
        patches=(
            (Pool, "_reserve_copies", _under_their_tag),
            (takings, "space_of", _whole),
        ),
        story=partial(spill_while, "revoke"),
    ),
    Canary(
        "spilled-before-published",
        "a taker answers as soon as it has read a page, so it is evicted before it can be found",
        20,
        patches=((Takings, "pulled", _answered_at_once),),
        story=spill,
    ),
    Canary(
        "spilled-though-unknown",
        "a taker answers that it has a page although owners have not acknowledged its record",
        20,
        patches=((takings, "_kept", _owners_or_not),),
        story=partial(spill_while, "cut-taker"),
    ),
    Canary(
        "spilled-by-both",
        "two holders that offer each other the same page both evict it",
        20,
        patches=((Pool, "_give", _whatever_was_answered),),
        story=partial(spill_while, "mutual"),
    ),
)
