"""The public names of the settings: none may change, and a new one is added here."""

from __future__ import annotations

from typing import Any

import pytest

from peercache.config.settings import SETTINGS, Config

GIB = 2**30

# Every setting as it was before the table of settings was made, with its default.
FROZEN: dict[str, Any] = {
    "cluster": "default",
    "listen": "",
    "advertise": "",
    "data_port": 0,
    "discovery_addr": (),
    "home": "",
    "namespace": "",
    "host_name": "",
    "tls_ca": "",
    "tls_cert": "",
    "tls_key": "",
    "tls_crl": "",
    "etcd_ca": "",
    "etcd_cert": "",
    "etcd_key": "",
    "insecure": "",
    "share_group": "",
    "share_uids": (),
    "pool_size": 4 * GIB,
    "shm_dir": "/dev/shm",
    "granule": 16384,
    "hugepages": "off",
    "hugepages_dir": "",
    "client_uncommitted_max": 0,
    "disk_enabled": False,
    "disk_path": "/data/peercache/",
    "disk_size": 100000000000,
    "disk_free_floor": 0.05,
    "disk_ttl": 0.0,
    "write_policy": "through",
    "disk_queue": 268435456,
    "disk_flush_s": 5.0,
    "drain_s": 60.0,
    "disk_promote_rate": 268435456,
    "max_masters": 3,
    "heartbeat_s": 1.0,
    "suspect_s": 3.0,
    "dead_s": 6.0,
    "directory_replicas": "auto",
    "virtual_nodes": 160,
    "handover_s": 10.0,
    "summary_s": 2.0,
    "republish_rate": 50000,
    "fabric": "auto",
    "max_channels_per_peer": 16,
    "tcp_serving_threads": 0,
    "rdma_device_names": (),
    "rdma_gid_index": -1,
    "rdma_traffic_class": 0,
    "rdma_service_level": 0,
    "rdma_hop_limit": 64,
    "rdma_timeout": 14,
    "rdma_retry_count": 6,
    "rdma_reads_at_once": 16,
    "rdma_clear_text": False,
    "verify": "sampled",
    "op_timeout_s": 2.0,
    "exists_timeout_s": 0.1,
    "location_cache_entries": 262144,
    "mirror_pulls": "off",
    "mirror_share": 0.25,
    "quotas": (),
    "metrics_port": -1,
    "http_listen": "",
    "http_open": False,
    "http_token_file": "",
    "engine_events": (),
    "object_events": "",
    "event_readers": (),
    "log_format": "auto",
    "log_level": "info",
}

ALIASES = {"discovery_addr": ("--discovery",)}


def test_every_setting_keeps_its_name_and_default() -> None:
    """Flags, TOML, environment, `Client.open` and SGLang's JSON all use these names."""
    assert {name: row.default for name, row in SETTINGS.items()} == FROZEN
    assert {name: getattr(Config(), name) for name in SETTINGS} == FROZEN


@pytest.mark.parametrize("name", FROZEN)
def test_every_setting_keeps_its_flag_and_environment_variable(name: str) -> None:
    """Both follow from the name; other spellings of a flag are listed."""
    row = SETTINGS[name]

    assert row.flag == "--" + name.replace("_", "-")
    assert row.environment == "PEERCACHE_" + name.upper()
    assert row.aliases == ALIASES.get(name, ())
