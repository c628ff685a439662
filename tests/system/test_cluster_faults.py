"""What dies, stops or comes back costs misses and time, never a wrong byte."""

from __future__ import annotations

import contextlib
import logging
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache import Client
from peercache.client import home
from peercache.errors import PeerUnreachable
from peercache.memory.attached import AttachedSegment
from peercache.net.sockets import PAIR1_GREETING
from peercache.paths.write import PUBLISH_TIMEOUT_S
from tests.pace import FACTOR, PROMPT_S, TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import (
    CALL_S,
    DIES_WRITING,
    EVICTED_IS_GONE,
    PAGE_BYTES,
    LocalCluster,
    capture_logs,
    keys_of,
    pages_of,
    read,
    script,
    timed,
)

STALL_S = 0.25
SMALL_BYTES = 16 * 1024


def test_a_killed_holder_is_missed_in_time_and_its_keys_can_be_set_again_at_once() -> None:
    """SIGKILL: the other holder's pages stay hits, the dead one's are misses, then hits again."""
    with LocalCluster() as cluster:
        first, second, third = cluster.start_many(3)
        keys = keys_of("killed", 32)
        writers = cluster.client(first), cluster.client(second)
        writers[0].batch_set(keys[:16], pages_of(keys[:16]))
        writers[1].batch_set(keys[16:], pages_of(keys[16:]))
        reader = cluster.client(third, fabric="tcp")
        wait_until(lambda: reader.batch_exists(keys) == 32)
        assert read(reader, keys) == [True] * 32

        second.kill()
        hits, took_s = timed(lambda: read(reader, keys))
        stored = writers[0].batch_set(keys[16:], pages_of(keys[16:]))

        assert hits == [True] * 16 + [False] * 16
        assert_within(took_s, PROMPT_S)
        assert stored == [True] * 16
        wait_until(lambda: read(reader, keys) == [True] * 32)
        assert reader.stats()["pages_missed_peer_unreachable"] >= 16


@pytest.mark.slow
def test_a_removal_names_a_dead_node_as_long_as_its_pages_can_be_read() -> None:
    """SIGKILL: what a removal has not reported as missed is found by no client of the host.

    They have the dead node's memory mapped, and each follows the view in its own time; one has lost
    its home node.
    """
    soon = ("--heartbeat-s", "0.5", "--suspect-s", "1.5", "--dead-s", "2.5")
    with LocalCluster() as cluster, capture_logs() as logged:
        first, second, third = [cluster.start(flags=soon) for _ in range(3)]
        for node in (first, second, third):
            cluster.wait_for_members(node, 3)
        remover = cluster.client(first, op_timeout_s=0.3)
        readers = [remover, *[cluster.client(node) for node in (third, second, second)]]
        keys = keys_of("dead", 240)
        assert all(readers[1].batch_set(keys, pages_of(keys, SMALL_BYTES)))
        assert [read(each, keys, SMALL_BYTES) for each in readers] == [[True] * 240] * 4

        third.kill()
        found: list[str] = []
        complete = 0
        for key in keys:
            logged.clear()
            remover.remove([key])
            if not any("client.removal_incomplete" in line for line in logged):
                complete += 1
                for number, each in enumerate(readers):
                    found += [f"get {number}"] * read(each, [key], SMALL_BYTES)[0]
                    found += [f"exists {number}"] * each.contains([key])[0]
            if complete == 20:
                break
            time.sleep(0.05)

        assert (found, complete) == ([], 20)


@pytest.mark.usefixtures("stalls")
def test_a_paused_holder_costs_one_stall_then_nothing_and_comes_back() -> None:
    """SIGSTOP: the first get waits a stall, the next do not, and after SIGCONT hits come back."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        keys = keys_of("paused", 16)
        cluster.client(first).batch_set(keys, pages_of(keys))
        reader = cluster.client(second, fabric="tcp")
        wait_until(lambda: read(reader, keys) == [True] * 16)

        first.pause()
        # One stall of the data port, and one of the control port where the retry asks.
        hits, took_s = timed(lambda: read(reader, keys))
        again = [timed(lambda: read(reader, keys)) for _ in range(20)]
        first.resume()

        assert [hits, *[more for more, _ in again]] == [[False] * 16] * 21
        assert_within(took_s, CALL_S / 2)
        # Even where the machine makes most of them late: a stall would be in all of them.
        assert min(seconds for _, seconds in again) < STALL_S / 2
        wait_until(lambda: read(reader, keys) == [True] * 16)


@pytest.mark.usefixtures("stalls")
def test_nodes_that_are_paused_for_less_than_the_deadline_allows_are_waited_for() -> None:
    """A host with more work than cores is not hung: a long `op_timeout_s` allows for it."""
    with LocalCluster() as cluster:
        home, other = cluster.start_many(2)
        keys = keys_of("standing-still", 32)
        patient = cluster.client(home, fabric="tcp", op_timeout_s=80.0)
        cluster.client(other).batch_set(keys[16:], pages_of(keys[16:]))
        wait_until(lambda: read(patient, keys) == [False] * 16 + [True] * 16)

        for node, call, expected in (
            (home, lambda: patient.batch_set(keys[:16], pages_of(keys[:16])), [True] * 16),
            (other, lambda: read(patient, keys[16:]), [True] * 16),
        ):
            node.pause()
            threading.Timer(4 * STALL_S, node.resume).start()
            assert call() == expected


@pytest.mark.usefixtures("stalls")
def test_a_set_waits_for_a_paused_home_node_for_half_of_its_time_and_reports_the_reason() -> None:
    """A pause of two stalls costs no page; one that lasts is logged once, and is no `no_home`."""
    with LocalCluster() as cluster, capture_logs() as logged:
        node = cluster.start()
        client = cluster.client(node, op_timeout_s=16 * STALL_S)
        first, second = keys_of("busy-home", 8), keys_of("hung-home", 8)

        node.pause()
        threading.Timer(4 * STALL_S, node.resume).start()
        assert client.batch_set(first, pages_of(first)) == [True] * 8

        node.pause()
        answers = [timed(lambda: client.batch_set(second, pages_of(second))) for _ in range(3)]
        node.resume()

        assert [stored for stored, _ in answers] == [[False] * 8] * 3
        assert_within(answers[0][1], 16 * STALL_S)
        wait_until(lambda: client.batch_set(second, pages_of(second)) == [True] * 8)
        figures = client.stats()
        assert figures["sets_refused_no_answer"] >= 24
        assert "sets_refused_no_home" not in figures
        assert len([line for line in logged if "home.set_unanswered" in line]) == 1


@pytest.mark.usefixtures("stalls")
def test_a_home_node_that_is_killed_during_a_set_ends_its_wait() -> None:
    """However patient the set is: nothing answers at that address any more."""
    with LocalCluster() as cluster:
        node = cluster.start()
        client = cluster.client(node, op_timeout_s=32 * STALL_S * FACTOR)
        keys = keys_of("killed-home", 8)
        client.batch_set(keys[:4], pages_of(keys[:4]))

        node.pause()
        threading.Timer(STALL_S, node.kill).start()
        stored, took_s = timed(lambda: client.batch_set(keys, pages_of(keys)))

        assert stored == [False] * 8
        assert_within(took_s, 8 * STALL_S * FACTOR)
        assert client.stats()["sets_refused_no_home"] == 8


@pytest.mark.usefixtures("stalls")
def test_a_paused_holder_is_read_over_shared_memory_as_ever() -> None:
    """Nothing there needs the holder: the word is in its memory, and so are the bytes."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        keys = keys_of("paused-shm", 16)
        cluster.client(first).batch_set(keys, pages_of(keys))
        reader = cluster.client(second, fabric="shm")
        wait_until(lambda: reader.batch_exists(keys) == 16)

        first.pause()
        answers = [read(reader, keys)]
        # Asked again and again, its control port is taken for hung: that must not matter.
        for _ in range(5):
            reader.contains(keys_of("others", 64))
            answers.append(read(reader, keys))
        first.resume()

        assert answers == [[True] * 16] * 6


@pytest.mark.slow
@pytest.mark.usefixtures("stalls")
def test_a_stopped_owner_costs_sets_one_timeout_once() -> None:
    """SIGSTOP: one set waits for it, the next do not; when it goes on it comes to know all."""
    with LocalCluster() as cluster:
        first, second, third = cluster.start_many(3)
        client = cluster.client(first)
        batches = [keys_of(f"stopped-{number}", 8) for number in range(8)]
        client.batch_set(batches[0], pages_of(batches[0]))
        reader = cluster.client(second)
        wait_until(lambda: reader.batch_exists(batches[0]) == 8)

        third.pause()
        took_s = []
        for keys in batches[1:]:
            stored, seconds = timed(lambda keys=keys: client.batch_set(keys, pages_of(keys)))
            assert stored == [True] * 8
            took_s.append(seconds)
        third.resume()

        assert took_s[0] >= PUBLISH_TIMEOUT_S * 0.9
        assert min(took_s[1:]) < PUBLISH_TIMEOUT_S / 2
        late = cluster.client(third)
        wait_until(lambda: [late.batch_exists(keys) for keys in batches] == [8] * 8)


def test_a_home_node_that_restarts_is_found_again_within_five_seconds() -> None:
    """The engine's client misses while its home is away, and writes to the new incarnation."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        keys = keys_of("home", 16)
        client = cluster.client(first)
        assert client.batch_set(keys, pages_of(keys)) == [True] * 16

        first.kill()
        refused, took_s = timed(lambda: client.batch_set(keys, pages_of(keys)))
        again = cluster.start("n0", flags=("--discovery-addr", second.ready["control"]))

        assert refused == [False] * 16
        assert_within(took_s, PROMPT_S)
        assert again.ready["home"] == first.ready["home"]
        wait_until(lambda: client.batch_set(keys, pages_of(keys)) == [True] * 16)
        # The other node, which the client asks for the view meanwhile, lets it in when it answers.
        wait_until(lambda: read(client, keys) == [True] * 16)
        assert client.stats()["home_attached"] == 2


@contextlib.contextmanager
def first_message_lost(url: str) -> Iterator[list[socket.socket]]:
    """Take the place of a node at its home address, and pass on all connections but one.

    Yields the callers that have sent a message. Nothing of the first one reaches the node.
    """
    path = url.removeprefix("ipc://")
    Path(path).rename(f"{path}.node")
    callers: list[socket.socket] = []
    is_ended = threading.Event()

    def relay() -> None:
        nodes: list[socket.socket] = []
        other: dict[socket.socket, socket.socket] = {}
        while not is_ended.is_set():
            for ready in select.select([listener, *other], [], [], 0.01)[0]:
                if ready is listener:
                    caller = stack.enter_context(listener.accept()[0])
                    node = stack.enter_context(socket.socket(socket.AF_UNIX))
                    node.connect(f"{path}.node")
                    nodes.append(node)
                    other |= {caller: node, node: caller}
                    continue
                try:
                    raw = ready.recv(2**16)
                except ConnectionResetError:
                    raw = b""
                if raw not in (b"", PAIR1_GREETING) and ready not in (*nodes, *callers):
                    callers.append(ready)
                # Either end may have gone meanwhile.
                with contextlib.suppress(OSError):
                    if not raw:
                        other.pop(ready).shutdown(socket.SHUT_WR)
                    elif ready not in callers[:1]:
                        other[ready].sendall(raw)

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=relay)
        thread.start()
        try:
            yield callers
        finally:
            is_ended.set()
            thread.join()


def test_a_connection_that_hangs_does_not_keep_a_client_from_its_home_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hello is sent again, over another connection, long before `open` gives up."""
    monkeypatch.setattr(home, "ATTACH_S", 5.0)  # As in production: the node ends it after ten.
    with LocalCluster() as cluster:
        node, keys = cluster.start(), keys_of("relayed", 4)
        with first_message_lost(node.ready["home"]) as callers:
            client = cluster.client(node)

            assert client.batch_set(keys, pages_of(keys)) == [True] * 4
            assert len(callers) > 1


def test_a_restart_with_the_same_addresses_never_serves_the_old_pages() -> None:
    """The successor at the same address and home refuses records and messages of the dead one."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        keys = keys_of("successor", 16)
        cluster.client(first).batch_set(keys, pages_of(keys))
        reader = cluster.client(second, fabric="tcp")
        wait_until(lambda: read(reader, keys) == [True] * 16)

        first.kill()
        successor = cluster.start(
            "n0",
            flags=(
                "--listen", first.ready["control"],
                "--data-port", first.ready["data"].rpartition(":")[2],
                "--discovery-addr", second.ready["control"],
            ),
        )  # fmt: skip
        others = keys_of("successor's own", 64)
        writer = cluster.client(successor)
        assert writer.batch_set(others, pages_of(others)) == [True] * 64

        # Not one hit may come of the records that name the dead incarnation at this address.
        assert read(reader, keys) == [False] * 16
        wait_until(lambda: read(reader, others) == [True] * 64)


def test_evict_between_exists_and_get_is_a_miss() -> None:
    """The pool reuses the slot after exists said yes: the get misses, with no wrong byte."""
    with LocalCluster() as cluster:
        node, _ = cluster.start_many(2, pool="2MiB", flags=EVICTED_IS_GONE)
        writer = cluster.client(node)
        readers = [cluster.client(node, fabric=fabric) for fabric in ("shm", "tcp")]
        keys, others = keys_of("evicted", 16), keys_of("evictors", 16)
        assert writer.batch_set(keys, pages_of(keys)) == [True] * 16
        assert [reader.batch_exists(keys) for reader in readers] == [16, 16]

        assert writer.batch_set(others, pages_of(others)) == [True] * 16

        for reader in readers:
            assert read(reader, keys) == [False] * 16
            assert reader.stats()["pages_missed_evicted"] == 16
            assert read(reader, others) == [True] * 16


def test_stale_records_after_join_evict_and_leave_are_never_hits() -> None:
    """Owners change twice while the pages are evicted: what comes back is a miss or the truth."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2, pool="2MiB", flags=EVICTED_IS_GONE)
        writer = cluster.client(first)
        reader = cluster.client(second, fabric="tcp")
        keys, others = keys_of("stale", 16), keys_of("newer", 16)
        writer.batch_set(keys, pages_of(keys))
        wait_until(lambda: reader.batch_exists(keys) == 16)

        third = cluster.start(pool="2MiB", flags=EVICTED_IS_GONE)
        cluster.wait_for_members(third, 3)
        assert writer.batch_set(others, pages_of(others)) == [True] * 16
        assert third.terminate() == 0
        cluster.wait_for_members(first, 2)

        for _ in range(5):
            assert read(reader, keys) == [False] * 16
        wait_until(lambda: read(reader, others) == [True] * 16)
        wait_until(lambda: not any(reader.contains(keys)))


def test_a_client_that_dies_between_reserve_and_commit_leaves_nothing() -> None:
    """Its slots come back, and what it reserved is never listed or read."""
    with LocalCluster() as cluster:
        (node,) = cluster.start_many(1)
        with script(DIES_WRITING, cluster.name, node.ready["home"], "half-written") as process:
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        client = cluster.client(node)

        wait_until(lambda: client.stats()["home_pool_bytes_reserved"] == 0)

        keys = keys_of("half-written", 8)
        assert client.contains(keys) == [False] * 8
        assert read(client, keys) == [False] * 8


STOPS_WRITING = """
import os, signal, sys
from peercache import Client
from peercache.client import bridge
from tests.system.nodes import keys_of
from tests.system.nodes import pages_of
place = bridge._place
def stop_then_place(step, segment):
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return place(step, segment)
bridge._place = stop_then_place
client = Client.open(cluster=sys.argv[1], home=sys.argv[2], op_timeout_s=60)
keys = keys_of("stopped", 4)
print(client.batch_set(keys, pages_of(keys)), flush=True)
"""


def test_a_client_that_is_stopped_while_it_copies_spoils_no_page() -> None:
    """Its slots stay its own, however long it sleeps; its late bytes fall on no other page."""
    with LocalCluster() as cluster:
        (node,) = cluster.start_many(1, pool="2MiB")
        with script(STOPS_WRITING, cluster.name, node.ready["home"]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            client = cluster.client(node)
            keys = keys_of("meanwhile", 48)
            # Three silent seconds, and every slot but the reserved ones reused twice.
            started = time.monotonic()
            while time.monotonic() - started < 3.0:
                for begin in range(0, 48, 8):
                    client.batch_set(keys[begin : begin + 8], pages_of(keys[begin : begin + 8]))
            # What this client reserved ahead comes back; the stopped one's slots stay.
            wait_until(lambda: client.stats()["home_pool_bytes_reserved"] == 4 * PAGE_BYTES)

            process.send_signal(signal.SIGCONT)
            stored = process.stdout.readline()

        assert stored == "[True, True, True, True]\n"
        hits = read(client, keys)
        assert any(hits)
        assert read(client, keys_of("stopped", 4)) == [True] * 4


FORKS = """
import os, sys
from peercache import Client
client = Client.open(embedded=True, pool_size="4MiB", listen="127.0.0.1:0", shm_dir=sys.argv[1])
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_an_engine_that_never_closes_exits_and_so_does_its_forked_child() -> None:
    """Neither nng's exit hook nor our threads hold a process up, and no segment is left."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, folder],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        left = list(Path(folder).iterdir())

    assert done.returncode == 0, done.stderr
    assert "child 0" in done.stdout
    assert left == []


def test_two_embedded_engines_share_pages_and_collide_in_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two engines on one host, default ports and all: each finds its own."""
    caplog.set_level(logging.INFO, logger="peercache")
    timeouts = {"exists_timeout_s": CALL_S, "op_timeout_s": CALL_S}
    common = {"embedded": True, "pool_size": "8MiB", "cluster": "two-engines", **timeouts}
    with Client.open(**common) as one:
        ready = next(line for line in caplog.messages if "event=node.ready" in line)
        port = re.search(r" control=\S*:(\d+)", ready)
        assert port is not None
        with Client.open(**common, discovery_addr=f"127.0.0.1:{port[1]}") as two:
            keys = keys_of("engines", 8)
            wait_until(lambda: two.stats()["members"] == 2 == one.stats()["members"])
            assert one.batch_set(keys, pages_of(keys)) == [True] * 8
            wait_until(lambda: two.batch_exists(keys) == 8)

            assert read(two, keys) == [True] * 8


def test_every_call_ends_by_its_deadline_when_all_nodes_are_stopped() -> None:
    """The whole cluster is paused: misses, each in time, and nothing raises."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        client = cluster.client(
            first,
            op_timeout_s=0.5,
            exists_timeout_s=0.5,
            location_cache_entries=0,
            fabric="tcp",
        )
        keys = keys_of("all-paused", 8)
        wait_until(lambda: client.batch_set(keys, pages_of(keys)) == [True] * 8)
        for node in (first, second):
            node.pause()

        _, set_s = timed(lambda: client.batch_set(keys, pages_of(keys)))
        hits, get_s = timed(lambda: read(client, keys))
        # What was stored is found in the tables of this host, as ever; of the rest the owners are
        # asked, for the table of a stopped owner may lack what came since.
        found, exists_s = timed(lambda: client.contains(keys_of("never-set", 8)))
        for node in (first, second):
            node.resume()

        assert not any(hits)
        assert not any(found)
        assert_within(max(set_s, get_s, exists_s), PROMPT_S)
        wait_until(lambda: read(client, keys) == [True] * 8)


@pytest.mark.parametrize("count", [1, 300])
def test_a_batch_larger_than_the_pool_is_stored_in_portions(count: int) -> None:
    """More pages than slots: all are stored in turn, the last ones are there afterwards."""
    with LocalCluster() as cluster:
        (node,) = cluster.start_many(1, pool="4MiB")
        client = cluster.client(node)
        keys = keys_of("portions", count)

        assert client.batch_set(keys, pages_of(keys)) == [True] * count
        hits = read(client, keys)

        assert sum(hits) >= min(count, 16)
        assert client.stats()["home_pool_bytes_reserved"] == 0


def test_a_client_whose_lock_file_was_cleaned_away_writes_again_after_a_restart() -> None:
    """A cleaner of temporary folders takes the file; the next node gets a new one."""
    with LocalCluster() as cluster:
        (node,) = cluster.start_many(1)
        client = cluster.client(node)
        keys = keys_of("cleaned", 4)
        assert client.batch_set(keys, pages_of(keys)) == [True] * 4
        for file in Path(f"{node.ready['home'].removeprefix('ipc://')}.clients").iterdir():
            file.unlink()

        node.kill()
        cluster.start("n0")

        wait_until(lambda: client.batch_set(keys, pages_of(keys)) == [True] * 4)


def test_pages_of_a_node_that_has_just_joined_are_found() -> None:
    """Or the set reports itself that owners do not know them yet."""
    with LocalCluster() as cluster:
        # Room for all pages: the last ones stored would be evicted for those that were read.
        reader = cluster.client(cluster.start(pool="32MiB"))
        lost, found = [], 0
        for turn in range(3):
            writer = cluster.client(cluster.start(pool="32MiB"))
            for number in range(40):
                keys = keys_of(f"newcomer-{turn}-{number}", 4)
                before = writer.stats().get("pages_unpublished", 0)
                assert all(writer.batch_set(keys, pages_of(keys)))
                if writer.stats().get("pages_unpublished", 0) == before:
                    hits = read(reader, keys).count(True)
                    found += hits
                    lost += [(turn, number)] * (hits < len(keys))

        assert lost == []
        assert found


def test_a_lost_home_node_is_one_warning_and_its_return_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine whose every page is a miss reports why, once; so does its status."""
    caplog.set_level(logging.INFO, logger="peercache")
    with LocalCluster() as cluster, capture_logs() as said:
        node = cluster.start()
        client = cluster.client(node)
        assert not client.home_state.is_lost

        def reported(event: str) -> list[str]:
            return [line for line in said if f"event={event}" in line]

        for _ in range(2):
            before = len(reported("home.lost"))
            node.pause()
            wait_until(lambda: client.home_state.is_lost)
            assert client.home_state.reason == "no_answer"
            node.resume()
            wait_until(lambda: not client.home_state.is_lost)
            assert len(reported("home.lost")) == before + 1
        wait_until(lambda: len(reported("home.found")) == 2)
        assert all(
            node.ready["home"] in line for line in reported("home.lost") + reported("home.found")
        )


def test_a_client_writes_over_no_connection_from_before_it_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has asked its restarted home node over tcp, as any member, where it must not write."""

    def not_yet(*_: object, **__: object) -> None:
        raise PeerUnreachable("its segment")

    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        client = cluster.client(first)
        wait_until(lambda: len(client.member_addresses()) == 2)
        first.kill()
        with monkeypatch.context() as patched:
            patched.setattr(AttachedSegment, "open", not_yet)
            again = cluster.start("n0", flags=("--discovery-addr", second.ready["control"]))
            wait_until(lambda: again.ready["control"] in client.member_addresses().values())
            keys = keys_of("before", 32)
            wait_until(lambda: client.contains(keys) == [False] * 32)

        wait_until(lambda: client.batch_set(keys, pages_of(keys)) == [True] * 32)

        assert "node.message_refused" not in again.said()
