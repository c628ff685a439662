"""Histograms of calls: as prometheus_client makes them, and what they say of the objectives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from peercache.client.client import series_of
from peercache.observability.latency import (
    LATENCY_BUCKETS_S,
    OBJECTIVES,
    OPERATIONS,
    PAGE_OF,
    PLACES,
    SERIES,
    Latency,
    added,
    counts_of,
    judged,
    observe_calls,
    packed,
    since,
)
from peercache.observability.metrics import Metrics

TIMES = [0.0, 0.00004, 0.0001, 0.00010001, 0.0002, 0.003, 0.005, 1.0, 2.5, 2.6, 100.0]


def test_a_call_has_the_series_of_its_tier_and_outcome() -> None:
    """A combination that no call has falls back to the operation alone."""
    assert SERIES[series_of("get", "tcp", 3, 3)] == ("get", "tcp", "all")
    assert SERIES[series_of("get", "tcp", 2, 3)] == ("get", "tcp", "some")
    assert SERIES[series_of("get", "", 0, 3)] == ("get", "", "none")
    assert SERIES[series_of("exists", "table", 0, 3)] == ("exists", "table", "none")
    assert SERIES[series_of("get", "pigeon", 3, 3)] == ("get", "", "")


def test_places_are_kept_for_clients_and_nodes_of_other_builds() -> None:
    """A report names a series by its place: the first are those of the builds without tiers."""
    assert [labels[0] for labels in SERIES[: len(OPERATIONS)]] == list(OPERATIONS)
    assert PLACES["get", "home", "all"] == 6
    assert PLACES["page", "disk", ""] == 33
    assert len(SERIES) <= 256


def test_the_histogram_is_that_of_prometheus() -> None:
    """The same times in ours and in the library's: the same buckets, count and sum."""
    registry, ours, theirs = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    latency = Latency("peercache_t_seconds", "T.", ("operation",), ours)
    library = Histogram(
        "peercache_t_seconds", "T.", ("operation",), buckets=LATENCY_BUCKETS_S, registry=theirs
    )
    for part in (TIMES[:4], TIMES[4:]):
        latency.observe(("get",), np.array(part))
    for time in TIMES:
        library.labels("get").observe(time)

    def samples(of: CollectorRegistry) -> dict[tuple[str, str], float]:
        return {
            (sample.name, sample.labels.get("le", "")): round(sample.value, 9)
            for family in text_string_to_metric_families(generate_latest(of).decode())
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert samples(ours) == samples(theirs)
    assert len(samples(ours)) == len(LATENCY_BUCKETS_S) + 3
    assert not samples(registry)


def test_a_time_of_exactly_a_bound_that_travelled_is_within_it() -> None:
    """Reports carry 32 bits, in which 0.0002 is a little more than 0.0002."""
    metrics = Metrics()

    observe_calls(metrics.latency_s, metrics.page_s, packed([(PLACES["get", "home", "all"], 2e-4)]))

    ((counts, _),) = metrics.latency_s.snapshot().values()
    assert counts[LATENCY_BUCKETS_S.index(0.0002)] == 1
    assert counts[LATENCY_BUCKETS_S.index(0.0001)] == 0


def test_a_page_has_a_time_of_its_own() -> None:
    """Of each tier, and only of gets that returned all of their pages."""
    metrics = Metrics()
    whole = PLACES["get", "tcp", "all"]

    ignored = observe_calls(
        metrics.latency_s, metrics.page_s, packed([(whole, 0.01), (PAGE_OF[whole], 0.0001)])
    )

    assert ignored == 0
    assert list(metrics.latency_s.snapshot()) == [("get", "tcp", "all")]
    assert list(metrics.page_s.snapshot()) == [("tcp",)]
    assert PLACES["get", "tcp", "some"] not in PAGE_OF


def exposition(fast: int, slow: int, *, tier: str = "home") -> str:
    """Return a scrape of a node with so many fast and slow pages out of memory."""
    metrics = Metrics()
    if fast + slow:
        metrics.page_s.observe((tier,), np.array([0.00015] * fast + [0.004] * slow))
    return generate_latest(metrics.registry).decode()


def reported(text: str, name: str = "memory"):  # noqa: ANN201 - Reported
    """Return what a scrape shows of one objective."""
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
    found = reported(exposition(fast, slow))

    assert (found.calls, found.is_met) == (1000, is_met)
    assert found.within == pytest.approx(fast / 1000)
    assert found.budget_left == pytest.approx(budget_left)


def test_quantiles_are_in_their_buckets() -> None:
    """By proportion within the bucket, as histogram_quantile."""
    found = reported(exposition(90, 10))

    assert found.quantiles["p50_s"] == pytest.approx(0.0001 + 0.0001 * 50 / 90)
    assert found.quantiles["p90_s"] == pytest.approx(0.0002)
    assert 0.0025 < found.quantiles["p99_s"] <= 0.005


def test_without_calls_nothing_is_missed() -> None:
    """A node that has just started."""
    found = reported(exposition(0, 0))

    assert (found.calls, found.is_met, found.budget_left) == (0, True, 1.0)
    assert math.isnan(found.within)


def test_only_the_tiers_of_an_objective_count() -> None:
    """A page over a network is no page of this host's memory, nor of its disk."""
    text = exposition(0, 100, tier="tcp")

    assert [each.calls for each in judged(counts_of(text))] == [0] * len(OBJECTIVES)
    assert reported(exposition(0, 100, tier="disk"), "disk").calls == 100


def test_nodes_add_up_and_restarts_count_from_zero() -> None:
    """Between two reads: the increase; of a node that has restarted, all that it has."""
    before, after = counts_of(exposition(100, 0)), counts_of(exposition(100, 50))
    restarted = counts_of(exposition(10, 0))

    between = added([since(before, after), since(before, restarted)])

    memory = next(each for each in judged(between) if each.objective.name == "memory")
    assert (memory.calls, memory.within) == (60, pytest.approx(1 / 6))
