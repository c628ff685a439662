"""`python -m benchmarks.copies`: what a kill takes with `copies = 2`, and when a page has a copy.

Three nodes on this machine. One client stores pages of 1 MiB at half of `placement_rate`; one
second after the last set its node is killed, and a client of another node reads all of them. Rows:
cold pools, which are empty; and full ones, of pages that are a few seconds older. Then the same
without copies. The bytes of each page that is read are compared.

Columns: pages that were stored, and found after the kill; after which time from the last set no
page was without a copy; how long after the reads that follow the kill all pages have two copies
again: a second node is killed then, and all of them must be found.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.engine import start_cluster
from peercache import Client
from peercache.cli.processes import NodeProcess, NodeProcesses

MIB = 2**20
BATCH = 8
RATE = 512 * MIB
NODES = ("one", "two", "three")
OLDER_S = 5.0
WAIT_S = 30.0


def page_of(key: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a page, which follow from its key."""
    seed = int.from_bytes(key.encode()[-8:].rjust(8), "big")
    return np.random.default_rng(seed).integers(0, 256, MIB, dtype=np.uint8)


def figure(node: NodeProcess, name: str) -> int:
    """Return a figure of a node's metrics."""
    with urllib.request.urlopen(f"http://{node.ready['http']}/metrics") as page:
        lines = page.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"peercache_{name} ")]
    return int(float(line.split()[-1]))


def seconds_until(is_done: Callable[[], bool], within_s: float) -> float:
    """Return after which time something is so; NaN: it took too long."""
    began = time.perf_counter()
    while time.perf_counter() < began + within_s:
        if is_done():
            return time.perf_counter() - began
        time.sleep(0.01)
    return float("nan")


def client_of(node: NodeProcess, fabric: str) -> Client:
    """Return a client of a node."""
    return Client.open(
        home=node.home, cluster="copies", fabric=fabric, op_timeout_s=10.0, exists_timeout_s=10.0
    )


def store(client: Client, keys: Sequence[str], rate: float = float("inf")) -> int:
    """Store pages at a rate in bytes a second; return how many."""
    began, stored = time.perf_counter(), 0
    for begin in range(0, len(keys), BATCH):
        batch = keys[begin : begin + BATCH]
        stored += sum(client.batch_set(batch, [page_of(key) for key in batch]))
        due = began + (begin + len(batch)) * MIB / rate
        time.sleep(max(0.0, due - time.perf_counter()))
    return stored


def found(client: Client, keys: Sequence[str]) -> int:
    """Return how many pages are hits; each must have its bytes."""
    hits = 0
    for begin in range(0, len(keys), BATCH):
        batch = keys[begin : begin + BATCH]
        into = [np.zeros(MIB, np.uint8) for _ in batch]
        for key, page, hit in zip(batch, into, client.batch_get(batch, into), strict=True):
            assert not hit or np.array_equal(page, page_of(key)), f"{key} has wrong bytes"
            hits += bool(hit)
    return hits


def row(*, copies: int, is_full: bool, pages: int, fabric: str) -> str:
    """Measure one row."""
    pool_bytes = 4 * pages * MIB
    settings = {
        "copies": str(copies),
        "placement-rate": str(RATE),
        "placement-min-age": "1",
        "fabric": fabric,
        "metrics-port": "-1",
    }
    with NodeProcesses() as processes:
        nodes = start_cluster(
            processes, "copies", dict.fromkeys(NODES, pool_bytes), dict.fromkeys(NODES, settings)
        )
        time.sleep(2.0)
        for name, node in nodes.items() if is_full else ():
            with client_of(node, fabric) as client:
                store(client, [f"old-{name}-{number}" for number in range(4 * pages)])
        time.sleep(OLDER_S if is_full else 0.0)
        keys = [f"page-{number:04}" for number in range(pages)]
        one, two, three = (nodes[name] for name in NODES)
        with client_of(one, fabric) as client:
            stored = store(client, keys, RATE / 2)
            began, single_s = time.perf_counter(), float("nan")
            if copies > 1 and not is_full:
                single_s = seconds_until(lambda: figure(one, "pages_single") == 0, 1.0)
            time.sleep(max(0.0, began + 1.0 - time.perf_counter()))
        with client_of(three, fabric) as client:
            one.kill()
            hits = found(client, keys)
            again_s = float("nan")
            if copies > 1 and not is_full:
                again_s = seconds_until(
                    lambda: min(figure(node, "pool_pages") for node in (two, three)) >= pages,
                    WAIT_S,
                )
                two.kill()
                assert found(client, keys) == pages, "a page was lost with the second node"
    pools = "full" if is_full else "cold"
    figures = f"{stored:>9}{hits:>7}{single_s * 1e3:>11.0f}{again_s:>10.1f}"
    return f"{copies:>7}{pools:>7}{figures}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--fabric", default="tcp")
    options = parser.parse_args()
    print(f"{'copies':>7}{'pools':>7}{'stored':>9}{'found':>7}{'single ms':>11}{'again s':>10}")
    for copies in (2, 1):
        for is_full in (False, True):
            line = row(copies=copies, is_full=is_full, pages=options.pages, fabric=options.fabric)
            print(line, flush=True)


if __name__ == "__main__":
    main()
