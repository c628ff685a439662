"""Members that move pages as attackers would: others lose no call and no byte to them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from tests.hostile.hostile_member import INVENTED
from tests.hostile.test_live_node import assert_well
from tests.pace import assert_within, wait_until
from tests.system.nodes import CALL_S, LocalCluster, NodeProcess, keys_of, pages_of, read, timed
from tests.system.test_spilling import BATCH, FLAGS, SIZE, counted

pytestmark = pytest.mark.slow

SHOWN = FLAGS[-1:]


def as_attacker(kind: str) -> tuple[str, ...]:
    """Return what stands before the command of a hostile node."""
    return (sys.executable, "-m", "tests.hostile.hostile_member", kind)


def spilled(node: NodeProcess) -> dict[str, Any]:
    """Return what a node reports of pages that moved."""
    member = json.loads(node.page(f"/api/v1/status/{node.ready['control']}"))
    return dict(member["status"]["spilled"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("silent", "no_answer"), ("answers-for-others", "malformed"), ("forgets", "")],
)
def test_a_hostile_taker_costs_pages_that_would_have_been_evicted(kind: str, reason: str) -> None:
    """No set waits for it, no hit has another page's bytes, and it is counted.

    It reports more room than the honest node, to which pages go once it gave no valid answer. One
    that forgets what it takes answers validly: the figures by peer name it.
    """
    with LocalCluster() as cluster:
        busy = cluster.start(pool="16MiB", flags=FLAGS)
        honest = cluster.start(pool="64MiB", flags=SHOWN)
        hostile = cluster.start(before=as_attacker(kind))
        cluster.wait_for_members(busy, 3)
        client, keys = cluster.client(busy), keys_of(kind, 12 * BATCH)

        def store(begin: int) -> None:
            batch = keys[begin : begin + BATCH]
            stored, took_s = timed(lambda: client.batch_set(batch, pages_of(batch, SIZE)))
            assert all(stored)
            assert_within(took_s, CALL_S / 2, "a set")

        for begin in range(0, len(keys), BATCH):
            store(begin)
            time.sleep(0.05)
        if reason:
            wait_until(lambda: spilled(busy)["not_moved"].get(reason, 0) >= BATCH)
            wait_until(lambda: counted(honest, "pages_taken_over_total") > 0)
        else:
            wait_until(lambda: spilled(busy)["moved"] >= BATCH)
            (row,) = spilled(busy)["peers"]
            assert row["name"] == hostile.ready["control"]
            assert row["given"] == spilled(busy)["moved"]

        hits, took_s = timed(lambda: read(client, keys, SIZE))
        assert_within(took_s, CALL_S / 2, "a read")
        assert hits[-BATCH:] == [True] * BATCH
        assert hits.count(True) >= BATCH * 4
        assert_well(busy)


def test_a_member_that_offers_pages_that_it_has_not_leaves_none_of_them() -> None:
    """They are not read, and counted; the pages that are there stay hits, and no room is lost."""
    with LocalCluster() as cluster:
        honest = cluster.start(pool="32MiB", flags=SHOWN)
        client, keys = cluster.client(honest), keys_of("kept", 4 * BATCH)
        assert all(client.batch_set(keys, pages_of(keys, SIZE)))
        cluster.start(pool="16MiB", flags=FLAGS, before=as_attacker("invents"))

        wait_until(lambda: spilled(honest)["not_taken"].get("not_read", 0) >= 2 * INVENTED)

        assert spilled(honest)["taken"] == 0
        assert read(client, keys, SIZE) == [True] * len(keys)
        wait_until(lambda: client.stats()["home_pool_bytes_used"] == len(keys) * SIZE)
        assert client.stats()["home_pool_pages"] == len(keys)
        assert_well(honest)
