"""Which channel a read gets, over rails that are busy or not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache.model.reads import PeerRead
from peercache.rdma.channels import STRIPE_BYTES_MIN, Channels, Reserved
from peercache.rdma.plan import ReadProgress
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, member_of
from tests.pace import TIMEOUT_S


def channels(rails: int) -> Channels:
    """Return the channels of a client, one to a peer over each of its rails."""
    sides: list[Any] = [
        SimpleNamespace(index=index, is_usable=lambda _: True) for index in range(rails)
    ]
    return Channels(sides, max_channels_per_peer=1, clock=time.monotonic)


def small() -> ReadProgress:
    """Return a read of one small page."""
    into = Destination.of([[GRANULE]])
    zero = np.zeros(1, np.uint64)
    read = PeerRead(member_of(INCARNATION), zero, into.lengths, into.runs, zero)
    assert read.lengths.sum() < STRIPE_BYTES_MIN
    return ReadProgress(read, time.monotonic() + TIMEOUT_S)


def reserve(ours: Channels) -> Reserved:
    """Lease what a small read goes over."""
    reserved, why = ours.reserve(small())
    assert why == ""
    (one,) = reserved
    return one


@pytest.mark.parametrize("freed", range(3))
@pytest.mark.parametrize("turns", range(3))
def test_small_read_takes_the_one_rail_that_is_free_out_of_turn(freed: int, turns: int) -> None:
    """Two rails of three are busy, and no read waits for them."""
    ours = channels(3)
    for _ in range(turns):
        ours.driver.end(reserve(ours).lease, None, works=False)
    busy = sorted([reserve(ours) for _ in range(3)], key=lambda each: each.side.index)
    ours.driver.end(busy.pop(freed).lease, None, works=False)

    got = reserve(ours)

    assert got.side.index == freed


def test_small_reads_take_turns_over_rails_that_are_all_free() -> None:
    """Else the first rail would have every small read, and the others none."""
    ours = channels(3)
    used = []
    for _ in range(6):
        reserved = reserve(ours)
        used.append(reserved.side.index)
        ours.driver.end(reserved.lease, None, works=False)

    assert sorted(used) == [0, 0, 1, 1, 2, 2]


def test_small_read_waits_where_every_rail_is_busy() -> None:
    """Until the first of them comes free, whichever that is."""
    ours = channels(2)
    busy = [reserve(ours) for _ in range(2)]
    got: list[Reserved] = []
    waiting = threading.Thread(target=lambda: got.append(reserve(ours)))

    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    ours.driver.end(busy[1].lease, None, works=False)
    waiting.join(TIMEOUT_S)

    assert [each.side for each in got] == [busy[1].side]
