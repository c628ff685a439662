"""The objectives: how fast calls shall be, what share of them, and what histograms say of that.

`peercache slo`, the alert rules and the board read this one table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
from prometheus_client.parser import text_string_to_metric_families

from peercache.observability.latency import DISK, HOME, HOST, KNOWN, TABLE

QUANTILES: Final = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}


@attrs.frozen
class Objective:
    """A share of calls that shall take at most so long.

    meaning:  one line for a person.
    metric:   the histogram, without suffix.
    labels:   by label, the values that count.
    within_s: one of the histogram's bounds.
    share:    of all calls, 0 to 1.
    """

    name: str
    meaning: str
    metric: str
    labels: Mapping[str, tuple[str, ...]]
    within_s: float
    share: float

    def selector(self, suffix: str, **more: str) -> str:
        """Return the PromQL selector of a series of the histogram."""
        chosen = [f'{name}=~"{"|".join(values)}"' for name, values in self.labels.items()]
        chosen += [f'{name}="{value}"' for name, value in more.items()]
        return f"{self.metric}_{suffix}{{{','.join(chosen)}}}"


OBJECTIVES: Final = (
    Objective(
        "exists",
        "an exists that this host answers itself takes at most 100 µs",
        "peercache_latency_seconds",
        {"operation": ("exists",), "tier": (KNOWN, TABLE)},
        0.0001,
        0.99,
    ),
    Objective(
        "memory",
        "a page out of this host's memory takes at most 200 µs",
        "peercache_page_seconds",
        {"tier": (HOME, HOST)},
        0.0002,
        0.99,
    ),
    Objective(
        "disk",
        "a page out of a disk takes at most 5 ms",
        "peercache_page_seconds",
        {"tier": (DISK,)},
        0.005,
        0.99,
    ),
)


@attrs.frozen
class Told:
    """What histograms say of an objective.

    calls:       how many were counted.
    within:      the share that was fast enough; NaN without calls.
    budget_left: of the slow calls that the objective allows, the share that is left: 1 with none,
                 0 where all are used up, below 0 where the objective is missed.
    quantiles:   seconds by name of QUANTILES, within a bucket by proportion; NaN without calls.
    """

    objective: Objective
    calls: int
    within: float
    budget_left: float
    quantiles: Mapping[str, float]

    @property
    def is_met(self) -> bool:
        """Whether the objective is kept; it is where there was no call."""
        return not self.calls or self.within >= self.objective.share


Counts = dict[str, dict[float, float]]
"""By name of the objective: cumulative counts by upper bound."""


def counts_of(exposition: str) -> Counts:
    """Return the counts of all objectives in what `/metrics` answered."""
    counts: Counts = {objective.name: {} for objective in OBJECTIVES}
    for family in text_string_to_metric_families(exposition):
        for objective in OBJECTIVES:
            if family.name != objective.metric:
                continue
            into = counts[objective.name]
            for sample in family.samples:
                if sample.name.endswith("_bucket") and all(
                    sample.labels.get(label) in values for label, values in objective.labels.items()
                ):
                    bound = float(sample.labels["le"])
                    into[bound] = into.get(bound, 0.0) + sample.value
    return counts


def added(parts: Iterable[Counts]) -> Counts:
    """Return the counts of several nodes together."""
    total: Counts = {objective.name: {} for objective in OBJECTIVES}
    for part in parts:
        for name, counts in part.items():
            for bound, count in counts.items():
                total[name][bound] = total[name].get(bound, 0.0) + count
    return total


def since(before: Counts, after: Counts) -> Counts:
    """Return what was counted in between by one node; all of it where the node has restarted."""
    has_restarted = any(
        count < before.get(name, {}).get(bound, 0.0)
        for name, counts in after.items()
        for bound, count in counts.items()
    )
    return {
        name: {
            bound: count - (0.0 if has_restarted else before.get(name, {}).get(bound, 0.0))
            for bound, count in counts.items()
        }
        for name, counts in after.items()
    }


def judged(counts: Counts) -> list[Told]:
    """Return what the counts say of each objective."""
    return [_judged(objective, counts[objective.name]) for objective in OBJECTIVES]


def _judged(objective: Objective, counts: Mapping[float, float]) -> Told:
    bounds = sorted(counts)
    calls = counts[math.inf] if counts else 0.0
    if not calls:
        nothing = dict.fromkeys(QUANTILES, math.nan)
        return Told(objective, 0, math.nan, 1.0, nothing)
    within = counts[objective.within_s] / calls
    budget_left = 1 - (1 - within) / (1 - objective.share)
    cumulative = [counts[bound] for bound in bounds]
    quantiles = {name: _quantile(part, bounds, cumulative) for name, part in QUANTILES.items()}
    return Told(objective, round(calls), within, budget_left, quantiles)


def _quantile(part: float, bounds: Sequence[float], cumulative: Sequence[float]) -> float:
    """Return a quantile as PromQL's histogram_quantile does: never above the last finite bound."""
    rank = part * cumulative[-1]
    place = next(place for place, count in enumerate(cumulative) if count >= rank)
    if math.isinf(bounds[place]):
        return bounds[place - 1]
    below, under = (0.0, 0.0) if place == 0 else (bounds[place - 1], cumulative[place - 1])
    in_bucket = cumulative[place] - under
    return below + (bounds[place] - below) * ((rank - under) / in_bucket if in_bucket else 1.0)
