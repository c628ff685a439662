"""What a read over tcp is made of: channels, deadlines, names, bytes in their places, the wire."""

from __future__ import annotations

import socket
import struct
import threading
import time

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from peercache.actors.channels.actor import IDLE_S, ChannelLeased
from peercache.errors import RemoteProtocolError
from peercache.fabric.channels import ChannelDriver
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.client import STEP_BYTES, Scatter, Watchdog, send_at_once
from peercache.fabric.tcp.names import Address, Names
from peercache.model.records import PAGE_BYTES_MAX
from peercache.model.runs import U64
from peercache.observability.reasons import CLOSED, DEADLINE
from tests.contracts.fabric_suite import Destination
from tests.pace import TIMEOUT_S

PEER = 7


@attrs.define(eq=False)
class Wire:
    """A channel that notes its close."""

    fails: bool = False
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True
        if self.fails:
            raise OSError("the device refuses")


def driver_of(channels: int) -> ChannelDriver[Wire]:
    return ChannelDriver(max_channels_per_peer=channels, clock=time.monotonic)


def leased(driver: ChannelDriver[Wire], timeout_s: float = TIMEOUT_S) -> ChannelLeased:
    lease = driver.lease(PEER, time.monotonic() + timeout_s)
    assert isinstance(lease, ChannelLeased)
    return lease


def test_read_waits_for_a_channel_until_another_returns_it() -> None:
    """The same channel serves both, and is opened once."""
    driver, wire = driver_of(1), Wire()
    first = leased(driver)
    got: list[ChannelLeased] = []
    waiting = threading.Thread(target=lambda: got.append(leased(driver)))
    waiting.start()

    driver.end(first, wire, works=True)
    waiting.join(TIMEOUT_S)

    assert [lease.is_new for lease in (first, *got)] == [True, False]
    assert driver.channel_of(got[0]) is wire


def test_wait_for_a_channel_ends_at_the_deadline() -> None:
    """The reason is the read's own deadline, not the peer."""
    driver = driver_of(1)
    leased(driver)

    assert driver.lease(PEER, time.monotonic() + 0.01) == DEADLINE


def test_close_ends_the_wait_for_a_channel() -> None:
    """A read that waits learns at once that the client is closed."""
    driver = driver_of(1)
    held = leased(driver)
    got: list[ChannelLeased | str] = []
    waiting = threading.Thread(
        target=lambda: got.append(driver.lease(PEER, time.monotonic() + TIMEOUT_S))
    )
    waiting.start()
    closing = threading.Thread(target=driver.close)
    closing.start()

    waiting.join(TIMEOUT_S)
    # It waits for the read in flight: the caller's destination is not abandoned.
    assert closing.is_alive()
    driver.end(held, None, works=False)
    closing.join(TIMEOUT_S)

    assert got == [CLOSED]
    assert not closing.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_channel_that_failed_is_closed_and_its_place_is_free(fails: bool) -> None:
    """Even where its close raises, the next read opens another one."""
    driver, wire = driver_of(1), Wire(fails=fails)
    lease = leased(driver)

    if fails:
        with pytest.raises(OSError, match="refuses"):
            driver.end(lease, wire, works=False)
    else:
        driver.end(lease, wire, works=False)

    assert wire.is_closed
    assert leased(driver).is_new


def test_lease_closes_channels_that_were_idle_too_long() -> None:
    """The surplus of a burst does not stay forever."""
    now = [0.0]
    driver: ChannelDriver[Wire] = ChannelDriver(max_channels_per_peer=2, clock=lambda: now[0])
    wire = Wire()
    lease = driver.lease(PEER, 1.0)
    assert isinstance(lease, ChannelLeased)
    driver.end(lease, wire, works=True)
    now[0] = IDLE_S

    after = driver.lease(PEER, IDLE_S + 1)

    assert isinstance(after, ChannelLeased)
    assert after.is_new
    assert wire.is_closed
    assert driver.channels == {}


def test_channel_that_failed_is_forgotten() -> None:
    """Its number is never used again: what was open under it must not stay forever."""
    driver, wire = driver_of(1), Wire()
    driver.end(leased(driver), wire, works=True)

    driver.end(leased(driver), wire, works=False)

    assert driver.channels == {}
    assert wire.is_closed


def test_what_outlasts_its_deadline_is_interrupted() -> None:
    """The interrupt comes from another thread, and release reports that it came."""
    watchdog = Watchdog(time.monotonic)
    interrupted = threading.Event()
    later = watchdog.watch(lambda: None, time.monotonic() + TIMEOUT_S)

    token = watchdog.watch(interrupted.set, time.monotonic() + 0.01)

    assert interrupted.wait(TIMEOUT_S)
    assert not watchdog.release(token)
    assert watchdog.release(later)
    watchdog.close()


def test_what_is_released_in_time_is_not_interrupted() -> None:
    """A read that ended is out of reach, even when its deadline passes."""
    watchdog = Watchdog(time.monotonic)
    interrupted: list[str] = []
    second_came = threading.Event()
    deadline = time.monotonic() + 1.0
    first = watchdog.watch(lambda: interrupted.append("first"), deadline)

    in_time = watchdog.release(first)
    watchdog.watch(second_came.set, deadline)

    assert in_time
    assert second_came.wait(TIMEOUT_S)
    assert interrupted == []
    watchdog.close()


def test_nearer_deadline_is_not_kept_waiting_by_a_farther_one() -> None:
    """The thread that sleeps until a far deadline is woken for a near one."""
    watchdog = Watchdog(time.monotonic)
    interrupted = threading.Event()
    far = watchdog.watch(lambda: None, time.monotonic() + 3600)
    begun = time.monotonic()

    watchdog.watch(interrupted.set, begun + 0.01)

    assert interrupted.wait(TIMEOUT_S)
    watchdog.release(far)
    watchdog.close()


def test_close_ends_the_thread() -> None:
    """Nothing of a closed fabric runs on."""
    before = set(threading.enumerate())
    watchdog = Watchdog(time.monotonic)
    watchdog.release(watchdog.watch(lambda: None, time.monotonic() + 3600))
    begun = [
        each for each in set(threading.enumerate()) - before if each.name == "peercache-deadlines"
    ]
    assert len(begun) == 1

    watchdog.close()

    assert not begun[0].is_alive()


def test_a_thread_that_could_not_be_started_is_started_for_the_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else no read would be bounded any more."""
    watchdog = Watchdog(time.monotonic)
    interrupted = threading.Event()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            watchdog.watch(lambda: None, time.monotonic())
    watchdog.watch(interrupted.set, time.monotonic())

    assert interrupted.wait(TIMEOUT_S)
    watchdog.close()


FOUND: list[Address] = [(socket.AF_INET, ("192.0.2.1", 80))]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_address_in_figures_needs_no_name_server(host: str) -> None:
    """Figures are taken as they are, even with no timeout at all."""
    found = Names().resolve(host, 80, 0.0)

    assert [address[:2] for _, address in found] == [(host, 80)]


def test_name_is_looked_up() -> None:
    """What is no figures is asked of the system."""
    found = Names().resolve("localhost", 80, TIMEOUT_S)

    assert found


def test_slow_name_server_holds_up_no_caller() -> None:
    """One thread resolves a name for all waiting callers, and for callers that come later."""
    answers = threading.Event()
    asked: list[str] = []

    def ask(host: str, port: int, flags: int) -> list[Address]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not in figures")
        asked.append(host)
        answers.wait(TIMEOUT_S)
        return FOUND

    names = Names(ask)
    first = names.resolve("slow.example", 80, 0.01)
    second = names.resolve("slow.example", 80, 0.01)
    asked_by_two = list(asked)
    answers.set()
    third = names.resolve("slow.example", 80, TIMEOUT_S)

    assert first == second == []
    assert third == FOUND
    assert asked_by_two == ["slow.example"]


def test_unknown_name_has_no_address() -> None:
    """A resolver's error is an empty answer, each time again."""

    def ask(host: str, port: int, flags: int) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    names = Names(ask)

    assert names.resolve("unknown.example", 80, TIMEOUT_S) == []
    assert names.resolve("unknown.example", 80, TIMEOUT_S) == []


def test_name_that_cannot_be_encoded_has_no_address() -> None:
    """A name that the resolver cannot even be asked for is no exception of the caller's."""
    found = Names().resolve("a" * 300 + ".example", 80, TIMEOUT_S)

    assert found == []


PLACES = 1024
"""More than one call of the kernel takes."""


@settings(suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    arrivals=st.lists(st.integers(1, 40), max_size=30),
)
@example(sizes=[1] * (3 * PLACES), arrivals=[PLACES - 1, 2])
@example(sizes=[0, 10, 0], arrivals=[3, 3, 3])
@example(sizes=[1, *[0] * PLACES, 1, 0], arrivals=[1, 1])
@example(sizes=[STEP_BYTES - 1, 2, STEP_BYTES, 5], arrivals=[STEP_BYTES, 1, STEP_BYTES])
def test_bytes_land_in_order_however_they_arrive(sizes: list[int], arrivals: list[int]) -> None:
    """After every arrival, exactly the bytes so far are in their places."""
    into = Destination.of([sizes])
    total = sum(sizes)
    stream = np.arange(1, total + 1, dtype=np.uint64).astype(np.uint8).tobytes()
    scatter = Scatter(into.runs.addresses, into.runs.sizes)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    sent = 0

    with ours, theirs:
        for count in [*arrivals, total]:
            sent += theirs.send(stream[sent : sent + count]) if sent < total else 0
            while scatter.received < sent:
                scatter.receive(ours.fileno())
            assert into.page(0)[:sent] == stream[:sent]

    assert scatter.received == scatter.total == total
    assert into.gaps_are_untouched()


def test_silence_and_end_are_distinguished() -> None:
    """Nothing yet is an exception, nothing any more is 0."""
    into = Destination.of([[4]])
    scatter = Scatter(into.runs.addresses, into.runs.sizes)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    with ours:
        with pytest.raises(BlockingIOError):
            scatter.receive(ours.fileno())
        theirs.close()
        taken = scatter.receive(ours.fileno())

    assert taken == 0


def test_place_that_is_no_memory_is_an_error() -> None:
    """The kernel's EFAULT comes through as what it is."""
    nowhere = Scatter(np.array([4096], np.uint64), np.array([4], np.uint64))
    ours, theirs = socket.socketpair()

    with ours, theirs:
        theirs.send(b"data")
        with pytest.raises(OSError, match="Bad address"):
            nowhere.receive(ours.fileno())


def test_send_takes_what_fits_and_does_not_wait() -> None:
    """A full socket takes nothing, and a closed one is an error."""
    ours, theirs = socket.socketpair()

    with ours:
        first = send_at_once(ours.fileno(), bytes(2**24))
        second = send_at_once(ours.fileno(), bytes(2**24))
        theirs.close()
        with pytest.raises(BrokenPipeError):
            send_at_once(ours.fileno(), b"x")

    assert 0 < first < 2**24
    assert second == 0


U64S = st.integers(0, 2**64 - 1)


def u64(values: list[int]) -> U64:
    """Return an array as the wire's functions take it."""
    return np.array(values, np.uint64)


@given(granule=U64S, incarnation=U64S, cluster=st.text())
def test_greeting_survives_the_wire(granule: int, incarnation: int, cluster: str) -> None:
    """What a client sends is what the server reads."""
    greeting = wire.greet(cluster=cluster, granule=granule, incarnation=incarnation)

    raw = wire.encode_greeting(greeting)
    wire.check_opening(raw[: wire.OPENING_BYTES])
    read = wire.decode_greeting(raw[wire.OPENING_BYTES :])

    assert read == greeting


@pytest.mark.parametrize("reason", wire.REASONS)
def test_reason_survives_the_wire(reason: str) -> None:
    """Both answers carry every reason, and neither is taken for the other."""
    answer, status = wire.encode_answer(reason), wire.encode_status(reason)

    assert wire.decode_answer(answer) == reason
    assert wire.decode_status(status) == reason
    with pytest.raises(RemoteProtocolError):
        wire.decode_status(answer)
    with pytest.raises(RemoteProtocolError):
        wire.decode_answer(status)


@given(raw=st.binary(min_size=wire.OPENING_BYTES, max_size=wire.OPENING_BYTES))
@example(raw=struct.pack("<4sHH", b"PCtg", 2, 2**16 - 1))
@example(raw=struct.pack("<4sHH", b"PCtg", 1, wire.GREETING_REST_BYTES))
def test_opening_of_anything_else_is_refused(raw: bytes) -> None:
    """Another magic, version or length is refused by the first 8 bytes."""
    with pytest.raises(wire.Refusal) as refusal:
        wire.check_opening(raw)

    assert refusal.value.what in (wire.MALFORMED, wire.VERSION)


@given(raw=st.binary(min_size=wire.ANSWER_BYTES, max_size=wire.ANSWER_BYTES))
@example(raw=struct.pack("<4sI", b"PCta", len(wire.REASONS)))
def test_answer_of_anything_else_is_an_error_of_the_peer(raw: bytes) -> None:
    """A client that reached some other service reports it, whatever that service sends."""
    with pytest.raises(RemoteProtocolError):
        wire.decode_answer(raw)


@given(
    lengths=st.lists(st.integers(1, 200) | st.integers(1, PAGE_BYTES_MAX), max_size=60),
    bytes_max=st.integers(1, 2**33),
    pages_max=st.integers(1, 10),
)
def test_cuts_are_the_greedy_ones(lengths: list[int], bytes_max: int, pages_max: int) -> None:
    """The vectorised cut is that of the obvious loop: as much as fits, and at least a page."""
    expected, size, count = [0], 0, 0
    for index, length in enumerate(lengths):
        if count and (count == pages_max or size + length > bytes_max):
            expected.append(index)
            size = count = 0
        size, count = size + length, count + 1
    if lengths:
        expected.append(len(lengths))

    found = wire.cuts(u64(lengths), bytes_max=bytes_max, pages_max=pages_max)

    assert found == expected


def test_largest_page_fits_into_a_request() -> None:
    """No page that a record can describe is unreadable over tcp."""
    lengths = u64([PAGE_BYTES_MAX] * 4)

    cut = wire.cuts(lengths, bytes_max=wire.REQUEST_BYTES_MAX, pages_max=wire.COUNT_MAX)

    assert PAGE_BYTES_MAX <= wire.REQUEST_BYTES_MAX
    assert cut == [0, 2, 4]


def test_portion_and_its_words_fit_into_one_system_call() -> None:
    """IOV_MAX pieces: the pages of a portion, and the words of the one before."""
    pieces = wire.PORTION_PAGES_MAX + 1

    assert pieces <= 1024
