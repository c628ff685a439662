"""The duration of batch calls: which calls are distinguished, and the histograms of their times.

A client records a call as a number and its seconds, which costs a tenth of a microsecond. Once a
second these are added to histograms: by the home node from a client's report, and by a client that
has its node in its own process.

Objectives: how fast which share of calls must be, and how the histograms compare with that. A node
shows its limits, which are settings, as `peercache_objective_seconds`: `peercache slo`, the alert
rules and the board read those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from threading import Lock
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from peercache.model.status import Latencies

LATENCY_BUCKETS_S: Final = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
    2.5,
)  # fmt: skip
"""Upper bounds. The limit of each objective is one of them."""

OPERATIONS: Final = ("get", "set", "exists", "remove", "clear", "stats")
"""The batch calls of a client; the values of the label `operation`."""

# Where pages were read, nearest first: the values of the label `tier` of a get. A call that read
# from several places has the farthest one.
HOME: Final = "home"  # the memory of the home node
HOST: Final = "host"  # the memory of another node of this host
RDMA: Final = "rdma"
TCP: Final = "tcp"
DISK: Final = "disk"  # a holder had to load pages from its disk first
READ_TIERS: Final = (HOME, HOST, RDMA, TCP, DISK)

# Where an exists was answered.
KNOWN: Final = "known"  # from the client's cache
TABLE: Final = "table"  # by the directory tables of this host
ASKED: Final = "asked"  # an owner was asked
EXISTS_TIERS: Final = (KNOWN, TABLE, ASKED)

ALL: Final = "all"
SOME: Final = "some"
NONE: Final = "none"
OUTCOMES: Final = (ALL, SOME, NONE)
"""Whether all, some or none of a call's pages were served; the values of the label `outcome`."""

Labels = tuple[str, str, str]
"""operation, tier, outcome; "" if a call has none."""

PAGE: Final = "page"
"""In place of an operation: the time per page of a get that returned all its pages."""

SERIES: Final[tuple[Labels, ...]] = (
    *((operation, "", "") for operation in OPERATIONS),
    *product(("get",), READ_TIERS, (ALL, SOME)),
    ("get", "", NONE),
    *product(("set",), (HOME,), OUTCOMES),
    *product(("exists",), EXISTS_TIERS, OUTCOMES),
    *((PAGE, tier, "") for tier in READ_TIERS),
)
"""The distinguished series. A report names a series by its index here: new ones are appended."""

PLACES: Final = {labels: place for place, labels in enumerate(SERIES)}

PAGE_OF: Final = {PLACES["get", tier, ALL]: PLACES[PAGE, tier, ""] for tier in READ_TIERS}
"""The series of the time per page, by that of a get that returned all its pages."""

SECONDS_MAX: Final = 1e6
"""The longest call, twelve days: far beyond any deadline, and sums stay finite."""

CALL: Final = np.dtype([("series", "u1"), ("seconds", "<f4")])
"""One time: its index in SERIES, and how long the call took."""

Calls = npt.NDArray[np.void]
"""Times, (n,) CALL."""


def packed(calls: Sequence[tuple[int, float]]) -> Calls:
    """Return times in the form of a report."""
    times: Calls = np.array(list(calls), CALL)
    return times


@final
class Latency:
    """A histogram by label values, filled by whole batches of times. Thread-safe.

    The histogram of prometheus_client accepts one time per call, at two microseconds each, and
    shows its buckets only to a scrape.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        """Register `name` with these labels."""
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._lock = Lock()
        self._counts: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, values: tuple[str, ...], seconds: npt.NDArray[np.floating]) -> None:
        """Add times, (n,), under these label values."""
        # A time equal to a bound belongs below it, as everywhere in Prometheus; as float32 it would
        # differ from the bound.
        bounds = np.asarray(LATENCY_BUCKETS_S, seconds.dtype)
        places = np.searchsorted(bounds, seconds, side="left")
        counts = np.bincount(places, minlength=len(bounds) + 1)
        with self._lock:
            if values in self._counts:
                self._counts[values] += counts
            else:
                self._counts[values] = counts
            self._sums[values] = self._sums.get(values, 0.0) + float(seconds.sum())

    def snapshot(self) -> dict[tuple[str, ...], tuple[list[int], float]]:
        """Return cumulative counts (one for each bound, and all) and the sum, by label values."""
        with self._lock:
            return {
                values: (np.cumsum(counts).tolist(), self._sums[values])
                for values, counts in sorted(self._counts.items())
            }

    def describe(self) -> Iterator[Metric]:
        """Yield the family without samples."""
        yield HistogramMetricFamily(self.name, self.text, labels=self.labels)

    def collect(self) -> Iterator[Metric]:
        """Yield the family, for a scrape."""
        bounds = [*(str(bound) for bound in LATENCY_BUCKETS_S), "+Inf"]
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for values, (counts, total) in self.snapshot().items():
            family.add_metric(values, list(zip(bounds, counts, strict=True)), total)
        yield family


def observe_calls(calls: Latency, pages: Latency, times: Calls) -> int:
    """Add times to the histograms of calls and of pages; return how many are invalid."""
    seconds = times["seconds"]
    known = (times["series"] < len(SERIES)) & (seconds >= 0) & (seconds <= SECONDS_MAX)
    kept = times[known]
    for place in np.unique(kept["series"]).tolist():
        seconds = kept["seconds"][kept["series"] == place]
        operation, tier, outcome = SERIES[place]
        if operation == PAGE:
            pages.observe((tier,), seconds)
        else:
            calls.observe((operation, tier, outcome), seconds)
    return len(times) - len(kept)


QUANTILES: Final = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}


@attrs.frozen
class Objective:
    """A share of calls that must take at most a given time.

    meaning:  what is measured, for operators.
    metric:   the histogram, without suffix.
    labels:   by label, the values that count.
    within_s: the limit, one of the histogram's bounds; that of a node is its setting
              `objective_NAME_s`.
    share:    the share of all calls, 0 to 1.
    """

    name: str
    meaning: str
    metric: str
    labels: Mapping[str, tuple[str, ...]]
    within_s: float
    share: float


OBJECTIVES: Final = (
    Objective(
        "exists",
        "an exists that this host answers itself",
        "peercache_latency_seconds",
        {"operation": ("exists",), "tier": (KNOWN, TABLE)},
        0.001,
        0.99,
    ),
    Objective(
        "memory",
        "a page out of this host's memory",
        "peercache_page_seconds",
        {"tier": (HOME, HOST)},
        0.0005,
        0.99,
    ),
    Objective(
        "disk",
        "a page out of a disk",
        "peercache_page_seconds",
        {"tier": (DISK,)},
        0.01,
        0.99,
    ),
)


@attrs.frozen
class ObjectiveResult:
    """How histograms compare with an objective.

    calls:       how many were counted.
    within:      the share that was fast enough; NaN without calls.
    budget_left: the remaining share of the slow calls that the objective allows: 1 without slow
                 calls, 0 if all are used up, below 0 if the objective is missed.
    quantiles:   seconds by name of QUANTILES, within a bucket by proportion; NaN without calls.
    """

    objective: Objective
    calls: int
    within: float
    budget_left: float
    quantiles: Mapping[str, float]

    @property
    def is_met(self) -> bool:
        """Whether the objective is met; it is if there was no call."""
        return not self.calls or self.within >= self.objective.share


OBJECTIVE_METRIC: Final = "peercache_objective_seconds"
"""The gauge with a node's limits. Its label `le` is that of the histogram's bucket, so that a rule
finds the bucket."""


def bound_for(seconds: float) -> float:
    """Return the limit that the histograms can judge: the first bound that is not below."""
    return next((bound for bound in LATENCY_BUCKETS_S if bound >= seconds), LATENCY_BUCKETS_S[-1])


def limits_of(exposition: str) -> dict[str, float]:
    """Return the limits in an answer of `/metrics`, by objective."""
    return {
        sample.labels["objective"]: float(sample.labels["le"])
        for family in text_string_to_metric_families(exposition)
        if family.name == OBJECTIVE_METRIC
        for sample in family.samples
    }


Counts = dict[str, dict[float, float]]
"""By name of the objective: cumulative counts by upper bound."""


def times_of(histograms: Iterable[Latency]) -> dict[str, Latencies]:
    """Return by objective the times that count for it, from this process's histograms."""
    found = {}
    for objective in OBJECTIVES:
        (histogram,) = (each for each in histograms if each.name == objective.metric)
        total = [0] * (len(LATENCY_BUCKETS_S) + 1)
        seconds = 0.0
        for values, (counts, spent) in histogram.snapshot().items():
            labels = dict(zip(histogram.labels, values, strict=True))
            if all(labels[name] in allowed for name, allowed in objective.labels.items()):
                total = [sum(both) for both in zip(total, counts, strict=True)]
                seconds += spent
        found[objective.name] = Latencies(
            bounds=LATENCY_BUCKETS_S, counts=tuple(total), seconds=seconds
        )
    return found


def counts_in(times: Mapping[str, Latencies]) -> Counts:
    """Return the counts of all objectives in a node's status."""
    found: Counts = {objective.name: {} for objective in OBJECTIVES}
    for name in found.keys() & times.keys():
        bounds = (*times[name].bounds, math.inf)
        if len(bounds) == len(times[name].counts):
            found[name] = dict(zip(bounds, map(float, times[name].counts), strict=True))
    return found


def counts_of(exposition: str) -> Counts:
    """Return the counts of all objectives in an answer of `/metrics`."""
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
    """Return the counts of one node in between; all of them if the node has restarted."""
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


def judged(counts: Counts, limits: Mapping[str, float] | None = None) -> list[ObjectiveResult]:
    """Return the result for each objective. limits: those that are not the default."""
    given = limits or {}
    return [
        _judged(attrs.evolve(each, within_s=given.get(each.name, each.within_s)), counts[each.name])
        for each in OBJECTIVES
    ]


def _judged(objective: Objective, counts: Mapping[float, float]) -> ObjectiveResult:
    bounds = sorted(counts)
    calls = counts[math.inf] if counts else 0.0
    if not calls:
        nothing = dict.fromkeys(QUANTILES, math.nan)
        return ObjectiveResult(objective, 0, math.nan, 1.0, nothing)
    within = counts[objective.within_s] / calls
    budget_left = 1 - (1 - within) / (1 - objective.share)
    counted = tuple(round(counts[bound]) for bound in bounds)
    times = Latencies(bounds=tuple(bounds[:-1]), counts=counted)
    quantiles = {name: times.quantile(part) for name, part in QUANTILES.items()}
    return ObjectiveResult(objective, round(calls), within, budget_left, quantiles)
