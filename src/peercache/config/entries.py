"""Entries: settings that name several things, `discovery_addr`, `engine_events` and the quotas.

`discovery_addr` names nodes by their addresses, and sources of addresses, as URLs:
`dns://NAME[:PORT]`, `etcd://HOST:PORT[,HOST:PORT]/PREFIX` (`etcds://` over TLS),
`k8s://SERVICE[.NAMESPACE][:PORT]`. `engine_events` names engines that publish which blocks they
have on their GPU. A quota is NAME=SHARE[/DISK_SHARE][,priority=N][,ttl=TIME[/DISK_TIME]], one rule
for each namespace or pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import attrs

from peercache.config.quantities import (
    DEFAULT_CONTROL_PORT,
    exact_size,
    format_address,
    parse_address,
    parse_names,
    parse_seconds,
    parse_size,
    written_duration,
)
from peercache.model.room import PRIORITY_MAX, RULES_MAX, Amount, QuotaRule

ETCD_PORT = 2379
"""The port that IANA has assigned to clients of etcd."""

SOURCES_MAX = 4
"""Sources of one node: each is queried all the time."""

_SCHEME = re.compile(r"([A-Za-z0-9+.-]+)://(.*)", re.ASCII | re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", re.ASCII)
_PREFIX_CHARACTERS_MAX = 200

_DNS = "must be dns://NAME or dns://NAME:PORT"
_ETCD = "must be etcd://HOST:PORT[,HOST:PORT]/PREFIX, or etcds:// for TLS"
_ETCD_SCHEMES = ("etcd", "etcds")
_KUBERNETES = "must be k8s://SERVICE, k8s://SERVICE.NAMESPACE or k8s://SERVICE.NAMESPACE:PORT"


@attrs.frozen
class DnsAddress:
    """A DNS name with the addresses of nodes, such as that of a headless service."""

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
    """A service of Kubernetes. namespace: "" means the pod's own; port: 0 means the slice's own."""

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
    """Return each HOST:PORT of an entry that must be resolved; none if the platform passes it to
    the pod.
    """
    if not is_source(entry):
        return (entry,)
    source = parse_source(entry)
    if isinstance(source, DnsAddress):
        return (format_address(source.name, source.port),)
    if isinstance(source, EtcdAddress):
        return tuple([format_address(host, port) for host, port in source.servers])
    return ()


def is_source(entry: str) -> bool:
    """Return whether an entry is a URL, not a HOST:PORT."""
    return "://" in entry


def parse_source(text: str) -> SourceAddress:
    """Return the source that a URL names; raise a ValueError that explains what is allowed."""
    match = _SCHEME.fullmatch(text)
    scheme, rest = (match[1], match[2]) if match is not None else ("", "")
    if scheme == "dns":
        return _parse_dns(text, rest)
    if scheme in _ETCD_SCHEMES:
        return _parse_etcd(text, scheme, rest)
    if scheme == "k8s":
        return _parse_kubernetes(text, rest)
    raise ValueError(f"{text!r} must be HOST:PORT, dns://, etcd://, etcds:// or k8s://")


def _whole(items: Iterable[str]) -> Iterable[str]:
    """Yield the entries: the servers of one etcd cluster are also separated by commas."""
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
        raise ValueError(f"{text!r} must have a host, and a port above 0, to connect to")
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


ENGINES_MAX = 64
"""The most engines that one process follows."""

_ENTRY = re.compile(r"([A-Za-z0-9_.:-]{1,64})=([^+\s]+)(?:\+([^+\s]+))?", re.ASCII)
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})|ipc:///\S{1,100}")


@attrs.frozen
class EngineEvents:
    """The endpoints at which an engine publishes its KV events.

    name:     for answers and logs. endpoint: of its publisher, tcp://HOST:PORT or ipc:///PATH.
    replay: the endpoint for events to be sent again; "" if it has none.
    """

    name: str
    endpoint: str
    replay: str = ""

    def __str__(self) -> str:
        """Return the text of the setting."""
        return f"{self.name}={self.endpoint}{self.replay and '+' + self.replay}"


def parse_engines(value: Any) -> tuple[EngineEvents, ...]:
    """Return engines, from a list or a string with commas; raise ValueError."""
    if isinstance(value, tuple) and all(isinstance(one, EngineEvents) for one in value):
        return value
    entries = [_engine(text) for text in parse_names(value, of="NAME=ENDPOINT")]
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("names an engine twice")
    if len(entries) > ENGINES_MAX:
        raise ValueError(f"names more than {ENGINES_MAX} engines")
    return tuple(entries)


def written_engines(value: tuple[EngineEvents, ...]) -> str:
    """Return the setting as `parse_engines` reads it."""
    return ",".join(map(str, value))


def _engine(text: str) -> EngineEvents:
    found = _ENTRY.fullmatch(text)
    if found is None or not all(map(_is_endpoint, filter(None, found.group(2, 3)))):
        raise ValueError(
            f"has {text!r:.80}: an engine is NAME=tcp://HOST:PORT, or with the endpoint that "
            "sends events again NAME=tcp://HOST:PORT+tcp://HOST:PORT"
        )
    return EngineEvents(found[1], found[2], found[3] or "")


def _is_endpoint(text: str) -> bool:
    found = _ENDPOINT.fullmatch(text)
    return found is not None and (not found[2] or 0 < int(found[2]) < 2**16)


TTL_MIN_S = 1.0
"""The shortest time to live: nodes look for pages that have expired once a second."""

_WANTED = "NAME=20%, NAME=4GiB or NAME=20%/40%,priority=1,ttl=1h/10d, with ';' between them"


def parse_quotas(value: Any) -> tuple[QuotaRule, ...]:
    """Return rules from a list of texts, or from one text with semicolons."""
    if isinstance(value, str):
        items = value.split(";")
    elif isinstance(value, (list, tuple)):
        items = [str(item) for item in value]
    else:
        raise TypeError(f"must be {_WANTED}")
    rules = tuple([_rule(item.strip()) for item in items if item.strip()])
    patterns = [rule.pattern for rule in rules]
    if len(rules) > RULES_MAX:
        raise ValueError(f"must have at most {RULES_MAX} rules")
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"{pattern!r} has two rules")
    for tier in ("pool", "disk"):
        parts = [getattr(rule, tier).part for rule in rules if rule.is_exact]
        if math.fsum(parts) > 1 + 1e-9:
            raise ValueError(f"the shares of the {tier} come to {math.fsum(parts):.0%} in all")
    return rules


def written_quotas(rules: tuple[QuotaRule, ...]) -> str:
    """Return rules as `parse_quotas` reads them."""
    return ";".join(map(_written, rules))


def _rule(text: str) -> QuotaRule:
    shares, *rest = text.split(",")
    match = re.fullmatch(r"([^=;]+)=([^/=]+)(?:/([^/=]+))?", shares)
    options = {name.strip(): value for name, _, value in (part.partition("=") for part in rest)}
    priority = options.get("priority", "0").strip()
    are_known = len(options) == len(rest) and options.keys() <= {"priority", "ttl"}
    if match is None or not are_known or not re.fullmatch(r"[0-9]{1,9}", priority):
        raise ValueError(f"{text!r}: must be {_WANTED}")
    if int(priority) > PRIORITY_MAX:
        raise ValueError(f"{text!r}: a priority is at most {PRIORITY_MAX}")
    pool = _amount(match[2])
    disk = _amount(match[3]) if match[3] else pool
    ttl_s, disk_ttl_s = _times(text, options.get("ttl"))
    return QuotaRule(match[1].strip(), pool, disk, int(priority), ttl_s, disk_ttl_s)


def _times(text: str, ttl: str | None) -> tuple[float | None, float | None]:
    """Return the time to live in memory, and that on disk."""
    if ttl is None:
        return None, None
    times = [parse_seconds(part) for part in ttl.split("/")]
    if len(times) > 2 or any(0 < time < TTL_MIN_S or time < 0 for time in times):
        raise ValueError(f"{text!r}: a ttl is a time of {TTL_MIN_S:g}s or more, or 0: never")
    return times[0], times[-1]


def _amount(text: str) -> Amount:
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    if match is None:
        return Amount(size_bytes=parse_size(text))
    if float(match[1]) > 100:
        raise ValueError(f"{text!r} is more than all of it")
    return Amount(part=float(match[1]) / 100)


def _written(rule: QuotaRule) -> str:
    amounts = "/".join(map(_written_amount, dict.fromkeys((rule.pool, rule.disk))))
    written = f"{rule.pattern}={amounts}" + (f",priority={rule.priority}" if rule.priority else "")
    if rule.ttl_s is None or rule.disk_ttl_s is None:
        return written
    times = dict.fromkeys((rule.ttl_s, rule.disk_ttl_s))
    return f"{written},ttl={'/'.join(map(written_duration, times))}"


def _written_amount(amount: Amount) -> str:
    return exact_size(amount.size_bytes) if amount.size_bytes else f"{amount.part * 100:.15g}%"
