"""Pages of two pools in one workload: a reported prefix is readable, or a counted miss."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

from peercache.model.prefix import SidePages
from sims.play import Outcome, play
from sims.swarm import Options, smaller

SEEDS = range(5_000_000, 5_000_004)


def two_pools(options: Options) -> Options:
    return attrs.evolve(smaller(options), pools=2)


def outcome(seed: int) -> Outcome:
    return play(seed, change=two_pools)


@pytest.mark.slow
def test_a_reported_prefix_is_read_or_counted_under_every_fault() -> None:
    """Crashes, loss, evictions: what was reported and is not read has a reason each."""
    counts: Counter[str] = Counter()

    for seed in SEEDS:
        run = outcome(seed)
        assert run.ok, f"seed {seed}: {run.checker}: {run.detail}"
        counts.update(run.counts)

    assert counts["prefix:reported"] > 100
    assert 0 < counts["prefix:short"] < counts["prefix:reported"] / 2


def test_a_prefix_that_forgets_its_side_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: a pool that gates nothing lets KV pages vouch for it."""
    monkeypatch.setattr(SidePages, "gates", False)

    found = next((run for run in map(outcome, SEEDS) if not run.ok), None)

    assert found is not None
    assert found.checker == "prefix-not-whole"
