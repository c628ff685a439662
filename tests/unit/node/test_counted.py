"""What a status tells of the metrics of its node."""

from __future__ import annotations

import numpy as np

from peercache.node.status import _counted
from peercache.observability.metrics import Metrics


def test_calls_of_all_tiers_are_one_histogram_of_their_operation() -> None:
    """Buckets that stood one set behind the other would have no quantile."""
    metrics = Metrics()
    metrics.latency_s.observe(("get", "home", "all"), np.array([0.00015, 0.003]))
    metrics.latency_s.observe(("get", "tcp", "some"), np.array([0.003]))
    metrics.latency_s.observe(("set", "home", "all"), np.array([0.02]))

    _, latency = _counted(metrics)

    assert set(latency) == {"get", "set"}
    get = latency["get"]
    assert len(get.counts) == len(get.bounds) + 1
    assert get.counts[-1] == 3
    assert round(get.seconds, 6) == 0.00615
    assert 0.0025 < get.quantile(0.99) <= 0.005
