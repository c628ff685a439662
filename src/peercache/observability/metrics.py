"""Metrics: every counter, gauge and histogram of one process, and its reports.

A client has no HTTP port. Once a second it reports the increases of its counters and the duration
of its calls to its home node. The node adds them to its own metrics, embedded and standalone alike,
so a node's scrape includes its engines.
"""

from __future__ import annotations

import math
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeGuard, cast, final

import attrs
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
    DECLINE_REASONS,
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
    "exists_declined": DECLINE_REASONS,
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


@attrs.frozen
class _Declared:
    """A metric before it is made for a registry. make: its class."""

    make: Callable[..., Any]
    text: str
    labels: tuple[str, ...]

    def made(self, name: str, registry: CollectorRegistry) -> Any:
        """Return the metric; one of times is named after seconds."""
        whole = re.sub("_s$", "_seconds", name)
        return self.make(whole, self.text, self.labels, registry=registry)


def _counter(text: str, *labels: str) -> Counter:
    return cast("Counter", _Declared(Counter, text, labels))


def _gauge(text: str, *labels: str) -> Gauge:
    return cast("Gauge", _Declared(Gauge, text, labels))


def _histogram(text: str) -> Histogram:
    make = partial(Histogram, buckets=LATENCY_BUCKETS_S)
    return cast("Histogram", _Declared(make, text, ()))


def _latency(text: str, *labels: str) -> Latency:
    return cast("Latency", _Declared(Latency, text, labels))


class Metrics:
    """The metrics of one process, in a registry of their own.

    Each is named after its attribute, with the prefix `peercache_`; docs/reference/metrics.md is
    generated from this.
    """

    _describes_process: bool = False

    # --- client
    pages_hit = _counter("Pages returned by get, verified.", "fabric")
    pages_missed = _counter("Pages that a get did not return.", "reason")
    pages_set = _counter("Pages committed, or already held.", "outcome")
    sets_refused = _counter("Pages that a set did not store.", "reason")
    pages_unpublished = _counter(
        "Stored pages that not every directory owner acknowledged in time."
    )
    exists_asked = _counter("Keys that exists was asked for.")
    exists_found = _counter("Keys that exists found, in the leading run.")
    exists_asked_again = _counter("Keys of batches that an engine asked again after a miss.")
    exists_declined = _counter(
        "Keys that exists found, and did not report because of what their pages cost.", "reason"
    )
    pages_short = _counter("Pages that SGLang asked for after exists had reported them.", "pool")
    bytes_read = _counter("Bytes of verified pages.", "fabric")
    bytes_written = _counter("Bytes copied into the home pool.")
    deadlines_overrun = _counter("Calls that ended after their deadline.")
    breakers_opened = _counter("Times a peer's circuit breaker opened.")
    home_attached = _counter("Times a client attached to its home node.")
    # --- hints: of engines, and of calls of the client
    hint_pages = _counter("Pages that hints named, by what became of them.", "hint", "outcome")
    hints_refused = _counter("Hints of engines that were not obeyed.", "reason")
    # --- node
    pool_bytes = _gauge("Bytes of the pool.", "state")
    pool_pages = _gauge("Pages in the pool.")
    pages_evicted = _counter("Pages evicted to make room.")
    hit_rate_estimate = _gauge(
        "Estimated hit rate of reads and sets with so many times the memory.", "memory"
    )
    reservations = _gauge("Live reservations.")
    messages_received = _counter("Control messages accepted.", "kind")
    messages_dropped = _counter("Control messages dropped.", "reason")
    connections = _gauge("Open connections.", "port")
    tcp_bytes_served = _counter("Page bytes sent by the tcp fabric.")
    tcp_refused = _counter("Requests the tcp fabric refused.", "reason")
    # --- the rdma fabric: of a client's reads, and of what a node serves
    rdma_fallbacks = _counter("Pages that another fabric read because rdma could not.", "reason")
    rdma_channels_opened = _counter("Channels that this client has opened.")
    rdma_channels_failed = _counter("Channels of this client that failed in a read.", "reason")
    rdma_channels = _gauge("Queue pairs between clients and this node.")
    rdma_registered_bytes = _gauge("Bytes of page memory that every rail serves.")
    # --- calls
    latency_s = _latency(
        "Time of one batch call; the tier is the farthest that it read, or that answered it.",
        "operation",
        "tier",
        "outcome",
    )
    page_s = _latency(
        "Time of one get that returned all of its pages, divided by their number.", "tier"
    )
    # --- the directory, and its readers
    tables_unusable = _counter(
        "Failed reads of directory tables of this host; their nodes were asked instead.", "reason"
    )
    directory_records = _gauge("Records in this shard.")
    directory_authority = _gauge(
        "1 while this shard has the records of all live nodes: other pages do not exist."
    )
    directory_holders_doubted = _gauge("Nodes whose records may be missing in this shard.")
    directory_owners_lagging = _gauge(
        "Lagging directory owners: no set of this node waits for them until they catch up."
    )
    followers = _gauge("Subscribers to the changes of the pages of this node.")
    records_refused = _counter("Records that this shard refused.", "reason")
    repairs = _counter("Record streams repaired after a summary differed.")
    # --- copies of pages that other hosts hold
    pages_mirrored = _counter("Pages of other hosts that were copied into the home pool.")
    pool_bytes_mirrored = _gauge("Bytes of the pool for pages of other hosts.")
    # --- namespaces with quotas; a node shows a bounded number of them
    namespace_bytes = _gauge(
        'Bytes that a namespace takes, by tier; "(others)" is all without a quota.',
        "namespace",
        "tier",
    )
    pool_bytes_retained = _gauge("Bytes of the pool for retained pages.")
    namespace_retained_bytes = _gauge(
        "Bytes of a namespace that are retained.", "namespace", "tier"
    )
    namespace_quota_bytes = _gauge("Bytes that a namespace is guaranteed.", "namespace", "tier")
    namespace_pages_evicted = _counter(
        "Pages of a namespace that were evicted to make room, by tier.", "namespace", "tier"
    )
    namespace_pages_expired = _counter(
        "Pages of a namespace that were not used for its ttl, by tier.", "namespace", "tier"
    )
    # --- pages that move to other nodes
    drain_pages = _gauge(
        "Pages of this node's drain: given, there before, lost without room or time, and left.",
        "state",
    )
    drain_bytes = _gauge(
        "Bytes of this node's drain: given, there before, lost without room or time, and left.",
        "state",
    )
    pages_taken_over = _counter("Pages that this node took over from nodes that offered them.")
    bytes_taken_over = _counter("Bytes of these pages.")
    pages_not_taken_over = _counter(
        "Pages that other nodes offered and this node did not take over.", "reason"
    )
    placement_pages = _gauge(
        "Pages offered ahead of their eviction since the node began: moved to another node, "
        "there before, refused without room or colder pages, and failed.",
        "outcome",
    )
    placement_bytes = _gauge("Bytes of the pages that were moved to another node.")
    pages_not_moved = _counter(
        "Pages that were offered to other nodes while this one serves, and refused or failed: they "
        "stay here. A page counts each time.",
        "reason",
    )
    copies_pages = _gauge(
        "Pages offered for a second copy since the node began: copied to another node, there "
        "before, refused without room or colder pages, and failed.",
        "outcome",
    )
    copies_bytes = _gauge("Bytes of the pages that were copied.")
    pages_single = _gauge("Pages of this node of which no other node has a copy, with copies = 2.")
    # --- the build, and access rights
    build_info = _gauge("1; the labels show what runs.", "version", "python")
    objective_s = _gauge(
        "Limit of an objective; le is its bucket in the histograms.", "objective", "le"
    )
    messages_refused = _counter(
        "Control messages that their senders may not send.", "reason", "message"
    )
    ticks_in_past = _counter(
        "Times that an actor asked for a tick in the past: a bug, logged as an error.", "actor"
    )
    insecure = _gauge("1 while this node serves other hosts without certificates.")
    certificate_days = _gauge("Days until this process's certificate expires; NaN without TLS.")
    http_refused = _counter("HTTP requests and handshakes refused.", "reason")
    # --- members, and the sources of their addresses
    members = _gauge("Members of the view.", "state")
    discovery_answering = _gauge("1 while a source of discovery_addr answers.", "source")
    discovery_addresses = _gauge("Addresses that a source of discovery_addr gave last.", "source")
    discovery_failures = _counter("Times a source of discovery_addr failed.", "source")
    discovery_dropped = _counter(
        "Dropped addresses of sources: not HOST:PORT, or too many.", "source"
    )
    # --- the disk tier
    disk_open = _gauge("1 while the disk tier of this node works.")
    disk_bytes = _gauge("Bytes of the disk tier.", "state")
    disk_pages = _gauge("Pages on disk.")
    disk_pages_written = _counter("Pages written to disk.")
    disk_bytes_written = _counter("Bytes of pages written to disk.")
    disk_writes_dropped = _counter("Pages that were dropped instead of written to disk.", "reason")
    pages_promoted = _counter("Pages loaded from disk into the pool.")
    bytes_promoted = _counter("Bytes of pages loaded from disk into the pool.")
    disk_pages_lost = _counter("Pages deleted from disk.", "reason")
    promote_s = _histogram("Time from a Promote to its answer.")

    def __init__(self) -> None:
        """Create every metric."""
        self.registry = registry = CollectorRegistry()
        self.slow = SlowLog()
        """The slowest calls of clients: no series, as each call has facts of its own."""
        for name, declared in vars(Metrics).items():
            if isinstance(declared, _Declared):
                setattr(self, name, declared.made(f"peercache_{name}", registry))
        self.certificate_days.set(math.nan)

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
