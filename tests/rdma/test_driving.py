"""Driving a read: its deadline holds whatever moves, and what could not be made is not counted."""

from __future__ import annotations

import select
import time
from typing import Any, cast

import numpy as np
import pytest

from peercache.observe import DEADLINE
from peercache.rdma import blocks
from peercache.rdma.blocks import Blocks
from peercache.rdma.memory import Regions
from peercache.rdma.reading import Transfer, drive


class Endless:
    """A transfer that gets on with every look at it, and takes its time."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.channel = type("Channel", (), {"descriptor": 0, "rail": None})()
        self.progress_at, self.fastest_s = clock[0], 0.1
        self.done, self.failure = 0, ""

    @property
    def is_over(self) -> bool:
        return bool(self.failure) or self.done >= 100

    def advance(self) -> bool:
        self.clock[0] += 0.1
        self.progress_at = self.clock[0]
        self.done += 1
        return True


class NoPoll:
    def register(self, descriptor: int, events: int) -> None:
        assert events == select.POLLIN


def test_deadline_holds_for_a_read_that_always_moves() -> None:
    """As one of many small pages does: it is bound by posting, and something is always complete."""
    now = [0.0]
    transfer = Endless(now)
    up = type("Rail", (), {"is_up": lambda _: True})()
    transfer.channel.rail = up

    drive(
        [cast("Transfer", transfer)], 1.0, lambda: now[0], has_spare=False,
        leave_out=lambda _: None, poller=cast("Any", NoPoll()),
    )  # fmt: skip

    assert transfer.failure == DEADLINE
    assert now[0] < 1.3


def test_block_that_could_not_be_made_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for a while must not mean no block for ever."""
    lent = Blocks(
        cast("Regions", object()), "words", block_bytes=4096, blocks_max=1, clock=time.monotonic
    )

    def none(*_: object) -> None:
        raise OSError(12, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr(blocks.mmap, "mmap", none)
        with pytest.raises(OSError, match="no memory"):
            lent.lend(time.monotonic() + 60.0)
    made = blocks.Block(0, 0, np.zeros(1, np.uint8), cast("Any", None))
    monkeypatch.setattr(lent, "_make", lambda _: made)

    assert lent.lend(time.monotonic() + 60.0) is made
