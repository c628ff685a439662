"""What the tier reports to vLLM's /metrics: how the home node is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import OffloadingGaugeMetadata

from peercache.engines.late_client import REASONS

HOME_LOST: Final = "vllm:kv_offload_peercache_home_lost"
HOME_ANSWERED: Final = "vllm:kv_offload_peercache_home_answered_seconds"

LABELS: Final = ("home", "namespace")


def definitions() -> dict[str, Any]:
    """Return what vLLM has to know of each metric before it comes."""
    return {
        HOME_LOST: OffloadingGaugeMetadata(
            documentation="1 while the home node is lost for this reason.",
            labelnames=(*LABELS, "reason"),
        ),
        HOME_ANSWERED: OffloadingGaugeMetadata(
            documentation="Seconds since the home node answered last.", labelnames=LABELS
        ),
    }


def stats_of(status: Mapping[str, Any]) -> Any:
    """Return vLLM's figures of a status of `LateClient`."""
    stats = OffloadingConnectorStats()
    labels = tuple(status[name] for name in LABELS)
    for reason in REASONS:
        # A gauge that is not set again keeps its value.
        stats.set_gauge(HOME_LOST, int(status["reason"] == reason), (*labels, reason))
    if status["last_success_s"] is not None:
        stats.set_gauge(HOME_ANSWERED, status["last_success_s"], labels)
    return stats
