"""Counts what the client does not: the connector's refusals, and SGLang's storage metrics."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from importlib import import_module
from typing import Any

PENDING_MAX = 1024
"""Batches kept until SGLang drains them at its next event-loop step. An engine that has stopped
stepping must not make the lists grow."""

_METRICS_MODULES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")


def storage_metrics_class() -> Any | None:
    """Return SGLang's StorageMetrics, or None where this version keeps it out of our reach."""
    for module in _METRICS_MODULES:
        with suppress(ImportError):
            return getattr(import_module(module), "StorageMetrics", None)
    return None


class BatchTally:
    """Counts of one store. Thread-safe: exists, get, set and the scheduler run at once."""

    def __init__(self, metrics_class: Any | None) -> None:
        """Count; keep what SGLang drains only if it gave us its StorageMetrics."""
        self._metrics_class = metrics_class
        self._lock = threading.Lock()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._pending = metrics_class() if metrics_class is not None else None

    def refused(self, operation: str, reason: str, pages: int) -> None:
        """Count pages that never reached the client, by operation and miss reason."""
        if pages == 0:
            return
        with self._lock:
            self._refused[operation, reason] += pages

    def moved(self, kind: str, pages: int, bytes_moved: int, elapsed_s: float) -> None:
        """Note one batch that read ("prefetch") or wrote ("backup") pages."""
        if self._pending is None or pages == 0:
            return
        with self._lock:
            counts = getattr(self._pending, f"{kind}_pgs")
            if len(counts) < PENDING_MAX:
                counts.append(pages)
                gigabytes = bytes_moved / 1e9
                getattr(self._pending, f"{kind}_bandwidth").append(gigabytes / max(elapsed_s, 1e-9))

    def drain(self) -> Any | None:
        """Return a StorageMetrics with what happened since the last call, or None."""
        if self._metrics_class is None:
            return None
        fresh = self._metrics_class()
        with self._lock:
            pending, self._pending = self._pending, fresh
        return pending

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return {operation: {reason: pages}}."""
        with self._lock:
            counted = dict(self._refused)
        out: dict[str, dict[str, int]] = {}
        for operation, reason in sorted(counted):
            out.setdefault(operation, {})[reason] = counted[operation, reason]
        return out
