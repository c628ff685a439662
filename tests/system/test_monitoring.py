"""Rules and board with real nodes: each expression has data, an alert comes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import alerts, board
from tests.pace import wait_until
from tests.system.monitoring import ALERTMANAGER, PROMETHEUS, Monitoring
from tests.system.nodes import LocalCluster, empty, free_port, keys_of, pages_of, read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PROMETHEUS and ALERTMANAGER),
        reason="there is no Prometheus (apt-get install prometheus prometheus-alertmanager)",
    ),
]

QUIET = {"disk_slow", "memory_slow", "exists_slow"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 48 MiB, which soon is full; unmounted afterwards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "peercache-test", str(folder)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def evaluated(expr: str) -> str:
    """Return an expression as Grafana would send it, for nodes that are scraped quickly."""
    return (
        expr.replace("$__rate_interval", "30s").replace("$job", "peercache").replace(
            "$instance", ".*"
        )
    )  # fmt: skip


def test_board_and_alerts_see_a_fault_of_real_nodes(tmp_path: Path, small_disk: Path) -> None:
    """A killed node and a full disk: no panel is empty, and alerts fire."""
    with LocalCluster() as cluster:
        ports = [free_port() for _ in range(3)]
        disk = ("--disk-enabled", "true", "--disk-path", str(small_disk), "--disk-size", "1GiB",
                "--disk-free-floor", "0")  # fmt: skip
        nodes = [
            cluster.start(pool="8MiB", flags=("--metrics-port", ports[0], *disk)),
            *(cluster.start(pool="16MiB", flags=("--metrics-port", port)) for port in ports[1:]),
        ]
        for node in nodes:
            cluster.wait_for_members(node, 3)
        with Monitoring(tmp_path, [f"127.0.0.1:{port}" for port in ports]) as monitoring:
            writers = [cluster.client(node, op_timeout_s=2.0) for node in nodes]
            reader = cluster.client(nodes[1], fabric="tcp", op_timeout_s=2.0)
            kept = keys_of("kept", 16)
            assert all(writers[2].batch_set(kept, pages_of(kept)))
            turn = 0

            def load() -> None:
                """Use every way that a board shows: memory, network, disk, misses."""
                nonlocal turn
                turn += 1
                keys = keys_of(f"turn-{turn % 40}", 16)
                writers[0].batch_set(keys, pages_of(keys))
                for client in (writers[1], reader):
                    client.contains(kept)
                    client.batch_get(kept, empty(len(kept)))
                old = keys_of(f"turn-{(turn + 5) % 40}", 4)
                writers[0].batch_get(old, empty(4))
                writers[1].contains(keys_of(f"unknown-{turn}", 4))
                writers[1].batch_get(keys_of("absent", 1), empty(1))

            def lacking() -> list[str]:
                load()
                return [
                    expr
                    for expr in board.expressions()
                    if not [
                        sample
                        for sample in monitoring.query(evaluated(expr))
                        if expr.startswith("min by") or not math.isnan(float(sample["value"][1]))
                    ]
                ]

            wait_until(lambda: not lacking())
            judged = subprocess.run(
                [sys.executable, "-m", "peercache", "slo", "--json",
                 *(f"127.0.0.1:{port}" for port in ports)],
                capture_output=True, check=False,
            )  # fmt: skip
            reported = json.loads(judged.stdout)
            assert judged.returncode == (0 if reported["ok"] else 1)
            assert all(objective["calls"] > 0 for objective in reported["objectives"])
            wait_until(lambda: load() or monitoring.receiver.received(
                "PeerCacheDiskDropsPages", "firing"
            ))  # fmt: skip

            nodes[2].kill()
            wait_until(lambda: load() or monitoring.query(
                'ALERTS{alertname="PeerCacheDown",alertstate="firing"}'
            ))  # fmt: skip
            for record in alerts.RECORDED:
                if not any(name in record for name in QUIET):
                    assert monitoring.query(record), record
            assert not lacking()


KNOWN_COMPLAINTS = (
    # Certificates are thought of in days, and the name is older than this test.
    "peercache_certificate_days use base unit",
    # The label joins an objective to its bucket of a histogram, without a label_replace.
    "peercache_objective_seconds non-histogram metrics",
)


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool")
def test_promtool_takes_what_a_node_shows() -> None:
    """The exposition is well formed; names follow the conventions of Prometheus."""
    with LocalCluster() as cluster:
        node = cluster.start(flags=("--metrics-port", free_port()))
        client = cluster.client(node)
        keys = keys_of("shown", 4)
        client.batch_set(keys, pages_of(keys))
        read(client, keys)
        wait_until(lambda: "peercache_page_seconds_count" in node.page("/metrics"))
        reported = subprocess.run(
            ["promtool", "check", "metrics"], input=node.page("/metrics"), capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    complaints = [
        line
        for line in reported.stderr.splitlines()
        if line and not line.startswith(KNOWN_COMPLAINTS)
    ]
    assert complaints == []
