"""What the compiled page server adds: it needs no Python while it serves, and goes with it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.client import TcpFabric
from peercache.fabric.tcp.server import serve_pages, usual_threads
from peercache.fabric.tcp.serving import ServingThread
from peercache.fabric.tcp.sockets import Line, open_listeners
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import U64
from peercache.model.seal import SEAL
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import REFUSED
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, member_of
from tests.contracts.fakes import PlainMemory
from tests.examples import examples
from tests.house.reference_pages import ROOT
from tests.pace import PROMPT_S, TIMEOUT_S, wait_until
from tests.unit.fabric.serving import PageServer, fabric_for

if sys.version_info < (3, 11):  # pragma: no cover - trio brings it there
    from exceptiongroup import ExceptionGroup

MEMORY_BYTES = 16 * 2**20


@attrs.define
class GrowingMemory(PlainMemory):
    """Page memory of which a part is usable."""

    usable: int = 0

    @property
    def usable_bytes(self) -> int:
        """Return how much that is."""
        return self.usable


def filled(memory: PlainMemory) -> PlainMemory:
    """Commit every granule under twice its index and 2, with bytes of its own."""
    memory.seals["word"] = 2 * np.arange(len(memory.seals)) + 2
    memory.seals["length"] = len(memory.pages)
    memory.pages.view(np.uint32)[:] = np.arange(len(memory.pages) // 4)
    return memory


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    """A server of 16 MiB, one for all: nothing here changes it."""
    memory = filled(PlainMemory.of(MEMORY_BYTES, GRANULE))
    running = PageServer(memory, incarnation=INCARNATION, granule=GRANULE)
    yield running
    running.close()


@pytest.fixture(scope="module")
def fabric() -> Iterator[TcpFabric]:
    """A client side."""
    with contextlib.closing(fabric_for(GRANULE)) as opened:
        yield opened


def read(fabric: TcpFabric, port: int, offsets: list[int], into: Destination) -> Fetched:
    """Read slots at these offsets."""
    member = member_of(INCARNATION, data=f"127.0.0.1:{port}")
    places: U64 = np.array(offsets, np.uint64)
    until = time.monotonic() + TIMEOUT_S
    generations = np.uint64(2) * places // np.uint64(GRANULE) + np.uint64(2)
    return fabric.read(PeerRead(member, places, into.lengths, into.runs, generations), until)


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(
    pages=st.lists(
        st.tuples(
            st.integers(0, MEMORY_BYTES // GRANULE - 1),
            st.one_of(st.integers(1, 3 * GRANULE), st.integers(1, 2 * wire.PORTION_BYTES_MAX)),
        ),
        min_size=1,
        max_size=12,
    ),
    repeated=st.sampled_from([1, 40]),
)
@example(pages=[(0, wire.PORTION_BYTES_MAX), (1, 1), (2, wire.PORTION_BYTES_MAX - 1)], repeated=1)
@example(pages=[(3, 1)], repeated=2 * wire.PORTION_PAGES_MAX + 1)
def test_every_page_arrives_with_its_own_word(
    server: PageServer, fabric: TcpFabric, pages: list[tuple[int, int]], repeated: int
) -> None:
    """Both sides cut any list of pages into the same portions, so bytes and words fall in place."""
    wanted = [
        (granule * GRANULE, min(size, MEMORY_BYTES - granule * GRANULE)) for granule, size in pages
    ]
    # Few copies of what is large.
    wanted *= max(1, min(repeated, 64 * 2**20 // sum(size for _, size in wanted)))
    into = Destination.of([[size] for _, size in wanted])

    got = read(fabric, server.port, [offset for offset, _ in wanted], into)

    everything = np.arange(MEMORY_BYTES // 4, dtype=np.uint32).tobytes()
    assert got.failure == ""
    assert got.seals["word"].tolist() == [2 * (offset // GRANULE) + 2 for offset, _ in wanted]
    for index, (offset, size) in enumerate(wanted):
        assert into.page(index) == everything[offset : offset + size]


def test_memory_is_served_as_far_as_it_is_usable_by_now() -> None:
    """What is not populated yet is refused; once it is, it is served, on open connections too."""
    memory = GrowingMemory(np.zeros(2 * GRANULE, np.uint8), np.zeros(2, SEAL), usable=GRANULE)
    filled(memory)
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE)
    into = Destination.of([[1]])
    with contextlib.closing(fabric_for(GRANULE)) as fabric:
        first = read(fabric, server.port, [0], into)
        early = read(fabric, server.port, [GRANULE], into)
        again = read(fabric, server.port, [0], into)
        memory.usable = 2 * GRANULE
        grown = read(fabric, server.port, [GRANULE], into)
    server.close()

    assert [first.failure, early.failure, again.failure, grown.failure] == ["", REFUSED, "", ""]
    assert server.refusals(wire.BOUNDS) == 1


def test_readers_that_do_not_receive_hold_up_no_other() -> None:
    """With many responses stuck in full sockets, another client reads at once."""
    memory = filled(PlainMemory.of(MEMORY_BYTES, GRANULE))
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE)
    known = wire.greet(cluster="tests", granule=GRANULE, incarnation=INCARNATION)
    count = 60
    whole = np.full(count, MEMORY_BYTES, np.uint64)
    request = wire.encode_request(
        np.zeros(count, np.uint64), whole, np.full(count, 2, np.uint64), INCARNATION
    )
    with contextlib.ExitStack() as stack:
        fabric = stack.enter_context(contextlib.closing(fabric_for(GRANULE)))
        for _ in range(20):
            stuck = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
            )
            stuck.sendall(wire.encode_greeting(known) + request)
        wait_until(lambda: server.connections() == 20)
        into = Destination.of([[2**20]] * 8)

        got = read(fabric, server.port, [0] * 8, into)
    server.close()

    assert got.failure == ""
    assert got.seals["word"].tolist() == [2] * 8


@pytest.mark.parametrize("threads", [1, 2])
def test_bytes_served_are_counted_when_the_server_ends(threads: int) -> None:
    """The loop reports nothing meanwhile; nothing is lost at the end, whichever thread sent it."""
    memory = filled(PlainMemory.of(MEMORY_BYTES, GRANULE))
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, threads=threads)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            fabric = stack.enter_context(contextlib.closing(fabric_for(GRANULE)))
            read(fabric, server.port, [0, GRANULE], Destination.of([[1000], [24]]))
    server.close()

    served = server.metrics.registry.get_sample_value("peercache_tcp_bytes_served_total")
    assert served == 3 * 1024


def test_connection_goes_to_the_thread_that_serves_fewest() -> None:
    """While one of two threads is held up, later connections go to the other one.

    1. The first client's thread is held in the middle of its response.
    2. The second one's is the other thread, which it leaves.
    3. So does the third one's; taken in turn it would have waited with the first.
    """
    memory = filled(PlainMemory.of(MEMORY_BYTES, GRANULE))
    server = PageServer(memory, incarnation=INCARNATION, granule=GRANULE, threads=2)
    held, going_on, calls = threading.Event(), threading.Event(), itertools.count()

    def hold_the_first() -> None:
        if next(calls) == 0:
            held.set()
            going_on.wait(TIMEOUT_S)

    server.between = hold_the_first
    first: list[Fetched] = []

    def go() -> None:
        with contextlib.closing(fabric_for(GRANULE)) as fabric:
            first.append(read(fabric, server.port, [0], Destination.of([[1]])))

    reading = threading.Thread(target=go)
    reading.start()
    assert held.wait(TIMEOUT_S)
    later = []
    for open_then in (1, 1):
        wait_until(lambda count=open_then: server.connections() == count)  # type: ignore[misc]
        with contextlib.closing(fabric_for(GRANULE, stall_s=PROMPT_S)) as fabric:
            later.append(read(fabric, server.port, [GRANULE], Destination.of([[1]])).failure)
    going_on.set()
    reading.join()
    server.close()

    assert later == ["", ""]
    assert first[0].failure == ""


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (15, 1), (16, 2), (32, 4), (128, 4)])
def test_threads_go_by_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    """A machine of two cores keeps one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    assert usual_threads() == threads


@contextlib.contextmanager
def stubborn_owner(what: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run an owner that does something unkind at the first line it gets."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.system.fabric.owner_process", what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            yield process, int(say(process, ""))
        finally:
            process.kill()


def say(process: subprocess.Popen[str], line: str) -> str:
    """Write a line if there is one, and return the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_pages_are_served_while_a_thread_holds_the_interpreters_lock(fabric: TcpFabric) -> None:
    """An engine that computes in Python, or in C without letting go, keeps no reader waiting."""
    into = Destination.of([[GRANULE]])
    with stubborn_owner("hold") as (process, port):
        read(fabric, port, [0], into)
        holding = say(process, "hold\n")

        got = read(fabric, port, [GRANULE], into)
        process.communicate("\n", timeout=TIMEOUT_S)

    assert holding == "holding"
    assert got.failure == ""
    assert got.seals["word"].tolist() == [4]


def test_owner_that_forks_serves_on_and_ends_without_a_word(fabric: TcpFabric) -> None:
    """A child's exit takes nothing along; neither process hangs on the thread that serves."""
    into = Destination.of([[GRANULE]])
    with stubborn_owner("fork") as (process, port):
        before = read(fabric, port, [0], into)
        childs_status = say(process, "fork\n")

        after = read(fabric, port, [GRANULE], into)
        process.communicate("\n", timeout=TIMEOUT_S)

    assert [before.failure, after.failure] == ["", ""]
    assert childs_status == "0"
    assert process.returncode == 0


def serving_thread() -> ServingThread:
    """Return a separate server, which is not started."""
    return ServingThread(
        filled(PlainMemory.of(MEMORY_BYTES, GRANULE)),
        granule=GRANULE,
        incarnation=INCARNATION,
        metrics=Metrics(),
        between_bytes_and_words=None,
    )


async def test_connection_that_comes_when_the_server_has_ended_stays_its_accepters() -> None:
    """It was accepted in the turn of the loop that ended it: the C server is freed by then."""
    pages = serving_thread()
    async with trio.open_nursery() as nursery:
        await nursery.start(pages.run)
        nursery.cancel_scope.cancel()
    ours, theirs = socket.socketpair()

    with ours, theirs:
        end = await pages.serve(Line(ours), (1.0, 1.0, 1.0))

        assert end == (None, "")
        assert ours.fileno() >= 0


async def test_exit_hook_that_runs_after_the_end_leaves_the_freed_server_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At exit Python may call from a copy of its list, in which nothing is unregistered."""
    hooks: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    pages = serving_thread()
    async with trio.open_nursery() as nursery:
        await nursery.start(pages.run)
        nursery.cancel_scope.cancel()

    # The C server is freed: to touch it would end this process.
    for hook in hooks:
        hook()

    assert len(hooks) == 1


@pytest.mark.parametrize("threads", [1, 3])
async def test_server_whose_last_thread_cannot_be_started_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A process at its limit of threads gets that error, and has no descriptor or exit hook left of
    it.
    """
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "peercache-pages":
            started.append(thread)
            if len(started) == threads:
                raise RuntimeError("can't start new thread")
        start(thread)

    hooks: list[object] = []
    monkeypatch.setattr(threading.Thread, "start", start_few)
    monkeypatch.setattr(atexit, "register", hooks.append)
    monkeypatch.setattr(atexit, "unregister", hooks.remove)
    admission = DataAdmission(cluster="tests", granule=GRANULE, incarnation=INCARNATION)
    before = open_files()
    listeners = await open_listeners("127.0.0.1", 0)

    with pytest.raises(ExceptionGroup) as failed:
        await serve_pages(
            listeners,
            PlainMemory.of(MEMORY_BYTES, GRANULE),
            admission=admission,
            metrics=Metrics(),
            threads=threads,
        )

    assert not any(thread.is_alive() for thread in started)
    assert failed.group_contains(RuntimeError, match="can't start new thread")
    assert not open_files() - before
    assert hooks == []


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of this process, and what each is of.

    Not their number: what a test before this one has left to the garbage collector may go any time.
    """
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The folder's own, for one.
            found.add((descriptor.name, str(descriptor.readlink())))
    return found
