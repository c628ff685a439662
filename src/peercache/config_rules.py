"""What the values of a configuration must be, alone and beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from peercache.config import Config

Rule: TypeAlias = tuple[bool, str, str]
"""(it is broken, the setting, what it wants)"""


def rules_of(config: Config) -> list[Rule]:
    """Return every rule; the first that is broken is what people are told."""
    granule, at_least_one = config.granule, "wants 1 or more"
    home_path = config.home.removeprefix("ipc://")
    is_power = granule >= 4096 and granule & (granule - 1) == 0
    is_home = not config.home or (config.home.startswith("ipc://") and bool(home_path))
    return [
        (not is_power, "granule", "wants a power of two, 4096 or more"),
        (config.pool_size < granule, "pool_size", f"wants at least one granule: {granule}"),
        (not 1 <= len(config.cluster) <= 255, "cluster", "wants 1 to 255 characters"),
        (not is_home, "home", "wants ipc://PATH"),
        # sockaddr_un holds 108 bytes with the closing zero.
        (len(home_path.encode()) > 100, "home", "wants a path of at most 100 bytes"),
        (not 0 <= config.data_port <= 65_535, "data_port", "wants 0 to 65535"),
        (not -1 <= config.metrics_port <= 65_535, "metrics_port", "wants 0 to 65535"),
        (config.max_masters < 1, "max_masters", at_least_one),
        (config.heartbeat_s <= 0, "heartbeat_s", "wants more than 0"),
        (config.suspect_s <= 2 * config.heartbeat_s, "suspect_s", "wants more than 2 heartbeat_s"),
        (config.dead_s <= config.suspect_s, "dead_s", "wants more than suspect_s"),
        (config.directory_replicas < 1, "directory_replicas", at_least_one),
        (not 1 <= config.virtual_nodes <= 4096, "virtual_nodes", "wants 1 to 4096"),
        (config.handover_s < 0, "handover_s", "wants 0 or more"),
        (config.summary_s <= 0, "summary_s", "wants more than 0"),
        (config.republish_rate < 1, "republish_rate", at_least_one),
        (
            not 1 <= config.max_channels_per_peer <= 1024,
            "max_channels_per_peer",
            "wants 1 to 1024",
        ),
        (not 0 <= config.tcp_serving_threads <= 64, "tcp_serving_threads", "wants 0 to 64"),
        *_rdma_rules(config),
        (config.op_timeout_s <= 0, "op_timeout_s", "wants more than 0"),
        (config.exists_timeout_s <= 0, "exists_timeout_s", "wants more than 0"),
        (config.location_cache_entries < 0, "location_cache_entries", "wants 0 or more"),
        (config.client_uncommitted_max < 0, "client_uncommitted_max", "wants 0 or more"),
        (config.disk_enabled and not config.disk_path, "disk_path", "wants a folder"),
        (config.disk_size < 2**24, "disk_size", "wants 16 MiB or more"),
        (config.disk_free_floor >= 1, "disk_free_floor", "wants less than 1"),
        (config.disk_ttl < 0, "disk_ttl", "wants 0 or more"),
        (config.disk_queue < 0, "disk_queue", "wants 0 or more"),
        (config.disk_promote_rate < 0, "disk_promote_rate", "wants 0 or more"),
    ]


def _rdma_rules(config: Config) -> list[Rule]:
    ranges = (
        ("rdma_gid_index", -1, 255),
        ("rdma_traffic_class", 0, 255),
        ("rdma_service_level", 0, 15),
        ("rdma_hop_limit", 1, 255),
        ("rdma_timeout", 1, 31),
        ("rdma_retry_count", 0, 6),
        ("rdma_reads_at_once", 1, 128),
    )
    return [
        (not low <= getattr(config, name) <= high, name, f"wants {low} to {high}")
        for name, low, high in ranges
    ]
