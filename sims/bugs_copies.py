"""The planted bugs of second copies: a node relies on one that is gone, or a removed page returns.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from peercache.actors.placement.offers import Offers
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.copies import REPORT_S, Copies
from peercache.model.member import DEAD
from sims import bugs_handover
from sims.canary import Canary
from sims.copying import copy, copy_while
from sims.parting import part
from sims.racing import race_copies
from sims.swarm import with_late_ticks


def _nothing(_: Any) -> Any:
    def ignored(*_args: Any, **_kwargs: Any) -> Any:
        return None

    return ignored


def _without_a_look_at_numbers(right: Any) -> Any:
    def lost(self: Any, node: int, report: Any, now: float) -> None:
        right(self, node, report, now)
        self._doubted.clear()

    return lost


def _without_the_dead(right: Any) -> Any:
    def note(self: Any, others: Any) -> None:
        right(self, others)
        for member in others:
            if member.state == DEAD:
                self._away.pop(member.incarnation, None)

    return note


def _from_the_last_step(right: Any) -> Any:
    def on_tick(self: Any, now: float) -> Any:
        before = self._slots.now
        effects = right(self, now)
        if self._copies._report_at == now + REPORT_S:
            self._copies._report_at = before + REPORT_S
        return effects

    return on_tick


CANARIES: tuple[Canary, ...] = (
    Canary(
        "copies-of-the-dead",
        "a node relies on copies at a node that is dead",
        20,
        patches=((Copies, "changed", _nothing),),
        story=partial(copy_while, "kill"),
    ),
    Canary(
        "copies-never-reported",
        "a node does not report the copies that it evicts",
        20,
        patches=((Copies, "_report", _nothing),),
        story=copy,
    ),
    Canary(
        "copies-reported-once",
        "a node that misses a report of evicted copies does not notice it",
        20,
        patches=((Copies, "lost", _without_a_look_at_numbers),),
        story=partial(copy_while, "lossy"),
    ),
    Canary(
        "copied-though-removed",
        "a page that is removed while another node reads it as a second copy comes back there",
        20,
        patches=bugs_handover.THOUGH_REMOVED,
        story=race_copies,
    ),
    Canary(
        "suspicion-forgotten",
        "a node forgets that a member was suspect as soon as it holds the member dead",
        5,
        patches=((Offers, "_note_returns", _without_the_dead),),
        story=part,
    ),
    Canary(
        "counts-from-the-last-message",
        "what a tick evicts is reported some time after the message before, not after the tick",
        10,
        patches=((Pool, "on_tick", _from_the_last_step),),
        change=with_late_ticks,
    ),
)
