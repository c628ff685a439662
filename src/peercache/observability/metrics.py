"""Metrics: every counter, gauge and histogram of one process, and its reports.

A client has no HTTP port. Once a second it reports the increases of its counters and the duration
of its calls to its home node. The node adds them to its own metrics, embedded and standalone alike,
so a node's scrape includes its engines.
"""

from __future__ import annotations

import math
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, TypeGuard, final

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from peercache.observability.latency import (
    CALL,
    LATENCY_BUCKETS_S,
    Latency,
    bound_for,
    observe_calls,
    packed,
)
from peercache.observability.reasons import (
    FABRICS,
    HINT_OUTCOMES,
    HINT_REFUSALS,
    MISS_REASONS,
    OFFER_FAILURES,
    RDMA_FAILURES,
    TABLE_FAILURES,
    TAKE_FAILURES,
)
from peercache.observability.slow import (
    REPORTED_MAX,
    SLOW_CALL,
    CallNote,
    SlowestCalls,
    SlowLog,
)
from peercache.wire.messages.session import Counted

CLIENT_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "pages_hit": FABRICS,
    "bytes_read": FABRICS,
    "rdma_fallbacks": RDMA_FAILURES,
    "rdma_channels_failed": RDMA_FAILURES,
    "rdma_channels_opened": (),
    "pages_missed": MISS_REASONS,
    "sets_refused": MISS_REASONS,
    "pages_set": ("copied", "here"),
    "pages_unpublished": (),
    "pages_mirrored": (),
    "exists_asked": (),
    "exists_found": (),
    "exists_asked_again": (),
    "bytes_written": (),
    "deadlines_overrun": (),
    "home_attached": (),
    "breakers_opened": (),
    "tables_unusable": TABLE_FAILURES,
    "hint_pages": tuple(
        f"{hint}/{outcome}" for hint, outcomes in HINT_OUTCOMES.items() for outcome in outcomes
    ),
    "hints_refused": HINT_REFUSALS,
}
"""The counters of a client, and the allowed values of their label; a slash between those of two."""

STARTED: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: values for name, values in CLIENT_COUNTERS.items() if values},
    "records_refused": ("forged",),
    "messages_dropped": (
        "cluster", "certificate", "revoked", "granule", "wire_version", "malformed",
        "mailbox_full", "outbox_full", "links_full", "expired",
    ),
    "tcp_refused": ("bounds", "busy", "descriptors"),
    "disk_writes_dropped": (
        "full", "no_room", "late", "failed", "queue_full", "changed", "too_large",
    ),
    "pages_not_moved": OFFER_FAILURES,
    "pages_not_taken_over": TAKE_FAILURES,
    "disk_pages_lost": ("damaged", "failed", "evicted", "expired", "replaced", "overwritten"),
}  # fmt: skip
"""Counters that a node shows from its start, and the values of their label."""


class Metrics:
    """The metrics of one process, in a registry of their own."""

    _describes_process: bool = False

    def __init__(self) -> None:
        """Create every metric; docs/reference/metrics.md is generated from this."""
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"peercache_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"peercache_{name}", text, labels, registry=registry)

        # --- client
        self.pages_hit = counter("pages_hit", "Pages returned by get, verified.", "fabric")
        self.pages_missed = counter("pages_missed", "Pages that a get did not return.", "reason")
        self.pages_set = counter("pages_set", "Pages committed, or already held.", "outcome")
        self.sets_refused = counter("sets_refused", "Pages that a set did not store.", "reason")
        self.pages_unpublished = counter(
            "pages_unpublished",
            "Stored pages that not every directory owner acknowledged in time.",
        )
        self.exists_asked = counter("exists_asked", "Keys that exists was asked for.")
        self.exists_found = counter("exists_found", "Keys that exists found, in the leading run.")
        self.exists_asked_again = counter(
            "exists_asked_again", "Keys of batches that an engine asked again after a miss."
        )
        self.pages_short = counter(
            "pages_short", "Pages that SGLang asked for after exists had reported them.", "pool"
        )
        self.bytes_read = counter("bytes_read", "Bytes of verified pages.", "fabric")
        self.bytes_written = counter("bytes_written", "Bytes copied into the home pool.")
        self.deadlines_overrun = counter(
            "deadlines_overrun", "Calls that ended after their deadline."
        )
        self.breakers_opened = counter("breakers_opened", "Times a peer's circuit breaker opened.")
        self.home_attached = counter("home_attached", "Times a client attached to its home node.")
        self._make_hints(counter)
        # --- node
        self.pool_bytes = gauge("pool_bytes", "Bytes of the pool.", "state")
        self.pool_pages = gauge("pool_pages", "Pages in the pool.")
        self.pages_evicted = counter("pages_evicted", "Pages evicted to make room.")
        self.hit_rate_estimate = gauge(
            "hit_rate_estimate",
            "Estimated hit rate of a pool with so many times the memory.",
            "memory",
        )
        self.reservations = gauge("reservations", "Live reservations.")
        self.messages_received = counter("messages_received", "Control messages accepted.", "kind")
        self.messages_dropped = counter("messages_dropped", "Control messages dropped.", "reason")
        self.connections = gauge("connections", "Open connections.", "port")
        self.tcp_bytes_served = counter("tcp_bytes_served", "Page bytes sent by the tcp fabric.")
        self.tcp_refused = counter("tcp_refused", "Requests the tcp fabric refused.", "reason")
        self._make_rdma(counter, gauge)
        self._make_latency(registry)
        self._make_directory(counter, gauge)
        self._make_mirrors(counter, gauge)
        self._make_namespaces(counter, gauge)
        self._make_drain(counter, gauge)
        self._make_trust(counter, gauge)
        self._make_discovery(counter, gauge)
        self._make_disk(registry, counter, gauge)

    def _make_rdma(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Create the metrics of the rdma fabric: of a client's reads, and of what a node serves."""
        self.rdma_fallbacks = counter(
            "rdma_fallbacks", "Pages that another fabric read because rdma could not.", "reason"
        )
        self.rdma_channels_opened = counter(
            "rdma_channels_opened", "Channels that this client has opened."
        )
        self.rdma_channels_failed = counter(
            "rdma_channels_failed", "Channels of this client that failed in a read.", "reason"
        )
        self.rdma_channels = gauge("rdma_channels", "Queue pairs between clients and this node.")
        self.rdma_registered_bytes = gauge(
            "rdma_registered_bytes", "Bytes of page memory that every rail serves."
        )

    def _make_latency(self, registry: CollectorRegistry) -> None:
        """Create the histograms of calls."""
        self.slow = SlowLog()
        """The slowest calls of clients: no series, as each call has facts of its own."""
        self.latency_s = Latency(
            "peercache_latency_seconds",
            "Time of one batch call; the tier is the farthest that it read, or that answered it.",
            ("operation", "tier", "outcome"),
            registry,
        )
        self.page_s = Latency(
            "peercache_page_seconds",
            "Time of one get that returned all of its pages, divided by their number.",
            ("tier",),
            registry,
        )

    def _make_mirrors(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Create the metrics of copies of pages that other hosts hold."""
        self.pages_mirrored = counter(
            "pages_mirrored", "Pages of other hosts that were copied into the home pool."
        )
        self.pool_bytes_mirrored = gauge(
            "pool_bytes_mirrored", "Bytes of the pool for pages of other hosts."
        )

    def _make_hints(self, counter: Callable[..., Counter]) -> None:
        """Create the metrics of hints: of engines, and of calls of the client."""
        self.hint_pages = counter(
            "hint_pages", "Pages that hints named, by what became of them.", "hint", "outcome"
        )
        self.hints_refused = counter(
            "hints_refused", "Hints of engines that were not obeyed.", "reason"
        )

    def _make_namespaces(
        self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]
    ) -> None:
        """Create the metrics of namespaces with quotas; a node shows a bounded number of them."""
        self.namespace_bytes = gauge(
            "namespace_bytes",
            'Bytes that a namespace takes, by tier; "(others)" is all without a quota.',
            "namespace",
            "tier",
        )
        self.pool_bytes_retained = gauge(
            "pool_bytes_retained", "Bytes of the pool for retained pages."
        )
        self.namespace_retained_bytes = gauge(
            "namespace_retained_bytes",
            "Bytes of a namespace that are retained.",
            "namespace",
            "tier",
        )
        self.namespace_quota_bytes = gauge(
            "namespace_quota_bytes", "Bytes that a namespace is guaranteed.", "namespace", "tier"
        )
        self.namespace_pages_evicted = counter(
            "namespace_pages_evicted",
            "Pages of a namespace that were evicted to make room, by tier.",
            "namespace",
            "tier",
        )

    def _make_drain(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Create the metrics of pages that are handed over when a node is drained."""
        reported = "of this node's drain: given, there before, lost without room or time, and left."
        self.drain_pages = gauge("drain_pages", f"Pages {reported}", "state")
        self.drain_bytes = gauge("drain_bytes", f"Bytes {reported}", "state")
        self.pages_taken_over = counter(
            "pages_taken_over", "Pages that this node took over from nodes that offered them."
        )
        self.bytes_taken_over = counter("bytes_taken_over", "Bytes of these pages.")
        self.pages_not_taken_over = counter(
            "pages_not_taken_over",
            "Pages that other nodes offered and this node did not take over.",
            "reason",
        )
        self.placement_pages = gauge(
            "placement_pages",
            "Pages offered ahead of their eviction since the node began: moved to another node, "
            "there before, refused without room or colder pages, and failed.",
            "outcome",
        )
        self.placement_bytes = gauge(
            "placement_bytes", "Bytes of the pages that were moved to another node."
        )
        self.pages_not_moved = counter(
            "pages_not_moved",
            "Pages that were offered to other nodes while this one serves, and refused or failed.",
            "reason",
        )
        self.copies_pages = gauge(
            "copies_pages",
            "Pages offered for a second copy since the node began: copied to another node, there "
            "before, refused without room or colder pages, and failed.",
            "outcome",
        )
        self.copies_bytes = gauge("copies_bytes", "Bytes of the pages that were copied.")
        self.pages_single = gauge(
            "pages_single", "Pages of this node of which no other node has a copy, with copies = 2."
        )

    def _make_directory(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Create the metrics of the directory, and of its readers."""
        self.tables_unusable = counter(
            "tables_unusable",
            "Failed reads of directory tables of this host; their nodes were asked instead.",
            "reason",
        )
        self.directory_records = gauge("directory_records", "Records in this shard.")
        self.directory_authority = gauge(
            "directory_authority",
            "1 while this shard has the records of all live nodes: other pages do not exist.",
        )
        self.directory_holders_doubted = gauge(
            "directory_holders_doubted", "Nodes whose records may be missing in this shard."
        )
        self.directory_owners_lagging = gauge(
            "directory_owners_lagging",
            "Lagging directory owners: no set of this node waits for them until they catch up.",
        )
        self.followers = gauge("followers", "Subscribers to the changes of the pages of this node.")
        self.records_refused = counter(
            "records_refused", "Records that this shard refused.", "reason"
        )
        self.repairs = counter("repairs", "Record streams repaired after a summary differed.")

    def describe_objectives(self, limits_s: Mapping[str, float]) -> None:
        """Add the limit of each objective, as the bucket by which it is judged."""
        for name, seconds in limits_s.items():
            bound = bound_for(seconds)
            self.objective_s.labels(name, str(bound)).set(bound)

    def describe_process(self, version: str) -> None:
        """Add the process (CPU, memory, open files, start) and the build, for a node's /metrics."""
        self.build_info.labels(version, platform.python_version()).set(1)
        # For an alert rule, a counter that appears with its first increase has never increased.
        for name, values in STARTED.items():
            for value in values:
                getattr(self, name).labels(*value.split("/"))
        if not self._describes_process:
            ProcessCollector(registry=self.registry)
            self._describes_process = True

    def _make_trust(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Create the metrics of the build, and of access rights."""
        self.build_info = gauge("build_info", "1; the labels show what runs.", "version", "python")
        self.objective_s = gauge(
            "objective_seconds",
            "Limit of an objective; le is its bucket in the histograms.",
            "objective",
            "le",
        )
        reported = "Control messages that their senders may not send."
        self.messages_refused = counter("messages_refused", reported, "reason", "message")
        self.insecure = gauge(
            "insecure", "1 while this node serves other hosts without certificates."
        )
        self.certificate_days = gauge(
            "certificate_days", "Days until this process's certificate expires; NaN without TLS."
        )
        self.certificate_days.set(math.nan)
        self.http_refused = counter(
            "http_refused", "HTTP requests and handshakes refused.", "reason"
        )

    def _make_discovery(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        """Create the metrics of members, and of the sources of their addresses."""
        self.members = gauge("members", "Members of the view.", "state")
        self.discovery_answering = gauge(
            "discovery_answering", "1 while a source of discovery_addr answers.", "source"
        )
        self.discovery_addresses = gauge(
            "discovery_addresses", "Addresses that a source of discovery_addr gave last.", "source"
        )
        self.discovery_failures = counter(
            "discovery_failures", "Times a source of discovery_addr failed.", "source"
        )
        self.discovery_dropped = counter(
            "discovery_dropped",
            "Dropped addresses of sources: not HOST:PORT, or too many.",
            "source",
        )

    def _make_disk(
        self,
        registry: CollectorRegistry,
        counter: Callable[..., Counter],
        gauge: Callable[..., Gauge],
    ) -> None:
        """Create the metrics of the disk tier."""
        self.disk_open = gauge("disk_open", "1 while the disk tier of this node works.")
        self.disk_bytes = gauge("disk_bytes", "Bytes of the disk tier.", "state")
        self.disk_pages = gauge("disk_pages", "Pages on disk.")
        self.disk_pages_written = counter("disk_pages_written", "Pages written to disk.")
        self.disk_bytes_written = counter("disk_bytes_written", "Bytes of pages written to disk.")
        self.disk_writes_dropped = counter(
            "disk_writes_dropped", "Pages that were dropped instead of written to disk.", "reason"
        )
        self.pages_promoted = counter("pages_promoted", "Pages loaded from disk into the pool.")
        self.bytes_promoted = counter(
            "bytes_promoted", "Bytes of pages loaded from disk into the pool."
        )
        self.disk_pages_lost = counter("disk_pages_lost", "Pages deleted from disk.", "reason")
        self.promote_s = Histogram(
            "peercache_promote_seconds",
            "Time from a Promote to its answer.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )


def totals_of(counter: Counter) -> dict[str, float]:
    """Return the totals of a counter, by the values of its labels; "" if it has no label."""
    return {
        "/".join(sample.labels.values()): sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


CALLS_MAX = 4096
"""Most times in one report (20 KiB); a second with more of them loses the oldest. A get has two."""

PEER_FABRIC = "peer_fabric"
"""Prefix, before a slash and a peer's name, of the fabric by which the client last read from it."""

PEERS_MAX = 256
"""Most peers in one report (10 KB): the others are in the next one."""

INCREASE_MAX = 2**53
"""The largest increase of a counter in one report: beyond it a sum of floats loses precision, and
sums could become infinite."""


@final
class ClientReport:
    """The counts that one client has not reported yet. Calls are added from any thread."""

    def __init__(
        self,
        metrics: Metrics,
        fabric_of_peers: Callable[[], Mapping[str, str]] = dict,
        name: str = "",
    ) -> None:
        """Report the increases of `metrics` from now on, and the fabric of each peer.

        fabric_of_peers: returns the fabric by the name of the peer. name: of this client.
        """
        self._name = name
        self.slowest = SlowestCalls()
        self._metrics = metrics
        self._fabric_of_peers = fabric_of_peers
        self._fabrics_reported: dict[str, str] = {}
        self._reported: dict[str, float] = {}
        self.calls: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)
        """(series, seconds) of each call (`observability.latency`); the client appends."""

    def take(self) -> Counted | None:
        """Return the increases since the last call, or None."""
        counts: dict[str, int | float | str] = {}
        for name, values in CLIENT_COUNTERS.items():
            # Each counter is read once: this runs in the engine's process, with its lock held.
            totals = totals_of(getattr(self._metrics, name))
            for value in values or ("",):
                path = f"{name}/{value}" if value else name
                total = totals.get(value, 0.0)
                if total > self._reported.get(path, 0.0):
                    counts[path] = total - self._reported.get(path, 0.0)
                    self._reported[path] = total
        counts |= self._take_fabrics()
        counts |= {
            f"{SLOW_CALL}/{place}": str(note) for place, note in enumerate(self.slowest.take())
        }
        calls = self._take_calls()
        if not counts and not calls:
            return None
        return Counted(counts, packed(calls).tobytes())

    def begin_again(self) -> None:
        """Report the fabric of each peer again, to a new home node."""
        self._fabrics_reported.clear()

    def _take_fabrics(self) -> dict[str, str]:
        """Return the changed fabrics, of at most PEERS_MAX peers."""
        used = self._fabric_of_peers()
        now = {f"{PEER_FABRIC}/{peer}": name for peer, name in used.items()}
        reported = {path: name for path, name in self._fabrics_reported.items() if path in now}
        changed = [item for item in now.items() if reported.get(item[0]) != item[1]][:PEERS_MAX]
        self._fabrics_reported = {**reported, **dict(changed)}
        return dict(changed)

    def settle(self) -> None:
        """Add the calls to the own metrics, for a client with a node in this process."""
        if calls := self._take_calls():
            observe_calls(self._metrics.latency_s, self._metrics.page_s, packed(calls))
        for note in self.slowest.take():
            self._metrics.slow.add(self._name, note, time.monotonic())

    def _take_calls(self) -> list[tuple[int, float]]:
        return [self.calls.popleft() for _ in range(len(self.calls))]


def is_increase(value: object) -> TypeGuard[float]:
    """Return whether a client may have counted this much since its last report."""
    return isinstance(value, (int, float)) and 0 <= value <= INCREASE_MAX


def absorb(metrics: Metrics, counted: Counted, client: str = "") -> int:
    """Add the report of a client of this name; return the number of invalid items."""
    ignored = noted = 0
    for path, increase in counted.counts.items():
        name, _, value = path.partition("/")
        note = CallNote.read(increase) if name == SLOW_CALL and noted < REPORTED_MAX else None
        if note is not None:
            metrics.slow.add(client, note, time.monotonic())
            noted += 1
            continue
        if name == PEER_FABRIC and increase in FABRICS:
            continue  # Not a metric: it is part of the node's status.
        labels = CLIENT_COUNTERS.get(name)
        is_known = labels is not None and value in (labels or ("",))
        if not is_known or not is_increase(increase):
            ignored += 1
            continue
        counter = getattr(metrics, name)
        (counter.labels(*value.split("/")) if value else counter).inc(increase)
    times = np.frombuffer(counted.calls, CALL)[:CALLS_MAX]
    ignored += observe_calls(metrics.latency_s, metrics.page_s, times)
    return ignored
