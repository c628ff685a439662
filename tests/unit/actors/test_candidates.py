"""Candidates: a member that speaks for itself does not wait for what was at its address before."""

from __future__ import annotations

import random

from peercache.actors.membership.candidates import ANSWER_S, Candidates


def test_one_that_speaks_for_itself_is_tried_after_a_second() -> None:
    """Another process was there and failed three times: gossip waits longer than its successor."""
    candidates, now = Candidates(rng=random.Random(1)), 0.0
    for _ in range(3):
        candidates.name("a:1", 7, now)
        assert candidates.due(now) == ["a:1"]
        now += ANSWER_S
        candidates.due(now)
        now += 4.0
    failed_at = now - 4.0

    candidates.name("a:1", 7, failed_at + 1.1)
    assert candidates.due(failed_at + 1.1) == []
    candidates.name("a:1", 7, failed_at + 1.1, is_own=True)
    assert candidates.due(failed_at + 1.1) == ["a:1"]
