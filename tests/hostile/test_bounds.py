"""What a peer may cost before anything is known of it, and what an admitted one may cost others."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache import Client
from peercache.errors import PeerCacheError
from peercache.net.sockets import PAIR1_GREETING
from peercache.wire.codec import ITEMS_MAX, MESSAGE_BYTES_MAX, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.directory import Lookup
from peercache.wire.messages.membership import ShareView
from tests.hostile.strangers import MIB, Caller, Vitals, one_node
from tests.pace import paced, wait_until
from tests.system.nodes import LocalCluster, script
from tests.unit.actors.membership_cluster import member
from tests.unit.net.peers import CLUSTER, Asking

HALF_SENT = 150
GROWTH_MAX = 64 * MIB


@pytest.mark.parametrize("claims", [8 * MIB, MESSAGE_BYTES_MAX], ids=["too-large", "largest"])
def test_messages_that_never_end_take_little_of_a_nodes_memory(claims: int) -> None:
    """A stranger needs a connection and no Hello for them: all of them together are bounded."""
    with one_node() as (_, node), contextlib.ExitStack() as stack:
        before = Vitals.of(node)
        for _ in range(HALF_SENT):
            stranger = stack.enter_context(Caller.at(node, "control"))
            # A node that takes no such message hangs up.
            with contextlib.suppress(ConnectionError):
                head = stranger.framed(b"", claims=claims)
                stranger.connection.sendall(head + b"\0" * (claims - 64))
        time.sleep(0.5)

        assert Vitals.of(node).rss_bytes < before.rss_bytes + GROWTH_MAX
        with Caller.at(node, "control") as another:
            another.connection.sendall(PAIR1_GREETING)
        assert node.process.poll() is None


FLOODS = """
import sys, threading
import pynng
raw = open(sys.argv[1], "rb").read()
listener = pynng.Pair1(polyamorous=True, send_buffer_size=200, recv_max_size=2**20)
listener.listen("tcp://127.0.0.1:0")
port = int.from_bytes(listener.listeners[0].local_address.port.to_bytes(2, "little"), "big")
print(port, flush=True)
while True:
    received = listener.recv_msg()
    def flood(pipe=received.pipe):
        for _ in range(100):
            message = pynng.Message(raw, pipe)
            try:
                listener.send_msg(message)
            except pynng.NNGException:
                return
    threading.Thread(target=flood, daemon=True).start()
"""
"""A member that answers every message with a hundred of the dearest messages there can be."""


@contextlib.contextmanager
def flooding(folder: Path) -> Iterator[str]:
    """Give the address of such a member."""
    dearest = [member(number, "h:1") for number in range(1, min(ITEMS_MAX, 200_000) // 12)]
    while True:
        try:
            raw = encode(Envelope(7, 0, ShareView(0, tuple(dearest))), cluster=CLUSTER)
            assert len(raw) <= MESSAGE_BYTES_MAX
            break
        except (AssertionError, PeerCacheError):
            del dearest[-len(dearest) // 20 :]
    path = folder / "message"
    path.write_bytes(raw)
    with script(FLOODS, str(path)) as process:
        assert process.stdout is not None
        yield f"tcp://127.0.0.1:{int(process.stdout.readline())}"


@pytest.mark.slow  # a flood that measures time
def test_a_deadline_is_kept_whatever_a_member_sends(tmp_path: Path) -> None:
    """Questions return within one and a half times theirs, while the dearest messages arrive."""
    arrived = 0
    with flooding(tmp_path) as url, Asking({7: url}) as client:

        def longest(pace_s: float) -> float:
            """Return the most that one took, in deadlines."""
            nonlocal arrived
            took = []
            for _ in range(6):
                client.breakers.answered(7)
                began = time.monotonic()
                client.asker.ask([(7, Lookup(0, bytes(16)))], began + pace_s)
                took.append((time.monotonic() - began) / pace_s)
                # Else each collection of garbage goes through all of them, for a second at last.
                arrived += len(client.unasked)
                client.unasked.clear()
            return max(took)

        most = paced(longest, lambda most: most < 1.5)

    assert arrived, "nothing arrived, so nothing was shown"
    assert most < 1.5


STOPS_BEFORE_COPYING = """
import os, signal, sys
from peercache import Client
from peercache.errors import PeerCacheError
from peercache.client import bridge
def stop(step, segment):
    print("reserved", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
bridge._place = stop
client = Client.open(cluster=sys.argv[1], home=sys.argv[2], op_timeout_s=600)
keys = [f"{os.getpid()}-{number}" for number in range(32)]
client.batch_set(keys, [bytes(2**20)] * 32)
"""


@pytest.mark.slow
def test_two_stopped_writers_leave_half_of_the_pool() -> None:
    """Each has reserved all that it was given; a third one stores a batch of pages."""
    pages = [bytes([number]) * MIB for number in range(8)]
    with LocalCluster() as cluster, contextlib.ExitStack() as stack:
        node = cluster.start(pool="32MiB")
        for _ in range(2):
            writer: subprocess.Popen[str] = stack.enter_context(
                script(STOPS_BEFORE_COPYING, cluster.name, node.ready["home"])
            )
            assert writer.stdout is not None
            assert writer.stdout.readline() == "reserved\n"
        client: Client = cluster.client(node)

        stored = client.batch_set([f"third-{number}" for number in range(8)], pages)

        stats = client.stats()
        assert stored == [True] * 8
        assert 0 < int(stats["home_pool_bytes_reserved"]) <= 16 * MIB


def test_a_batch_of_many_thousand_pages_is_stored_found_and_read() -> None:
    """It is cut into messages that a node takes, in every conversation."""
    count, size = 5000, 256
    keys = [f"many-{number}" for number in range(count)]
    pages = [number.to_bytes(4, "little") * (size // 4) for number in range(count)]
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2, pool="192MiB")
        writer = cluster.client(first)
        reader = cluster.client(second, location_cache_entries=0)

        stored = writer.batch_set(keys, pages)
        wait_until(lambda: reader.batch_exists(keys) == count)
        buffers = [bytearray(size) for _ in keys]
        hits = reader.batch_get(keys, buffers)
        removed = writer.remove(keys)

        assert stored == hits == [True] * count
        assert buffers == pages
        assert removed == count
