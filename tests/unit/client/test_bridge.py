"""The bridge: steps done in the caller's thread, and nothing left running behind a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, cast

import attrs
import numpy as np
import pytest
import xxhash

from peercache.client import bridge as bridge_module
from peercache.client.bridge import Bridge, checksums_of
from peercache.memory.attached import AttachedSegment
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD, unread_seals
from peercache.net.breaker import Breakers, data_port
from peercache.net.requests import Asker
from peercache.observability import reasons
from peercache.observability.log import get_logger
from peercache.paths.steps import Ask, Checksum, Fetch, Place, Post, Step
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within

PAGE = 1000
GRANULE = 4096


def member(incarnation: int) -> Member:
    return Member(incarnation, 1, ALIVE, 255, "h", "h:1", "h:1", "boot", "")


def read_of(incarnation: int, pages: int = 1) -> tuple[PeerRead, list[Any]]:
    """Return a read of so many pages, and its destinations."""
    into = [np.zeros(PAGE, np.uint8) for _ in range(pages)]
    runs = PageRuns.of([[(page.ctypes.data, PAGE)] for page in into])
    offsets = np.arange(pages, dtype=np.uint64) * np.uint64(GRANULE)
    generations = np.full(pages, 4, np.uint64)
    return PeerRead(member(incarnation), offsets, runs.lengths, runs, generations), into


@attrs.define(eq=False)
class Pipe:
    """A fabric that takes as long as it is set to, and answers by its deadline at the latest."""

    name: str = "tcp"
    reachable: Callable[[Member], bool] = lambda _: True
    failure: str = ""
    raises: Exception | None = None
    together: threading.Barrier | None = None
    go: threading.Event = attrs.field(factory=threading.Event)
    begun: list[int] = attrs.field(factory=list)
    ended: list[int] = attrs.field(factory=list)
    threads: set[int] = attrs.field(factory=set)

    def reaches(self, member: Member) -> bool:
        return self.reachable(member)

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        self.begun.append(read.member.incarnation)
        self.threads.add(threading.get_ident())
        if self.together is not None:
            self.together.wait(TIMEOUT_S)
        if self.raises is not None and read.member.incarnation == 1:
            raise self.raises
        on_time = self.go.wait(max(0.0, deadline - time.monotonic()))
        self.ended.append(read.member.incarnation)
        seals = unread_seals(len(read.offsets))
        if on_time and not self.failure:
            seals["word"] = 4
        return Fetched(seals, self.failure or ("" if on_time else reasons.DEADLINE))

    def close(self) -> None:
        return


class Mute:
    """An asker that notes what it was asked."""

    def __init__(self) -> None:
        self.noted: list[Any] = []

    def ask(self, *question: Any) -> list[None]:
        self.noted.append(question)
        return [None]

    def post(self, messages: Any) -> None:
        self.noted.append(messages)


def bridge_over(*fabrics: Pipe, breakers: Breakers | None = None) -> Bridge:
    return Bridge(
        asker=cast("Asker", Mute()),
        fabrics=fabrics,
        breakers=breakers or Breakers(),
        clock=time.monotonic,
        log=get_logger(),
    )


def done(bridge: Bridge, step: Step, segment: AttachedSegment | None = None) -> Any:
    """Return what a path of one step is answered."""

    def path() -> Generator[Step, Any, Any]:
        return (yield step)

    return bridge.run(path(), segment)


def fetch(bridge: Bridge, *reads: PeerRead, timeout_s: float = TIMEOUT_S) -> list[Fetched]:
    found: list[Fetched] = done(bridge, Fetch(reads, time.monotonic() + timeout_s))
    return found


def test_a_path_is_driven_to_its_end() -> None:
    """Each step's answer goes back into the path; what it returns is the result."""
    seen: list[Any] = []

    def path() -> Generator[Step, Any, str]:
        page = np.arange(10, dtype=np.uint8)
        seen.append((yield Ask((), 0.0)))
        seen.append((yield Post(())))
        seen.append((yield Checksum(PageRuns.of([[(page.ctypes.data, 10)]]), np.array([0]))).shape)
        seen.append((yield Place(np.empty(0, np.uint64), PageRuns.of([]), 0.0)))
        return "done"

    assert bridge_over().run(path()) == "done"
    assert seen == [[None], None, (1,), 0]


def test_a_path_lets_go_when_a_step_raises() -> None:
    """At once: a reservation that stayed listed would keep its slots forever."""
    closed: list[str] = []

    def path() -> Generator[Step, Any, None]:
        try:
            yield Fetch((read_of(1)[0],), time.monotonic() + 1)
        finally:
            closed.append("closed")

    kept = path()
    with pytest.raises(ZeroDivisionError):
        bridge_over(Pipe(raises=ZeroDivisionError())).run(kept)
    assert closed == ["closed"]


def test_holders_are_read_at_the_same_time_over_a_network() -> None:
    """Their streams overlap; the first is read in the caller's own thread."""
    pipe = Pipe()
    bridge = bridge_over(pipe)
    pipe.together = threading.Barrier(3, action=pipe.go.set)

    found = fetch(bridge, *[read_of(i)[0] for i in (1, 2, 3)])

    assert [fetched.seals["word"].tolist() for fetched in found] == [[4]] * 3
    assert [fetched.fabric for fetched in found] == ["tcp"] * 3
    assert threading.get_ident() in pipe.threads
    assert len(pipe.threads) == 3
    bridge.close()


def test_memory_copies_stay_in_the_callers_thread() -> None:
    """They gain nothing from threads."""
    pipe = Pipe(name="shm")
    pipe.go.set()

    fetch(bridge_over(pipe), *[read_of(i)[0] for i in (1, 2, 3)])

    assert pipe.threads == {threading.get_ident()}


def test_nothing_reads_on_when_another_read_raises() -> None:
    """What is raised comes out after the last thread has left the destinations alone."""
    pipe = Pipe(raises=ZeroDivisionError())
    bridge = bridge_over(pipe)
    threading.Timer(0.2, pipe.go.set).start()

    with pytest.raises(ZeroDivisionError):
        fetch(bridge, *[read_of(i)[0] for i in (1, 2, 3)])

    assert sorted(set(pipe.begun) - {1}) == sorted(pipe.ended)
    bridge.close()


def test_what_a_read_raises_in_another_thread_comes_out_in_the_callers() -> None:
    """Else the caller would wait for a result that never comes."""
    pipe = Pipe(raises=LookupError())
    pipe.go.set()
    bridge = bridge_over(pipe)

    with pytest.raises(LookupError):
        fetch(bridge, read_of(2)[0], read_of(1)[0])
    bridge.close()


def test_a_read_that_close_drops_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits behind another call's read when the client is closed; its own call ends as ever."""
    monkeypatch.setattr(bridge_module, "FETCH_THREADS_MAX", 1)
    pipe = Pipe()
    bridge = bridge_over(pipe)
    found: list[Fetched] = []
    other = threading.Thread(target=lambda: fetch(bridge, read_of(1)[0], read_of(2)[0]))
    other.start()
    while 2 not in pipe.begun:
        time.sleep(0.001)
    ours = threading.Thread(target=lambda: found.extend(fetch(bridge, *_reads_of(3, 4))))
    ours.start()
    while 3 not in pipe.begun:
        time.sleep(0.001)

    bridge.close()
    pipe.go.set()
    other.join()
    ours.join()

    assert [fetched.failure for fetched in found] == ["", reasons.CLOSED]
    assert 4 not in pipe.begun


def _reads_of(*incarnations: int) -> list[PeerRead]:
    return [read_of(incarnation)[0] for incarnation in incarnations]


def test_a_read_that_waits_behind_others_does_not_outlast_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other calls have later deadlines; what has not begun by ours never begins."""
    monkeypatch.setattr(bridge_module, "FETCH_THREADS_MAX", 1)
    pipe = Pipe()
    bridge = bridge_over(pipe)
    other = threading.Thread(target=lambda: fetch(bridge, read_of(1)[0], read_of(2)[0]))
    other.start()
    while 2 not in pipe.begun:
        time.sleep(0.001)

    began = time.monotonic()
    found = fetch(bridge, read_of(3)[0], read_of(4)[0], timeout_s=0.1)
    took_s = time.monotonic() - began
    pipe.go.set()
    other.join()

    assert_within(took_s, PROMPT_S)
    assert [fetched.failure for fetched in found] == [reasons.DEADLINE] * 2
    assert 4 not in pipe.begun
    bridge.close()


def test_after_close_reads_happen_without_threads() -> None:
    """A call that is still under way ends as ever; no pool of threads is made again."""
    pipe = Pipe()
    pipe.go.set()
    bridge = bridge_over(pipe)
    bridge.close()

    found = fetch(bridge, read_of(1)[0], read_of(2)[0])

    assert [fetched.seals["word"].tolist() for fetched in found] == [[4], [4]]
    assert pipe.threads == {threading.get_ident()}


def test_the_first_fabric_that_reaches_a_holder_is_used() -> None:
    """And shown; who is out of reach of all reports it without a wait."""
    near = Pipe(name="shm", reachable=lambda m: m.incarnation == 1)
    far = Pipe(name="tcp", reachable=lambda m: m.incarnation == 2)
    near.go.set()
    far.go.set()
    bridge = bridge_over(near, far)

    found = fetch(bridge, *[read_of(i, 2)[0] for i in (1, 2, 3)])

    assert [fetched.fabric for fetched in found] == ["shm", "tcp", ""]
    assert found[2].failure == reasons.PEER_UNREACHABLE
    assert (found[2].seals["word"] == ODD).all()
    assert bridge.fabric_of_peers() == {1: "shm", 2: "tcp"}
    bridge.forget({2})
    assert bridge.fabric_of_peers() == {2: "tcp"}
    bridge.close()


@pytest.mark.parametrize(
    ("failure", "opens"),
    [
        (reasons.PEER_UNREACHABLE, True),
        (reasons.DEADLINE, False),
        (reasons.REFUSED, False),
        ("", False),
    ],
)
def test_only_an_unreachable_holder_opens_its_breaker(failure: str, opens: bool) -> None:
    """That a deadline came, or a slot was refused, is no evidence against it."""
    pipe = Pipe(failure=failure)
    pipe.go.set()
    breakers = Breakers()
    bridge = bridge_over(pipe, breakers=breakers)

    fetch(bridge, read_of(1)[0])
    again = fetch(bridge, read_of(1)[0])

    assert breakers.is_open(data_port(1)) is opens
    assert len(pipe.begun) == (1 if opens else 2)
    assert again[0].failure == failure


def test_a_read_that_works_closes_the_breaker() -> None:
    """The probe of one caller is enough."""
    pipe = Pipe()
    pipe.go.set()
    breakers = Breakers()
    bridge = bridge_over(pipe, breakers=breakers)
    breakers.failed(data_port(1), time.monotonic() - 60)

    fetch(bridge, read_of(1)[0])

    assert not breakers.is_open(data_port(1))


@pytest.fixture
def segment(tmp_path: Any) -> Any:
    """Yield a published segment of four granules, and the writable attachment of a client."""
    published = PublishedSegment.create(
        str(tmp_path), incarnation=Incarnation(9), page_bytes=4 * GRANULE, granule=GRANULE
    )
    published.populate(4 * GRANULE)
    attached = AttachedSegment.open(published.path, incarnation=Incarnation(9), writable=True)
    yield published, attached
    attached.close(1.0)
    published.close()


def placed(segment: AttachedSegment | None, offsets: list[int], size: int = PAGE) -> int:
    page = np.full(size, 7, np.uint8)
    runs = PageRuns.of([[(page.ctypes.data, size)]] * len(offsets))
    step = Place(np.array(offsets, np.uint64), runs, time.monotonic() + TIMEOUT_S)
    count: int = done(bridge_over(), step, segment)
    return count


def test_pages_are_placed_in_their_slots(segment: Any) -> None:
    """All of them, and nothing next to them."""
    published, attached = segment

    assert placed(attached, [GRANULE, 3 * GRANULE]) == 2

    pages = published.pages.reshape(4, GRANULE)
    assert (pages[1::2, :PAGE] == 7).all()
    assert not pages[0::2].any()
    assert not pages[1::2, PAGE:].any()


@pytest.mark.parametrize(
    "offset", [4 * GRANULE, 4 * GRANULE - PAGE + 1, 2**63, 2**64 - 1, 2**64 - PAGE, 2**64 - 10]
)
def test_slots_outside_of_the_segment_are_not_written(segment: Any, offset: int) -> None:
    """The home node is trusted with our pages, not with our memory; sums may wrap around."""
    published, attached = segment

    assert placed(attached, [0, offset]) == 0
    assert not published.pages.any()


def test_a_segment_that_is_being_closed_takes_no_page(segment: Any) -> None:
    """The home node has restarted under the call: nothing is in place, nothing is raised."""
    _, attached = segment
    attached.close(1.0)

    assert placed(attached, [0]) == 0
    assert placed(None, [0]) == 0


def test_a_page_larger_than_the_segment_is_not_written(
    segment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even from its beginning on: what is behind the segment may be anything of ours."""
    _, attached = segment
    copies: list[Any] = []
    monkeypatch.setattr(attached, "copy", lambda *of, **_more: copies.append(of) or 0)

    assert placed(attached, [0], size=4 * GRANULE + 1) == 0
    assert copies == []


def test_nothing_is_placed_after_the_deadline(segment: Any) -> None:
    """The copy of a late step does not begin."""
    published, attached = segment
    page = np.full(PAGE, 7, np.uint8)
    runs = PageRuns.of([[(page.ctypes.data, PAGE)]])

    count = done(bridge_over(), Place(np.zeros(1, np.uint64), runs, time.monotonic()), attached)

    assert count == 0
    assert not published.pages.any()


def test_a_segment_stays_mapped_while_pages_are_placed(
    segment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home node has restarted in the middle: the copy ends first."""
    _, attached = segment
    unmapped: list[bool] = []

    def copy(*_of: Any, **_more: Any) -> int:
        unmapped.append(attached.close(0.0))
        return 1

    monkeypatch.setattr(attached, "copy", copy)

    assert placed(attached, [0]) == 1
    assert unmapped == [False]
    assert attached.close(0.0)


def test_a_checksum_is_of_the_bytes_whatever_their_runs() -> None:
    """Gathered from pieces or whole; zero would mean that there is none."""
    page = np.arange(100, dtype=np.uint8)
    at = page.ctypes.data
    whole = PageRuns.of([[(at, 100)], [(at, 60)], [(at, 50)]])
    pieces = PageRuns.of([[(at, 7), (at + 7, 0), (at + 7, 93)], [(at, 60)], [(at, 50)]])
    some = np.array([2, 0])

    digests = checksums_of(whole, some).tolist()

    assert digests == checksums_of(pieces, some).tolist()
    assert digests == [xxhash.xxh3_64_intdigest(page[:size].tobytes()) for size in (50, 100)]


def test_read_that_was_queued_without_a_thread_never_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no thread can be started the executor fails, and has queued the read all the same."""
    pipe = Pipe()
    bridge = bridge_over(pipe)
    busy = bridge.submit(read_of(9)[0], pipe, time.monotonic() + TIMEOUT_S)
    while 9 not in pipe.begun:
        time.sleep(0.001)
    start = threading.Thread.start

    def no_more(thread: threading.Thread) -> None:
        if thread.name.startswith("peercache-fetch"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    queued = bridge.submit(read_of(1)[0], pipe, time.monotonic() + TIMEOUT_S)
    pipe.go.set()
    assert busy is not None
    busy.result(TIMEOUT_S)
    bridge._threads.shutdown(wait=True)  # type: ignore[union-attr]

    assert queued is None
    assert 1 not in pipe.begun
