"""What exists reports stays readable for the get that follows, in every pool of a model.

Two pools of a model are two namespaces of one name; a page of either has the same hash.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from peercache import Client
from peercache.model.keys import Namespace, PageKeys, page_keys_of
from peercache.model.prefix import ALL_PAGES, Prefix, SidePages, prefix_of
from peercache.model.runs import PageRuns, runs_of_buffers
from tests.pace import wait_until
from tests.system.nodes import (
    PAGE_BYTES,
    LocalCluster,
    NodeProcess,
    Page,
    empty,
    free_port,
    keys_of,
    page_of,
    pages_of,
)

POOLS = [Namespace("model", pool).digest() for pool in ("kv", "window")]
PREFIX = 16


@pytest.fixture
def two() -> Iterator[LocalCluster]:
    """Give two nodes whose pools hold about 120 pages."""
    with LocalCluster() as cluster:
        for _ in range(2):
            cluster.start(pool="16MiB", flags=("--metrics-port", free_port()))
        for node in cluster.nodes:
            cluster.wait_for_members(node, 2)
        yield cluster


def client_of(cluster: LocalCluster, node: NodeProcess, fabric: str = "auto") -> Client:
    return cluster.client(node, namespace=Namespace("model", "kv"), fabric=fabric)


def rows_of(keys: list[str]) -> PageKeys:
    """Return the page keys of both pools, (2, n)."""
    return page_keys_of(keys, POOLS)


def content(keys: list[str], pool: int) -> list[Page]:
    return [page_of(key) ^ np.uint8(pool) for key in keys]


def store(client: Client, names: PageKeys, pages: list[Page]) -> list[bool]:
    held, runs = runs_of_buffers(pages, writable=False)
    stored = client.batch_set_from(names, runs)
    del held
    return stored


def read_both(client: Client, keys: list[str]) -> list[bool]:
    """Read both pools of a prefix in one batch; assert that every hit is the right page."""
    buffers = empty(2 * len(keys))
    halves = [buffers[: len(keys)], buffers[len(keys) :]]
    parts = [runs_of_buffers(each, writable=True)[1] for each in halves]
    hits = client.batch_get_into(rows_of(keys).reshape(-1), PageRuns.joined(parts))
    wanted = content(keys, 0) + content(keys, 1)
    for page, buffer, hit in zip(wanted, buffers, hits, strict=True):
        assert not hit or np.array_equal(page, buffer)
    return hits


def reported(client: Client, keys: list[str]) -> Prefix:
    """Ask how far a prefix reaches in both pools, in one batch."""
    asked = rows_of(keys).T.reshape(-1)
    found = np.array(client.touch(asked)).reshape(len(keys), len(POOLS))
    return prefix_of(found[:, 0], len(keys), [SidePages(ALL_PAGES, found[:, 1])])


def touched(node: NodeProcess) -> int:
    """Return how many messages about touched pages a node has had."""
    named = 'peercache_messages_received_total{kind="Touched"} '
    lines = node.page("/metrics").splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(named)))


def test_a_reported_prefix_outlives_the_pages_written_after_it(two: LocalCluster) -> None:
    """It was the oldest of a full pool; reported, it is the youngest before the call returns."""
    holder, other = two.nodes
    writer, reader = client_of(two, holder), client_of(two, other)
    prefix, filler, later = (keys_of(n, c) for n, c in (("p", PREFIX), ("f", 200), ("l", 60)))
    for pool, names in enumerate(rows_of(prefix)):
        assert all(store(writer, names, content(prefix, pool)))
    for begin in range(0, len(filler), 2):
        if writer.stats()["home_pool_bytes_free"] < 8 * PAGE_BYTES:
            break
        assert all(writer.batch_set(filler[begin : begin + 2], pages_of(filler[begin : begin + 2])))
    wait_until(lambda: reader.batch_exists(rows_of(prefix).reshape(-1)) == 2 * PREFIX)
    before = touched(holder)

    found = reported(reader, prefix)
    wait_until(lambda: touched(holder) > before)
    stored = writer.batch_set(later, pages_of(later))

    assert found.pages == PREFIX
    assert touched(holder) == before + 1
    assert all(stored)
    assert writer.stats()["home_pool_pages_evicted"] >= 2 * PREFIX
    assert all(read_both(reader, prefix))


def test_asking_for_everything_again_and_again_stops_no_eviction(two: LocalCluster) -> None:
    """A report is no pin: new pages always find room."""
    holder, other = two.nodes
    writer, reader = client_of(two, holder), client_of(two, other)
    keys = keys_of("all", 300)

    for begin in range(0, len(keys), 20):
        some = keys[begin : begin + 20]
        assert all(writer.batch_set(some, pages_of(some)))
        reader.touch(keys)
        writer.touch(keys)

    assert writer.stats()["home_pool_pages_evicted"] > 100


def test_a_prefix_ends_where_one_pool_has_lost_its_holder(two: LocalCluster) -> None:
    """Half of the window's pages die with their node, between side pool and KV."""
    holder, other = two.nodes
    # Memory of this host outlives its node for readers that have mapped it.
    reader, lost = client_of(two, holder, "tcp"), client_of(two, other)
    prefix = keys_of("killed", PREFIX)
    kv, window = rows_of(prefix)
    assert all(store(reader, kv, content(prefix, 0)))
    assert all(store(reader, window[:5], content(prefix[:5], 1)))
    assert all(store(lost, window[5:], content(prefix[5:], 1)))
    wait_until(lambda: reported(reader, prefix).pages == PREFIX)

    other.kill()
    hits = read_both(reader, prefix)
    wait_until(lambda: reported(reader, prefix) == Prefix(5, [1, 2, 3, 4, 5], PREFIX, [5]))
    figures = reader.stats()

    assert hits == [True] * (PREFIX + 5) + [False] * (PREFIX - 5)
    missed = sum(int(n) for name, n in figures.items() if name.startswith("pages_missed_"))
    assert missed == PREFIX - 5
    assert read_both(reader, prefix[:5]) == [True] * 10
