"""Channels of the data port whose certificates expire while they are open."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from pathlib import Path

import numpy as np
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.model.reads import PeerRead
from peercache.observability.reasons import REFUSED
from tests.contracts.fabric_suite import GRANULE, Destination, Owner
from tests.contracts.fakes import PlainMemory
from tests.pace import FACTOR, TIMEOUT_S, wait_until
from tests.unit.fabric.secured import Cluster, fabric_with, member_at, serve
from tests.unit.fabric.serving import PageServer

SHORT = dt.timedelta(seconds=2 * FACTOR)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster.of(tmp_path)


@pytest.fixture
def memory() -> PlainMemory:
    """Memory with one page, b"page", under generation 2."""
    plain = PlainMemory.of(2**20, GRANULE)
    Owner(plain).store(0, b"page", 2)
    return plain


def one_page(server: PageServer, *name: str) -> PeerRead:
    """Return what reads the server's first page."""
    into = Destination.of([[4]])
    asked = np.array([[0], [2]], np.uint64)
    return PeerRead(member_at(server, *name), asked[0], into.lengths, into.runs, asked[1])


def test_open_channel_of_a_certificate_that_expires_is_closed(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """By the server; that of another client stays."""
    server = serve(memory, cluster.node())
    late = cluster.live(cluster.client_files("ends", lifetime=SHORT))
    with (
        contextlib.closing(fabric_with(late)) as expires,
        contextlib.closing(fabric_with(cluster.client())) as stays,
    ):
        page = one_page(server)
        for fabric in (expires, stays):
            assert fabric.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        assert server.connections() == 2

        wait_until(lambda: server.connections() == 1)

        assert stays.read(page, time.monotonic() + TIMEOUT_S).failure == ""
        assert expires.read(page, time.monotonic() + TIMEOUT_S).failure == REFUSED
    server.close()


def test_open_channel_to_a_server_whose_certificate_expires_is_used_no_more(
    memory: PlainMemory, cluster: Cluster
) -> None:
    """The client looks, too: the server may be who stole the certificate."""
    server = serve(memory, cluster.node("short", lifetime=SHORT), "short")
    with contextlib.closing(fabric_with(cluster.client())) as fabric:
        page = one_page(server, "short")
        assert fabric.read(page, time.monotonic() + TIMEOUT_S).failure == ""

        wait_until(
            lambda: fabric.read(page, time.monotonic() + TIMEOUT_S).failure == REFUSED,
        )
    server.close()
