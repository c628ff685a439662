"""The virtual clock: when no task can run, it jumps to the next deadline."""

from __future__ import annotations

import math
import time

import trio

POLLS_BETWEEN_LOOKS = 256


class Deadlock(Exception):
    """No task can run, and no task waits for a time."""


class TooSlow(Exception):
    """The run took more wall time than allowed."""


class VirtualClock(trio.abc.Clock):
    """Seconds from 0 that pass only while all tasks wait.

    Trio asks how long it may sleep only when no task can run; then the clock jumps.
    """

    def __init__(self, *, wall_s: float = math.inf) -> None:
        """Give a run `wall_s` seconds of real time; `overrun` is set beyond it."""
        self.now_s = 0.0
        self.overrun = False
        self.deadlocked = False
        self._wall_until = time.monotonic() + wall_s
        self._polls = 0

    def start_clock(self) -> None:
        """Start; time passes only in jumps anyway."""

    def current_time(self) -> float:
        """Return the virtual seconds since the start."""
        return self.now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the deadline, and make trio not sleep."""
        self._polls += 1
        if self._polls % POLLS_BETWEEN_LOOKS == 0 and time.monotonic() > self._wall_until:
            self.overrun = True
        if deadline == math.inf:
            # A real sleep would hang; `sims.play` checks this.
            self.deadlocked = True
            return 0.0
        self.now_s = max(self.now_s, deadline)
        return 0.0
