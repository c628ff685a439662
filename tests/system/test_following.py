"""Routers follow real nodes: what is stored, moved to disk, dropped and lost, over nng."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from peercache.cli.operate.connecting import Target
from peercache.cli.operate.events import follow_cluster
from peercache.events.cluster import ClusterFollower
from peercache.events.following import Index
from peercache.model.changes import IN_MEMORY
from peercache.model.keys import Namespace, page_keys
from tests.system.nodes import LocalCluster, keys_of, pages_of, read, wait_until

pytestmark = pytest.mark.slow

PAGES = 24


def target_of(cluster: LocalCluster, node: str) -> Target:
    return Target.of(at=node, timeout_s=5.0, config=None, cluster=cluster.name, environment={})


def reads(follower: ClusterFollower, index: Index, wanted: Callable[[], bool]) -> None:
    """Apply what comes until something holds."""

    def holds() -> bool:
        batch = follower.next(0.01)
        if batch is not None:
            index.apply(batch)
        return wanted()

    wait_until(holds)


def named(keys: list[str]) -> list[bytes]:
    found: list[bytes] = page_keys(keys, Namespace().digest()).tolist()
    return found


def test_an_index_equals_what_nodes_hold_through_stores_evictions_and_death() -> None:
    """Pages of before, new ones, removed and evicted ones; a killed node, and its successor."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2, pool="8MiB")
        one, two = (node.ready["control"] for node in nodes)
        early, late = keys_of("early", PAGES), keys_of("late", PAGES)
        client, other = (cluster.client(node) for node in nodes)
        assert all(client.batch_set(early, pages_of(early)))
        with follow_cluster(target_of(cluster, two)) as follower:
            index = Index()
            everything = dict.fromkeys(named(early), IN_MEMORY)
            reads(follower, index, lambda: index.pages(one) == everything)
            assert all(other.batch_set(late, pages_of(late)))
            reads(follower, index, lambda: index.prefix(two, named(late)) == PAGES)
            assert client.remove(early[:4]) == 4
            rest = dict.fromkeys(named(early[4:]), IN_MEMORY)
            reads(follower, index, lambda: index.pages(one) == rest)

            # The pool holds fewer pages than this: what it evicts is told.
            many = keys_of("many", 100)
            for at in range(0, len(many), 20):
                other.batch_set(many[at : at + 20], pages_of(many[at : at + 20]))
            stored = other.stats()["home_pool_pages"]
            reads(
                follower,
                index,
                lambda: len(index.pages(two)) == stored and named(many)[-1] in index.pages(two),
            )
            there = read(other, many)
            assert [key in index.pages(two) for key in named(many)] == there

            nodes[0].kill()
            reads(follower, index, lambda: index.nodes() == [two])
            assert index.holders(named(early)[-1]) == {}
            again = cluster.start("again", flags=["--listen", one, "--discovery-addr", two])
            assert again.ready["control"] == one
            reads(follower, index, lambda: sorted(index.nodes()) == sorted([one, two]))
            assert index.pages(one) == {}


def test_the_command_tells_what_nodes_hold_line_by_line() -> None:
    """All that is there and each change, as JSON; only the kinds and nodes that are named."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        one, two = (node.ready["control"] for node in nodes)
        keys = keys_of("told", 4)
        client = cluster.client(nodes[0])
        assert all(client.batch_set(keys[:2], pages_of(keys[:2])))
        command = [
            sys.executable, "-m", "peercache", "events", "--at", two, "--node", one,
            "--kind", "stored", "--kind", "removed", "--json", "--for", "60",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                told = [json.loads(running.stdout.readline()) for _ in range(2)]
                assert sorted(row["key"] for row in told) == sorted(
                    k.hex() for k in named(keys[:2])
                )
                assert all(client.batch_set(keys[2:], pages_of(keys[2:])))
                client.remove(keys[:1])
                more = [json.loads(running.stdout.readline()) for _ in range(3)]
            finally:
                running.kill()
    assert {row["node"] for row in told + more} == {one}
    size = len(pages_of(keys[:1])[0])
    assert [(row["event"], row["bytes"]) for row in told] == [("stored", size)] * 2
    assert [row["event"] for row in more] == ["stored", "stored", "removed"]
    assert more[2] == {"node": one, "event": "removed", "key": named(keys)[0].hex(), "bytes": 0}


def test_the_command_ends_by_itself_and_says_what_is_wrong() -> None:
    """0 after --for; 2 where no node answers."""
    with LocalCluster() as cluster:
        node = cluster.start()
        ended = told_by("--at", node.ready["control"], "--for", "0.5")
        assert (ended.returncode, ended.stdout.split()) == (0, [node.ready["control"], "anew"])
        node.kill()
        ended = told_by("--at", node.ready["control"], "--for", "0.5")
        assert ended.returncode == 2
        assert "nothing listens there" in ended.stderr


def told_by(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "peercache", "events", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
