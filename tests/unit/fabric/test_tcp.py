"""The tcp fabric's client side: deadlines, broken peers, and the channels behind its reads."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time

import numpy as np
import pytest

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.client import TcpChannel, TcpFabric
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD, SEAL_BYTES
from peercache.observability.reasons import DEADLINE, INTERNAL, PEER_UNREACHABLE
from tests.contracts.fabric_suite import (
    GRANULE,
    INCARNATION,
    UNTOUCHED,
    Destination,
    Owner,
    member_of,
)
from tests.contracts.fakes import PlainMemory
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, paced, wait_until
from tests.unit.fabric.scripted_peer import PORTION, accept, at, peer_that, read
from tests.unit.fabric.serving import PageServer, fabric_for

# --- deadlines and silence ------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [DEADLINE, PEER_UNREACHABLE])
def test_read_that_stops_midway_keeps_its_leading_run(server: PageServer, failure: str) -> None:
    """The owner hangs after the bytes of page 1 and before its word: page 0 counts.

    A near deadline ends the read as "deadline", a far one as "peer_unreachable" after stall_s; the
    owner that goes on afterwards writes nothing.
    """
    into = Destination.of([[PORTION]] * 4)

    def story(pace_s: float) -> tuple[Fetched, float, bytes]:
        going_on = threading.Event()
        portions = iter(range(10))
        server.between = lambda: going_on.wait(TIMEOUT_S) if next(portions) == 1 else None
        timeout_s, stall_s = (pace_s, TIMEOUT_S) if failure == DEADLINE else (TIMEOUT_S, pace_s)
        with contextlib.closing(fabric_for(GRANULE, stall_s=stall_s)) as fabric:
            begun = time.monotonic()
            got = read(fabric, at(server), into, step=PORTION, timeout_s=timeout_s)
            seconds = time.monotonic() - begun
        first_page = into.page(0)
        into.memory[:] = UNTOUCHED
        going_on.set()
        wait_until(lambda: server.connections() == 0)
        return got, seconds, first_page

    got, seconds, first_page = paced(story, lambda reported: reported[0].seals["word"][0] != ODD)

    assert got.failure == failure
    assert got.seals["word"].tolist() == [2, *[int(ODD)] * 3]
    assert first_page == b"".join(bytes([index % 251]) * GRANULE for index in range(1024))
    assert_within(seconds, PROMPT_S)
    assert (into.memory == UNTOUCHED).all()


def test_peer_that_accepts_and_is_silent_is_unreachable_after_stall_s() -> None:
    """A paused process still accepts connections: its kernel does."""
    fabric = fabric_for(GRANULE, stall_s=0.25)
    with socket.create_server(("127.0.0.1", 0)) as paused, contextlib.closing(fabric):
        member = member_of(INCARNATION, data=f"127.0.0.1:{paused.getsockname()[1]}")
        begun = time.monotonic()
        got = read(fabric, member, Destination.of([[1]]))
        seconds = time.monotonic() - begun

    assert got.failure == PEER_UNREACHABLE
    assert 0.2 < seconds < PROMPT_S


def test_peer_that_trickles_cannot_outlast_the_deadline(fabric: TcpFabric) -> None:
    """Bytes that come one by one, faster than the kernel's time-out counts, are not forever."""
    ended = threading.Event()

    def trickle(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(wire.encode_status(""))
        while not ended.is_set():
            connection.sendall(b"\x00")

    into = Destination.of([[2**24]])
    with peer_that(trickle) as peer:
        begun = time.monotonic()
        got = read(fabric, peer.member, into, timeout_s=0.3)
        seconds = time.monotonic() - begun
        ended.set()

    assert got.failure == DEADLINE
    assert got.seals["word"].tolist() == [int(ODD)]
    assert_within(seconds, PROMPT_S)


def test_deadline_holds_where_the_time_out_of_the_kernel_does_not_count(
    fabric: TcpFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts only sleeping: with a peer that keeps us just awake it is as good as none."""
    monkeypatch.setattr(TcpChannel, "_wait_at_most", lambda *_: None)
    ended = threading.Event()

    def serve_half(connection: socket.socket) -> None:
        accept(connection)
        connection.sendall(wire.encode_status("") + bytes(50))
        ended.wait(TIMEOUT_S)

    with peer_that(serve_half) as peer:
        begun = time.monotonic()
        got = read(fabric, peer.member, Destination.of([[100]]), timeout_s=0.1)
        seconds = time.monotonic() - begun
        ended.set()

    assert got.failure == DEADLINE
    assert got.seals["word"].tolist() == [int(ODD)]
    assert_within(seconds, PROMPT_S)


# --- channels -------------------------------------------------------------------------------------


def test_reads_one_after_another_share_a_channel(server: PageServer, fabric: TcpFabric) -> None:
    """A connection is made once, not for every read."""
    for _ in range(5):
        read(fabric, at(server), Destination.of([[1]]))

    assert server.connections() == 1


def test_threads_never_have_more_channels_than_allowed(server: PageServer) -> None:
    """Eight threads share two channels, and all of them read."""
    fabric = fabric_for(GRANULE, max_channels_per_peer=2)
    failures: list[str] = []
    most = [0.0]

    def go() -> None:
        for _ in range(10):
            failures.append(read(fabric, at(server), Destination.of([[1]])).failure)
            most[0] = max(most[0], server.connections())

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fabric.close()

    assert failures == [""] * 80
    assert most[0] <= 2


def test_channel_that_the_server_closed_while_idle_is_replaced(
    memory: PlainMemory, fabric: TcpFabric
) -> None:
    """A stale channel is found out by the next read, which succeeds over a new one."""
    first = PageServer(memory, incarnation=INCARNATION, granule=GRANULE)
    before = read(fabric, at(first), Destination.of([[1]]))
    first.close()
    second = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, port=first.port)

    after = read(fabric, at(second), Destination.of([[1]]))
    second.close()

    assert before.failure == after.failure == ""


def test_channels_that_the_server_closed_while_idle_are_all_given_up(
    memory: PlainMemory, fabric: TcpFabric
) -> None:
    """One was found dead: the next attempt must not meet another of them."""
    first = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, threads=2)
    together = threading.Barrier(2, timeout=TIMEOUT_S)
    first.between = together.wait
    one, other = Destination.of([[1]]), Destination.of([[1]])
    reading = threading.Thread(target=lambda: read(fabric, at(first), one))
    reading.start()
    read(fabric, at(first), other)
    reading.join()
    opened = first.connections()
    first.close()

    second = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, port=first.port)
    after = read(fabric, at(second), Destination.of([[1]]))
    second.close()

    assert opened == 2
    assert after.failure == ""


def test_forgotten_member_keeps_no_connection(server: PageServer, fabric: TcpFabric) -> None:
    """The channels to a member that is dead are closed at once."""
    read(fabric, at(server), Destination.of([[1]]))

    fabric.forget(INCARNATION)
    wait_until(lambda: server.connections() == 0)
    again = read(fabric, at(server), Destination.of([[1]]))

    assert again.failure == ""


# --- our own side's troubles ----------------------------------------------------------------------


def test_destination_that_is_no_memory_is_a_bug_of_ours(
    server: PageServer, fabric: TcpFabric
) -> None:
    """The kernel reports it, the read reports it, and the fabric serves on."""
    runs = PageRuns.of([[(4096, 100)]])
    zero = np.zeros(1, np.uint64)
    nowhere = PeerRead(at(server), zero, runs.lengths, runs, zero)

    got = fabric.read(nowhere, time.monotonic() + TIMEOUT_S)
    after = read(fabric, at(server), Destination.of([[100]]))

    assert (got.failure, got.seals["word"].tolist()) == (INTERNAL, [int(ODD)])
    assert after.failure == ""


def test_lengths_that_differ_from_the_destinations_are_a_bug_of_ours(
    server: PageServer, fabric: TcpFabric
) -> None:
    """Nothing is read: the bytes would land in the wrong places."""
    into = Destination.of([[100]])
    zero = np.zeros(1, np.uint64)
    wrong = PeerRead(at(server), zero, np.array([99], np.uint64), into.runs, zero)

    got = fabric.read(wrong, time.monotonic() + TIMEOUT_S)

    assert got.failure == INTERNAL
    assert (into.memory == UNTOUCHED).all()


def test_signal_in_the_middle_of_a_read_does_not_end_it(fabric: TcpFabric) -> None:
    """A system call that a signal cut short, with some bytes or none, is taken up again."""
    caught: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    main_thread = threading.get_ident()

    def interrupt() -> None:
        for _ in range(5):
            before = len(caught)
            # One that comes just before a system call is caught only after it: so again.
            while len(caught) == before:
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                time.sleep(0.001)

    def serve(connection: socket.socket) -> None:
        accept(connection)
        interrupt()
        connection.sendall(wire.encode_status("") + bytes(50))
        interrupt()
        connection.sendall(bytes(50) + bytes(SEAL_BYTES))

    try:
        with peer_that(serve) as peer:
            got = read(fabric, peer.member, Destination.of([[100]]))
    finally:
        signal.signal(signal.SIGUSR1, previous)

    assert len(caught) >= 10
    assert got.failure == ""
    assert got.seals["word"].tolist() == [0]


def test_interrupted_caller_leaves_no_channel_that_still_receives(
    server: PageServer, fabric: TcpFabric
) -> None:
    """Ctrl-C in mid-read comes through, and the owner's later bytes reach no buffer."""
    going_on = threading.Event()
    main_thread = threading.get_ident()
    caught: list[int] = []

    def catch(number: int, _: object) -> None:
        caught.append(number)
        if len(caught) == 1:
            raise KeyboardInterrupt

    def interrupt() -> None:
        server.between = lambda: None
        # A signal that comes between two receives ends neither: people press again, too.
        while not caught:
            signal.pthread_kill(main_thread, signal.SIGINT)
            going_on.wait(0.01)
        going_on.wait(TIMEOUT_S)

    server.between = interrupt
    into = Destination.of([[PORTION]] * 4)
    previous = signal.signal(signal.SIGINT, catch)
    try:
        with pytest.raises(KeyboardInterrupt):
            read(fabric, at(server), into, step=PORTION)
        into.memory[:] = UNTOUCHED
        going_on.set()
        # From here on no signals are sent.
        wait_until(lambda: server.connections() == 0)
    finally:
        signal.signal(signal.SIGINT, previous)

    assert (into.memory == UNTOUCHED).all()
    assert read(fabric, at(server), Destination.of([[1]])).failure == ""


def test_page_that_took_the_slot_is_not_named(
    server: PageServer, memory: PlainMemory, fabric: TcpFabric
) -> None:
    """Its key and its space may be none of the reader's business: the word shows that it came."""
    server.between = lambda: Owner(memory).store(0, b"other", 10, key=b"k" * 16, space=7)

    got = read(fabric, at(server), Destination.of([[1]]))

    assert got.failure == ""
    assert got.seals[0].tolist() == (10, bytes(16), 0, 0)
