"""The configuration: one table of settings for flags, TOML, environment, `Client.open` and SGLang.

Later sources win: defaults, the TOML file, the environment (`PEERCACHE_POOL_SIZE`), then flags,
keyword arguments or SGLang's extra-config JSON. A configuration is read once, validated as a whole,
and frozen.

Each value keeps its source, which errors about it name. `RELATIONS` lists the conditions between
settings.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from math import ceil, log2
from pathlib import Path
from typing import Any

import attrs

from peercache.config.entries import EngineEvents, is_source
from peercache.config.quantities import DEFAULT_CONTROL_PORT, is_loopback, parse_address
from peercache.config.table import (
    DEVICES,
    ENGINES,
    ENVIRONMENT_PREFIX,
    FILE,
    FOLDER,
    HOME,
    HOST,
    LISTEN,
    MILLISECONDS,
    NETWORKS,
    PEERS,
    POWER_OF_TWO,
    QUOTAS,
    REPLICAS,
    SECONDS,
    SHARE,
    SIZE,
    SWITCH,
    TEXT,
    USERS,
    WHOLE,
    Setting,
    choice,
    environment_name,
    setting,
    switch,
)
from peercache.errors import ConfigError
from peercache.model.room import QuotaRule

REMOVED = {
    "credentials": "is gone: a secret that all share distinguishes no process. Use certificates "
    "(`peercache certs` makes them; tls_ca, tls_cert, tls_key), or, for a trial, insecure = true",
    "rdma_timeout": "is gone: rdma_timeout_ms has the time in milliseconds, and 14 was 67",
    **dict.fromkeys(
        (
            "virtual_nodes", "handover_s", "summary_s", "republish_rate", "rdma_hop_limit",
            "rdma_reads_at_once",
        ),
        "is gone: it has its former default on all nodes now, so leave it out",
    ),
}  # fmt: skip
"""Settings of earlier builds, and what to use instead. Credentials would protect nothing."""

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
"""Keys of SGLang's extra-config JSON that are SGLang's own."""


LOOPBACK = "127.0.0.1"

HTTP_WAYS_OUT = (
    "other hosts reach that address: without certificates it requires http_open = true, which "
    "shows /metrics and /healthz only, or insecure = true"
)

UNNAMED_PORT = -1
"""Stands for the port that an address does not name."""

WAYS_OUT = (
    "give the node a certificate (`peercache certs` makes it; tls_ca, tls_cert, tls_key), or, for "
    "a trial in which every process that connects may read every page, set insecure = true"
)
"""The remedy in the error about an open address."""

RELATIONS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    (
        "pool_size",
        "must be at least one granule",
        lambda config: config.pool_size >= config.granule,
    ),
    (
        "suspect_s",
        "must be more than 2 heartbeat_s",
        lambda config: config.suspect_s > 2 * config.heartbeat_s,
    ),
    ("dead_s", "must be more than suspect_s", lambda config: config.dead_s > config.suspect_s),
    (
        "decline",
        "is cost, and page_compute_ms is 0: state how long the engine takes to compute a page",
        lambda config: config.decline == "off" or config.page_compute_ms > 0,
    ),
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
        "names etcd://, which is clear text, and etcd_ca or etcd_cert: write etcds:// for TLS",
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
        "contradicts metrics_port: set only one of them",
        lambda config: not config.http_listen or _is_one_port(config),
    ),
    (
        "embedded",
        "runs a node in this process, and home names another node: leave one of them out",
        lambda config: not (config.embedded and config.home),
    ),
    (
        "fabric",
        "rdma does not encrypt; with TLS it requires rdma_clear_text = true",
        lambda config: config.fabric != "rdma" or config.may_use_rdma,
    ),
    (
        "disk_path",
        "must name a folder if disk_enabled is true",
        lambda config: bool(config.disk_path) or not config.disk_enabled,
    ),
)
"""Conditions between settings: the setting to name, the problem, and the check."""


def _is_one_port(config: Any) -> bool:
    _, port = parse_address(config.http_listen, default_port=UNNAMED_PORT)
    is_off = config.metrics_port == 0
    return config.metrics_port == -1 or (not is_off and port in (UNNAMED_PORT, config.metrics_port))


def _host_of(http_listen: str) -> str:
    return parse_address(http_listen or LOOPBACK, default_port=UNNAMED_PORT)[0]


def _is_on_this_host(address: str) -> bool:
    return not is_source(address) and is_loopback(parse_address(address)[0])


if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same library under its name before 3.11
    import tomli as tomllib

MISSPELT = 0.78
"""How similar to a setting a variable must be, without the prefix, to count as a mistake. Other
tools set variables with the same prefix, and so does Kubernetes for a service of this name:
PEERCACHE_SERVICE_PORT is 0.75 like metrics_port."""


def from_environment(
    environment: Mapping[str, str], known: Collection[str], removed: Collection[str]
) -> dict[str, str]:
    """Return the values of settings that variables hold; raise ConfigError for a misspelt one."""
    found = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        is_spelt = environment_name(name) == variable
        if is_spelt and (name in known or name in removed):
            found[name] = value
        elif meant := get_close_matches(name, known, n=1, cutoff=MISSPELT):
            problem = f"no setting has this variable: is {environment_name(meant[0])} meant?"
            raise ConfigError(variable, problem)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file; raise ConfigError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            settings: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from error
    for name, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError("config", f"{path} has a table [{name}]: no setting is in a table")
    return settings


DEFAULT_METRICS_PORT = 31997

DEFAULT_CLUSTER = "default"

CLUSTER_CHARACTERS_MAX = 255


@attrs.frozen
class Config:
    """The table of settings, and their values: attributes with the names of the settings."""

    # --- the node and its addresses
    cluster: str = setting(
        TEXT,
        DEFAULT_CLUSTER,
        "Name of the cluster; a node refuses nodes and clients of another cluster.",
        low=1,
        high=CLUSTER_CHARACTERS_MAX,
    )
    listen: str = setting(
        LISTEN,
        "",
        'HOST:PORT of control and discovery; ":PORT" is every interface. An address that other '
        "hosts reach requires tls_ca or insecure. Default: 127.0.0.1, or every interface with "
        "tls_ca or insecure; port 31998, or a free port where that is taken. A port named here "
        "must be free.",
    )
    advertise: str = setting(
        HOST,
        "",
        "Host name or IP under which others reach this node. Default: the bound host, or, where "
        "that is a wildcard, the address at which other nodes have connected; before the first "
        "connection the address that this host uses towards the discovery address or the internet.",
    )
    data_port: int = setting(
        WHOLE,
        -1,
        "Port of the tcp fabric; 0 takes a free one. Default (-1): 31999, or a free port where "
        "that is taken, or if `listen` has port 0; a port named here must be free.",
        low=-1,
        high=65_535,
    )
    discovery_addr: tuple[str, ...] = setting(
        PEERS,
        (),
        "One or several HOST:PORT of nodes to join, the first ones of which become head masters; "
        "or what gives addresses: dns://NAME:PORT, etcd://HOST:PORT[,HOST:PORT]/PREFIX, etcds:// "
        "for etcd over TLS, or k8s://SERVICE[.NAMESPACE][:PORT]. Empty: start a cluster alone.",
        aliases=("--discovery",),
    )
    home: str = setting(
        HOME,
        "",
        "ipc://PATH where a node listens for the clients of its host, and where these find it. "
        "Default: ipc:///run/peercache/home.ipc for root and for users who may write to that "
        "folder, else home.ipc in $XDG_RUNTIME_DIR/peercache, or without it in /tmp/peercache-UID. "
        "A client of a user without such a node looks in /run/peercache, too.",
    )
    embedded: bool = switch(
        "For a client: run a node in this process, with a pool of its own, instead of using the "
        "node of this host. A node itself ignores it.",
    )
    namespace: str = setting(
        TEXT,
        "",
        "Name of the namespace of this client's pages, which certificates give rights to. For "
        "SGLang it replaces the served model's name and the identity of the weights: new weights "
        "need a new name. Default: the SGLang server's own; `default` for other clients.",
        high=255,
    )
    host_name: str = setting(
        TEXT,
        "",
        "Name of this host in the view, its masters' order and the log. Default: the system's "
        "host name.",
    )
    # --- trust
    tls_ca: str = setting(
        FILE,
        "",
        "Certificates of the authorities that sign this cluster's certificates, as PEM; two while "
        "one replaces the other. Requires tls_cert and tls_key.",
    )
    tls_cert: str = setting(
        FILE,
        "",
        "Certificate of this node or client, as PEM. `peercache certs` makes certificates.",
    )
    tls_key: str = setting(
        FILE,
        "",
        "Private key of tls_cert, as PEM; other users must not be able to read the file.",
    )
    tls_crl: str = setting(
        FILE,
        "",
        "List of revoked certificates, signed by an authority of tls_ca; the node keeps newer ones "
        "that it receives there. Default: revoked.crl in the folder of tls_ca.",
    )
    insecure: bool = switch(
        "For trials: without certificates, listen for other hosts, and trust those that answer. "
        "Every process that can connect reads every page.",
    )
    share_group: str = setting(
        TEXT,
        "",
        "Group, by name or number. Its members share this host's node: they may read its memory "
        "and write at it. Empty: only the node's own user, root and share_uids.",
    )
    share_uids: tuple[str, ...] = setting(
        USERS, (), "Further users, by name or number, that share this host's node."
    )
    etcd_ca: str = setting(
        FILE,
        "",
        "Certificates of the authorities that sign the etcd servers of etcds://, as PEM. Default: "
        "those that this system trusts.",
    )
    etcd_cert: str = setting(
        FILE,
        "",
        "Certificate by which this node proves itself to the etcd servers of etcds://, as PEM.",
    )
    etcd_key: str = setting(
        FILE,
        "",
        "Private key of etcd_cert, as PEM; other users must not be able to read the file.",
    )
    # --- memory
    pool_size: int = setting(
        SIZE,
        4 * 2**30,
        "Bytes of published memory for pages. Sizes may be written 4GiB or 100gb.",
    )
    shm_dir: str = setting(FOLDER, "/dev/shm", "Folder of the shared-memory file; a tmpfs.")  # noqa: S108 - the kernel's shared memory
    granule: int = setting(
        POWER_OF_TWO,
        16 * 2**10,
        "Bytes a generation word stands for, and the unit of slots; a power of two, equal in the "
        "whole cluster.",
        low=4096,
    )
    hugepages: str = setting(
        choice("off", "2M", "1G"),
        "off",
        "Huge pages for the pool, which must be free at the start: 2M or 1G; off uses normal "
        "pages from shm_dir.",
    )
    hugepages_dir: str = setting(
        FOLDER,
        "",
        "Folder of the pool's file with huge pages. Default: the first hugetlbfs of that page size "
        "that is mounted.",
    )
    client_uncommitted_max: int = setting(
        SIZE,
        0,
        "Maximum of bytes that one client may have reserved and not committed; 0 is its share of "
        "half of the pool.",
        low=0,
    )
    mirror_pulls: str = setting(
        choice("off", "hot", "all"),
        "off",
        "Which pages a client keeps a copy of in its home node's pool when it has read them from "
        "another host: hot means those that it read within the last one to two minutes, too.",
    )
    mirror_share: float = setting(
        SHARE, 0.25, "Most of a node's pool that copies of other hosts' pages take.", low=0, below=1
    )
    spill: bool = switch(
        "Offer the pages that this node evicts next to nodes with free memory or colder pages.",
        is_on=True,
    )
    copies: int = setting(
        WHOLE,
        1,
        "Nodes that keep each page in memory: with 2, a page outlives the death of one of them.",
        low=1,
        high=2,
    )
    placement_rate: int = setting(
        SIZE,
        512 * 2**20,
        "Bytes a second of pages that this node offers to other nodes, for spill and copies.",
        low=2**20,
    )
    placement_min_age: float = setting(
        SECONDS,
        20.0,
        "Seconds since its last use before a page is evicted for one that another node offers.",
        low=0,
    )
    quotas: tuple[QuotaRule, ...] = setting(
        QUOTAS,
        (),
        "Namespaces that are guaranteed a share of this node's pool and disk, by name or pattern: "
        "'tenant-a=20%,priority=2;team-*=4GiB;*=1%/5%,ttl=1h/10d'. A second share is that of the "
        "disk. With ttl, pages expire so long after their last use, in memory and on disk.",
    )
    # --- disk
    disk_enabled: bool = switch(
        "Keep pages on disk too: they outlive eviction and restarts.",
    )
    disk_path: str = setting(
        FOLDER,
        "/data/peercache/",
        "Folder of the disk tier; each node locks one of its own below it.",
    )
    disk_size: int = setting(
        SIZE, 100 * 10**9, "Most bytes that the disk tier takes.", low=16 * 2**20
    )
    disk_free_floor: float = setting(
        SHARE, 0.05, "Share of the file system that the disk tier leaves free.", low=0, below=1
    )
    disk_ttl: float = setting(
        SECONDS,
        0.0,
        "Seconds since its last use after which a page on disk is deleted; 0 is never.",
        low=0,
    )
    write_policy: str = setting(
        choice("through", "on_evict"),
        "through",
        "When pages go to disk: through writes each one soon after it was stored, on_evict the "
        "coldest ones before the pool evicts them.",
    )
    disk_queue: int = setting(
        SIZE,
        256 * 2**20,
        "Maximum of bytes that wait to be written to disk; pages beyond it are counted, "
        "and not written.",
        low=0,
    )
    disk_flush_s: float = setting(
        SECONDS,
        5.0,
        "Seconds that a graceful stop may take to write pages that are only in memory to disk, "
        "hottest first; 0 writes none. A node embedded in an engine takes one second at most.",
        low=0,
    )
    drain_s: float = setting(
        SECONDS,
        60.0,
        "Seconds that `peercache drain` may take to hand this node's pages over to other nodes, "
        "hottest first; the time to write them to disk comes on top.",
        low=0,
    )
    disk_promote_rate: int = setting(
        SIZE,
        256 * 2**20,
        "Bytes a second that a node loads from disk because a client asked whether they exist.",
        low=0,
    )
    # --- membership and directory
    max_masters: int = setting(WHOLE, 3, "Nodes that collect heartbeats and share the view.", low=1)
    heartbeat_s: float = setting(
        SECONDS, 1.0, "Seconds between heartbeats to the masters.", above=0
    )
    suspect_s: float = setting(
        SECONDS, 3.0, "Silence after which a member is suspect; more than 2 heartbeats."
    )
    dead_s: float = setting(
        SECONDS, 6.0, "Silence after which a member is dead; more than suspect_s."
    )
    directory_replicas: int | str = setting(
        REPLICAS,
        "auto",
        "Nodes that keep each record; auto: one per host, 2 beyond 8 hosts.",
        low=1,
    )
    # --- reading and writing
    fabric: str = setting(
        choice("auto", "shm", "tcp", "rdma"),
        "auto",
        "How bytes move: auto chooses shm on one host, rdma where both sides have it, else tcp; "
        "rdma makes its absence an error.",
    )
    max_channels_per_peer: int = setting(
        WHOLE,
        16,
        "Maximum of tcp connections, and of queue pairs per rail, that a client keeps to one peer.",
        low=1,
        high=1024,
    )
    tcp_congestion: str = setting(
        TEXT,
        "",
        "Congestion control of the connections over which a node sends pages, as Linux names it: "
        "bbr for networks that lose packets. Default (empty): that of the host.",
        high=15,
    )
    tcp_serving_threads: int = setting(
        WHOLE,
        0,
        "Threads that send a node's pages over tcp, each for some of the connections. Default (0): "
        "one for 8 cores, 1 to 4.",
        low=0,
        high=64,
    )
    verify: str = setting(
        choice("generation", "sampled", "full"),
        "sampled",
        "Checksum in addition to the generation check: never, on 1 in 64 keys, or on all.",
    )
    op_timeout_s: float = setting(
        SECONDS,
        2.0,
        "Deadline of a batch_get or batch_set. A node that is silent for an eighth of it, and for "
        "at least 0.25 s, is given up for a while; by a batch_set the home node after half of it.",
        above=0,
    )
    exists_timeout_s: float = setting(SECONDS, 0.1, "Deadline of a batch_exists.", above=0)
    decline: str = setting(
        choice("off", "cost"),
        "off",
        "Which found pages batch_exists and the engines' adapters do not report: cost means those "
        "that take longer to read, as this client has measured, than the engine takes to compute.",
    )
    page_compute_ms: float = setting(
        MILLISECONDS,
        0.0,
        "Milliseconds that the engine takes to compute one page, for decline; 0 is unknown. A page "
        "of vLLM and LMCache is a chunk.",
        low=0,
    )
    location_cache_entries: int = setting(
        WHOLE,
        262_144,
        "Records a client remembers; 0 asks the directory for every page.",
        low=0,
    )
    # --- RDMA
    rdma_device_names: tuple[str, ...] = setting(
        DEVICES,
        (),
        "Devices to use, mlx5_0 or mlx5_0:2 (its second port) each: several are rails, and batches "
        "are striped over them. Default: the fastest one whose link is up.",
    )
    rdma_gid_index: int = setting(
        WHOLE,
        -1,
        "Entry of the port's GID table. Default (-1): RoCE v2, IPv4 before IPv6.",
        low=-1,
        high=255,
    )
    rdma_traffic_class: int = setting(
        WHOLE, 0, "Traffic class of packets: four times the DSCP value.", low=0, high=255
    )
    rdma_service_level: int = setting(WHOLE, 0, "Service level of packets.", low=0, high=15)
    rdma_timeout_ms: float = setting(
        MILLISECONDS,
        67.0,
        "Milliseconds after which a packet without an acknowledgement is sent again. Devices know "
        "4.096 µs and its doubles: the next longer one counts, 67.1 ms by default.",
        above=0,
        high=60_000,
    )
    rdma_retry_count: int = setting(
        WHOLE,
        6,
        "Times that a packet is sent again; not 7: some devices then never stop.",
        low=0,
        high=6,
    )
    rdma_clear_text: bool = switch(
        "Use RDMA with TLS, too: its packets are not encrypted, so its network must be trusted.",
    )
    # --- metrics, traces and logs
    metrics_port: int = setting(
        WHOLE,
        -1,
        "Port of the dashboard (/), /metrics and /healthz; 0 turns it off. Default (-1): 31997, or "
        "a free port where that is taken, and none for a node embedded in an engine; a port named "
        "here must be free.",
        low=-1,
        high=65_535,
    )
    http_listen: str = setting(
        LISTEN,
        "",
        "HOST or HOST:PORT of the dashboard, /metrics and /healthz; beyond loopback it requires "
        "tls_ca, http_open or insecure. Default: 127.0.0.1, and the port of metrics_port.",
    )
    http_open: bool = switch(
        "Show /metrics and /healthz to every client that can connect to http_listen, in clear text "
        "too: probes and scrapers often have no certificate.",
    )
    http_token_file: str = setting(
        FILE,
        "",
        "File with a bearer token that opens every page over HTTP; over TLS beyond loopback. Other "
        "users must not be able to read the file.",
    )
    engine_events: tuple[EngineEvents, ...] = setting(
        ENGINES,
        (),
        "Engines that publish their KV events, as NAME=tcp://HOST:PORT, with the endpoint that "
        "sends events again as NAME=tcp://HOST:PORT+tcp://HOST:PORT. The prefix index reports "
        "what is on their GPUs. Requires the extra `events`.",
    )
    object_events: str = setting(
        TEXT,
        "",
        "Endpoint of SGLang's first rank, such as tcp://127.0.0.1:5558: it publishes there, as "
        "Mooncake's store does, which of the engine's pages its home node holds, for routers. "
        "Empty: it does not. Requires the extra `events`.",
    )
    event_readers: tuple[str, ...] = setting(
        NETWORKS,
        (),
        "Addresses or networks of the hosts that may read `object_events`, such as 10.0.0.0/16. "
        "Required if that endpoint is beyond loopback: its readers show no certificate.",
    )
    otel_traces: bool = switch(
        "Make an OpenTelemetry span of each call of a client, in the trace that is current in its "
        "thread: by the engine's tracer provider, or sent by OTLP to OTEL_EXPORTER_OTLP_ENDPOINT. "
        "Requires the extra `otel`.",
    )
    objective_exists_s: float = setting(
        SECONDS,
        0.001,
        "Objective of `peercache slo` and the alerts: 99 % of the batch_exists that this host "
        "answers take at most this long. The metrics distinguish 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 25 "
        "ms and so on: a limit between them counts as the next one.",
        above=0,
    )
    objective_memory_s: float = setting(
        SECONDS,
        0.0005,
        "The same for a page read from this host's memory: longer for pages above 2 MiB.",
        above=0,
    )
    objective_disk_s: float = setting(
        SECONDS, 0.01, "The same for a page that is read from a disk first.", above=0
    )
    log_format: str = setting(
        choice("auto", "json", "console"),
        "auto",
        "Log lines as JSON or for a console; auto looks whether stderr is a terminal.",
    )
    log_level: str = setting(
        choice("debug", "info", "warning", "error"),
        "info",
        "Lowest level that is logged; in an engine the default is the engine's own.",
    )

    # --- constants: no flag and no file sets them, simulations and tests do
    virtual_nodes: int = attrs.field(default=160, kw_only=True)
    """Tokens of a node on the ring."""
    handover_s: float = attrs.field(default=10.0, kw_only=True)
    """How long after a view change a reader that finds nothing at an owner asks the next."""
    summary_s: float = attrs.field(default=2.0, kw_only=True)
    """Seconds between two regular summaries of a record stream."""
    republish_rate: int = attrs.field(default=50_000, kw_only=True)
    """Records a second that a node publishes again after a view change."""

    @classmethod
    def load(
        cls,
        settings: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        context: Mapping[str, str] | None = None,
    ) -> Config:
        """Merge file, environment and settings: the later override the earlier.

        settings:    values by name, as texts ("64GiB", "90s") or in the setting's own type.
        file:        the path of a TOML file.
        environment: variables, of which those with the prefix `PEERCACHE_` count; None: none.
        context:     what the others override, by name (`config.contexts`).

        Raises ConfigError for the first unknown name, or value that cannot be used.
        """
        of_file = {**(context or {}), **({} if file is None else read_toml(Path(file)))}
        of_variables = from_environment(environment or {}, SETTINGS, REMOVED)
        given = {name: value for name, value in (settings or {}).items() if value is not None}
        try:
            return cls._of({**of_file, **of_variables, **given})
        except ConfigError as error:
            # A flag or an argument has the setting's own name, which the error contains anyway.
            if error.name in given or error.name not in {**of_file, **of_variables}:
                raise
            source = environment_name(error.name) if error.name in of_variables else file
            if source is None:
                raise  # The context's values are valid one by one.
            raise ConfigError(error.name, f"{error.problem} (in {source})") from error

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Config:
        for name, problem in REMOVED.items():
            if name in given:
                raise ConfigError(name, problem)
        for name in given:
            if name not in SETTINGS:
                raise ConfigError(name, f"there is no such name{_meant(name)}")
        _check_switch(given.get("insecure"))
        config = cls(**{name: SETTINGS[name].parse(value) for name, value in given.items()})
        for name, problem, is_kept in RELATIONS:
            if not is_kept(config):
                raise ConfigError(name, problem)
        return config

    @classmethod
    def from_sglang(
        cls, extra: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Config:
        """Read SGLang's extra-config JSON, without the keys that are SGLang's own."""
        ours = {name: value for name, value in extra.items() if name not in SGLANG_KEYS}
        return cls.load(ours, environment=environment)

    def host(self) -> str:
        """Return the host name for the view."""
        return self.host_name or socket.gethostname()

    @property
    def has_tls(self) -> bool:
        """Whether every tcp connection is encrypted and requires certificates of both sides."""
        return bool(self.tls_ca)

    @property
    def is_open(self) -> bool:
        """Whether other hosts may connect: with certificates, or in a trial without them."""
        return self.has_tls or self.insecure

    def listen_address(self) -> tuple[str, int]:
        """Return (host, port) to listen on; host "" is every interface."""
        if self.listen:
            return parse_address(self.listen, default_port=DEFAULT_CONTROL_PORT)
        return "" if self.is_open else LOOPBACK, DEFAULT_CONTROL_PORT

    def http_address(self, *, in_process: bool) -> tuple[str, int] | None:
        """Return (host, port) of the HTTP server: port -1 means the default one; None for no
        server.

        in_process: whether the node runs in an engine, which has HTTP only if it is configured.
        """
        is_unasked = in_process and self.metrics_port == -1 and not self.http_listen
        if self.metrics_port == 0 or is_unasked:
            return None
        if not self.http_listen:
            return LOOPBACK, self.metrics_port
        host, port = parse_address(self.http_listen, default_port=UNNAMED_PORT)
        return host, self.metrics_port if port == UNNAMED_PORT else port

    @property
    def rdma_timeout(self) -> int:
        """The timeout of a packet as devices have it: 4.096 µs × 2 to this power."""
        return max(1, ceil(log2(self.rdma_timeout_ms * 1000 / 4.096)))

    @property
    def may_use_rdma(self) -> bool:
        """Whether pages may travel over RDMA, which is clear text."""
        return self.fabric in ("auto", "rdma") and (not self.has_tls or self.rdma_clear_text)


SETTINGS: dict[str, Setting] = {
    field.name: attrs.evolve(field.metadata["row"], name=field.name)
    for field in attrs.fields(Config)
    if field.metadata
}
"""The rows of the table, by name."""


def _check_switch(insecure: Any) -> None:
    """Raise ConfigError for the name of a trial: earlier builds took it in `insecure`."""
    try:
        SWITCH.parse(False if insecure is None else insecure)
    except (ValueError, TypeError) as error:
        problem = f"is true or false: write insecure = true, and cluster = {str(insecure)!r}"
        raise ConfigError("insecure", problem) from error


def _meant(name: str) -> str:
    known = get_close_matches(name, SETTINGS, n=1)
    guess = f": is {known[0]} meant?" if known else ";"
    return f"{guess} `peercache config` lists all that there are"
