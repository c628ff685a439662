"""The rdma fabric over a device within this process: rails that fail, peers that lie or have no
RDMA, and the other fabric that reads instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.memory.published import PublishedSegment
from peercache.model.seal import ODD
from peercache.observability.reasons import NO_MEMORY, PEER_UNREACHABLE, REFUSED
from peercache.rdma import channels
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import ChannelOpened, OpenChannel, Refused
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination
from tests.contracts.fakes import FakeFabric
from tests.pace import PROMPT_S, assert_within, wait_until
from tests.rdma.fake_bench import CLIENT, FakeBench


def test_rail_that_is_down_is_left_out_and_comes_back(make_bench: Callable[..., FakeBench]) -> None:
    """Every page comes over the other one; later both are used."""
    bench = make_bench(rails=2)
    offsets, contents = bench.pages(8, 2**18)
    bench.get(offsets, Destination.of([[2**18]] * 8))
    bench.ours[1].link_is_up = False
    time.sleep(0.02)
    into = Destination.of([[2**18]] * 8)

    alone = bench.get(offsets, into)
    used = [len(bench.world.pairs_over(f"reader{rail}")) for rail in range(2)]
    bench.ours[1].link_is_up = True
    time.sleep(0.02)
    before = bench.world.doorbells
    together = bench.get(offsets, Destination.of([[2**18]] * 8))

    assert (alone.failure, together.failure) == ("", "")
    assert [into.page(page) for page in range(8)] == contents
    assert used == [1, 1]
    assert bench.world.doorbells == before + 2


def test_rail_that_hangs_while_the_other_goes_on_is_left_out(
    make_bench: Callable[..., FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link reports that it is up: what shows it is that it alone makes no progress."""
    monkeypatch.setattr(channels, "BACKOFF_S", 3.0)
    bench = make_bench(rails=2)
    offsets, contents = bench.pages(8, 2**18)
    into = Destination.of([[2**18]] * 8)
    bench.get(offsets, Destination.of([[2**18]] * 8))
    (hanging,) = bench.world.pairs_over("reader1")
    hanging.go_on = lambda chains=None: None  # type: ignore[method-assign]
    begun = time.monotonic()

    got = bench.get(offsets, into)

    took_s = time.monotonic() - begun
    before = bench.world.doorbells
    soon = bench.get(offsets, Destination.of([[2**18]] * 8))
    alone = bench.world.doorbells - before
    time.sleep(channels.BACKOFF_S)
    later = bench.get(offsets, Destination.of([[2**18]] * 8))

    assert (got.failure, soon.failure, later.failure) == ("", "", "")
    assert_within(took_s, PROMPT_S)
    assert alone == 1
    assert bench.world.doorbells - before - alone == 2
    assert [into.page(page) for page in range(8)] == contents


@pytest.fixture
def other(segment: PublishedSegment) -> FakeFabric:
    """Another fabric that reads the same memory."""
    fabric = FakeFabric(granule=GRANULE)
    fabric.peers[INCARNATION] = segment
    return fabric


def fallbacks(bench: FakeBench, reason: str) -> float | None:
    """Return how many pages another fabric read for a reason."""
    return bench.metrics.registry.get_sample_value(
        "peercache_rdma_fallbacks_total", {"reason": reason}
    )


def test_what_rdma_cannot_read_is_read_by_the_other_fabric(
    make_bench: Callable[..., FakeBench], other: FakeFabric
) -> None:
    """The pages arrive, under the other's name, and it is counted."""
    bench = make_bench(fallback=other)
    offsets, contents = bench.pages(2)
    bench.answer = lambda asked: Refused(asked.request, "no_rdma", "it has no device")
    into = Destination.of([[GRANULE]] * 2)

    got = bench.get(offsets, into)

    assert (got.failure, got.fabric) == ("", "fake")
    assert [into.page(page) for page in range(2)] == contents
    assert not bench.fabric.reaches(bench.member)
    assert fallbacks(bench, REFUSED) == 2


def test_read_whose_memory_is_not_registered_soon_is_the_other_fabrics_within_its_deadline(
    make_bench: Callable[..., FakeBench], other: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while an engine's memory is being registered; when that is over, rdma reads again."""
    bench = make_bench(fallback=other)
    offsets, contents = bench.pages(2)
    monkeypatch.setattr("peercache.rdma.memory.REGISTER_S", 0.01)
    bench.ours[0].registrar.gate.clear()
    # Less than a registration was once waited for, and time enough for all else.
    into = Destination.of([[GRANULE]] * 2)

    late = bench.get(offsets, into, timeout_s=4.0)
    counted = fallbacks(bench, NO_MEMORY)
    bench.ours[0].registrar.gate.set()

    assert (late.failure, late.fabric) == ("", "fake")
    assert [into.page(page) for page in range(2)] == contents
    assert counted == 2
    wait_until(lambda: bench.get(offsets, Destination.of([[GRANULE]] * 2)).fabric == "rdma")


def test_client_that_finds_no_peer_never_connects_and_reads_elsewhere(
    make_bench: Callable[..., FakeBench], other: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting would look for the node's end for a second, and all of the engine would wait."""
    bench = make_bench(fallback=other)
    offsets, contents = bench.pages(2)
    bench.ours[0].finds_others = False
    connected: list[object] = []
    monkeypatch.setattr("peercache.rdma.channels.Channel.connect", connected.append)
    into = Destination.of([[GRANULE]] * 2)

    got = bench.get(offsets, into)

    assert (got.failure, got.fabric) == ("", "fake")
    assert [into.page(page) for page in range(2)] == contents
    assert connected == []
    assert len(bench.asked) == 1
    assert not bench.fabric.reaches(bench.member)
    # The node learns that its end is not needed.
    assert bench.fabric.held() == []
    assert bench.world.open_pairs() == 1


@pytest.mark.parametrize("who", ["client", "node"])
@pytest.mark.parametrize("pages", [1, 8])
def test_peer_without_a_path_over_one_rail_is_read_over_the_other(
    make_bench: Callable[..., FakeBench], who: str, pages: int
) -> None:
    """Either end finds no peer; it is tried once, and the peer is not given up."""
    bench = make_bench(rails=2)
    offsets, contents = bench.pages(pages, 2**18)

    def refuse(asked: OpenChannel) -> Message:
        if asked.rail == 1:
            return Refused(asked.request, "no_path", "no answer for your GID")
        return bench.server.open(CLIENT, asked)

    if who == "client":
        bench.ours[1].finds_others = False
    else:
        bench.answer = refuse
    for _ in range(3):
        into = Destination.of([[2**18]] * pages)
        got = bench.get(offsets, into)
        assert got.failure == ""
        assert [into.page(page) for page in range(pages)] == contents

    assert bench.fabric.reaches(bench.member)
    assert len([asked for asked in bench.asked if asked.rail == 1]) == 1
    bench.fabric.forget(INCARNATION)
    bench.ours[1].finds_others, bench.answer = True, None
    for _ in range(2):
        assert bench.get(offsets, Destination.of([[2**18]] * pages)).failure == ""
    assert len(bench.world.pairs_over("reader1")) == 1


def test_peer_without_rdma_is_asked_once_and_not_by_every_read(bench: FakeBench) -> None:
    """It is remembered; a node that restarts is another incarnation."""
    offsets, _ = bench.pages(1)
    bench.answer = lambda asked: Refused(asked.request, "no_rdma", "it has no device")

    got = bench.get(offsets, Destination.of([[GRANULE]]))
    reached = bench.fabric.reaches(bench.member)
    bench.fabric.forget(INCARNATION)

    assert got.failure == REFUSED
    assert (reached, bench.fabric.reaches(bench.member)) == (False, True)
    assert len(bench.asked) == 1


def test_memory_that_is_registered_later_is_asked_for_again(
    make_bench: Callable[..., FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel stays; only what it opens is reported again."""
    monkeypatch.setattr("peercache.rdma.fabric.REFRESH_S", 0.0)
    bench = make_bench(registers=False)
    offsets, contents = bench.pages(1)
    early = bench.get(offsets, Destination.of([[GRANULE]]))
    bench.serve_all()
    into = Destination.of([[GRANULE]])

    late = bench.get(offsets, into)

    assert (early.failure, late.failure) == (REFUSED, "")
    assert into.page(0) == contents[0]
    assert len({asked.qp_num for asked in bench.asked}) == 1


@pytest.mark.parametrize(
    "forged",
    [
        {"regions": np.array([(0, 2**64 - 1, 9999)], "<u8").tobytes(), "page_bytes": 2**62},
        {"regions": b""},
        {"granule": 0},
        {"granule": 3 * 4096},
        {"gid": b""},
        {"reads_at_once": 0, "regions": b""},
        {"pages_address": 2**64 - 1},
    ],
    ids=str,
)
def test_node_that_describes_its_memory_falsely_does_no_harm(
    bench: FakeBench, forged: dict[str, Any]
) -> None:
    """Keys that open nothing, and memory of absurd shapes, are refusals or misses."""
    offsets, _ = bench.pages(1)
    honest = bench.server.open

    def forge(asked: OpenChannel) -> Message:
        answer = honest(CLIENT, asked)
        assert isinstance(answer, ChannelOpened)
        return attrs.evolve(answer, **forged)

    bench.answer = forge

    got = bench.get(offsets, Destination.of([[GRANULE]]))

    assert got.failure in (REFUSED, PEER_UNREACHABLE)
    assert (got.seals["word"] == ODD).all()
