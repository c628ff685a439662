"""Pages move between real nodes, and only right ones."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from peercache import Client
from peercache.client.client import CLOSE_S
from peercache.client.report import reporting
from peercache.errors import InvalidRequest, PeerCacheError, Rejected
from peercache.memory.attached import AttachedSegment
from peercache.model.keys import Namespace
from peercache.observability import reasons
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import (
    PAGE_BYTES,
    LocalCluster,
    capture_logs,
    empty,
    free_port,
    keys_of,
    page_of,
    pages_of,
    read,
)

# One worker starts the nodes.
pytestmark = pytest.mark.xdist_group("three nodes")


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    """Give three nodes that know each other, to all tests of this file."""
    with LocalCluster() as cluster:
        cluster.start_many(3, pool="32MiB")
        yield cluster


@pytest.mark.parametrize("fabric", ["shm", "tcp", "auto"])
def test_what_one_node_stores_every_client_reads(three: LocalCluster, fabric: str) -> None:
    """A page set through any node is a hit, with its bytes, for clients of all nodes."""
    first, second, third = three.nodes
    keys = keys_of(f"everywhere-{fabric}", 48)

    stored = three.client(first).batch_set(keys[:24], pages_of(keys[:24]))
    stored += three.client(second).batch_set(keys[24:], pages_of(keys[24:]))

    assert stored == [True] * 48
    for node in (first, second, third):
        client = three.client(node, fabric=fabric)
        wait_until(lambda c=client: c.batch_exists(keys) == 48)  # type: ignore[misc]
        assert read(client, keys) == [True] * 48
        used = {name for name in client.stats() if name.startswith("pages_hit")}
        assert used == {"pages_hit_shm" if fabric != "tcp" else "pages_hit_tcp"}


def test_pages_scatter_into_and_gather_from_many_pieces(three: LocalCluster) -> None:
    """A page's segments are one object in their order, however the reader cuts it."""
    key = keys_of("pieces", 1)
    page = page_of(key[0])
    writer, reader = three.client(three.nodes[0]), three.client(three.nodes[1], fabric="tcp")
    whole = np.zeros(PAGE_BYTES, np.uint8)
    address, target = page.ctypes.data, whole.ctypes.data

    stored = writer.batch_set_from(
        key, [[(address, 1000), (address + 1000, 31_000), (address + 32_000, PAGE_BYTES - 32_000)]]
    )
    wait_until(lambda: reader.batch_exists(key) == 1)
    hit = reader.batch_get_into(key, [[(target, 50_001), (target + 50_001, PAGE_BYTES - 50_001)]])

    assert (stored, hit) == ([True], [True])
    assert np.array_equal(whole, page)


def test_a_report_shows_what_a_call_moved_and_why_the_rest_missed(three: LocalCluster) -> None:
    """Bytes are counted once: not those that were there, and not those of a miss."""
    client = three.client(three.nodes[0])
    keys = keys_of("reported", 4)
    client.batch_set(keys[:1], pages_of(keys[:1]))

    with reporting() as stored:
        client.batch_set(keys[:2], pages_of(keys[:2]))
    with reporting() as read_back:
        read(client, keys)
    with reporting(is_detailed=True) as asked:
        found = client.contains(keys)
    with reporting() as misfit:
        client.batch_get(keys[:1], [np.zeros(PAGE_BYTES + 1, np.uint8)])

    assert (stored.pages, stored.bytes, stored.misses) == (1, PAGE_BYTES, {})
    assert (read_back.pages, read_back.bytes) == (2, 2 * PAGE_BYTES)
    assert read_back.misses == {reasons.ABSENT: 2}
    assert found == [True, True, False, False]
    assert (asked.pages, asked.misses) == (0, {reasons.ABSENT: 2})
    assert misfit.misses == {reasons.WRONG_SIZE: 1}


def test_a_key_set_again_is_one_copy_and_counted_as_there(three: LocalCluster) -> None:
    """In one batch or in several, of which it is a part, all or none."""
    client = three.client(three.nodes[0])
    keys = keys_of("twice", 4)
    before = client.stats()["home_pool_pages"]

    for some in ([*keys[:2], keys[0]], keys, keys):
        assert client.batch_set(some, pages_of(some)) == [True] * len(some)

    stats = client.stats()
    assert stats["home_pool_pages"] == before + 4
    assert (stats["pages_set_copied"], stats["bytes_written"]) == (4, 4 * PAGE_BYTES)
    assert stats["pages_set_here"] == 2 + 4
    assert read(client, keys) == [True] * 4


def test_of_two_sizes_under_one_key_the_first_stays(three: LocalCluster) -> None:
    """Another size is refused when setting, and a miss that touches nothing when getting."""
    client = three.client(three.nodes[0])
    key = keys_of("two-sizes", 1)
    client.batch_set(key, pages_of(key))
    small = np.full(PAGE_BYTES // 2, 0x5A, np.uint8)

    refused = client.batch_set(key, [small])
    missed = client.batch_get(key, [small])

    assert (refused, missed) == ([False], [False])
    assert (small == 0x5A).all()
    assert client.stats()["sets_refused_wrong_size"] == 1
    assert client.stats()["pages_missed_wrong_size"] == 1
    assert read(client, key) == [True]


def test_a_page_larger_than_the_pool_is_refused_and_the_rest_stays(three: LocalCluster) -> None:
    """One impossible page costs no other page anything."""
    client = three.client(three.nodes[0])
    keys = keys_of("too-large", 3)
    client.batch_set(keys[:2], pages_of(keys[:2]))

    stored = client.batch_set(keys[2:], [np.zeros(64 * 2**20, np.uint8)])

    assert stored == [False]
    assert client.stats()["sets_refused_too_large"] == 1
    assert read(client, keys[:2]) == [True, True]


def test_remove_and_clear_reach_every_holder_and_no_other_namespace(three: LocalCluster) -> None:
    """What is removed is gone everywhere; clear takes one namespace only."""
    mine = Namespace("model-a", "bf16", "tp=0")
    here = three.client(three.nodes[0], namespace=mine)
    there = three.client(three.nodes[1], namespace=mine)
    other = three.client(three.nodes[1], namespace=Namespace("model-b", "bf16", "tp=0"))
    keys = keys_of("removed", 8)
    for client in (here, there, other):
        assert client.batch_set(keys, pages_of(keys)) == [True] * 8

    removed = here.remove(keys[:3])

    assert removed == 6
    assert read(there, keys) == [False] * 3 + [True] * 5
    assert here.clear() == 10
    assert read(here, keys) == read(there, keys) == [False] * 8
    assert read(other, keys) == [True] * 8


def test_what_was_removed_is_found_by_no_client_of_the_host_again(three: LocalCluster) -> None:
    """By `exists` neither, however soon it is asked, and though it found the pages just before."""
    mine = Namespace("model-r", "bf16", "tp=0")
    here, neighbour = (three.client(node, namespace=mine) for node in three.nodes[:2])
    fellow = three.client(three.nodes[0], namespace=mine)
    found = []
    for turn in range(60):
        keys = keys_of(f"cleared-{turn}", 12)
        assert all(here.batch_set(keys, pages_of(keys)))
        for client in (fellow, neighbour):
            wait_until(lambda client=client, keys=keys: all(client.contains(keys)), "it is found")
        if turn % 2:
            here.clear()
        else:
            here.remove(keys)
        found += [client.contains(keys).count(True) for client in (here, fellow, neighbour)]

    assert found == [0] * len(found)


def test_one_name_with_two_geometries_is_like_two_names(three: LocalCluster) -> None:
    """Engines that are replaced one by one: both work, they share nothing, one line reports it."""
    spaces = [Namespace("model-c", f"page_size={size}", "tp=0") for size in (64, 32)]
    keys = keys_of("of-two-geometries", 4)
    old, new, again = (
        three.client(three.nodes[2], namespace=space) for space in (*spaces, spaces[1])
    )

    assert old.batch_set(keys, pages_of(keys)) == [True] * 4
    assert new.batch_exists(keys) == 0
    assert read(new, keys) == [False] * 4
    assert new.batch_set(keys, pages_of(keys)) == [True] * 4
    assert read(old, keys) == read(again, keys) == [True] * 4
    said = [line for line in three.nodes[2].said().splitlines() if "node.geometry_differs" in line]
    assert len(said) == 1
    assert all(part in said[0] for part in ("model-c", "page_size=64", "page_size=32"))


def test_a_client_that_does_not_fit_is_refused_with_the_reason(three: LocalCluster) -> None:
    """Another granule is a clear error at once, not 0 % hits later."""
    with pytest.raises(Rejected) as refusal:
        three.client(three.nodes[0], granule="32KiB")

    assert refusal.value.reason == "granule"
    assert "node.peer_refused" in three.nodes[0].said()


def test_a_node_serves_with_as_many_threads_as_configured() -> None:
    """The setting comes through; its default goes by the machine."""
    client = Client.open(
        embedded=True, cluster="threads", listen="127.0.0.1:0", pool_size="1MiB",
        tcp_serving_threads=3,
    )  # fmt: skip
    names = [thread.name for thread in threading.enumerate()]
    client.close()

    assert names.count("peercache-pages") == 3


def test_a_client_of_another_cluster_is_refused(three: LocalCluster) -> None:
    """A wrong cluster name is reported on both sides."""
    with pytest.raises(PeerCacheError, match="other"):
        Client.open(cluster="other", home=three.nodes[0].ready["home"])

    assert "node.peer_refused" in three.nodes[0].said()


@pytest.mark.parametrize(
    "keys",
    [
        np.array(["a", "b"]),
        np.array(["a", "b"], object),
        np.zeros(2, np.float64),
        np.zeros(2, "V8"),
        np.zeros(2, "S16"),
        np.zeros((2, 16), np.uint8),
        np.zeros((2, 1), "V16"),
    ],
    ids=lambda keys: f"{keys.dtype}-{keys.ndim}",
)
def test_arrays_that_are_no_page_keys_are_misses_without_a_wait(
    three: LocalCluster, keys: Any
) -> None:
    """Their bytes would be other keys; and a request with too many is not answered at all."""
    client = three.client(three.nodes[0], op_timeout_s=4 * TIMEOUT_S)
    pages = pages_of(["a", "b"])
    runs = [[(page.ctypes.data, page.nbytes)] for page in pages]

    with capture_logs() as logged:
        answers = [
            client.batch_set(keys, pages),
            client.batch_get_into(keys, runs),
            client.contains(keys),
            client.batch_exists(keys),
            client.lengths(keys),
            client.remove(keys),
            client.retain(keys, 1.0),
            client.prefetch(keys),
            client.overlap(keys).whole,
        ]

    assert answers == [[False] * 2, [False] * 2, [False] * 2, 0, [0, 0], 0, 0, 0, False]
    assert len(logged) == len(answers)
    assert all("client.call_refused" in line and str(keys.dtype) in line for line in logged)


def test_unusable_buffers_are_misses_not_exceptions(three: LocalCluster) -> None:
    """Read-only, scattered, missing or foreign buffers miss; nothing raises."""
    client = three.client(three.nodes[0])
    keys = keys_of("unusable", 2)
    client.batch_set(keys, pages_of(keys))
    read_only = bytes(PAGE_BYTES)
    every_other = np.zeros(2 * PAGE_BYTES, np.uint8)[::2]

    answers = [
        client.batch_get(keys, [read_only, read_only]),
        client.batch_get(keys, [every_other, every_other]),
        client.batch_get(keys, empty(1)),
        client.batch_get(keys, [None, 7]),
        client.batch_set(keys, []),
    ]

    assert answers == [[False, False]] * 5
    assert client.batch_get([], []) == []
    assert client.batch_exists([]) == 0
    assert read(client, keys) == [True, True]


def test_str_and_bytes_and_any_length_of_key_name_pages(three: LocalCluster) -> None:
    """A key need not be a digest, and its str and bytes are one key."""
    client = three.client(three.nodes[0])
    page = page_of(keys_of("names", 1)[0])
    buffer = empty(1)

    stored = client.batch_set(["système", b"", "x" * 10_000], [page] * 3)

    assert stored == [True] * 3
    assert client.batch_get(["système".encode()], buffer) == [True]
    assert np.array_equal(buffer[0], page)
    assert client.contains(["", b"x" * 10_000, "y"]) == [True, True, False]


def test_a_forked_child_answers_misses_and_exits(three: LocalCluster) -> None:
    """A fork has no threads and no sockets of its own: every call is a miss, the exit is quick."""
    client = three.client(three.nodes[0])
    keys = keys_of("forked", 2)
    client.batch_set(keys, pages_of(keys))
    reads_end, writes_end = os.pipe()

    child = os.fork()
    if child == 0:
        answer = [client.batch_exists(keys), *read(client, keys), *client.batch_set(keys, [])]
        answer.append(len(client.stats()))
        client.close()
        try:
            Client.open(cluster=three.nodes[0].cluster, home=three.nodes[0].ready["home"])
        except InvalidRequest as refusal:
            answer.append("spawn" in str(refusal))
        os.write(writes_end, repr(answer).encode())
        os._exit(0)
    os.close(writes_end)
    answered = os.read(reads_end, 100)
    os.close(reads_end)
    os.waitpid(child, 0)

    assert answered == b"[0, False, False, False, False, 0, True]"
    assert read(client, keys) == [True, True]


def test_after_close_every_call_is_a_counted_miss(three: LocalCluster) -> None:
    """A closed client answers as an empty cache does."""
    client = three.client(three.nodes[0])
    client.close()
    keys = keys_of("closed", 2)

    assert client.batch_set(keys, pages_of(keys)) == [False, False]
    assert read(client, keys) == [False, False]
    assert client.batch_exists(keys) == 0
    assert client.remove(keys) == client.clear() == 0
    assert client.stats()["pages_missed_closed"] == 2
    client.close()


def test_close_waits_for_the_call_in_flight_and_no_longer(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step wakes the closing thread; what it copies is not unmapped before."""
    begun, may_end = threading.Event(), threading.Event()
    copy = AttachedSegment.copy

    def copy_late(*arguments: Any, **more: Any) -> Any:
        begun.set()
        may_end.wait(TIMEOUT_S)
        return copy(*arguments, **more)

    monkeypatch.setattr(AttachedSegment, "copy", copy_late)
    client, keys = three.client(three.nodes[0]), keys_of("in flight", 1)
    calling = threading.Thread(target=client.batch_set, args=(keys, pages_of(keys)))
    closing = threading.Thread(target=client.close)
    calling.start()
    assert begun.wait(TIMEOUT_S)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()

    may_end.set()
    closing.join(CLOSE_S / 2)

    assert not closing.is_alive()
    calling.join()


def test_sources_may_change_as_soon_as_set_has_returned(three: LocalCluster) -> None:
    """The engine reuses its host page at once: what is read later is what was set."""
    client = three.client(three.nodes[0], verify="full")
    keys = keys_of("source", 32)
    source = np.empty(PAGE_BYTES, np.uint8)
    for key in keys:
        source[:] = page_of(key)
        assert client.batch_set([key], [source]) == [True]
        source[:] = 0xEE

    assert read(client, keys) == [True] * 32


def test_bytes_that_changed_under_a_right_word_are_a_miss_and_an_error(three: LocalCluster) -> None:
    """With verify = full: memory that flips a bit is caught by the checksum, and logged loudly."""
    node = three.nodes[0]
    client = three.client(node, verify="full")
    keys = keys_of("flipped", 4)
    client.batch_set(keys, pages_of(keys))
    node.flip(page_of(keys[2]).tobytes())

    with capture_logs() as lines:
        hits = read(client, keys)

    assert hits == [True, True, False, True]
    assert client.stats()["pages_missed_verify_failed"] == 1
    assert "client.checksum_failed" in "".join(lines)


def test_what_clients_count_is_seen_at_their_home_node() -> None:
    """One scrape of the node shows its engines' hits, misses and latencies."""
    with LocalCluster() as cluster:
        node = cluster.start(flags=("--metrics-port", free_port()))
        client = cluster.client(node)
        keys = keys_of("counted", 4)
        client.batch_set(keys, pages_of(keys))
        read(client, [*keys, *keys_of("absent", 1)])

        wait_until(lambda: 'peercache_pages_hit_total{fabric="shm"} 4.0' in node.page("/metrics"))
        scraped = node.page("/metrics")
        assert 'peercache_pages_missed_total{reason="absent"} 1.0' in scraped
        assert (
            'peercache_latency_seconds_count{operation="get",outcome="some",tier="home"} 1.0'
            in scraped
        )


def test_lines_of_a_node_name_the_call_of_the_client() -> None:
    """At debug: what an engine's line and a node's line have in common is the call."""
    with LocalCluster() as cluster:
        node = cluster.start(flags=("--log-level", "debug", "--log-format", "json"))
        client = cluster.client(node)
        with reporting() as first:
            client.batch_set(keys := keys_of("named", 2), pages_of(keys))
        with reporting() as second:
            client.remove(keys)

        def asked() -> set[tuple[str, int]]:
            lines = [json.loads(line) for line in node.said().splitlines() if line[:1] == "{"]
            mine = [line for line in lines if line.get("client") == client.stats()["client"]]
            return {
                (line["message"], line["call"])
                for line in mine
                if line["event"] == "node.question_received"
            }

        wait_until(lambda: ("Remove", second.call) in asked())
        assert ("Commit", first.call) in asked()
        assert first.call < second.call
