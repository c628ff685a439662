"""What settings must be beside each other. `config` is the Config, which imports this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peercache.config.discovery import is_source
from peercache.config.quantities import is_loopback, parse_address

LOOPBACK = "127.0.0.1"

HTTP_WAYS_OUT = (
    "other hosts reach that address: without certificates it wants http_open = true, which shows "
    "/metrics and /healthz only, or insecure = NAME"
)

UNNAMED_PORT = -1
"""Stands for the port that an address does not name."""

WAYS_OUT = (
    "give the node a certificate (`peercache certs` makes it; tls_ca, tls_cert, tls_key), or, for "
    "a trial in which every process that connects may read every page, set insecure = NAME"
)
"""What the error about an open address tells to do."""

RELATIONS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "pool_size",
        "wants at least one granule",
        lambda config: config.pool_size >= config.granule,
    ),
    (
        "suspect_s",
        "wants more than 2 heartbeat_s",
        lambda config: config.suspect_s > 2 * config.heartbeat_s,
    ),
    ("dead_s", "wants more than suspect_s", lambda config: config.dead_s > config.suspect_s),
    (
        "tls_ca",
        "tls_ca, tls_cert and tls_key go together: set all three, or none",
        lambda config: len({bool(config.tls_ca), bool(config.tls_cert), bool(config.tls_key)}) == 1,
    ),
    (
        "etcd_cert",
        "etcd_cert and etcd_key go together: set both, or none",
        lambda config: bool(config.etcd_cert) == bool(config.etcd_key),
    ),
    (
        "discovery_addr",
        "names etcd:// beside etcd_ca or etcd_cert, which is clear text: write etcds:// for TLS",
        lambda config: (
            not (config.etcd_ca or config.etcd_cert)
            or not any(entry.startswith("etcd://") for entry in config.discovery_addr)
        ),
    ),
    (
        "insecure",
        "is for trials without certificates: leave it out, or leave out tls_ca, tls_cert, tls_key",
        lambda config: not (config.insecure and config.has_tls),
    ),
    (
        "listen",
        f"other hosts reach that address; {WAYS_OUT}",
        lambda config: config.is_open or is_loopback(config.listen_address()[0]),
    ),
    (
        "discovery_addr",
        f"names another host, and this node listens on loopback only; {WAYS_OUT}",
        lambda config: config.is_open or all(map(_is_on_this_host, config.discovery_addr)),
    ),
    (
        "http_listen",
        HTTP_WAYS_OUT,
        lambda config: (
            config.is_open or config.http_open or is_loopback(_host_of(config.http_listen))
        ),
    ),
    (
        "http_listen",
        "says something else than metrics_port: leave one of them out",
        lambda config: not config.http_listen or _is_one_port(config),
    ),
    (
        "fabric",
        "rdma does not encrypt; beside TLS it wants rdma_clear_text = true",
        lambda config: config.fabric != "rdma" or config.may_use_rdma,
    ),
    (
        "disk_path",
        "wants a folder where disk_enabled is true",
        lambda config: bool(config.disk_path) or not config.disk_enabled,
    ),
)
"""What settings must be beside each other: the one to name, the problem, and the check."""


def _is_one_port(config: Any) -> bool:
    _, port = parse_address(config.http_listen, default_port=UNNAMED_PORT)
    is_off = config.metrics_port == 0
    return config.metrics_port == -1 or (not is_off and port in (UNNAMED_PORT, config.metrics_port))


def _host_of(http_listen: str) -> str:
    return parse_address(http_listen or LOOPBACK, default_port=UNNAMED_PORT)[0]


def _is_on_this_host(address: str) -> bool:
    return not is_source(address) and is_loopback(parse_address(address)[0])
