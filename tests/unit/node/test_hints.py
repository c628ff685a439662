"""Hints that a node takes over HTTP: one outcome for each page, in time, even without answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import trio
import trio.testing

from peercache.actors.origin import Origin
from peercache.model.keys import Namespace, PageKeys, page_keys
from peercache.model.prefix import Overlap
from peercache.model.records import ON_DISK, RESIDENT
from peercache.node.hints import PART_KEYS, NodeHints
from peercache.observability.metrics import Metrics, totals_of
from peercache.wire.messages.pool import (
    LATER,
    LOST,
    NOT_HERE,
    OVER_QUOTA,
    PROMOTED,
    RETAINED,
    Demote,
    Promote,
    Promoted,
    Retain,
    Retained,
)

ME, OTHER = 7, 8


class Rig:
    """The actors of a node, which answer at once or never."""

    def __init__(self, flags: Any = None, *, whole: bool = True, answers: bool = True) -> None:
        """Flags: of this node and another one, for each page."""
        self.flags = flags
        self.whole = whole
        self.answers = answers
        self.asked: list[Any] = []
        self.metrics = Metrics()
        self.hints = NodeHints(self.put, self.overlap, ME, self.metrics)

    def put(self, sender: Origin, question: Any) -> None:
        self.asked.append(question)
        count = len(question.keys) // 16
        if not self.answers:
            return
        if isinstance(question, Promote):
            states = bytes([PROMOTED, LATER, LOST])[:count]
            self.hints.take(Promoted(question.request, states, b""))
        else:
            states = bytes([RETAINED, OVER_QUOTA, NOT_HERE] + [RETAINED] * count)[:count]
            self.hints.take(Retained(question.request + 1000, states))
            self.hints.take(Retained(question.request, states))

    async def overlap(self, keys: PageKeys) -> Overlap:
        return Overlap((ME, OTHER), np.array(self.flags, np.uint8), self.whole)

    def hint(self, kind: str, count: int, seconds: float = 0.0) -> dict[str, int]:
        keys = page_keys([f"page-{number}" for number in range(count)], Namespace("team").digest())

        async def run() -> Any:
            return await self.hints.hint(kind, keys, 5, seconds)

        return dict(trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0)))


def test_pages_are_retained_and_demoted_by_the_removal_actor() -> None:
    rig = Rig()
    count = PART_KEYS + 3

    assert rig.hint("retain", count, 1e300) == {"done": count - 4, "refused": 2, "missing": 2}
    assert rig.hint("demote", 3) == {"done": 1, "refused": 1, "missing": 1}

    assert [type(question) for question in rig.asked] == [Retain, Retain, Demote]
    assert rig.asked[0].seconds == 30 * 86400
    assert rig.asked[0].namespace == rig.asked[2].namespace == 5
    shown = totals_of(rig.metrics.hint_pages)
    assert (shown["demote/done"], shown["retain/refused"]) == (1, 2)


def test_a_prefetch_loads_from_the_own_disk_and_nothing_else() -> None:
    here = [RESIDENT, ON_DISK, ON_DISK, ON_DISK, 0, 0]
    rig = Rig([here, [0, 0, 0, 0, RESIDENT, 0]])

    assert rig.hint("prefetch", 6) == {
        "already": 1, "done": 1, "unanswered": 1, "missing": 2, "refused": 1,
    }  # fmt: skip
    assert len(rig.asked[0].keys) == 3 * 16
    rig.whole = False
    assert rig.hint("prefetch", 6) == {
        "already": 1, "done": 1, "unanswered": 2, "missing": 1, "refused": 1,
    }  # fmt: skip
    assert rig.asked[1].keys == rig.asked[0].keys


def test_shared_pages_are_those_with_a_holder() -> None:
    rig = Rig([[RESIDENT, 0, 0], [0, ON_DISK, 0]])

    assert rig.hint("share", 3) == {"already": 2, "missing": 1}
    rig.whole = False
    assert rig.hint("share", 3) == {"already": 2, "unanswered": 1}
    assert Rig([[], []]).hint("share", 0) == {}


def test_an_actor_that_does_not_answer_leaves_pages_unanswered() -> None:
    """Within the time of a hint; a late answer changes nothing."""
    rig = Rig([[ON_DISK, RESIDENT], [0, 0]], answers=False)

    assert rig.hint("demote", 2) == {"unanswered": 2}
    assert rig.hint("prefetch", 2) == {"already": 1, "unanswered": 1}
    rig.hints.take(Retained(1, b"\2\2"))
