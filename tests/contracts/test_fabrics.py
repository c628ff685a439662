"""Every fabric, and the fake that other tests use, passes the suite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from peercache.fabric.shm import ShmFabric
from peercache.memory.layout import boot_id
from peercache.memory.published import PublishedSegment
from peercache.model.member import Member
from tests.contracts.fabric_suite import (
    GRANULE,
    INCARNATION,
    PAGE_MEMORY_BYTES,
    FabricSuite,
    Owner,
    member_of,
    published_segment,
)
from tests.contracts.fakes import FakeFabric, PlainMemory
from tests.unit.fabric.secured import Cluster, fabric_with, member_at, serve
from tests.unit.fabric.serving import PageServer, fabric_for


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[PublishedSegment]:
    """A published segment, all of it usable."""
    with published_segment(tmp_path) as published:
        yield published


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster's certificates."""
    return Cluster.of(tmp_path_factory.mktemp("cluster"))


@attrs.define
class Bench:
    """An owner, and a fabric that calls `act` between bytes and word."""

    owner: Owner
    member: Member
    fabric: Any = attrs.field(init=False)
    between: Callable[[], None] = attrs.field(default=lambda: None, init=False)

    def act(self) -> None:
        """Do what the test wants done between bytes and word."""
        self.between()


class TestFakeFabric(FabricSuite):
    """The fake obeys the contract, or what is tested with it proves nothing."""

    @pytest.fixture
    def bench(self) -> Bench:
        """Memory of this process, read by the fake."""
        memory = PlainMemory.of(PAGE_MEMORY_BYTES, GRANULE)
        bench = Bench(Owner(memory), member_of(INCARNATION))
        bench.fabric = FakeFabric(granule=GRANULE)
        bench.fabric.peers[INCARNATION] = memory
        bench.fabric.between = bench.act
        return bench


@contextlib.contextmanager
def served(segment: PublishedSegment, **options: Any) -> Iterator[Bench]:
    """Serve a segment over tcp."""
    server = PageServer(segment, incarnation=INCARNATION, granule=GRANULE, **options)
    bench = Bench(Owner(segment), member_of(INCARNATION, data=server.address))
    bench.fabric = fabric_for(GRANULE)
    server.between = bench.act
    yield bench
    bench.fabric.close()
    server.close()


class TestTcpFabric(FabricSuite):
    """Bytes through the kernel's loopback."""

    @pytest.fixture
    def bench(self, segment: PublishedSegment) -> Iterator[Bench]:
        """A segment, served by another thread."""
        with served(segment, threads=1) as bench:
            yield bench


class TestTcpFabricWithTwoServingThreads(FabricSuite):
    """Connections of one client, some with each thread."""

    @pytest.fixture
    def bench(self, segment: PublishedSegment) -> Iterator[Bench]:
        """A segment, served by two other threads."""
        with served(segment, threads=2) as bench:
            yield bench


class TestTcpFabricOverTls(FabricSuite):
    """The same bytes, encrypted."""

    @pytest.fixture
    def bench(self, segment: PublishedSegment, cluster: Cluster) -> Iterator[Bench]:
        """A segment, served to a client with a certificate."""
        server = serve(segment, cluster.node(), threads=2)
        bench = Bench(Owner(segment), member_at(server))
        bench.fabric = fabric_with(cluster.client())
        server.between = bench.act
        yield bench
        bench.fabric.close()
        server.close()


class TestShmFabric(FabricSuite):
    """One memory copy out of a mapped segment."""

    @pytest.fixture
    def bench(self, segment: PublishedSegment) -> Iterator[Bench]:
        """A segment, mapped a second time by the fabric."""
        member = member_of(INCARNATION, boot_id=boot_id(), segment=str(segment.path))
        bench = Bench(Owner(segment), member)
        bench.fabric = ShmFabric(boot_id=boot_id(), between=bench.act)
        yield bench
        bench.fabric.close()
