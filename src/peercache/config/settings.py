"""The configuration: one flat set of names for flags, TOML, environment, Client.open and SGLang.

Sources, later ones win: defaults, the TOML file, environment (`PEERCACHE_POOL_SIZE`), flags or
keyword arguments or SGLang's extra-config JSON. It is read once, validated as a whole and frozen.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from peercache.config import quantities
from peercache.config.quantities import (
    DEFAULT_CONTROL_PORT,
    format_address,
    parse_address,
    parse_size,
)
from peercache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same library under its name before 3.11
    import tomli as tomllib

__all__ = [
    "DEFAULT_CONTROL_PORT", "DEFAULT_METRICS_PORT", "ENVIRONMENT_PREFIX", "FIELDS", "SGLANG_KEYS",
    "Config", "format_address", "parse_address", "parse_size",
]  # fmt: skip

DEFAULT_METRICS_PORT = 31997
ENVIRONMENT_PREFIX = "PEERCACHE_"

SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Keys of SGLang's extra-config JSON that are not ours and pass."""


def _of(
    convert: Callable[[Any], Any],
    default: Any,
    help_text: str,
    choices: tuple[str, ...] = (),
    *,
    secret: bool = False,
) -> Any:
    return attrs.field(
        default=default,
        kw_only=True,
        repr=not secret,
        metadata={"convert": convert, "help": help_text, "choices": choices},
    )


Rule: TypeAlias = tuple[bool, str, str]
"""(it is broken, the setting, what it wants)"""


@attrs.frozen
class Config:
    """Everything that can be set. docs/reference/configuration.md is made from this class."""

    # --- the node and its addresses
    cluster: str = _of(
        quantities.text, "default", "Name of the cluster; nodes and clients of another are refused."
    )
    listen: str = _of(
        quantities.text,
        "",
        "HOST:PORT of control and discovery. Default: every interface, port 31998, or a free "
        "port where that is taken; a port named here must be free.",
    )
    advertise: str = _of(
        quantities.text,
        "",
        "Host name or IP under which others reach this node. Default: the bound host, or, "
        "where that is a wildcard, the address this host uses towards the discovery address, or "
        "towards the internet where none is given.",
    )
    data_port: int = _of(quantities.whole, 0, "Port of the tcp fabric; 0 takes a free one.")
    discovery_addr: tuple[str, ...] = _of(
        quantities.addresses,
        (),
        "One or several HOST:PORT of nodes to join; the first ones that are reached become "
        "head masters. Empty: start a cluster alone.",
    )
    home: str = _of(
        quantities.text,
        "",
        "ipc://PATH where local clients reach this node, stable over restarts. For a client: "
        "the address in the node's ready line; empty embeds a node.",
    )
    host_name: str = _of(
        quantities.text,
        "",
        "Name of this host in the view, its masters' order and the log. Default: the system's"
        " host name.",
    )
    credentials: str = _of(
        quantities.text,
        "",
        "Shared secret that every node and client of the cluster presents; empty admits "
        "everybody who can connect.",
        secret=True,
    )
    # --- memory
    pool_size: int = _of(
        quantities.size,
        4 * 2**30,
        "Bytes of published memory for pages. Sizes may be written 4GiB or 100gb.",
    )
    shm_dir: str = _of(quantities.text, "/dev/shm", "Folder of the shared-memory file; a tmpfs.")  # noqa: S108 - the kernel's shared memory
    granule: int = _of(
        quantities.size,
        16 * 2**10,
        "Bytes a generation word stands for, and the unit of slots; a power of two, equal in "
        "the whole cluster.",
    )
    hugepages: str = _of(
        quantities.text,
        "off",
        "Huge pages for the pool, which must be free at the start: 2M or 1G; off takes normal "
        "pages from shm_dir.",
        ("off", "2M", "1G"),
    )
    hugepages_dir: str = _of(
        quantities.text,
        "",
        "Folder of the pool's file with huge pages. Default: the first hugetlbfs of that page "
        "size that is mounted.",
    )
    client_uncommitted_max: int = _of(
        quantities.size,
        0,
        "Most bytes one client may have reserved and not committed; 0 is half the pool.",
    )
    # --- disk
    disk_enabled: bool = _of(
        quantities.switch,
        default=False,
        help_text="Keep pages on disk too: they outlive eviction and restarts.",
    )
    disk_path: str = _of(
        quantities.text,
        "/data/peercache/",
        "Folder of the disk tier; each node locks one of its own below it.",
    )
    disk_size: int = _of(quantities.size, 100 * 10**9, "Most bytes that the disk tier takes.")
    disk_free_floor: float = _of(
        quantities.share, 0.05, "Share of the file system that the disk tier leaves free."
    )
    disk_ttl: float = _of(
        quantities.seconds, 0.0, "Seconds after which a page on disk is deleted; 0 is never."
    )
    write_policy: str = _of(
        quantities.text,
        "through",
        "When pages go to disk: through writes each one soon after it was stored, on_evict the "
        "coldest ones before the pool evicts them.",
        ("through", "on_evict"),
    )
    disk_queue: int = _of(
        quantities.size,
        256 * 2**20,
        "Most bytes that wait to be written to disk; what is more is not written, and counted.",
    )
    disk_promote_rate: int = _of(
        quantities.size,
        256 * 2**20,
        "Bytes a second that a node loads from disk because somebody asked whether they exist.",
    )
    # --- membership and directory
    max_masters: int = _of(quantities.whole, 3, "Nodes that collect heartbeats and share the view.")
    heartbeat_s: float = _of(quantities.seconds, 1.0, "Seconds between heartbeats to the masters.")
    suspect_s: float = _of(
        quantities.seconds, 3.0, "Silence after which a member is suspect; more than 2 heartbeats."
    )
    dead_s: float = _of(
        quantities.seconds, 6.0, "Silence after which a member is dead; more than suspect_s."
    )
    directory_replicas: int = _of(quantities.whole, 2, "Nodes that keep each location record.")
    virtual_nodes: int = _of(
        quantities.whole, 160, "Tokens a node has on the ring; equal in the whole cluster."
    )
    handover_s: float = _of(
        quantities.seconds,
        10.0,
        "Seconds after a view change in which a reader that finds nothing at an owner asks "
        "the next.",
    )
    summary_s: float = _of(
        quantities.seconds,
        2.0,
        "Seconds between two summaries of a record stream: how long a lost message may hide a"
        " page.",
    )
    republish_rate: int = _of(
        quantities.whole, 50_000, "Records a second that a node re-publishes after a view change."
    )
    # --- reading and writing
    fabric: str = _of(
        quantities.text,
        "auto",
        "How bytes move: auto chooses shm on one host, rdma where both sides have it, else tcp; "
        "rdma makes its absence an error.",
        ("auto", "shm", "tcp", "rdma"),
    )
    max_channels_per_peer: int = _of(
        quantities.whole,
        16,
        "Most tcp connections, and queue pairs a rail, that a client keeps to one peer.",
    )
    tcp_serving_threads: int = _of(
        quantities.whole,
        0,
        "Threads that send a node's pages over tcp, each for some of the connections. Default (0): "
        "one for 8 cores, 1 to 4.",
    )
    # --- rdma
    rdma_device_names: tuple[str, ...] = _of(
        quantities.names,
        (),
        "Devices to use, mlx5_0 or mlx5_0:2 (its second port) each: several are rails, and batches "
        "are striped over them. Default: the fastest one whose link is up.",
    )
    rdma_gid_index: int = _of(
        quantities.whole,
        -1,
        "Entry of the port's GID table. Default (-1): RoCE v2, IPv4 before IPv6.",
    )
    rdma_traffic_class: int = _of(
        quantities.whole, 0, "Traffic class of packets, 0 to 255: four times the DSCP value."
    )
    rdma_service_level: int = _of(quantities.whole, 0, "Service level, 0 to 15.")
    rdma_hop_limit: int = _of(quantities.whole, 64, "Routers that a packet may pass, 1 to 255.")
    rdma_timeout: int = _of(
        quantities.whole,
        14,
        "A packet is sent again after 4.096 µs × 2 to this power, 1 to 31; 14 is 67 ms.",
    )
    rdma_retry_count: int = _of(
        quantities.whole,
        6,
        "How often it is sent again, 0 to 6. Never 7: to some devices that means for ever.",
    )
    rdma_reads_at_once: int = _of(
        quantities.whole,
        16,
        "READs outstanding on a queue pair (max_rd_atomic), at most what both devices can do.",
    )
    verify: str = _of(
        quantities.text,
        "sampled",
        "Checksum beside the generation check: never, on 1 in 64 keys, or on all.",
        ("generation", "sampled", "full"),
    )
    op_timeout_s: float = _of(quantities.seconds, 2.0, "Deadline of a batch_get or batch_set.")
    exists_timeout_s: float = _of(quantities.seconds, 0.1, "Deadline of a batch_exists.")
    location_cache_entries: int = _of(
        quantities.whole,
        262_144,
        "Records a client remembers; 0 asks the directory for every page.",
    )
    # --- what people see
    metrics_port: int = _of(
        quantities.whole,
        -1,
        "Port of the overview (/), /metrics and /healthz; 0 turns it off. Default (-1): 31997, or "
        "a free port where that is taken, and none for a node embedded in an engine; a port named "
        "here must be free.",
    )
    log_format: str = _of(
        quantities.text,
        "auto",
        "Log lines as JSON or for a console; auto looks whether stderr is a terminal.",
        ("auto", "json", "console"),
    )
    log_level: str = _of(
        quantities.text,
        "info",
        "Least level that is logged.",
        ("debug", "info", "warning", "error"),
    )

    @classmethod
    def load(
        cls,
        settings: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Config:
        """Merge file, environment and settings; raise ConfigError for the first thing wrong."""
        merged: dict[str, Any] = {}
        if file is not None:
            merged.update(_read_toml(Path(file)))
        for name, value in sorted((environment or {}).items()):
            if name.startswith(ENVIRONMENT_PREFIX):
                field = name[len(ENVIRONMENT_PREFIX) :].lower()
                # Other tools of the project keep their switches under the same prefix.
                if field in FIELDS:
                    merged[field] = value
        merged.update(
            {name: value for name, value in (settings or {}).items() if value is not None}
        )
        return cls._checked(merged)

    @classmethod
    def from_sglang(
        cls, extra: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Config:
        """Read SGLang's extra-config JSON: its own keys pass, any other unknown one is an error."""
        ours = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
        return cls.load(ours, environment=environment)

    @classmethod
    def _checked(cls, merged: Mapping[str, Any]) -> Config:
        values: dict[str, Any] = {}
        for name, value in merged.items():
            field = FIELDS.get(name)
            if field is None:
                raise ConfigError(name, f"there is no such name{_meant(name)}")
            try:
                values[name] = field.metadata["convert"](value)
            except (ValueError, TypeError) as error:
                raise ConfigError(name, f"{value!r}: {error}") from error
            choices = field.metadata["choices"]
            if choices and values[name] not in choices:
                raise ConfigError(name, f"{value!r} is not one of {', '.join(choices)}")
        config = cls(**values)
        config.validate()
        return config

    def validate(self) -> None:
        """Check values and their relations; raise ConfigError that names the key."""
        for wrong, name, problem in _rules_of(self):
            if wrong:
                raise ConfigError(name, problem)
        if self.listen:
            try:
                parse_address(self.listen, default_port=DEFAULT_CONTROL_PORT)
            except ValueError as error:
                raise ConfigError("listen", str(error)) from error

    def host(self) -> str:
        """Return the host name for the view."""
        return self.host_name or socket.gethostname()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            settings: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from error
    for name, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError("config", f"{path} has a table [{name}]: settings stand in none")
    return settings


def _meant(name: str) -> str:
    known = get_close_matches(name, FIELDS, n=1)
    guess = f": is {known[0]} meant?" if known else ";"
    return f"{guess} `peercache config` lists all that there are"


FIELDS: dict[str, attrs.Attribute[Any]] = {field.name: field for field in attrs.fields(Config)}


def _rules_of(config: Config) -> list[Rule]:
    """Return what values must be, alone and beside each other, in the order of telling."""
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
