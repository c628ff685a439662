"""The overview: what a person sees of a node, and what keeps it from being seen."""

from __future__ import annotations

import json
import re

import pytest

from peercache.http.pages import Health
from peercache.model.member import ALIVE, DEAD, Member
from peercache.observability.metrics import Metrics
from tests.unit.http.http_node import ask, served


def member(number: int, state: int, host_name: str) -> Member:
    """Return a member of a view; only what people look at differs."""
    at = f"10.0.0.{number}"
    return Member(
        number, 1, state, 255, host_name, f"{at}:31998", f"{at}:4000", "boot", "/dev/shm/x"
    )


async def test_overview_shows_the_node_its_calls_and_its_members() -> None:
    """What a person looks for first is on the page, with figures as people read them."""
    facts: dict[str, int | float | str] = {
        "node": f"{1:016x}",
        "pool_bytes": 4 * 2**30,
        "pool_bytes_usable": 4 * 2**30,
        "pool_bytes_used": 3 * 2**30,
        "pool_pages": 3072,
        "directory_records": 77,
    }
    metrics = Metrics()
    metrics.pages_hit.labels("rdma").inc(1234)
    metrics.bytes_read.labels("rdma").inc(1234 * 2**20)
    metrics.pages_missed.labels("deadline").inc(5)
    metrics.pages_set.labels("copied").inc(6)
    metrics.bytes_written.inc(6 * 2**20)
    members = [member(2, DEAD, "beta"), member(1, ALIVE, "alpha")]

    async with served(
        health=lambda: Health(serving=True, facts=facts), metrics=metrics, members=members
    ) as address:
        status, page = await ask(address, "/?from=a-bookmark")

    assert status == 200
    assert "3.0 GiB of 4.0 GiB, 3072 pages" in page
    lines = re.findall("<tr>(.*?)</tr>", page)
    rows = [re.sub("<[^>]+>", " ", line).split() for line in lines]
    assert ["get", "hit", "over", "rdma", "1,234", "1.2", "GiB"] in rows
    assert ["get", "miss:", "deadline", "5"] in rows
    assert ["set", "copied", "6", "6.0", "MiB"] in rows
    ours = ["10.0.0.1:31998", "(this", "node)", "alive", "alpha", "10.0.0.1:4000", f"{1:016x}"]
    assert ours in rows
    assert ["10.0.0.2:31998", "dead", "beta", "10.0.0.2:4000", f"{2:016x}"] in rows
    assert rows.index(ours) < len(rows) - 1  # the living first
    assert "Members: 1 live" in page
    assert "77 records" in page
    assert "Disk" not in page


async def test_overview_escapes_what_other_nodes_say_of_themselves() -> None:
    """A host name is a stranger's text: it is shown, never run."""
    async with served(members=[member(1, ALIVE, "<script>alert(1)</script>")]) as address:
        _, page = await ask(address, "/")

    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


async def test_overview_of_a_node_that_is_not_well_says_why() -> None:
    """They see the reason, also that of a bug of ours, and that of a disk that has ended."""
    now: Health | None = Health(
        serving=False, reason="the loop is 9 s late", facts={"disk_problem": "stuck <sda>"}
    )

    def health() -> Health:
        if now is None:
            raise RuntimeError("no pool")
        return now

    async with served(health=health) as address:
        late = await ask(address, "/")
        now = None
        broken = await ask(address, "/")

    assert late[0] == broken[0] == 200
    assert "not serving: the loop is 9 s late" in late[1]
    assert "off: stuck &lt;sda&gt;" in late[1]
    assert "not serving: RuntimeError: no pool" in broken[1]


async def test_overview_says_what_does_not_work_although_the_node_serves() -> None:
    """Beside the address by which people know the node, not the number of its start."""
    facts: dict[str, int | float | str] = {"node": "0123", "control": "10.0.0.1:31998"}
    half = Health(serving=True, degraded="the disk is full", facts=facts)

    async with served(health=lambda: half) as address:
        _, page = await ask(address, "/")

    assert "serving, degraded: the disk is full" in page
    assert "<h1>PeerCache node <code>10.0.0.1:31998</code>" in page


async def test_overview_shows_what_no_encoding_and_no_integer_holds() -> None:
    """A path that is no text, a counter that has run over: the page is made all the same."""
    metrics = Metrics()
    for _ in range(2):
        metrics.pages_hit.labels("shm").inc(1.7e308)
        metrics.bytes_read.labels("shm").inc(1.7e308)
    ill = Health(serving=True, facts={"disk_problem": "no room in /disk\udcff"})

    async with served(health=lambda: ill, metrics=metrics) as address:
        status, page = await ask(address, "/")

    assert status == 200
    assert "no room in /disk?" in page
    assert "inf" in page


async def test_page_that_cannot_be_made_is_an_error_and_ends_nothing() -> None:
    """A bug in one page must not take the node with it."""

    def broken() -> tuple[Member, ...]:
        raise RuntimeError("no view")

    async with served(members=broken) as address:
        failed = await ask(address, "/")
        following = await ask(address, "/healthz")

    assert (failed[0], json.loads(failed[1])) == (500, {"error": "RuntimeError: no view"})
    assert following[0] == 200


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({"cluster": "ann", "insecure": 1}, "The trial ann has no certificates"),
        ({"cluster": "prod", "insecure": 0, "certificate_days": 12.34}, "expires in 12.3 days"),
        ({"cluster": "prod", "insecure": 0, "certificate_days": -1.0}, "has expired"),
        ({"cluster": "default", "insecure": 0}, "Cluster default, on this host only"),
        ({"cluster": "<b>", "insecure": 1}, "The trial &lt;b&gt; has"),
    ],
)
async def test_overview_says_how_the_cluster_is_protected(
    facts: dict[str, int | float | str], shown: str
) -> None:
    """A trial that was forgotten, and a certificate that ends, are seen at the first look."""
    async with served(health=lambda: Health(serving=True, facts=facts)) as address:
        _, page = await ask(address, "/")

    assert shown in " ".join(re.sub("<[^>]+>", "", page).split())


async def test_overview_of_a_large_cluster_stays_small() -> None:
    """Thousands of members are counted, and the first hundreds shown."""
    members = [member(number, ALIVE, "host") for number in range(1, 5001)]

    async with served(members=members) as address:
        _, page = await ask(address, "/")

    assert "and 4800 more" in page
    assert len(page) < 60_000
