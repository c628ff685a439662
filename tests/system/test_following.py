"""Routers follow real nodes: what is stored, moved to disk, dropped and lost, over nng."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peercache.client.following import follow_cluster
from peercache.client.operator import Target
from peercache.connector.followed_blocks import FollowedBlocks
from peercache.connector.metadata import cluster_store
from peercache.events.blocks import BlockRemoved, BlockStored
from peercache.events.following import ClusterFollower, Index
from peercache.events.publishing import BlockPublisher
from peercache.model.keys import Namespace, page_keys
from peercache.model.records import IN_FILES, IN_MEMORY
from tests.pace import wait_until
from tests.system.nodes import EVICTED_IS_GONE, LocalCluster, command, keys_of, pages_of, read
from tests.unit.connector.rig import PAGE_TOKENS, Engine, mapping_of
from tests.unit.events.test_publishing import ANY, replayed

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
        nodes = cluster.start_many(2, pool="8MiB", flags=EVICTED_IS_GONE)
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

            # The pool holds fewer pages than this: what it evicts is reported.
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


def test_another_member_reports_who_comes_when_the_asked_node_has_ended() -> None:
    """The follower goes on without the node that it was given, and finds one that joins later."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        one, two = (node.ready["control"] for node in nodes)
        with follow_cluster(target_of(cluster, one)) as follower:
            index = Index()
            reads(follower, index, lambda: sorted(index.nodes()) == sorted([one, two]))
            nodes[0].kill()
            reads(follower, index, lambda: index.nodes() == [two])
            three = cluster.start("three", flags=["--discovery-addr", two]).ready["control"]
            reads(follower, index, lambda: sorted(index.nodes()) == sorted([two, three]))


def test_pages_that_are_on_disk_only_are_reported_as_such_and_come_back(tmp_path: Path) -> None:
    """Evicted to disk, promoted by a read, and found by a restarted node: the tier follows."""
    disk = ["--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "64MiB"]
    with LocalCluster() as cluster:
        node = cluster.start(pool="4MiB", flags=disk)
        at = node.ready["control"]
        client = cluster.client(node)
        wait_until(lambda: client.stats().get("home_disk_open") == 1)
        keys = keys_of("both", 64)
        for start in range(0, 64, 8):
            part = keys[start : start + 8]
            assert all(client.batch_set(part, pages_of(part)))
            wait_until(lambda done=start + 8: client.stats()["home_disk_pages"] >= done)  # type: ignore[misc]
        with follow_cluster(target_of(cluster, at)) as follower:
            index = Index()
            reads(follower, index, lambda: len(index.pages(at)) == 64)
            in_memory = client.stats()["home_pool_pages"]
            tiers = list(index.pages(at).values())
            assert (tiers.count(IN_MEMORY), tiers.count(IN_FILES)) == (
                in_memory,
                64 - int(in_memory),
            )
            first = named(keys)[0]
            assert index.pages(at)[first] == IN_FILES
            assert read(client, keys[:1]) == [True]
            reads(follower, index, lambda: index.pages(at)[first] == IN_MEMORY)

            assert node.terminate() == 0
            reads(follower, index, lambda: len(index) == 0)


def test_a_consumer_that_was_stopped_reads_on_and_slows_no_node() -> None:
    """The command is stopped while pages come and go; then it reports all that it has missed."""
    with LocalCluster() as cluster:
        node = cluster.start()
        client = cluster.client(node)
        keys = keys_of("missed", 40)
        command = [
            sys.executable, "-m", "peercache", "events", "--at", node.ready["control"],
            "--json", "--for", "60",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                assert json.loads(running.stdout.readline())["event"] == "resync"
                os.kill(running.pid, signal.SIGSTOP)
                for start in range(0, 40, 8):
                    part = keys[start : start + 8]
                    assert all(client.batch_set(part, pages_of(part)))
                assert client.remove(keys[:8]) == 8
                os.kill(running.pid, signal.SIGCONT)
                reported = [json.loads(running.stdout.readline()) for _ in range(48)]
            finally:
                running.kill()
        assert [row["event"] for row in reported] == ["stored"] * 40 + ["removed"] * 8
        assert [row["key"] for row in reported[:40]] == [key.hex() for key in named(keys)]


def test_the_command_reports_what_nodes_hold_line_by_line() -> None:
    """All that is there and each change, as JSON; only the kinds and nodes that are named."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        one, two = (node.ready["control"] for node in nodes)
        keys = keys_of("reported", 4)
        client = cluster.client(nodes[0])
        assert all(client.batch_set(keys[:2], pages_of(keys[:2])))
        command = [
            sys.executable, "-m", "peercache", "events", "--at", two, "--node", one,
            "--kind", "stored", "--kind", "removed", "--json", "--for", "60",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                reported = [json.loads(running.stdout.readline()) for _ in range(2)]
                assert sorted(row["key"] for row in reported) == sorted(
                    k.hex() for k in named(keys[:2])
                )
                assert all(client.batch_set(keys[2:], pages_of(keys[2:])))
                client.remove(keys[:1])
                more = [json.loads(running.stdout.readline()) for _ in range(3)]
            finally:
                running.kill()
    assert {row["node"] for row in reported + more} == {one}
    size = len(pages_of(keys[:1])[0])
    assert [(row["event"], row["bytes"]) for row in reported] == [("stored", size)] * 2
    assert [row["event"] for row in more] == ["stored", "stored", "removed"]
    assert more[2] == {"node": one, "event": "removed", "key": named(keys)[0].hex(), "bytes": 0}


def test_the_command_ends_by_itself_and_reports_what_is_wrong() -> None:
    """0 after --for; 2 where no node answers."""
    with LocalCluster() as cluster:
        node = cluster.start()
        ended = command("events", "--at", node.ready["control"], "--for", "0.5")
        assert (ended.returncode, ended.stdout.split()) == (0, [node.ready["control"], "resync"])
        node.kill()
        ended = command("events", "--at", node.ready["control"], "--for", "0.5")
        assert ended.returncode == 2
        assert "nothing listens there" in ended.stderr


# --- a router that reads vLLM's format: a connector's blocks come and go --------------------------

BLOCKS = 8


def known_blocks(publisher: BlockPublisher) -> set[Any]:
    """Return the blocks that a router knows which has read everything."""
    names: set[Any] = set()
    for event in [event for _, events in replayed(publisher.replay, 0) for event in events]:
        if isinstance(event, BlockStored):
            names |= set(event.hashes)
        elif isinstance(event, BlockRemoved):
            names -= set(event.hashes)
        else:
            names.clear()
    return names


def test_blocks_go_with_their_pages_and_with_their_node() -> None:
    """Stored, cleared, stored again, and lost with the node that is killed."""
    with LocalCluster() as cluster:
        one, two = cluster.start_many(2)
        store = cluster_store(home=one.ready["home"], cluster=cluster.name)(Namespace("engine"))
        tokens = list(range(BLOCKS * PAGE_TOKENS))
        with (
            follow_cluster(target_of(cluster, two.ready["control"])) as follower,
            FollowedBlocks(ANY, follower, ANY) as blocks,
            Engine(store, on_stored=blocks.stored) as engine,
        ):

            def keep(request: str) -> None:
                mapping = mapping_of(range(BLOCKS))
                future, _ = engine.connector.store_kv_async(request, mapping, tokens)
                assert future.result(30) == len(tokens)

            keep("first")
            wait_until(lambda: len(known_blocks(blocks.publisher)) == BLOCKS)

            assert cluster.client(one, namespace=Namespace("engine")).clear() == BLOCKS
            wait_until(lambda: not known_blocks(blocks.publisher))

            keep("again")
            wait_until(lambda: len(known_blocks(blocks.publisher)) == BLOCKS)
            one.kill()
            wait_until(lambda: not known_blocks(blocks.publisher))
