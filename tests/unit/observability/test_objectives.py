"""What histograms say of the objectives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client import generate_latest

from peercache.observability.metrics import Metrics
from peercache.observability.objectives import OBJECTIVES, added, counts_of, judged, since


def exposition(fast: int, slow: int, *, tier: str = "home") -> str:
    """Return a scrape of a node with so many fast and slow pages out of memory."""
    metrics = Metrics()
    if fast + slow:
        metrics.page_s.observe((tier,), np.array([0.00015] * fast + [0.004] * slow))
    return generate_latest(metrics.registry).decode()


def told(text: str, name: str = "memory"):  # noqa: ANN201 - Told
    """Return what a scrape says of one objective."""
    return next(each for each in judged(counts_of(text)) if each.objective.name == name)


@pytest.mark.parametrize(
    ("fast", "slow", "is_met", "budget_left"),
    [(1000, 0, True, 1.0), (995, 5, True, 0.5), (990, 10, True, 0.0), (980, 20, False, -1.0)],
)
def test_share_and_budget_follow_from_the_buckets(
    fast: int,
    slow: int,
    is_met: bool,
    budget_left: float,
) -> None:
    """An objective of 99 % allows ten slow calls in a thousand."""
    found = told(exposition(fast, slow))

    assert (found.calls, found.is_met) == (1000, is_met)
    assert found.within == pytest.approx(fast / 1000)
    assert found.budget_left == pytest.approx(budget_left)


def test_quantiles_lie_in_their_buckets() -> None:
    """By proportion within the bucket, as histogram_quantile."""
    found = told(exposition(90, 10))

    assert found.quantiles["p50_s"] == pytest.approx(0.0001 + 0.0001 * 50 / 90)
    assert found.quantiles["p90_s"] == pytest.approx(0.0002)
    assert 0.0025 < found.quantiles["p99_s"] <= 0.005


def test_without_calls_nothing_is_missed() -> None:
    """A node that has just started."""
    found = told(exposition(0, 0))

    assert (found.calls, found.is_met, found.budget_left) == (0, True, 1.0)
    assert math.isnan(found.within)


def test_only_the_tiers_of_an_objective_count() -> None:
    """A page over a network is no page of this host's memory, nor of its disk."""
    text = exposition(0, 100, tier="tcp")

    assert [each.calls for each in judged(counts_of(text))] == [0] * len(OBJECTIVES)
    assert told(exposition(0, 100, tier="disk"), "disk").calls == 100


def test_nodes_add_up_and_restarts_count_from_zero() -> None:
    """Between two reads: the increase; of a node that has restarted, all that it has."""
    before, after = counts_of(exposition(100, 0)), counts_of(exposition(100, 50))
    restarted = counts_of(exposition(10, 0))

    between = added([since(before, after), since(before, restarted)])

    memory = next(each for each in judged(between) if each.objective.name == "memory")
    assert (memory.calls, memory.within) == (60, pytest.approx(1 / 6))
