"""`python -m benchmarks.asked_again`: what it costs to ask for missing pages again.

While a request waits in SGLang's queue, `storage_prefetch.py` calls `exists` of its missing pages
up to eight times more (`--hicache-storage-prefetch-retry-max-attempts`). This measures calls that
look every key up (`contains`), and those of the leading run (`batch_exists`), which ask again only
up to the page that was missing: their time, the requests that they send, and the processor time
that all nodes use meanwhile. Both take turns, batch by batch.

A cluster of a few hosts has an owner of every key on each host, and a larger one two owners of each
key on any hosts (`directory_replicas`). The nodes run on this machine with their tables in separate
folders, so that a client can read the table of its home node only, as on separate hosts.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np

from peercache import Client
from peercache.cli.main import run
from peercache.cli.options import json_option
from peercache.cli.processes import LOCAL, NodeProcess, NodeProcesses
from peercache.cli.terminal import print_json, show_progress
from peercache.config.settings import Config
from peercache.model.keys import PageKeys, page_keys
from peercache.net.requests import Asker

KEYS = 128
REPEATS = 8
BATCHES = 25
"""Batches of new keys, each asked for once and then REPEATS times."""

WHEN = {"first": 1, "again": REPEATS}
CASES = {
    "all_first": "every key",
    "all_again": "every key, again",
    "run_again": "the run, again",
}

SMALL_HOSTS = 3
WAIT_S = 60.0
HANDOVER_S = 2.0
"""Until then after a change of the view, two owners are asked for an absent key."""


@contextmanager
def requests_counted() -> Iterator[Counter[str]]:
    """Count the requests that clients of this process send, by message."""
    counted: Counter[str] = Counter()
    ask = Asker.ask

    def counting(self: Any, questions: Any, *arguments: Any) -> Any:
        asked = list(questions)
        counted.update(type(message).__name__ for _, message in asked)
        return ask(self, asked, *arguments)

    setattr(Asker, "ask", counting)  # noqa: B010 - a method, for a while
    try:
        yield counted
    finally:
        setattr(Asker, "ask", ask)  # noqa: B010


def start(stack: ExitStack, hosts: int, owners: int) -> tuple[list[NodeProcess], Client]:
    """Start a cluster of nodes with separate tables, and a client of the first of them."""
    cluster = f"asked-{os.getpid()}-{hosts}"
    processes = stack.enter_context(NodeProcesses())
    nodes: list[NodeProcess] = []
    for number in range(hosts):
        memory = tempfile.TemporaryDirectory(prefix="peercache-", dir="/dev/shm")
        settings = {**LOCAL, "cluster": cluster, "pool-size": "8MiB", "log-level": "error"}
        settings |= {"shm-dir": stack.enter_context(memory), "directory-replicas": str(owners)}
        if nodes:
            settings["discovery-addr"] = nodes[0].ready["control"]
        nodes.append(processes.launch(f"n{number}", settings))
        processes.await_ready(nodes[-1])
    mine: dict[str, Any] = {"op_timeout_s": 30.0, "exists_timeout_s": 10.0}
    mine |= {"directory_replicas": owners, "cluster": cluster, "home": nodes[0].home}
    config = attrs.evolve(Config.load(mine), handover_s=HANDOVER_S)
    client = stack.enter_context(Client.open(config))
    until = time.monotonic() + WAIT_S
    while client.stats().get("members") != hosts and time.monotonic() < until:
        time.sleep(0.1)
    return nodes, client


def used_s(nodes: Sequence[NodeProcess]) -> float:
    """Return the processor time of these processes so far."""
    ticks = 0
    for node in nodes:
        fields = Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(hosts: int, owners: int) -> dict[str, float]:
    """Return the figures of one cluster."""
    with ExitStack() as stack:
        nodes, client = start(stack, hosts, owners)
        # Connections are dialled on use, and a new owner has authority after a while.
        for number in range(10):
            client.batch_exists([f"warm-{number}-{key}" for key in range(KEYS)])
            time.sleep(HANDOVER_S / 4)
        began_s, idle_s = time.monotonic(), used_s(nodes)
        time.sleep(2.0)
        idle = (used_s(nodes) - idle_s) / (time.monotonic() - began_s)
        counted = stack.enter_context(requests_counted())
        figures: dict[str, float] = {"hosts": hosts}
        digest = client.namespace.digest()
        calls: dict[str, Callable[[PageKeys], Any]] = {
            "all": client.contains,
            "run": client.batch_exists,
        }
        times: dict[str, list[float]] = {f"{kind}_{when}": [] for kind in calls for when in WHEN}
        sent, busy_s = dict.fromkeys(times, 0), dict.fromkeys(times, 0.0)
        for number in range(BATCHES):
            for kind, call in calls.items():
                names = [f"absent-{kind}-{number}-{key}" for key in range(KEYS)]
                keys = page_keys(names, digest)
                for when, repeats in WHEN.items():
                    counted.clear()
                    began_s, before_s = time.monotonic(), used_s(nodes)
                    for _ in range(repeats):
                        started = time.perf_counter()
                        found = call(keys)
                        times[f"{kind}_{when}"].append(time.perf_counter() - started)
                        assert not np.any(found)
                    took_s = time.monotonic() - began_s
                    busy_s[f"{kind}_{when}"] += used_s(nodes) - before_s - idle * took_s
                    sent[f"{kind}_{when}"] += counted["Lookup"]
    for case, each in times.items():
        figures[f"{case}_us"] = statistics.median(each) * 1e6
        figures[f"{case}_requests"] = sent[case] / len(each)
        figures[f"{case}_nodes_us"] = max(0.0, busy_s[case]) / len(each) * 1e6
    return figures


@click.command
@click.option("--hosts", type=click.IntRange(min=2), default=12, show_default=True)
@json_option
def asked_again(hosts: int, *, as_json: bool) -> None:
    """Measure `exists` of missing pages, in a small and in a larger cluster."""
    figures = []
    for members, owners in ((SMALL_HOSTS, SMALL_HOSTS), (hosts, 2)):
        show_progress(f"{members} hosts")
        figures.append(measure(members, owners))
    if as_json:
        print_json({"keys": KEYS, "clusters": figures})
        return
    print(f"  {KEYS} missing keys            call    requests    nodes' processors")
    for row in figures:
        hosts = int(row["hosts"])
        for case, what in CASES.items():
            took, asked, busy = (row[f"{case}_{unit}"] for unit in ("us", "requests", "nodes_us"))
            print(f"  {hosts:2} hosts, {what:16} {took:7,.0f} µs {asked:9.1f} {busy:13,.0f} µs")


if __name__ == "__main__":
    sys.exit(run(asked_again, "benchmarks.asked_again", sys.argv[1:]))
