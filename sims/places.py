"""Places: the processes of a run, their hosts, and whether they are paused."""

from __future__ import annotations

import math

import attrs
import trio


@attrs.define(eq=False)
class Place:
    """A process: a node or an engine with its client.

    rate, offset_s: its clock shows rate × time + offset.
    """

    name: str
    host: str
    rate: float = 1.0
    offset_s: float = 0.0
    alive: bool = True
    paused_until: float = -math.inf
    _pauses: list[tuple[float, float]] = attrs.field(factory=list)

    def local(self, now: float) -> float:
        """Return what the clock of this place shows."""
        return now * self.rate + self.offset_s

    def now(self) -> float:
        """Return what the clock of this place shows now."""
        return self.local(trio.current_time())

    def world(self, local: float) -> float:
        """Return the time at which its clock shows this."""
        return (local - self.offset_s) / self.rate

    def pause(self, now: float, span_s: float) -> None:
        """Pause the process for a while, as by SIGSTOP."""
        if now < self.paused_until:
            return
        self.paused_until = now + span_s
        self._pauses.append((now, now + span_s))

    def is_paused(self, now: float) -> bool:
        """Return whether it is paused."""
        return now < self.paused_until

    def paused_s(self, since: float, until: float) -> float:
        """Return for how long of this time it was paused."""
        return sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in self._pauses)

    async def awake(self) -> None:
        """Wait while it is paused; a process must call this before its next action."""
        while trio.current_time() < self.paused_until:
            await trio.sleep_until(self.paused_until)
