"""A memory, a server of it and a reader, for the tests of the tcp fabric."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from peercache.fabric.tcp.client import TcpFabric
from tests.contracts.fabric_suite import GRANULE, INCARNATION
from tests.contracts.fakes import PlainMemory
from tests.unit.fabric.scripted_peer import PORTION
from tests.unit.fabric.serving import PageServer, fabric_for


@pytest.fixture
def memory() -> PlainMemory:
    """Page memory of four portions; word i is 2 i + 2, granule i is full of the byte i % 251."""
    plain = PlainMemory.of(4 * PORTION, GRANULE)
    plain.seals["word"] = 2 * np.arange(len(plain.seals)) + 2
    plain.seals["length"] = len(plain.pages)
    plain.pages.reshape(-1, GRANULE)[:] = (np.arange(len(plain.words)) % 251)[:, None]
    return plain


@pytest.fixture
def server(memory: PlainMemory) -> Iterator[PageServer]:
    """A server of that memory."""
    running = PageServer(memory, incarnation=INCARNATION, granule=GRANULE)
    yield running
    running.close()


@pytest.fixture
def fabric() -> Iterator[TcpFabric]:
    """A client side that the server admits."""
    with contextlib.closing(fabric_for(GRANULE)) as opened:
        yield opened
