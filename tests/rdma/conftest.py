"""Both ends of a read wait for each other on a slow machine; benches that move bytes by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peercache.memory.published import PublishedSegment
from tests.contracts.fabric_suite import published_segment
from tests.pace import TIMEOUT_S, no_peer_is_taken_for_hung
from tests.rdma.fake_bench import FakeBench


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts between the two ends."""
    no_peer_is_taken_for_hung(monkeypatch)
    monkeypatch.setattr("peercache.rdma.fabric.EXCHANGE_S", TIMEOUT_S)
    monkeypatch.setattr("peercache.rdma.memory.REGISTER_S", TIMEOUT_S)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[PublishedSegment]:
    """A published segment, all of it usable."""
    with published_segment(tmp_path) as published:
        yield published


@pytest.fixture
def make_bench(segment: PublishedSegment) -> Iterator[Callable[..., FakeBench]]:
    """Make benches, and see that each leaves nothing behind."""
    made: list[FakeBench] = []

    def make(**facts: Any) -> FakeBench:
        made.append(FakeBench(segment, **facts))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., FakeBench]) -> FakeBench:
    """One rail a side."""
    return make_bench()
