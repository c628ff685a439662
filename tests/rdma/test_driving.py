"""Driving a read: its deadline holds whatever moves."""

from __future__ import annotations

import select
from typing import Any, cast

from peercache.observability.reasons import DEADLINE
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

    def stand(self, seconds: float) -> None:
        """It never does for long."""


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
