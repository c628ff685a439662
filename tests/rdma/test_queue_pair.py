"""The states of a queue pair, its retries, and what pyverbs is never asked."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from peercache.config.settings import Config
from peercache.rdma import neighbours, verbs
from peercache.rdma.device import Gid
from peercache.rdma.queue_pair import RETRIES_MAX, QpEnd, QueuePair, Sizes
from tests.pace import TIMEOUT_S
from tests.rdma.fake_device import FakeRail, World

OTHER = QpEnd(7, 8, 0, bytes(16))


def pair_of(world: World) -> tuple[FakeRail, QueuePair]:
    """Return a new queue pair, not connected."""
    rail = FakeRail(world)
    queue = rail.verbs.CQ(None, 8)
    return rail, rail.queue_pair(queue, Sizes(work=4, pieces=2))


def test_a_connected_pair_is_not_connected_again() -> None:
    """A bug of ours, so an assertion."""
    rail, pair = pair_of(World())
    pair.connect(rail.path(mtu=5, reads_at_once=16), OTHER, psn=1)

    with pytest.raises(AssertionError):
        pair.connect(rail.path(mtu=5, reads_at_once=16), OTHER, psn=1)


def test_retries_are_never_forever() -> None:
    """The fake asserts what the kernel does not: 7 is no number of retries."""
    rail, pair = pair_of(World())
    path = rail.path(mtu=5, reads_at_once=16)

    pair.connect(attrs.evolve(path, config=Config(rdma_retry_count=7)), OTHER, psn=1)

    assert RETRIES_MAX == 6


def test_destroyed_pair_is_left_alone() -> None:
    """Destroying twice is fine, and nothing of it is touched: the fake would say so."""
    world = World()
    _, pair = pair_of(world)

    pair.destroy()
    pair.destroy()

    assert pair.posting is None
    assert world.open_pairs() == 0


def test_importing_pyverbs_leaves_logging_as_it_was() -> None:
    """It calls logging.basicConfig, which is the engine's business."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))

    with verbs.logging_unchanged():
        for handler in list(root.handlers):
            root.removeHandler(handler)
        logging.basicConfig(level=logging.CRITICAL)
        for handler in before[1]:
            root.addHandler(handler)

    assert root.level == before[0]
    assert root.handlers == before[1]


def test_absence_of_pyverbs_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an exception where peercache is imported or a client opened."""

    def missing(name: str) -> Any:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(verbs, "_loaded", [])
    monkeypatch.setattr("importlib.import_module", missing)

    answer = verbs.load()

    assert answer == ("pyverbs cannot be imported: libibverbs.so.1: cannot open shared object file")


def test_constants_that_a_broken_build_lost_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel made with the wrong Cython imports, and lacks them."""
    monkeypatch.setattr(verbs, "_loaded", [])
    monkeypatch.setattr("importlib.import_module", lambda name: SimpleNamespace())

    answer = verbs.load()

    assert isinstance(answer, str)
    assert answer.startswith("pyverbs is incomplete: ")


ARP = """IP address       HW type     Flags       HW address            Mask     Device
10.9.2.1         0x1         0x2         8e:d3:a1:23:15:de     *        rd2
10.9.2.2         0x1         0x0         00:00:00:00:00:00     *        rd1
"""


@pytest.mark.parametrize(
    ("address", "is_known"),
    [("0a090201", True), ("0a090202", False), ("0a090203", True)],
)
def test_neighbour_without_an_answer_is_known_as_such(
    tmp_path: Path, address: str, *, is_known: bool
) -> None:
    """One behind a router has no entry of its own, and is taken to be there."""
    table = tmp_path / "arp"
    table.write_text(ARP)
    raw = bytes(10) + b"\xff\xff" + bytes.fromhex(address)

    assert neighbours.is_known(raw, table) == is_known


OURS = Gid(0, bytes(10) + b"\xff\xff" + bytes([198, 51, 100, 7]), "RoCE v2")


@pytest.mark.parametrize(("left_s", "took_s"), [(9.0, neighbours.RESOLVE_S), (0.02, 0.02)])
def test_looking_for_a_neighbour_ends_soon(left_s: float, took_s: float) -> None:
    """After what an answer may take, and never later than the caller's time."""
    now = [50.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    found = neighbours.find(
        OURS, OURS.raw, 50.0 + left_s, look=lambda raw: False, clock=lambda: now[0], sleep=sleep
    )

    assert not found
    assert took_s <= now[0] - 50.0 <= took_s + 2 * neighbours.LOOK_S


def test_neighbour_that_answers_meanwhile_is_found() -> None:
    """Only its answer is waited for."""
    slept: list[float] = []

    found = neighbours.find(
        OURS, OURS.raw, 60.0, look=lambda raw: len(slept) == 3, clock=lambda: 50.0,
        sleep=slept.append,
    )  # fmt: skip

    assert found
    assert len(slept) == 3


def entry_of(state: int, address: bytes) -> bytes:
    """What the kernel reports of one IPv6 neighbour, as recorded: a cache entry and its address."""
    body = struct.pack("=BxxxiHBB", 10, 2, state, 0, 1)
    body += struct.pack("=HH", 20, 1) + address
    body += struct.pack("=HH", 10, 2) + b"\x02\xfc\0\0\0\5" + bytes(2)
    return struct.pack("=IHHII", 16 + len(body), 28, 2, 1, 9) + body


def test_ipv6_neighbours_are_read_out_of_what_the_kernel_reports() -> None:
    """Whichever order they come in; what is cut off is no entry."""
    theirs, other = bytes.fromhex("fd09" + "00" * 13 + "02"), bytes(16)
    done = struct.pack("=IHHIIi", 20, 3, 2, 1, 9, 0)
    dump = entry_of(0x20, other) + entry_of(0x01, theirs) + done + entry_of(0x02, theirs)

    assert list(neighbours.states_of(theirs, dump)) == [0x01, 0x02]
    assert list(neighbours.states_of(other, dump)) == [0x20]
    for end in range(len(dump)):
        assert set(neighbours.states_of(theirs, dump[:end])) <= {0x01, 0x02}


@pytest.mark.parametrize(
    ("states", "is_known"), [([], True), ([0x01], False), ([0x20], False), ([0x20, 0x04], True)]
)
def test_ipv6_neighbour_is_known_by_its_states(
    monkeypatch: pytest.MonkeyPatch, states: list[int], *, is_known: bool
) -> None:
    """Incomplete and failed entries have no address; one that is stale has."""
    theirs = bytes.fromhex("fd09" + "00" * 13 + "02")
    dump = b"".join(entry_of(state, theirs) for state in states)
    monkeypatch.setattr(neighbours, "_dump", lambda: dump)

    assert neighbours.is_known(theirs) == is_known


def test_kernel_reports_its_ipv6_neighbours_or_nothing() -> None:
    """It is asked for real; what it knows is its own affair."""
    assert neighbours.is_known(bytes(15) + b"\1")


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def asked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[socket.socket, bytes]]:
    """The device of this host to ask, and its GID."""
    address, gid = "127.0.0.1", bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])
    if request.param == socket.AF_INET6:
        address, gid = "::1", bytes(15) + b"\1"
    with socket.socket(request.param, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.bind((address, 0))
        except OSError as error:
            pytest.skip(f"no {address} here: {error}")
        monkeypatch.setattr(neighbours, "DISCARD_PORT", datagrams.getsockname()[1])
        yield datagrams, gid


def test_asking_for_a_neighbour_sends_it_an_empty_datagram_from_the_rails_address(
    asked: tuple[socket.socket, bytes],
) -> None:
    """It makes the kernel look for the address, on the network that the rail is of."""
    datagrams, gid = asked
    datagrams.settimeout(TIMEOUT_S)

    neighbours.ask(Gid(0, gid, "RoCE v2"), gid)
    content, sender = datagrams.recvfrom(64)

    assert content == b""
    assert sender[0] == datagrams.getsockname()[0]


def test_neighbour_that_cannot_be_asked_is_left_to_connecting(
    asked: tuple[socket.socket, bytes],
) -> None:
    """No such address of ours, no route: nothing is sent from another one, and nothing raised."""
    datagrams, gid = asked
    datagrams.setblocking(False)
    not_ours = bytes(10) + b"\xff\xff" + bytes([198, 51, 100, 7])
    if datagrams.family == socket.AF_INET6:
        not_ours = bytes.fromhex("20010db8" + "00" * 11 + "07")

    neighbours.ask(Gid(0, not_ours, "RoCE v2"), gid)

    with pytest.raises(BlockingIOError):
        datagrams.recvfrom(64)
