"""The Grafana board in deploy/grafana: its rows, panels and expressions, from one table.

`make docs` writes `peercache.json`. A panel names the metrics of the registry that it shows; a test
demands that every metric is shown.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from peercache.observability.latency import OBJECTIVES, Objective
from tests.house.alerts import selector, within

ON = 'job=~"$job",instance=~"$instance"'
WINDOW = "$__rate_interval"


def rate(metric: str, by: str = "", *, unborn: bool = False) -> str:
    """Return the increase a second of a counter over all nodes, by labels.

    unborn: no node has the counter before its first increase; until then it is 0.
    """
    grouped = f"sum by ({by})" if by else "sum"
    expr = f"{grouped} (rate(peercache_{metric}{{{ON}}}[{WINDOW}]))"
    return f"{expr} or vector(0)" if unborn else expr


def gauge(metric: str, by: str = "instance", how: str = "sum", *, unborn: bool = False) -> str:
    """Return a gauge of all nodes, by labels."""
    expr = f"{how} by ({by}) (peercache_{metric}{{{ON}}})"
    return f"{expr} or vector(0)" if unborn else expr


def quantile(part: float, metric: str, chosen: str = "", by: str = "") -> str:
    """Return a quantile of a histogram over all nodes, by labels."""
    labels = ",".join(filter(None, (ON, chosen)))
    grouped = ", ".join(filter(None, ("le", by)))
    rates = f"sum by ({grouped}) (rate(peercache_{metric}_bucket{{{labels}}}[{WINDOW}]))"
    return f"histogram_quantile({part}, {rates})"


@attrs.frozen
class Panel:
    """One panel: expressions with their legends, and the unit of Grafana."""

    title: str
    unit: str
    shown: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    meaning: str = ""


def _ratio(of: str, and_: str) -> str:
    return f"{of} / ({of} + {and_})"


def _quantiles(metric: str, chosen: str, by: str, legend: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (quantile(part, metric, chosen, by), f"{legend} p{part * 100:g}")
        for part in (0.5, 0.9, 0.99)
    )


def _slow(objective: Objective) -> str:
    """Return the share of calls that were slower than an objective allows."""
    fast = within(objective, WINDOW, f"{ON},")
    every = selector(objective, "count").replace("{", f"{{{ON},")
    return f"1 - sum({fast}) / sum(rate({every}[{WINDOW}]))"


HITS, MISSES = rate("pages_hit_total"), rate("pages_missed_total")

ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel("Nodes that answer", "none", ((f"count(up{{{ON}}} == 1)", ""),), "stat"),
        Panel("Hit rate of get", "percentunit", ((_ratio(HITS, MISSES), ""),), "stat"),
        Panel(
            "Found by exists",
            "percentunit",
            ((f"{rate('exists_found_total')} / {rate('exists_asked_total')}", ""),),
            "stat",
        ),
        Panel("Pages in memory", "short", ((f"sum(peercache_pool_pages{{{ON}}})", ""),), "stat"),
        Panel("Firing alerts", "none", (('count(ALERTS{alertstate="firing"}) or vector(0)', ""),),
              "stat"),
        Panel("Builds", "none", ((gauge("build_info", "version, python"), "{{version}}"),)),
    ),
    "Objectives": tuple(
        Panel(
            f"{objective.name}: {objective.meaning}",
            "percentunit",
            (
                (_slow(objective), "slower"),
                (f"vector({1 - objective.share:.4g})", "allowed"),
            ),
        )
        for objective in OBJECTIVES
    ),
    "Reads": (
        Panel("Pages read by fabric", "ops", ((rate("pages_hit_total", "fabric"), "{{fabric}}"),)),
        Panel("Bytes read by fabric", "Bps", ((rate("bytes_read_total", "fabric"), "{{fabric}}"),)),
        Panel("Misses by reason", "ops", ((rate("pages_missed_total", "reason"), "{{reason}}"),)),
        Panel("Time of get by tier, p50", "s",
              ((quantile(0.5, "latency_seconds", 'operation="get"', "tier"), "{{tier}}"),)),
        Panel("Time of get by tier, p99", "s",
              ((quantile(0.99, "latency_seconds", 'operation="get"', "tier"), "{{tier}}"),)),
        Panel("Time of a page by tier, p99", "s",
              ((quantile(0.99, "page_seconds", "", "tier"), "{{tier}}"),)),
        Panel("Keys asked by exists", "ops", ((rate("exists_asked_total"), "asked"),
                                              (rate("exists_found_total"), "found"),
                                              (rate("exists_asked_again_total"), "asked again"))),
        Panel("Found by exists, and declined by reason", "ops",
              ((rate("exists_declined_total", "reason"), "{{reason}}"),)),
        Panel("Time of exists by tier, p99", "s",
              ((quantile(0.99, "latency_seconds", 'operation="exists"', "tier"), "{{tier}}"),)),
        Panel("Reported by exists and missing", "ops",
              ((rate("pages_short_total", "pool", unborn=True), "{{pool}}"),)),
        Panel("Copies kept of other hosts' pages", "ops",
              ((rate("pages_mirrored_total"), "pages"),)),
        Panel("Pages of hints by outcome", "ops",
              ((rate("hint_pages_total", "hint, outcome"), "{{hint}} {{outcome}}"),)),
        Panel("Refused hints of engines", "ops",
              ((rate("hints_refused_total", "reason"), "{{reason}}"),)),
        Panel("Calls after their deadline; breakers opened", "ops",
              ((rate("deadlines_overrun_total"), "late calls"),
               (rate("breakers_opened_total"), "breakers opened"))),
        Panel("Tables of this host that could not be read", "ops",
              ((rate("tables_unusable_total", "reason"), "{{reason}}"),)),
    ),
    "Writes": (
        Panel("Pages set", "ops", ((rate("pages_set_total", "outcome"), "{{outcome}}"),)),
        Panel("Bytes written", "Bps", ((rate("bytes_written_total"), "bytes"),)),
        Panel("Pages not stored, by reason", "ops",
              ((rate("sets_refused_total", "reason"), "{{reason}}"),)),
        Panel("Time of set", "s", _quantiles("latency_seconds", 'operation="set"', "", "set")),
        Panel("Stored, not yet found everywhere", "ops",
              ((rate("pages_unpublished_total"), "pages"),)),
        Panel("Clients attached", "ops", ((rate("home_attached_total"), "attached"),)),
    ),
    "Pool": (
        Panel("Memory by state", "bytes", ((gauge("pool_bytes", "state"), "{{state}}"),)),
        Panel("Pages by node", "short", ((gauge("pool_pages"), "{{instance}}"),)),
        Panel("Evicted", "ops", ((rate("pages_evicted_total", "instance"), "{{instance}}"),)),
        Panel("Estimated hit rate of reads and sets by times the memory", "percentunit",
              # A node without an engine has no estimate, which is NaN.
              ((f"avg by (memory) (peercache_hit_rate_estimate{{{ON}}} >= 0)", "{{memory}} ×"),)),
        Panel("Live reservations", "short", ((gauge("reservations"), "{{instance}}"),)),
        Panel("Memory for pages of other hosts", "bytes",
              ((gauge("pool_bytes_mirrored"), "{{instance}}"),)),
        Panel("Memory for retained pages", "bytes",
              ((gauge("pool_bytes_retained"), "{{instance}}"),)),
        Panel("Taken by namespaces with quotas", "bytes",
              ((gauge("namespace_bytes", "namespace, tier", unborn=True), "{{namespace}} {{tier}}"),
               (gauge("namespace_retained_bytes", "namespace, tier", unborn=True),
                "{{namespace}} {{tier}}, retained"),
               (gauge("namespace_quota_bytes", "namespace, tier", unborn=True),
                "{{namespace}} {{tier}}, sure"))),
        Panel("Evicted of namespaces with quotas", "ops",
              ((rate("namespace_pages_evicted_total", "namespace, tier", unborn=True),
                "{{namespace}} {{tier}}"),
               (rate("namespace_pages_expired_total", "namespace, tier", unborn=True),
                "{{namespace}} {{tier}}, expired"))),
        Panel("Drains: pages by what became of them", "short",
              ((gauge("drain_pages", "instance, state"), "{{instance}} {{state}}"),)),
        Panel("Drains: bytes by what became of them", "bytes",
              ((gauge("drain_bytes", "instance, state"), "{{instance}} {{state}}"),)),
        Panel("Offered ahead of eviction, pages", "short",
              ((gauge("placement_pages", "instance, outcome"), "{{instance}} {{outcome}}"),)),
        Panel("Moved ahead of eviction, bytes", "bytes",
              ((gauge("placement_bytes", "instance"), "{{instance}}"),)),
        Panel("Offered for a second copy, pages", "short",
              ((gauge("copies_pages", "instance, outcome"), "{{instance}} {{outcome}}"),)),
        Panel("Copied to a second node, bytes", "bytes",
              ((gauge("copies_bytes", "instance"), "{{instance}}"),)),
        Panel("Pages without a second copy", "short",
              ((gauge("pages_single", "instance"), "{{instance}}"),)),
        Panel("Offered to other nodes and not taken, by reason", "ops",
              ((rate("pages_not_moved_total", "reason"), "{{reason}}"),)),
        Panel("Taken over from other nodes", "ops",
              ((rate("pages_taken_over_total", "instance"), "{{instance}}"),)),
        Panel("Taken over from other nodes, bytes", "Bps",
              ((rate("bytes_taken_over_total", "instance"), "{{instance}}"),)),
        Panel("Offered by other nodes and not taken over, by reason", "ops",
              ((rate("pages_not_taken_over_total", "reason"), "{{reason}}"),)),
    ),
    "Disk": (
        Panel("Disk tier open", "none", ((gauge("disk_open"), "{{instance}}"),)),
        Panel("Bytes by state", "bytes", ((gauge("disk_bytes", "state", unborn=True),
                                           "{{state}}"),)),
        Panel("Pages on disk", "short", ((gauge("disk_pages"), "{{instance}}"),)),
        Panel("Written and loaded, pages", "ops", ((rate("disk_pages_written_total"), "written"),
                                                   (rate("pages_promoted_total"), "loaded"))),
        Panel("Written and loaded, bytes", "Bps", ((rate("disk_bytes_written_total"), "written"),
                                                   (rate("bytes_promoted_total"), "loaded"))),
        Panel("Dropped instead of written", "ops",
              ((rate("disk_writes_dropped_total", "reason"), "{{reason}}"),)),
        Panel("Deleted from disk", "ops",
              ((rate("disk_pages_lost_total", "reason"), "{{reason}}"),)),
        Panel("Time until a holder answers for its disk", "s",
              _quantiles("promote_seconds", "", "", "promote")),
    ),
    "Cluster": (
        Panel("Members alive, as each node sees it", "none",
              ((gauge("members", "instance, state"), "{{instance}} {{state}}"),)),
        Panel("Directory records", "short", ((gauge("directory_records"), "{{instance}}"),)),
        Panel("Owners that lag behind a node", "none",
              ((gauge("directory_owners_lagging"), "{{instance}}"),)),
        Panel("Shards that lack no record; holders in doubt", "none",
              ((gauge("directory_authority"), "{{instance}} lacks none"),
               (gauge("directory_holders_doubted"), "{{instance}} in doubt"))),
        Panel("Programs that follow a node", "none", ((gauge("followers"), "{{instance}}"),)),
        Panel("Streams repaired", "ops", ((rate("repairs_total", "instance"), "{{instance}}"),)),
        Panel("Records refused", "ops", ((rate("records_refused_total", "reason"), "{{reason}}"),)),
        Panel("Messages received", "ops", ((rate("messages_received_total", "kind"), "{{kind}}"),)),
        Panel("Messages dropped", "ops",
              ((rate("messages_dropped_total", "reason"), "{{reason}}"),)),
        Panel("Sources of addresses", "none",
              ((gauge("discovery_answering", "instance, source", unborn=True),
                "{{instance}} {{source}} answers"),
               (gauge("discovery_addresses", "instance, source", unborn=True),
                "{{instance}} {{source}} addresses"),
               (rate("discovery_failures_total", "source", unborn=True), "{{source}} failures"),
               (rate("discovery_dropped_total", "source", unborn=True), "{{source}} dropped"))),
    ),
    "Connections and trust": (
        Panel("Connections", "none", ((gauge("connections", "instance, port"),
                                       "{{instance}} {{port}}"),)),
        Panel("Sent over tcp", "Bps", ((rate("tcp_bytes_served_total", "instance"),
                                        "{{instance}}"),)),
        Panel("Refused on the data port", "ops", ((rate("tcp_refused_total", "reason"),
                                                   "{{reason}}"),)),
        Panel("Refused messages", "ops", ((rate("messages_refused_total", "reason, message",
              unborn=True), "{{reason}} {{message}}"),)),
        Panel("Refused over HTTP", "ops", ((rate("http_refused_total", "reason", unborn=True),
                                            "{{reason}}"),)),
        Panel("Days of the certificate", "d", ((gauge("certificate_days", how="min"),
                                                "{{instance}}"),)),
        Panel("Without certificates", "none", ((gauge("insecure"), "{{instance}}"),)),
    ),
    "RDMA": (
        Panel("Queue pairs; opened", "none", ((gauge("rdma_channels"), "{{instance}}"),
                                      (rate("rdma_channels_opened_total"), "opened a second"))),
        Panel("Memory that rails serve", "bytes", ((gauge("rdma_registered_bytes"),
                                                    "{{instance}}"),)),
        Panel("Read by another fabric", "ops", ((rate("rdma_fallbacks_total", "reason"),
                                                 "{{reason}}"),)),
        Panel("Channels failed", "ops", ((rate("rdma_channels_failed_total", "reason"),
                                          "{{reason}}"),)),
    ),
    "Processes": (
        Panel("Processor", "percentunit",
              ((f"rate(process_cpu_seconds_total{{{ON}}}[{WINDOW}])", "{{instance}}"),)),
        Panel("Resident memory", "bytes",
              ((f"process_resident_memory_bytes{{{ON}}}", "{{instance}}"),)),
        Panel("Open files, of the limit", "percentunit",
              ((f"process_open_fds{{{ON}}} / process_max_fds{{{ON}}}", "{{instance}}"),)),
        Panel("Up since", "s",
              ((f"time() - process_start_time_seconds{{{ON}}}", "{{instance}}"),)),
        Panel("Ticks asked for in the past, a bug", "ops",
              ((rate("ticks_in_past_total", "actor", unborn=True), "{{actor}}"),)),
    ),
}  # fmt: skip


def expressions() -> list[str]:
    """Return every expression of the board."""
    return [expr for row in ROWS.values() for panel in row for expr, _ in panel.shown]


def board() -> str:
    """Return deploy/grafana/peercache.json."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False,
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})  # fmt: skip
        y += 1
        x = 0
        for panel in row:
            width, height = (4, 4) if panel.kind == "stat" else (8, 8)
            if x + width > 24:
                x, y = 0, y + height
            panels.append(_panel(panel, {"h": height, "w": width, "x": x, "y": y}))
            x += width
        y += height
    for number, made in enumerate(panels, start=1):
        made["id"] = number
    return json.dumps({**_ABOUT, "panels": panels}, indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend or "__auto",
             "datasource": _SOURCE}
            for at, (expr, legend) in enumerate(panel.shown)
        ],
    }  # fmt: skip


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {"name": name, "label": label, "type": "query", "datasource": _SOURCE,
            "query": {"query": query, "refId": name}, "refresh": 2, "multi": True,
            "includeAll": True, "allValue": ".*",
            "current": {"text": "All", "value": "$__all"}}  # fmt: skip


_ABOUT: dict[str, Any] = {
    "title": "PeerCache",
    "uid": "peercache",
    "description": "Made by `make docs` from tests/house/board.py.",
    "tags": ["peercache"],
    "schemaVersion": 39,
    "editable": True,
    "refresh": "30s",
    "time": {"from": "now-1h", "to": "now"},
    "templating": {
        "list": [
            {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            _variable("job", "Job", "label_values(peercache_build_info, job)"),
            _variable("instance", "Node",
                      'label_values(peercache_build_info{job=~"$job"}, instance)'),
        ]
    },
}  # fmt: skip
