"""The rdma fabric over two devices of the guest: the contract of every fabric, and its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache.memory.published import PublishedSegment
from tests.contracts.fabric_suite import (
    FabricSuite,
    published_segment,
)
from tests.rdma.fabric_bench import RdmaBench

pytestmark = pytest.mark.rdma


@pytest.fixture
def segment() -> Iterator[PublishedSegment]:
    """A published segment, all of it usable."""
    with published_segment(Path("/dev/shm")) as published:
        yield published


@pytest.fixture
def bench(segment: PublishedSegment) -> Iterator[RdmaBench]:
    """An owner on rxe2, a reader on rxe1."""
    made = RdmaBench(segment)
    yield made
    made.close()


class TestRdmaFabric(FabricSuite):
    """The contract, into memory that is not registered: every byte goes through a block of ours."""
