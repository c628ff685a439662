"""The rdma fabric over two devices of the guest: the contract of every fabric, and its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fabric_bench import RdmaBench

from contracts.fabric_suite import GRANULE, INCARNATION, PAGE_MEMORY_BYTES, FabricSuite
from peercache.ids import Incarnation
from peercache.segment.published import PublishedSegment

pytestmark = pytest.mark.rdma


@pytest.fixture
def segment() -> Iterator[PublishedSegment]:
    """A published segment, all of it usable."""
    published = PublishedSegment.create(
        Path("/dev/shm"),
        incarnation=Incarnation(INCARNATION),
        page_bytes=PAGE_MEMORY_BYTES,
        granule=GRANULE,
    )
    published.populate(PAGE_MEMORY_BYTES)
    yield published
    published.close()


@pytest.fixture
def bench(segment: PublishedSegment) -> Iterator[RdmaBench]:
    """An owner on rxe2, a reader on rxe1."""
    made = RdmaBench(segment)
    yield made
    made.close()


class TestRdmaFabric(FabricSuite):
    """The contract, into memory that is not registered: every byte goes through a block of ours."""
