"""What the tier shows of itself in vLLM's metrics and log.

Owns    the counts since the last `take`, and whether vLLM shuts the tier out.
Takes   counts, on threads of the lanes; vLLM's scheduler, which takes them.
Keeps   each count is taken once. A change of vLLM's back-pressure is logged once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from peercache.engines.late_client import REASONS

HOME_LOST: Final = "vllm:kv_offload_peercache_home_lost"
HOME_ANSWERED: Final = "vllm:kv_offload_peercache_home_answered_seconds"
MISSED: Final = "vllm:kv_offload_peercache_missed_chunks"
NOT_STORED: Final = "vllm:kv_offload_peercache_not_stored_chunks"
SHUT_OUT: Final = "vllm:kv_offload_peercache_shut_out"

LABELS: Final = ("home", "namespace")
BY_REASON: Final = (*LABELS, "reason")

HINT: Final = (
    "vLLM's back-pressure drops stores to this tier: see whether the home node or the host is "
    "overloaded; if not, raise high_water_s in the tier's backpressure, or set locality to REMOTE"
)


def definitions() -> dict[str, Any]:
    """Return the definition that vLLM needs of each metric in advance."""
    return {
        HOME_LOST: OffloadingGaugeMetadata(
            documentation="1 while the home node is lost for this reason.", labelnames=BY_REASON
        ),
        HOME_ANSWERED: OffloadingGaugeMetadata(
            documentation="Seconds since the home node answered last.", labelnames=LABELS
        ),
        MISSED: OffloadingCounterMetadata(
            documentation="Chunks that were found and then not loaded, by reason.",
            labelnames=BY_REASON,
        ),
        NOT_STORED: OffloadingCounterMetadata(
            documentation="Chunks that were not stored, by reason.", labelnames=BY_REASON
        ),
        SHUT_OUT: OffloadingGaugeMetadata(
            documentation="1 while vLLM's back-pressure drops stores to this tier.",
            labelnames=LABELS,
        ),
    }


@final
class TierFigures:
    """Counts of one tier. `add` may be called by any thread, the rest by one at a time."""

    def __init__(self, detector: Any, log: Any) -> None:
        """Start at zero. detector: vLLM's, that decides whether chunks are stored; or None."""
        self._detector, self._log = detector, log
        self._is_shut_out = False
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, metric: str, reasons: Mapping[str, int]) -> None:
        """Count chunks, by reason."""
        with self._lock:
            for reason, chunks in reasons.items():
                if chunks:
                    self._counts[metric, reason] += chunks

    def watch(self, waiting: int) -> None:
        """Log it if vLLM has begun or ended to shut this tier out. waiting: stores in a queue."""
        if self._detector is None:
            return
        is_shut_out = bool(self._detector.is_under_pressure())
        if is_shut_out == self._is_shut_out:
            return
        self._is_shut_out = is_shut_out
        if is_shut_out:
            average = self._detector.stats.get("store_latency_ema", 0.0)
            self._log.warning(
                "vllm.stores_shut_out",
                seconds_per_mib=round(average, 4),
                stores_waiting=waiting,
                hint=HINT,
            )
        else:
            self._log.info("vllm.stores_admitted")

    def take(self, status: Mapping[str, Any]) -> Any:
        """Return vLLM's figures. status: of `LateClient`."""
        stats = OffloadingConnectorStats()
        labels = tuple(status[name] for name in LABELS)
        for reason in REASONS:
            # A gauge that is not set again keeps its value.
            stats.set_gauge(HOME_LOST, int(status["reason"] == reason), (*labels, reason))
        if status["last_success_s"] is not None:
            stats.set_gauge(HOME_ANSWERED, status["last_success_s"], labels)
        if self._detector is not None:
            stats.set_gauge(SHUT_OUT, int(self._is_shut_out), labels)
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for (metric, reason), chunks in counts.items():
            stats.increase_counter(metric, chunks, (*labels, reason))
        return stats
