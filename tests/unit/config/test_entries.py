"""What discovery_addr may name, and names of settings that no release may take away."""

from __future__ import annotations

from typing import Any

import pytest

from peercache.config.entries import (
    DnsAddress,
    EtcdAddress,
    KubernetesAddress,
    heads_of,
    hosts_to_ask,
    parse_discovery,
    parse_source,
    sources_of,
)
from peercache.config.settings import SETTINGS, Config
from peercache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dns://nodes.svc:5", DnsAddress("dns://nodes.svc:5", "nodes.svc", 5)),
        ("dns://nodes", DnsAddress("dns://nodes:31998", "nodes", 31998)),
        ("etcd://a:1/pc", EtcdAddress("etcd://a:1/pc", (("a", 1),), "pc")),
        (
            "etcd://a,[::1]:7/pc/nodes/",
            EtcdAddress("etcd://a:2379,[::1]:7/pc/nodes", (("a", 2379), ("::1", 7)), "pc/nodes"),
        ),
        ("etcds://a/pc", EtcdAddress("etcds://a:2379/pc", (("a", 2379),), "pc", has_tls=True)),
        ("k8s://peercache", KubernetesAddress("k8s://peercache", "peercache", "", 0)),
        ("k8s://pc.prod:5", KubernetesAddress("k8s://pc.prod:5", "pc", "prod", 5)),
    ],
)  # fmt: skip
def test_a_source_is_a_url(text: str, expected: object) -> None:
    """Its text is written one way, and reads back as itself."""
    found = parse_source(text)

    assert found == expected
    assert parse_source(found.text) == found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dns://", "must be dns://NAME"),
        ("dns://:5", "must be dns://NAME"),
        ("dns://a:0", "must be dns://NAME"),
        ("dns://a/b", "must be dns://NAME"),
        ("dns://a b", "must be dns://NAME"),
        ("etcd://a:1", "must be etcd://HOST:PORT"),
        ("etcd://a:1/", "must be etcd://HOST:PORT"),
        ("etcd:///pc", "must be etcd://HOST:PORT"),
        ("etcd://root:secret@a:1/pc", "must be etcd://HOST:PORT"),
        ("etcd://a:1,b:2", "must be etcd://HOST:PORT"),
        ("etcds://a:1,b:2", "etcds:// for TLS"),
        ("etcd://a:1,dns://b", "must be etcd://HOST:PORT"),
        ("etcd://a:1/pc nodes", "must be etcd://HOST:PORT"),
        ("etcd://a:1/" + "x" * 201, "must be etcd://HOST:PORT"),
        ("k8s://", "must be k8s://SERVICE"),
        ("k8s://Pc", "must be k8s://SERVICE"),
        ("k8s://a.b.c", "must be k8s://SERVICE"),
        ("k8s://a.", "must be k8s://SERVICE"),
        ("k8s://a.b/c", "must be k8s://SERVICE"),
        ("consul://a", "dns://, etcd://, etcds:// or k8s://"),
        ("dns://a,dns://b,dns://c,dns://d,dns://e", "more than 4 sources"),
    ],
)
def test_wrong_source_is_answered_with_its_form(text: str, wanted: str) -> None:
    """One sentence names the setting, what is wrong and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        Config.load({"discovery_addr": text, "insecure": True})

    assert caught.value.name == "discovery_addr"
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["a,etcds://b:1,c:2/pc,dns://d", ["a", "etcds://b:1,c:2/pc", "dns://d"]],
    ids=["text", "list"],
)
def test_nodes_and_sources_stand_side_by_side(value: Any) -> None:
    """The servers of one etcd belong together, though commas stand between them."""
    entries = parse_discovery(value)

    assert entries == ("a:31998", "etcds://b:1,c:2/pc", "dns://d:31998")
    assert heads_of(entries) == ("a:31998",)
    assert [source.text for source in sources_of(entries)] == list(entries[1:])
    asked = [host for entry in (*entries, "k8s://pc") for host in hosts_to_ask(entry)]
    assert asked == ["a:31998", "b:1", "c:2", "d:31998"]
    assert parse_discovery(SETTINGS["discovery_addr"].kind.written(entries)) == entries


def test_node_on_loopback_asks_no_source() -> None:
    """A source names other hosts, which could not call back."""
    with pytest.raises(ConfigError, match="'discovery_addr': names another host"):
        Config.load({"discovery_addr": "dns://localhost"})


@pytest.mark.parametrize(
    ("settings", "name", "said"),
    [
        ({"etcd_cert": "a.crt"}, "etcd_cert", "go together"),
        (
            {"etcd_ca": "ca.crt", "discovery_addr": "etcd://a/pc"},
            "discovery_addr",
            "write etcds://",
        ),
    ],
)
def test_files_for_etcd_are_whole_and_never_left_unused(
    settings: dict[str, Any], name: str, said: str
) -> None:
    """A certificate wants its key; clear text with an authority is a mistake."""
    with pytest.raises(ConfigError, match=said) as caught:
        Config.load({**settings, "insecure": True})

    assert caught.value.name == name


GIB = 2**30

# Every setting as it was before the table of settings was made, with its default.
FROZEN: dict[str, Any] = {
    "cluster": "default",
    "listen": "",
    "advertise": "",
    "data_port": -1,
    "discovery_addr": (),
    "home": "",
    "embedded": False,
    "namespace": "",
    "host_name": "",
    "tls_ca": "",
    "tls_cert": "",
    "tls_key": "",
    "tls_crl": "",
    "etcd_ca": "",
    "etcd_cert": "",
    "etcd_key": "",
    "insecure": False,
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
    "fabric": "auto",
    "max_channels_per_peer": 16,
    "tcp_congestion": "",
    "tcp_serving_threads": 0,
    "rdma_device_names": (),
    "rdma_gid_index": -1,
    "rdma_traffic_class": 0,
    "rdma_service_level": 0,
    "rdma_timeout_ms": 67.0,
    "rdma_retry_count": 6,
    "rdma_clear_text": False,
    "verify": "sampled",
    "op_timeout_s": 2.0,
    "exists_timeout_s": 0.1,
    "decline": "off",
    "page_compute_ms": 0.0,
    "location_cache_entries": 262144,
    "mirror_pulls": "off",
    "mirror_share": 0.25,
    "spill": True,
    "copies": 1,
    "placement_rate": 512 * 2**20,
    "placement_min_age": 20.0,
    "quotas": (),
    "metrics_port": -1,
    "http_listen": "",
    "http_open": False,
    "http_token_file": "",
    "engine_events": (),
    "object_events": "",
    "event_readers": (),
    "otel_traces": False,
    "objective_exists_s": 0.001,
    "objective_memory_s": 0.0005,
    "objective_disk_s": 0.01,
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
