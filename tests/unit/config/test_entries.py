"""What discovery_addr may name, and what is said of anything else."""

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
        ("dns://", "wants dns://NAME"),
        ("dns://:5", "wants dns://NAME"),
        ("dns://a:0", "wants dns://NAME"),
        ("dns://a/b", "wants dns://NAME"),
        ("dns://a b", "wants dns://NAME"),
        ("etcd://a:1", "wants etcd://HOST:PORT"),
        ("etcd://a:1/", "wants etcd://HOST:PORT"),
        ("etcd:///pc", "wants etcd://HOST:PORT"),
        ("etcd://root:secret@a:1/pc", "wants etcd://HOST:PORT"),
        ("etcd://a:1,b:2", "wants etcd://HOST:PORT"),
        ("etcds://a:1,b:2", "etcds:// for TLS"),
        ("etcd://a:1,dns://b", "wants etcd://HOST:PORT"),
        ("etcd://a:1/pc nodes", "wants etcd://HOST:PORT"),
        ("etcd://a:1/" + "x" * 201, "wants etcd://HOST:PORT"),
        ("k8s://", "wants k8s://SERVICE"),
        ("k8s://Pc", "wants k8s://SERVICE"),
        ("k8s://a.b.c", "wants k8s://SERVICE"),
        ("k8s://a.", "wants k8s://SERVICE"),
        ("k8s://a.b/c", "wants k8s://SERVICE"),
        ("consul://a", "dns://, etcd://, etcds:// or k8s://"),
        ("dns://a,dns://b,dns://c,dns://d,dns://e", "more than 4 sources"),
    ],
)
def test_wrong_source_is_answered_with_its_form(text: str, wanted: str) -> None:
    """One sentence names the setting, what is wrong and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        Config.load({"discovery_addr": text, "insecure": "x"})

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
    """A certificate wants its key; clear text beside an authority is a mistake."""
    with pytest.raises(ConfigError, match=said) as caught:
        Config.load({**settings, "insecure": "x"})

    assert caught.value.name == name
