"""Reports of a client's counters to its home node, so that a node's scrape includes its engines.

A client has no HTTP port. Once a second it reports the increases of its counters and the duration
of its calls. The node adds them to its own metrics, embedded and standalone alike.
"""

from __future__ import annotations

import math
from collections import deque
from typing import final

import numpy as np

from peercache.observability.metrics import Metrics, totals_of
from peercache.observability.reasons import MISS_REASONS, RDMA_FAILURES
from peercache.wire.messages.session import Counted

OPERATIONS = ("get", "set", "exists", "remove", "clear", "stats")
"""The batch calls of a client; the values of the label `operation`."""

CALL = np.dtype([("operation", "u1"), ("seconds", "<f4")])
"""One call: its place in OPERATIONS, and how long it took."""

CALLS_MAX = 4096
"""Most calls in one report (20 KiB); a second with more calls loses the oldest."""

_LABELS: dict[str, tuple[str, ...]] = {
    "pages_hit": ("shm", "tcp", "rdma"),
    "bytes_read": ("shm", "tcp", "rdma"),
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
    "bytes_written": (),
    "deadlines_overrun": (),
    "home_attached": (),
}
"""The counters of a client, and the values their one label may have."""


@final
class ClientReport:
    """The counts that one client has not reported yet. Calls are added from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        """Report the increases of `metrics` from here on."""
        self._metrics = metrics
        self._told: dict[str, float] = {}
        self.calls: deque[tuple[str, float]] = deque(maxlen=CALLS_MAX)
        """(operation, seconds) of each call; the client appends."""

    def take(self) -> Counted | None:
        """Return the increases since the last call, or None."""
        counts: dict[str, int | float | str] = {}
        for name, values in _LABELS.items():
            # Each counter is read once: this runs in the engine's process, with its lock held.
            totals = totals_of(getattr(self._metrics, name))
            for value in values or ("",):
                path = f"{name}/{value}" if value else name
                total = totals.get(value, 0.0)
                if total > self._told.get(path, 0.0):
                    counts[path] = total - self._told.get(path, 0.0)
                    self._told[path] = total
        calls = [self.calls.popleft() for _ in range(len(self.calls))]
        if not counts and not calls:
            return None
        packed = [(OPERATIONS.index(operation), seconds) for operation, seconds in calls]
        return Counted(counts, np.array(packed, CALL).tobytes())


def absorb(metrics: Metrics, counted: Counted) -> int:
    """Add a client's report; return the number of items that no correct client sends."""
    ignored = 0
    for path, increase in counted.counts.items():
        name, _, value = path.partition("/")
        is_known = name in _LABELS and (value in _LABELS[name] or (not value and not _LABELS[name]))
        if not is_known or isinstance(increase, str) or not 0 <= increase < math.inf:
            ignored += 1
            continue
        counter = getattr(metrics, name)
        (counter.labels(value) if value else counter).inc(increase)
    for operation, seconds in np.frombuffer(counted.calls, CALL)[:CALLS_MAX].tolist():
        if operation < len(OPERATIONS) and 0 <= seconds < math.inf:
            metrics.latency_s.labels(OPERATIONS[operation]).observe(seconds)
        else:
            ignored += 1
    return ignored
