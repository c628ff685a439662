"""What a client counts reaches its home node's metrics, once, and nothing else does."""

from __future__ import annotations

import numpy as np
from prometheus_client import Metric

from peercache.client.bridge import NOT_OPENED
from peercache.memory.table_reading import REASONS
from peercache.observability.latency import CALL, PLACES
from peercache.observability.metrics import CALLS_MAX, PEERS_MAX, ClientReport, Metrics, absorb
from peercache.observability.reasons import TABLE_FAILURES
from peercache.wire.messages.session import Counted


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """Return one sample."""
    return metrics.registry.get_sample_value(f"peercache_{name}", labels) or 0.0


def test_a_report_carries_each_increase_once() -> None:
    """Two reports add up to the client's figures, labels and latencies included."""
    client, node = Metrics(), Metrics()
    report = ClientReport(client)
    client.pages_hit.labels("tcp").inc(3)
    report.calls.append((PLACES["get", "tcp", "all"], 0.5))
    first = report.take()
    client.pages_hit.labels("tcp").inc(4)
    client.exists_asked.inc(2)
    second = report.take()

    assert first is not None
    assert second is not None
    assert absorb(node, first) == absorb(node, second) == 0

    assert value(node, "pages_hit_total", fabric="tcp") == 7
    assert value(node, "exists_asked_total") == 2
    labels = {"operation": "get", "tier": "tcp", "outcome": "all"}
    assert value(node, "latency_seconds_count", **labels) == 1
    assert value(node, "latency_seconds_sum", **labels) == 0.5
    assert report.take() is None


def test_a_report_names_by_what_each_peer_is_read_once() -> None:
    """What has changed only; all of it to a home node that has started again; no metric of it."""
    used = {"aa": "shm", "bb": "tcp"}
    report = ClientReport(Metrics(), lambda: used)

    def reported() -> dict[str, object]:
        counted = report.take()
        assert counted is None or absorb(Metrics(), counted) == 0
        return {} if counted is None else dict(counted.counts)

    one, two = "peer_fabric/aa", "peer_fabric/bb"
    assert reported() == {one: "shm", two: "tcp"}
    assert reported() == {}
    used["bb"] = "rdma"
    assert reported() == {two: "rdma"}
    report.begin_again()
    assert reported() == {one: "shm", two: "rdma"}
    assert absorb(Metrics(), Counted({one: "carrier pigeon"}, b"")) == 1
    used |= {f"{peer:x}": "tcp" for peer in range(2 * PEERS_MAX)}
    assert len(reported()) == PEERS_MAX == len(reported())
    assert reported() == {}


class LooksCounted:
    """A collector of a registry: counts how often the whole of it is looked at."""

    looks = 0

    def collect(self) -> list[Metric]:
        """Return no metric."""
        self.looks += 1
        return []


def test_a_report_looks_at_the_counters_it_reports_and_not_at_all_metrics() -> None:
    """It is made every second in the engine's process, whose threads wait meanwhile."""
    metrics, everything = Metrics(), LooksCounted()
    metrics.registry.register(everything)
    before = everything.looks

    ClientReport(metrics).take()

    assert everything.looks == before


def test_what_no_correct_client_reports_is_ignored_and_counted() -> None:
    """Unknown names and labels, negative and endless figures change nothing."""
    node = Metrics()
    forged = {
        "pages_evicted": 5, "registry": 1, "pages_hit/pigeon": 1, "pages_hit": 1,
        "exists_asked/x": 1, "bytes_written": -1, "exists_found": float("inf"),
        "pages_unpublished": "many", "pages_hit/shm": 1e308, "pages_hit/tcp": 2**63,
    }  # fmt: skip
    times = [(255, 1.0), (0, float("nan")), (0, -1.0), (0, 1e308), (0, 3e38)]
    with np.errstate(over="ignore"):
        calls = np.array(times, CALL).tobytes()

    assert absorb(node, Counted(forged, calls)) == len(forged) + len(times)
    assert not node.latency_s.snapshot()
    assert value(node, "pages_evicted_total") == 0


def test_calls_that_wait_to_be_reported_are_bounded() -> None:
    """An engine whose home node is away keeps the newest calls only."""
    report = ClientReport(Metrics())
    for _ in range(CALLS_MAX + 10):
        report.calls.append((1, 0.001))

    counted = report.take()

    assert counted is not None
    assert len(counted.calls) == CALLS_MAX * CALL.itemsize


def test_a_client_with_its_node_in_its_process_reports_to_itself() -> None:
    """Its calls reach the metrics that the node shows, once."""
    metrics = Metrics()
    report = ClientReport(metrics)
    report.calls.append((PLACES["set", "home", "all"], 0.002))

    report.settle()
    report.settle()

    assert value(
        metrics, "latency_seconds_count", operation="set", tier="home", outcome="all"
    ) == 1  # fmt: skip


def test_failures_of_tables_and_breakers_reach_the_node() -> None:
    """They were counted in the engine's process only, where no scrape sees them."""
    client, node = Metrics(), Metrics()
    client.tables_unusable.labels("torn").inc(2)
    client.breakers_opened.inc(3)

    counted = ClientReport(client).take()

    assert counted is not None
    assert absorb(node, counted) == 0
    assert value(node, "tables_unusable_total", reason="torn") == 2
    assert value(node, "breakers_opened_total") == 3


def test_reasons_of_unusable_tables_are_those_that_clients_count() -> None:
    """A reason that a report does not know would be dropped as malformed."""
    assert {*REASONS.values(), "closed", NOT_OPENED} == set(TABLE_FAILURES)
