"""What exists reports, when pages take longer to read than to compute: real nodes, a slow link."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from peercache import Client
from tests.pace import wait_until
from tests.system.nodes import CALL_S, PAGE_BYTES, LocalCluster, empty, keys_of, pages_of, read
from tests.system.relay import SlowLink

PAGES, COMPUTE_S = 32, 0.02
SLOW_BYTE_S = 0.4 / PAGE_BYTES
"""Reading a few pages takes longer than computing all, whatever else delays the first read."""
LONG_S = 60.0
"""A page takes longer to compute than any link and machine here takes to deliver it."""
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


def client_of(cluster: LocalCluster, decline: str, compute_s: float = COMPUTE_S) -> Client:
    """Return a client whose deadline leaves time for all pages while others use the link, too."""
    settings = {"decline": decline, "page_compute_ms": compute_s * 1000}
    return cluster.client(cluster.nodes[0], fabric="tcp", op_timeout_s=10 * CALL_S, **settings)


def declined(client: Client) -> dict[str, object]:
    """Return the counts of declined pages, by reason."""
    prefix = "exists_declined_"
    return {k.removeprefix(prefix): n for k, n in client.stats().items() if k.startswith(prefix)}


def test_pages_that_take_longer_to_read_than_to_compute_are_not_reported(
    cluster: LocalCluster, link: SlowLink
) -> None:
    """From the first prompt on, and a get of them hits all the same."""
    link.data.byte_s = math.inf
    off, cost = client_of(cluster, "off"), client_of(cluster, "cost")

    assert cost.batch_exists(KEYS) == 0
    assert declined(cost) == {"unmeasured": PAGES}
    link.data.byte_s = SLOW_BYTE_S
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

    assert cost.batch_exists(KEYS, compute_s=LONG_S) == PAGES
    longer = [LONG_S] * 4 + [0.0] * (PAGES + 1 - 4)
    assert cost.batch_exists([*KEYS, "unknown"], compute_s=longer) == 4


def test_a_fast_link_is_measured_before_the_first_prompt(
    cluster: LocalCluster, link: SlowLink
) -> None:
    """Nothing is declined."""
    link.data.byte_s = 0.0
    cost = client_of(cluster, "cost", LONG_S)

    assert cost.batch_exists(KEYS) == PAGES
    assert read(cost, KEYS) == [True] * PAGES
    assert cost.batch_exists(KEYS) == PAGES
    assert declined(cost) == {}
