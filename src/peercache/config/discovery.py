"""What `discovery_addr` names: nodes by their addresses, and sources that give addresses.

A source is written as a URL: `dns://NAME[:PORT]`, `etcd://HOST:PORT[,HOST:PORT]/PREFIX`
(`etcds://` over TLS), `k8s://SERVICE[.NAMESPACE][:PORT]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import attrs

from peercache.config.quantities import (
    DEFAULT_CONTROL_PORT,
    format_address,
    parse_address,
    parse_names,
)

ETCD_PORT = 2379
"""The port that IANA lists for clients of etcd."""

SOURCES_MAX = 4
"""Sources of one node: each is asked all the time."""

_SCHEME = re.compile(r"([A-Za-z0-9+.-]+)://(.*)", re.ASCII | re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", re.ASCII)
_PREFIX_CHARACTERS_MAX = 200

_DNS = "wants dns://NAME or dns://NAME:PORT"
_ETCD = "wants etcd://HOST:PORT[,HOST:PORT]/PREFIX, or etcds:// for TLS"
_ETCD_SCHEMES = ("etcd", "etcds")
_KUBERNETES = "wants k8s://SERVICE, k8s://SERVICE.NAMESPACE or k8s://SERVICE.NAMESPACE:PORT"


@attrs.frozen
class DnsAddress:
    """A name all of whose addresses are nodes', such as that of a headless service."""

    text: str
    name: str
    port: int


@attrs.frozen
class EtcdAddress:
    """The members of an etcd cluster, and the prefix below which nodes write their addresses."""

    text: str
    servers: tuple[tuple[str, int], ...]
    prefix: str
    has_tls: bool = False


@attrs.frozen
class KubernetesAddress:
    """A service of Kubernetes. namespace: "" is the pod's own; port: 0 is the slice's own."""

    text: str
    service: str
    namespace: str
    port: int


SourceAddress: TypeAlias = DnsAddress | EtcdAddress | KubernetesAddress


def parse_discovery(value: Any) -> tuple[str, ...]:
    """Return nodes to connect to and sources to ask, from a list or a string with commas."""
    entries = tuple([_entry(item) for item in _whole(parse_names(value, of="HOST:PORT"))])
    if len(sources_of(entries)) > SOURCES_MAX:
        raise ValueError(f"names more than {SOURCES_MAX} sources")
    return entries


def heads_of(entries: Iterable[str]) -> tuple[str, ...]:
    """Return the entries that are a node's HOST:PORT, in their order."""
    return tuple([entry for entry in entries if not is_source(entry)])


def sources_of(entries: Iterable[str]) -> tuple[SourceAddress, ...]:
    """Return the entries that name a source, in their order."""
    return tuple([parse_source(entry) for entry in entries if is_source(entry)])


def hosts_to_ask(entry: str) -> tuple[str, ...]:
    """Return each HOST:PORT whose name an entry wants resolved; none where a pod is told it."""
    if not is_source(entry):
        return (entry,)
    source = parse_source(entry)
    if isinstance(source, DnsAddress):
        return (format_address(source.name, source.port),)
    if isinstance(source, EtcdAddress):
        return tuple([format_address(host, port) for host, port in source.servers])
    return ()


def is_source(entry: str) -> bool:
    """Return whether an entry is a URL, and no HOST:PORT."""
    return "://" in entry


def parse_source(text: str) -> SourceAddress:
    """Return what a URL names; raise ValueError that says what is allowed."""
    match = _SCHEME.fullmatch(text)
    scheme, rest = (match[1], match[2]) if match is not None else ("", "")
    if scheme == "dns":
        return _parse_dns(text, rest)
    if scheme in _ETCD_SCHEMES:
        return _parse_etcd(text, scheme, rest)
    if scheme == "k8s":
        return _parse_kubernetes(text, rest)
    raise ValueError(f"{text!r} wants HOST:PORT, dns://, etcd://, etcds:// or k8s://")


def _whole(items: Iterable[str]) -> Iterable[str]:
    """Yield the entries: the servers of one etcd cluster have commas between them too."""
    begun = ""
    for item in items:
        if begun and is_source(item):
            raise ValueError(f"{begun!r} {_ETCD}")
        begun = f"{begun},{item}" if begun else item
        scheme, _, rest = begun.partition("://")
        if scheme in _ETCD_SCHEMES and "/" not in rest:
            continue
        yield begun
        begun = ""
    if begun:
        raise ValueError(f"{begun!r} {_ETCD}")


def _entry(text: str) -> str:
    if is_source(text):
        return parse_source(text).text
    host, port = parse_address(text, default_port=DEFAULT_CONTROL_PORT)
    if not host or not port:
        raise ValueError(f"{text!r} wants a host, and a port above 0, to connect to")
    return format_address(host, port)


def _parse_dns(text: str, rest: str) -> DnsAddress:
    name, port = _named(text, rest, DEFAULT_CONTROL_PORT, _DNS)
    if not _NAME.fullmatch(name) or not port:
        raise ValueError(f"{text!r} {_DNS}")
    return DnsAddress(f"dns://{format_address(name, port)}", name, port)


def _parse_etcd(text: str, scheme: str, rest: str) -> EtcdAddress:
    servers, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _PREFIX.fullmatch(prefix) or len(prefix) > _PREFIX_CHARACTERS_MAX:
        raise ValueError(f"{text!r} {_ETCD}")
    found = tuple([_named(text, server, ETCD_PORT, _ETCD) for server in servers.split(",")])
    if not all(host and port and "@" not in host for host, port in found):
        raise ValueError(f"{text!r} {_ETCD}")
    written = ",".join([format_address(host, port) for host, port in found])
    return EtcdAddress(f"{scheme}://{written}/{prefix}", found, prefix, scheme == "etcds")


def _parse_kubernetes(text: str, rest: str) -> KubernetesAddress:
    name, port = _named(text, rest, 0, _KUBERNETES)
    service, _, namespace = name.partition(".")
    labels = (service, namespace) if "." in name else (service,)
    if not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text!r} {_KUBERNETES}")
    written = f"k8s://{name}:{port}" if port else f"k8s://{name}"
    return KubernetesAddress(written, service, namespace, port)


def _named(text: str, rest: str, default_port: int, wanted: str) -> tuple[str, int]:
    try:
        return parse_address(rest, default_port=default_port)
    except ValueError as error:
        raise ValueError(f"{text!r} {wanted}") from error
