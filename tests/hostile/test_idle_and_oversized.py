"""Connections that only sit there, false lengths, and descriptors that run out."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from peercache import Client
from peercache.errors import Rejected
from peercache.fabric.tcp import wire as tcp_wire
from peercache.memory.client_lock import LockProbe
from peercache.model.member import ALIVE, Member
from peercache.net import link
from peercache.net.peers import Gate, Peer, Transport
from peercache.net.sockets import PAIR1_GREETING, Dialer, Listener, OutOfDescriptors
from peercache.node.admission import STRANGER_S, Admission
from peercache.trust.sharing import Sharing
from peercache.wire.codec import MESSAGE_BYTES_MAX
from peercache.wire.messages.membership import Join, ReportStatus, RequestStatus
from tests.descriptors import no_descriptors
from tests.hostile.garbage import hello
from tests.hostile.strangers import (
    MIB,
    Bystander,
    Caller,
    Vitals,
    metric,
    one_node,
    ports_of,
    received,
)
from tests.hostile.test_live_node import DESCRIPTORS_SPARE, assert_well
from tests.pace import ends_within, wait_until
from tests.system.nodes import LocalCluster, NodeProcess, keys_of, pages_of, read

IDLE = 1000


@contextlib.contextmanager
def many(
    node: NodeProcess, port: str, count: int, said: bytes = b""
) -> Iterator[list[socket.socket]]:
    """Keep so many connections open, which have said that much each."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            connection = stack.enter_context(ports_of(node)[port]())
            with contextlib.suppress(OSError):
                connection.sendall(said)
            opened.append(connection)
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("greets", [False, True], ids=["mute", "greeted"])
def test_a_thousand_idle_connections_a_port_cost_no_thread_and_keep_no_client_out(
    greets: bool,
) -> None:
    """Those who are there are served, those who come are let in, and all that was taken returns."""
    use_every_descriptor()
    with one_node() as (cluster, node), Bystander(cluster, node) as bystander:
        said = opening_of(node, cluster.name) if greets else {}
        before = Vitals.of(node)
        for port in ("control", "home", "data", "http"):
            patient_until = time.monotonic() + STRANGER_S
            with many(node, port, IDLE, said.get(port, b"")):
                if port != "http":  # That one keeps only a few.
                    # A slow connector sees the first closed before the last has come.
                    wait_until(
                        lambda until=patient_until: (  # type: ignore[misc]
                            Vitals.of(node).descriptors >= IDLE or time.monotonic() > until
                        )
                    )
                during = Vitals.of(node)
                assert_lets_in(cluster, node, port)
                health = healthz(node)
            wait_until(
                lambda: Vitals.of(node).descriptors <= before.descriptors + DESCRIPTORS_SPARE
            )
            after = Vitals.of(node)
            print(port, before, during, after, f"longest read {bystander.longest_s:.2f} s")
            assert health.startswith(b"HTTP/1.1 200")
            assert max(during.threads, after.threads) <= before.threads + 1
            assert during.rss_bytes < before.rss_bytes + 64 * MIB
        assert_well(node)


def assert_lets_in(cluster: LocalCluster, node: NodeProcess, name: str) -> None:
    """Assert that a new client can store and read pages."""
    keys = keys_of(name, 8)
    with cluster.client(node, fabric="tcp") as newcomer:
        wait_until(lambda: all(newcomer.batch_set(keys, pages_of(keys))))
        wait_until(lambda: all(read(newcomer, keys)))
    cluster.clients.remove(newcomer)


def opening_of(node: NodeProcess, cluster: str) -> dict[str, bytes]:
    """Return how an honest client begins on each port; on http, without an end."""
    incarnation = int(node.ready["node"], 16)
    greeting = tcp_wire.greet(cluster=cluster, granule=16384, incarnation=incarnation)
    return {
        "control": PAIR1_GREETING,
        "home": PAIR1_GREETING,
        "data": tcp_wire.encode_greeting(greeting),
        "http": b"GET /metrics HTTP/1.1\r\n",
    }


def use_every_descriptor() -> None:
    """Let these tests open as many connections as the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def healthz(node: NodeProcess) -> bytes:
    """Return what a probe gets."""
    with ports_of(node)["http"]() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            return received(connection, 15)
        return b""


@pytest.mark.parametrize("port", ["control", "home", "data"])
def test_lengths_that_are_false_are_never_buffered(port: str) -> None:
    """Two hundred claims of the largest message, or of more, and not a megabyte each is taken."""
    with one_node() as (cluster, node), Bystander(cluster, node):
        before = Vitals.of(node)
        kind = b"\x01" if port == "home" else b""
        claims = [MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 65, 2**31, 2**40, 2**63, 2**64 - 1]
        forged = [
            PAIR1_GREETING + kind + struct.pack(">QI", claim, 1) + b"x" * 100 for claim in claims
        ]
        if port == "data":
            incarnation = int(node.ready["node"], 16)
            forged = [
                opening_of(node, cluster.name)["data"]
                + struct.pack("<4sIQQ", b"PCtr", count, incarnation, total)
                for count, total in ((4096, 2**33), (4097, 1), (2**32 - 1, 1), (1, 2**64 - 1))
            ]
        with contextlib.ExitStack() as stack:
            for one in forged:
                stack.enter_context(many(node, port, 200 // len(forged) + 1, one))
            # Nothing to wait for: what must not happen is that its memory grows.
            time.sleep(0.5)
            during = Vitals.of(node)
        print(port, before, during)
        assert_well(node)
        assert during.rss_bytes < before.rss_bytes + 48 * MIB


def test_a_message_longer_than_any_ends_its_own_connection_only() -> None:
    """The length alone makes nng hang up, even on who was admitted, before a byte more."""
    with one_node() as (cluster, node), Bystander(cluster, node):
        with Caller.at(node, "control") as caller, Caller.at(node, "control") as honest:
            for one in (caller, honest):
                assert one.ask(hello(cluster.name), sender=5)

            caller.connection.sendall(caller.framed(b"", claims=MESSAGE_BYTES_MAX + 65))
            ended = received(caller.connection, 1)
            welcome = honest.ask(hello(cluster.name), sender=5)

        assert ended == b""
        assert welcome


def test_what_cannot_be_dialled_for_lack_of_descriptors_reports_it() -> None:
    """It is no fault of the address: the caller tries again, and nothing is left open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with no_descriptors(), pytest.raises(OutOfDescriptors):
        Dialer("tcp://127.0.0.1:1")

    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    Dialer("tcp://127.0.0.1:1").close()


async def test_a_link_without_a_descriptor_is_dialled_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited in its outbox meanwhile is sent then: an address is not given up for that."""
    failures = 3

    class Scarce(Dialer):
        def __init__(self, url: str, **facts: Callable[[], None]) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise OutOfDescriptors(url)
            super().__init__(url, **facts)

    monkeypatch.setattr(link, "Dialer", Scarce)
    monkeypatch.setattr(link, "DIAL_AGAIN_S", 0.01)
    listener = Listener(on_removed=lambda _: None)
    listener.listen_local(f"ipc://{tmp_path}/x")
    dropped: list[int] = []
    late = link.Link(
        f"ipc://{tmp_path}/x",
        hello=lambda: b"hello",
        on_answer=lambda _: None,
        on_dropped=dropped.append,
        accepts=lambda _: True,
    )
    late.send(b"news")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(late.run)
        with ends_within():
            messages = [(await listener.receive())[1] for _ in range(2)]
        late.stop()
    listener.close()

    assert (failures, messages, dropped) == (0, [b"hello", b"news"], [])


def test_a_node_takes_as_many_descriptors_as_it_may() -> None:
    """The soft limit of most systems, 1024, is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        with one_node() as (_, node):
            limits = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert limits == (hard, hard)


def test_who_sends_no_hello_in_time_is_hung_up_on() -> None:
    """First by time, then by age as long as there are too many; who said it stays forever."""
    admission = Admission(
        cluster="c",
        granule=16384,
        home="ipc:///nowhere",
        local_secret=b"t",
        gate=Gate(Sharing.of(), None),
        probe=lambda home, name: LockProbe(home, name, Sharing.of()),
    )
    admission.admit(2, Peer(Transport.INPROC), 5, hello("c"))

    admission.connections_max = 3
    at_once = admission.overstaying([1, 2, 3], 100.0)
    admission.connections_max = 2
    full = admission.overstaying([1, 2, 3, 4], 105.0)
    admission.connections_max = 9
    late = admission.overstaying([1, 2, 3, 4], 100.0 + STRANGER_S)
    admission.connections_max = 9
    later = admission.overstaying([2, 4], 105.0 + STRANGER_S)
    admission.connections_max = 0
    forgotten = admission.overstaying([2, 1], 200.0)

    assert (at_once, full, late, later) == ([], [1, 3], [1, 3], [4])
    assert forgotten == [1]


@pytest.mark.slow
def test_strangers_give_way_before_descriptors_run_out() -> None:
    """Who connects and never sends Hello is shown out, oldest first; who said it stays."""
    with one_node() as (cluster, node), Caller.at(node, "control") as admitted:
        assert admitted.ask(hello(cluster.name), sender=5)
        spare = Vitals.of(node).descriptors
        resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (400, 400))

        with many(node, "control", 200, PAIR1_GREETING) as strangers:
            wait_until(lambda: metric(node, "peercache_messages_dropped").get("no_hello", 0) >= 100)
            wait_until(lambda: Vitals.of(node).descriptors <= spare + 100)

            assert received(strangers[0], 100) == PAIR1_GREETING
            assert admitted.ask(hello(cluster.name), sender=5)
            wait_until(lambda: metric(node, "peercache_connections")["control"] <= 101)


@pytest.mark.parametrize(
    ("port", "greets"),
    [
        ("control", True),
        pytest.param("control", False, marks=pytest.mark.slow),
        pytest.param("home", True, marks=pytest.mark.slow),
        ("data", False),
        pytest.param("http", False, marks=pytest.mark.slow),
    ],
)
def test_a_node_out_of_descriptors_lives_and_serves_again_when_they_come_back(
    port: str, greets: bool
) -> None:
    """A client that connects without end takes them all; a joining node breaks nothing."""
    said = PAIR1_GREETING if greets and port in {"control", "home"} else b""
    with LocalCluster() as cluster:
        node = cluster.start(flags=("--metrics-port=-1",))
        keys = keys_of("before", 8)
        assert cluster.client(node).batch_set(keys, pages_of(keys)) == [True] * 8
        with Caller.at(node, "control") as newcomer:
            newcomer.say(hello(cluster.name, is_node=True), sender=77)
            newcomer.hear()
            spare = Vitals.of(node).descriptors + 20
            resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (spare, spare))
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(flood(node, port, said))
                wait_until(lambda: Vitals.of(node).descriptors >= spare - 1)
                # A link to it, and whatever else takes a descriptor, must wait or fail in peace.
                for number in range(1000, 1010):
                    member = Member(77, 1, ALIVE, 255, "h", f"127.0.0.1:{number}", "", "", "")
                    newcomer.say(Join(member), sender=77)
                # Nothing to wait for: this is the time in which a node used to end.
                time.sleep(1.0)
                assert node.process.poll() is None, node.said()

        wait_until(lambda: Vitals.of(node).descriptors < spare - 10)
        # Those that have waited to be accepted take descriptors once more, and are found gone: a
        # request in between is refused, for want of one to look up its owner with.
        wait_until(lambda: healthz(node).startswith(b"HTTP/1.1 200"))
        readers: list[Client] = []

        def is_let_in() -> bool:
            try:
                readers.append(cluster.client(node, fabric="tcp"))
            except Rejected as refusal:
                if "Too many open files" not in refusal.detail:
                    raise
            return bool(readers)

        wait_until(is_let_in)
        wait_until(lambda: all(read(readers[0], keys)))
        assert_well(node)


def test_a_node_without_a_descriptor_answers_how_it_is() -> None:
    """An answer that opens a file cannot be given then; and no answer ends a node."""
    with LocalCluster() as cluster:
        node = cluster.start()
        with Caller.at(node, "control") as member:
            member.say(hello(cluster.name, is_node=True), sender=77)
            member.hear()
            spare = Vitals.of(node).descriptors + 20
            resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (spare, spare))
            with contextlib.ExitStack() as stack:
                for _ in range(40):
                    stack.enter_context(flood(node, "control", PAIR1_GREETING))
                wait_until(lambda: Vitals.of(node).descriptors >= spare - 1)
                member.say(RequestStatus(5, detail=False), sender=77)
                answer = member.answer()

            assert isinstance(answer, ReportStatus), answer
            assert node.process.poll() is None, node.said()


def flood(node: NodeProcess, port: str, said: bytes) -> socket.socket:
    """Connect without waiting to be accepted."""
    connection = socket.socket(socket.AF_UNIX if port == "home" else socket.AF_INET)
    connection.settimeout(0.1)
    address = node.ready[port].removeprefix("ipc://")
    host, _, number = address.rpartition(":")
    with contextlib.suppress(OSError):
        connection.connect(address if port == "home" else (host, int(number)))
        connection.sendall(said)
    return connection
