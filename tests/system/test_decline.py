"""What exists reports, when pages take longer to read than to compute: real nodes, a slow link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peercache import Client
from tests.pace import wait_until
from tests.system.nodes import PAGE_BYTES, LocalCluster, empty, keys_of, pages_of, read
from tests.system.relay import SlowLink

PAGES, COMPUTE_S = 32, 0.2
SLOW_BYTE_S = 2 * COMPUTE_S / PAGE_BYTES
KEYS = keys_of("declined", PAGES)


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    """A link to the node that holds the pages."""
    with SlowLink.open() as link:
        yield link


@pytest.fixture(scope="module")
def cluster(link: SlowLink) -> Iterator[LocalCluster]:
    """Two nodes, of which the second has the pages, behind the link."""
    with LocalCluster() as cluster:
        reader = cluster.start()
        holder = cluster.start(flags=link.flags)
        cluster.wait_for_members(reader, 2)
        assert all(cluster.client(holder).batch_set(KEYS, pages_of(KEYS)))
        yield cluster


def client_of(cluster: LocalCluster, decline: str) -> Client:
    settings = {"decline": decline, "page_compute_ms": COMPUTE_S * 1000}
    return cluster.client(cluster.nodes[0], fabric="tcp", **settings)


def declined(client: Client) -> dict[str, object]:
    """Return the counts of declined pages, by reason."""
    prefix = "exists_declined_"
    return {k.removeprefix(prefix): n for k, n in client.stats().items() if k.startswith(prefix)}


def test_pages_that_take_longer_to_read_than_to_compute_are_not_reported(
    cluster: LocalCluster, link: SlowLink
) -> None:
    """From the first prompt on, and a get of them hits all the same."""
    link.data.byte_s = SLOW_BYTE_S
    off, cost = client_of(cluster, "off"), client_of(cluster, "cost")

    assert cost.batch_exists(KEYS) == 0
    assert declined(cost) == {"unmeasured": PAGES}
    wait_until(lambda: cost.batch_touch(KEYS) == 0 and "slow_fabric" in declined(cost))
    assert off.batch_exists(KEYS) == PAGES
    assert cost.contains(KEYS) == [True] * PAGES
    assert (off.worth_reading(KEYS), cost.worth_reading(KEYS)) == (PAGES, 0)
    # An engine may ask for a whole prompt of which only the first pages are known.
    assert cost.worth_reading([*KEYS, *keys_of("unknown", 4 * PAGES)]) == 0
    assert declined(off) == {}

    assert read(cost, KEYS[:1]) == [True]
    assert cost.batch_get(KEYS[:1], empty(1)) == [True]


def test_a_prefix_is_reported_to_whom_it_takes_longer_to_compute(
    cluster: LocalCluster, link: SlowLink
) -> None:
    """A caller may state the time of each page; those beyond the prefix do not count."""
    link.data.byte_s = SLOW_BYTE_S
    cost = client_of(cluster, "cost")
    wait_until(lambda: cost.batch_exists(KEYS) == 0 and "slow_fabric" in declined(cost))

    assert cost.batch_exists(KEYS, compute_s=60.0) == PAGES
    longer = [60.0] * 4 + [0.0] * (PAGES + 1 - 4)
    assert cost.batch_exists([*KEYS, "unknown"], compute_s=longer) == 4


def test_a_fast_link_is_measured_before_the_first_prompt(
    cluster: LocalCluster, link: SlowLink
) -> None:
    """Nothing is declined."""
    link.data.byte_s = 0.0
    cost = client_of(cluster, "cost")

    assert cost.batch_exists(KEYS) == PAGES
    assert read(cost, KEYS) == [True] * PAGES
    assert cost.batch_exists(KEYS) == PAGES
    assert declined(cost) == {}
