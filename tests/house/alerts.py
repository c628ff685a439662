"""The alerts and recording rules of deploy/prometheus, their tests, and their runbook.

`make docs` writes `rules.yml`, `rules_test.yml` and the entries of docs/how-to/runbook.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from peercache.observability.latency import OBJECTIVE_METRIC, OBJECTIVES, Objective

JOB = "peercache"
GOOD_BEFORE_M = 10
GOOD_AFTER_M = 15
"""Minutes of the made series before and after the fault. No alert needs more to clear: one that
looks an hour back looks five minutes back, too."""

INSTANCE = 'instance="a:31997",job="peercache"'
OTHER = 'instance="b:31997",job="peercache"'
EVERYWHERE = {"job": JOB, "instance": "a:31997"}


@attrs.frozen
class Series:
    """A made series: what it is while all is well, and during the fault.

    grows: both are increases a minute of a counter, not values.
    """

    name: str
    good: float
    bad: float
    grows: bool = False

    def values(self, fault_m: int) -> str:
        """Return the values of promtool's notation, one a minute."""
        if not self.grows:
            return (
                f"{self.good:g}+0x{GOOD_BEFORE_M - 1} {self.bad:g}+0x{fault_m - 1} "
                f"{self.good:g}+0x{GOOD_AFTER_M}"
            )
        begin = self.good * GOOD_BEFORE_M
        end = begin + self.bad * fault_m
        return (
            f"0+{self.good:g}x{GOOD_BEFORE_M - 1} {begin:g}+{self.bad:g}x{fault_m - 1} "
            f"{end:g}+{self.good:g}x{GOOD_AFTER_M}"
        )


def counter(name: str, good: float, bad: float, **labels: str) -> Series:
    """Return a made counter of one node, by its increases a minute."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return Series(f"peercache_{name}{{{INSTANCE}{more}}}", good, bad, grows=True)


@attrs.frozen
class Alert:
    """An alert, its runbook entry, and the series on which it fires and clears.

    fault_m: minutes that the fault of the made series lasts.
    labels:  those of the alert that fires, in addition to severity.
    """

    name: str
    expr: str
    for_m: int
    severity: str
    summary: str
    meaning: str
    look: str
    act: str
    series: tuple[Series, ...]
    fault_m: int
    labels: Mapping[str, str] = attrs.Factory(lambda: dict(EVERYWHERE))

    def filled(self, text: str) -> str:
        """Return a text of the alert with the values of its labels."""
        for name, value in self.labels.items():
            text = text.replace(f"{{{{ $labels.{name} }}}}", value)
        return text

    def annotations(self) -> dict[str, str]:
        """Return the summary, and the link to the runbook."""
        return {"summary": self.summary, "runbook": f"docs/how-to/runbook.md#{self.name.lower()}"}


def selector(objective: Objective, suffix: str, **more: str) -> str:
    """Return the PromQL selector of a series of an objective's histogram."""
    chosen = [f'{name}=~"{"|".join(values)}"' for name, values in objective.labels.items()]
    chosen += [f'{name}="{value}"' for name, value in more.items()]
    return f"{objective.metric}_{suffix}{{{','.join(chosen)}}}"


def slow_ratio(objective: Objective, window: str) -> str:
    """Return the share of calls that were slower than an objective allows, by node."""
    fast, every = within(objective, window), selector(objective, "count")
    by = "sum by (job, instance)"
    return f"1 - {by} ({fast}) / {by} (rate({every}[{window}]))"


def within(objective: Objective, window: str, chosen: str = "") -> str:
    """Return the rate of the calls within the limit that the node itself shows.

    chosen: more matchers of the series.
    """
    fast = selector(objective, "bucket").replace("{", f"{{{chosen}")
    limit = f'{OBJECTIVE_METRIC}{{{chosen}objective="{objective.name}"}}'
    return f"rate({fast}[{window}]) and on (job, instance, le) {limit}"


RECORDED = {
    **{
        f"peercache:{objective.name}_slow:ratio_rate{window}": slow_ratio(objective, window)
        for objective in OBJECTIVES
        for window in ("5m", "1h")
    },
    "peercache:hits:ratio_rate5m": "sum by (job, instance) (rate(peercache_pages_hit_total[5m])) / "
    "(sum by (job, instance) (rate(peercache_pages_hit_total[5m])) + "
    "sum by (job, instance) (rate(peercache_pages_missed_total[5m])))",
    "peercache:found:ratio_rate5m": "rate(peercache_exists_found_total[5m]) / "
    "rate(peercache_exists_asked_total[5m])",
}
"""Recording rules: name and expression."""

BURN = 14.4
"""A month's budget of slow calls is gone in two days at this rate."""


def _slow(objective: Objective) -> Alert:
    limit = round(BURN * (1 - objective.share), 4)
    labels = ",".join(f'{name}="{values[0]}"' for name, values in objective.labels.items())
    if objective.metric == "peercache_latency_seconds":
        labels += ',outcome="all"'
    fast = f'{objective.metric}_bucket{{{INSTANCE},{labels},le="{objective.within_s}"}}'
    every = f"{objective.metric}_count{{{INSTANCE},{labels}}}"
    look = "`peercache slo --over 60s --at HOST:PORT` shows how far off it is. "
    causes = {
        "exists": "Look at the processor of the host: an engine or another process that takes all "
        "cores delays the call. `peercache_tables_unusable_total` rises where the tables of this "
        "host cannot be read.",
        "memory": "Large pages need longer: a page of 4 MiB is 250 µs of copying at 16 GB/s. Look "
        "at the host's memory bandwidth, at NUMA placement, and whether `peercache doctor` warns "
        "of the copy through the kernel.",
        "disk": "Look at `peercache_promote_seconds` and at the device (`iostat -x`): a slow or "
        "failing disk, or other programs on it.",
    }[objective.name]
    acts = {
        "exists": "Leave the engine a core for its threads; attach it to the node of its own host; "
        "or raise `objective_exists_s` if your engines can wait.",
        "memory": "Use the node of the engine's own NUMA node and user; raise "
        "`objective_memory_s` if your pages are large.",
        "disk": "Give `disk_path` a device of its own (`peercache bench disk` measures it), or "
        "lower `disk_promote_rate`.",
    }[objective.name]
    return Alert(
        f"PeerCache{objective.name.title()}Slow",
        f"peercache:{objective.name}_slow:ratio_rate5m > {limit} and "
        f"peercache:{objective.name}_slow:ratio_rate1h > {limit}",
        2,
        "warning",
        f"{{{{ $labels.instance }}}}: too many calls take longer than objective_{objective.name}_s",
        f"The objective is that {objective.meaning} takes at most `objective_{objective.name}_s` "
        f"({objective.within_s * 1e3:g} ms by default), in {objective.share:.0%} of cases. More "
        f"than {limit:.0%} have missed it for five minutes and for the last hour.",
        look + causes,
        acts,
        (
            Series(fast, 60, 6, grows=True),
            Series(every, 60, 60, grows=True),
            Series(
                f'{OBJECTIVE_METRIC}{{{INSTANCE},objective="{objective.name}",'
                f'le="{objective.within_s}"}}',
                objective.within_s,
                objective.within_s,
            ),
        ),
        60,
    )


ALERTS = (
    Alert(
        "PeerCacheDown",
        f'up{{job="{JOB}"}} == 0',
        1,
        "page",
        "node {{ $labels.instance }} does not answer",
        "Prometheus cannot scrape a node: its process or its host is gone, or the HTTP port is "
        "closed to Prometheus. Its pages are misses; engines of its host store nothing.",
        "On the host: `systemctl status peercache`, `curl -s 127.0.0.1:31997/healthz`, and the end "
        "of the node's log. `process_start_time_seconds` shows whether it restarts repeatedly.",
        "Start it. With a disk tier it comes back with its pages. Where only Prometheus is "
        "refused, see the [ways to open the port](secure-a-cluster.md#probes-and-monitoring).",
        (Series(f"up{{{INSTANCE}}}", 1, 0),),
        5,
    ),
    Alert(
        "PeerCacheMembersMissing",
        'peercache_members{state="alive"} < on (job) group_left () '
        f'count by (job) (up{{job="{JOB}"}} == 1)',
        2,
        "page",
        "{{ $labels.instance }} sees fewer members than Prometheus scrapes",
        "Nodes that answer Prometheus are not in the view of this node: the network between nodes "
        "is cut, or they refuse each other. Each side serves its own pages only.",
        "`peercache_members` of all nodes by state; in the logs `node.peer_refused`, "
        "`node.not_reached`, `membership.member_changed`.",
        "Open the control and data ports (31998, 31999) between the nodes in both directions; for "
        "a refusal the log line names the setting or the certificate.",
        (
            Series(f'peercache_members{{{INSTANCE},state="alive"}}', 2, 1),
            Series(f"up{{{INSTANCE}}}", 1, 1),
            Series(f"up{{{OTHER}}}", 1, 1),
        ),
        6,
        {**EVERYWHERE, "state": "alive"},
    ),
    Alert(
        "PeerCacheWrongBytes",
        "increase(peercache_pages_missed_total"
        '{reason=~"internal|verify_failed|wrong_page"}[10m]) > 0',
        0,
        "page",
        "{{ $labels.instance }}: reads failed verification: {{ $labels.reason }}",
        "A read found wrong bytes or a wrong record. No wrong byte was returned: the pages were "
        "misses. A healthy cluster never does this.",
        "`client.checksum_failed` or `client.call_failed` in the log of the engine; errors of the "
        "memory of the holder's host (`dmesg`, `edac-util`).",
        "Report it with these lines. Take a host with memory errors out of service.",
        (counter("pages_missed_total", 0, 1, reason="verify_failed"),),
        5,
        {**EVERYWHERE, "reason": "verify_failed"},
    ),
    Alert(
        "PeerCacheRecordsForged",
        'increase(peercache_records_refused_total{reason="forged"}[10m]) > 0',
        0,
        "page",
        "{{ $labels.instance }} received records in another node's name",
        "A peer publishes records of pages that another node holds. They were refused.",
        "Which processes can reach the control port; the certificates in use (`peercache certs "
        "show`). Without certificates every process that connects is accepted as a member.",
        "Revoke the certificate (`peercache certs revoke`), and "
        "[secure the cluster](secure-a-cluster.md).",
        (counter("records_refused_total", 0, 1, reason="forged"),),
        5,
        {**EVERYWHERE, "reason": "forged"},
    ),
    Alert(
        "PeerCacheRefusesItsOwn",
        "increase(peercache_messages_dropped_total"
        '{reason=~"cluster|certificate|revoked|granule|wire_version"}[10m]) > 10',
        0,
        "warning",
        "{{ $labels.instance }} refuses a peer because of its {{ $labels.reason }}",
        "A node or a client with other settings, another release or a certificate that does not "
        "fit tries to join, again and again. It is outside of the cluster until that is fixed. One "
        "command with a wrong `--cluster` does not fire.",
        "`node.peer_refused` in the log of the node names the peer, its address and what differs.",
        "Give both the same setting; see [which connections are refused]"
        "(read-the-metrics.md#which-connections-are-refused).",
        (counter("messages_dropped_total", 0.5, 60, reason="granule"),),
        5,
        {**EVERYWHERE, "reason": "granule"},
    ),
    Alert(
        "PeerCacheStoresNothing",
        'rate(peercache_sets_refused_total{reason=~"no_home|no_answer|pool_full|too_large"}[5m])'
        " > 0",
        3,
        "warning",
        "{{ $labels.instance }}: pages are not stored: {{ $labels.reason }}",
        "Engines of this host set pages that are not stored: the home node did not run, it ran but "
        "did not answer in time, the pool has no room, or a page is larger than the pool.",
        "By reason: `peercache_home_attached_total`; the load of the host, and "
        "`home.set_unanswered` in the log of the engine; "
        '`peercache_pool_bytes{state="reserved"}` and `peercache_reservations`; the page size of '
        "the engine.",
        "`no_home`: start the node. `no_answer`: the node runs, so do not start one. Give it more "
        "cores, or raise `op_timeout_s` of the engines. Restart it only if `peercache health` gets "
        "no answer either. `pool_full`: raise `client_uncommitted_max` or the "
        "[pool](size-the-pool.md). `too_large`: a larger pool.",
        (counter("sets_refused_total", 0, 60, reason="no_home"),),
        10,
        {**EVERYWHERE, "reason": "no_home"},
    ),
    Alert(
        "PeerCachePeersUnreachable",
        "sum by (job, instance) (rate("
        'peercache_pages_missed_total{reason="peer_unreachable"}[5m])) / '
        "(sum by (job, instance) (rate(peercache_pages_hit_total[5m])) + "
        "sum by (job, instance) (rate(peercache_pages_missed_total[5m]))) > 0.05",
        5,
        "warning",
        "{{ $labels.instance }}: 5 % of the requested pages are on peers that do not answer",
        "A short burst means that a node died. If it lasts for minutes, the cause is a firewall, "
        "an overloaded host, or a wrong `advertise`.",
        "`peercache_members` by state, `peercache_breakers_opened_total`, `tcp.read_failed` and "
        "`node.not_reached` in the logs.",
        "Open the data port (31999); correct `advertise`; take an unstable host out of service.",
        (
            counter("pages_missed_total", 0, 60, reason="peer_unreachable"),
            counter("pages_hit_total", 60, 60, fabric="tcp"),
        ),
        15,
    ),
    Alert(
        "PeerCacheLate",
        "rate(peercache_deadlines_overrun_total[10m]) > 0.1",
        0,
        "warning",
        "{{ $labels.instance }}: calls of its engines end after their deadline",
        "A call took longer than `op_timeout_s` or `exists_timeout_s`: its thread was blocked.",
        "`peercache slow` lists the calls. Whether the host is out of processor time or swaps; "
        "`peercache_latency_seconds` by tier.",
        "Leave the engine's threads a core; smaller batches or a larger `op_timeout_s`.",
        (Series(f"peercache_deadlines_overrun_total{{{INSTANCE}}}", 0, 60, grows=True),),
        10,
    ),
    Alert(
        "PeerCachePoolStuck",
        'peercache_pool_bytes{state="reserved"} > on (job, instance) group_left () '
        "(sum by (job, instance) (peercache_pool_bytes) * 0.5)",
        10,
        "warning",
        "{{ $labels.instance }}: half of the pool is reserved and not committed",
        "A live client holds slots that it does not commit: it is paused, or hangs in a copy. "
        "Memory that a client may still write to is never reused.",
        "`peercache_reservations`; the processes of engines on the host (state T or D).",
        "Continue or end that process: its slots are free when it is gone.",
        (
            Series(f'peercache_pool_bytes{{{INSTANCE},state="reserved"}}', 0, 60),
            Series(f'peercache_pool_bytes{{{INSTANCE},state="used"}}', 80, 20),
            Series(f'peercache_pool_bytes{{{INSTANCE},state="free"}}', 20, 20),
        ),
        15,
        {**EVERYWHERE, "state": "reserved"},
    ),
    Alert(
        "PeerCacheDiskClosed",
        "peercache_disk_open == 0 and on (job, instance) "
        'peercache_disk_bytes{state="waiting"} >= 0',
        2,
        "warning",
        "{{ $labels.instance }} works without its disk tier",
        "The configured disk tier could not be opened, or has failed. The node serves from "
        "memory only.",
        "`disk_problem` in `/healthz`; `disk.open_failed` and `disk.ended` in the log.",
        "Fix the path, its rights or the device, and restart the node.",
        (
            Series(f"peercache_disk_open{{{INSTANCE}}}", 1, 0),
            Series(f'peercache_disk_bytes{{{INSTANCE},state="waiting"}}', 0, 0),
        ),
        6,
    ),
    Alert(
        "PeerCacheDiskDropsPages",
        'rate(peercache_disk_writes_dropped_total{reason=~"full|no_room|late|failed"}[5m]) > 0',
        3,
        "warning",
        "{{ $labels.instance }}: pages are not written to disk: {{ $labels.reason }}",
        "`full` and `no_room`: the file system has no room. `late` and `failed`: the disk has "
        "faults. These pages are lost at a restart.",
        "`df` of `disk_path`; `disk.writes_failed` and `disk.call_failed` in the log.",
        "Make room, or lower `disk_size`; replace a disk that fails.",
        (counter("disk_writes_dropped_total", 0, 60, reason="full"),),
        10,
        {**EVERYWHERE, "reason": "full"},
    ),
    Alert(
        "PeerCacheDiskPagesDamaged",
        'increase(peercache_disk_pages_lost_total{reason=~"damaged|failed"}[10m]) > 0',
        0,
        "warning",
        "{{ $labels.instance }}: pages on disk could not be read: {{ $labels.reason }}",
        "A page's bytes or header on disk were not what was written. The page was dropped.",
        "`disk.page_damaged` names the file and place; `dmesg`, `smartctl -a`.",
        "`peercache disk check` on the stopped node; replace the device if this continues.",
        (counter("disk_pages_lost_total", 0, 1, reason="damaged"),),
        5,
        {**EVERYWHERE, "reason": "damaged"},
    ),
    Alert(
        "PeerCacheCertificateExpires",
        "peercache_certificate_days < 7",
        60,
        "warning",
        "{{ $labels.instance }}: the certificate expires within a week",
        "Without a valid certificate a node is refused by all others and is not a member any more.",
        "`peercache certs show FILE`.",
        "Issue a new one to the same path: files are read again without a restart "
        "([secure a cluster](secure-a-cluster.md)).",
        (Series(f"peercache_certificate_days{{{INSTANCE}}}", 60, 5),),
        90,
    ),
    Alert(
        "PeerCacheDescriptorsShort",
        "process_open_fds / process_max_fds > 0.8 and on (job, instance) peercache_build_info",
        5,
        "warning",
        "{{ $labels.instance }} has used 80 % of its file descriptors",
        "Each connection takes one. A node that has none left refuses connections.",
        "`peercache_connections` by port, `peercache_messages_dropped_total` for `links_full`.",
        "Raise `LimitNOFILE=` (`ulimit -n`) to at least four times the expected connections.",
        (
            Series(f"process_open_fds{{{INSTANCE}}}", 10, 90),
            Series(f"process_max_fds{{{INSTANCE}}}", 100, 100),
            Series(f"peercache_build_info{{{INSTANCE}}}", 1, 1),
        ),
        10,
    ),
    Alert(
        "PeerCacheDiscoveryFails",
        "peercache_discovery_answering == 0",
        10,
        "warning",
        "{{ $labels.instance }}: {{ $labels.source }} gives no addresses",
        "A source of `discovery_addr` does not answer. A running cluster continues; a node that "
        "starts now may stay alone.",
        "`discovery.source_failed` in the log has the reason.",
        "Fix the name service, etcd or the rights of the pod "
        "([find each other](find-each-other.md)).",
        (Series(f'peercache_discovery_answering{{{INSTANCE},source="dns://x:1"}}', 1, 0),),
        20,
        {**EVERYWHERE, "source": "dns://x:1"},
    ),
    *map(_slow, OBJECTIVES),
)


def _yaml(value: Any) -> str:
    # JSON is YAML; an unescaped string is read by people.
    return json.dumps(value, ensure_ascii=False)


def rules() -> str:
    """Return deploy/prometheus/rules.yml."""
    lines = [
        "# Made by `make docs` from tests/house/alerts.py. Every alert has an entry in",
        "# docs/how-to/runbook.md. The scrape job is named `peercache`.",
        "groups:",
        "  - name: peercache.recorded",
        "    rules:",
    ]
    for name, expr in RECORDED.items():
        lines += [f"      - record: {name}", f"        expr: {_yaml(expr)}"]
    lines += ["  - name: peercache.alerts", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {_yaml(alert.expr)}",
            *([f"        for: {alert.for_m}m"] if alert.for_m else []),
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            *(f"          {name}: {_yaml(text)}" for name, text in alert.annotations().items()),
        ]
    return "\n".join(lines) + "\n"


def rules_test() -> str:
    """Return deploy/prometheus/rules_test.yml: each alert fires, and clears."""
    lines = [
        "# Made by `make docs`. Try it: promtool test rules rules_test.yml",
        "rule_files: [rules.yml]",
        "evaluation_interval: 1m",
        "tests:",
    ]
    for alert in ALERTS:
        lines += [f"  - name: {alert.name}", "    interval: 1m", "    input_series:"]
        for series in alert.series:
            values = series.values(alert.fault_m)
            lines.append(f"      - {{series: {_yaml(series.name)}, values: {_yaml(values)}}}")
        fired = {
            "exp_labels": {**alert.labels, "severity": alert.severity},
            "exp_annotations": {k: alert.filled(v) for k, v in alert.annotations().items()},
        }
        last_bad = GOOD_BEFORE_M + alert.fault_m - 1
        lines += ["    alert_rule_test:"]
        for at, expected in (
            (GOOD_BEFORE_M - 1, []),
            (last_bad, [fired]),
            (last_bad + GOOD_AFTER_M, []),
        ):
            lines.append(
                f"      - {{eval_time: {at}m, alertname: {alert.name}, "
                f"exp_alerts: {_yaml(expected)}}}"
            )
    return "\n".join(lines) + "\n"


def runbook() -> str:
    """Return the entries of docs/how-to/runbook.md."""
    entries = []
    for alert in ALERTS:
        wait = f"For {alert.for_m} min. " if alert.for_m else ""
        entries.append(
            f"## {alert.name}\n\n"
            f"{alert.meaning}\n\n"
            f"* **Fires** ({alert.severity}): {wait}`{alert.expr}`\n"
            f"* **Look**: {alert.look}\n"
            f"* **Do**: {alert.act}"
        )
    return "\n\n".join(entries)
