"""What our fabric costs compared with a bare loop of pyverbs, in one run over one cable.

The bare loop is what one would write first: sixteen READs outstanding, one page and one post each,
no generation words. Both are measured in turns, so that a busy host slows both; the best turn of
each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination
from tests.rdma.fabric_bench import RdmaBench

if TYPE_CHECKING:
    from tests.rdma.verbs_ends import Cable

pytestmark = pytest.mark.rdma

TOTAL_BYTES = 32 << 20
# More turns cannot make a slow fabric fast, only a fast one less disturbed.
TURNS_MIN, TURNS_MAX = 4, 64


@pytest.fixture
def bench() -> Iterator[RdmaBench]:
    """An owner on rxe2 with TOTAL_BYTES of pages, a reader on rxe1."""
    segment = PublishedSegment.create(
        Path("/dev/shm"),
        incarnation=Incarnation(INCARNATION),
        page_bytes=TOTAL_BYTES,
        granule=GRANULE,
    )
    segment.populate(TOTAL_BYTES)
    made = RdmaBench(segment)
    yield made
    made.close()
    segment.close()


@pytest.fixture
def cable() -> Iterator[Cable]:
    """The same cable, for the bare loop."""
    from tests.rdma.verbs_ends import Cable

    made = Cable("rxe1", "rxe2", size_bytes=TOTAL_BYTES)
    made.connect()
    yield made
    made.close()


@pytest.mark.parametrize(("page_bytes", "share"), [(1 << 20, 0.95), (128 << 10, 0.8)])
def test_the_fabric_keeps_up_with_a_bare_loop(
    bench: RdmaBench, cable: Cable, page_bytes: int, share: float
) -> None:
    """At least that share of the bare loop's throughput."""
    from tests.rdma.verbs_ends import bare_loop

    count = TOTAL_BYTES // page_bytes
    bench.fill(page_bytes)
    into = Destination.of([[page_bytes]] * count, gap=0)
    bench.register(into)
    offsets = [page_bytes * page for page in range(count)]
    words = [2 * (page + 1) for page in range(count)]

    def ours() -> None:
        got = bench.get(offsets, into, timeout_s=60.0)
        assert got.failure == ""
        assert got.seals["word"].tolist() == words

    def bare() -> None:
        bare_loop(cable, page_bytes=page_bytes, count=count)

    ours(), bare()
    best = {ours: float("inf"), bare: float("inf")}
    for turn in range(TURNS_MAX):
        for each in (ours, bare):
            best[each] = min(best[each], seconds(each))
        if turn + 1 >= TURNS_MIN and best[bare] / best[ours] >= share:
            break

    mb_s = {each.__name__: TOTAL_BYTES / best[each] / 1e6 for each in best}
    reported = (
        f"{page_bytes >> 10} KiB pages: ours {mb_s['ours']:.0f}, bare {mb_s['bare']:.0f} MB/s"
    )
    print(reported)
    assert np.array_equal(into.memory, bench.segment.pages[:TOTAL_BYTES])
    assert mb_s["ours"] / mb_s["bare"] >= share, reported


def seconds(call: Callable[[], None]) -> float:
    """How long a call took."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
