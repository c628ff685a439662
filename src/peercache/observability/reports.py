"""What a client counts, told to its home node: one scrape of a node sees its engines too.

A client in an engine's process has no port of its own. Once a second it tells the home node how far
its counters have risen and how long its calls took; the node adds that to its own metrics, so both
shapes, embedded and standalone, show the same figures at the same place.
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
"""Calls told at once: more in a second are not told one by one (20 KiB)."""

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
    "exists_asked": (),
    "exists_found": (),
    "bytes_written": (),
    "deadlines_overrun": (),
    "home_attached": (),
}
"""The counters of a client, and the values their one label may have."""


@final
class Report:
    """What one client has not told yet. Calls are added from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        """Report the increases of `metrics` from here on."""
        self._metrics = metrics
        self._told: dict[str, float] = {}
        self.calls: deque[tuple[str, float]] = deque(maxlen=CALLS_MAX)
        """(operation, seconds) of each call; the client appends."""

    def take(self) -> Counted | None:
        """Return what has changed since the last time, or None."""
        counts: dict[str, int | float | str] = {}
        for name, values in _LABELS.items():
            # One look a counter: this is done in the engine's process, and holds its lock.
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
    """Add what a client told; return how many items no correct client sends."""
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
