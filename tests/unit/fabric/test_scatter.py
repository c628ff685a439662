"""A stream is laid into its places, whatever pieces it comes in."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from peercache.fabric.tcp.client import STEP_BYTES, Scatter, send_at_once
from tests.contracts.fabric_suite import Destination

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


def test_silence_and_end_are_told_apart() -> None:
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
