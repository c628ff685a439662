"""Jobs and their threads: bounded, with deadlines that hold even where the kernel does not answer.

Owns    the threads that do input and output, and the one that watches them.
Keeps   every job is answered exactly once, and by its deadline. A page whose call is under way then
        is DISK_LATE, and is named by LateEnded when the call has returned.
        Facts are told outside the lock, DiskEnded last.
Limits  WAITING_PAGES_MAX pages wait to be moved; what comes beyond is DISK_UNTRIED at once. Slots
        that wait to be wiped are bounded by those that there are.

A thread that is still stuck `stuck_s` after a deadline ends the tier: it cannot be taken back, and
the next call would take another. Threads are daemons, and `close` does not wait for a stuck one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final

import attrs
import numpy as np

from peercache.actors.storage_port import (
    DISK_FAILED,
    DISK_LATE,
    DISK_UNTRIED,
    DiskEnded,
    DiskFact,
    LateEnded,
    Load,
    LoadDone,
    Spill,
    SpillDone,
)
from peercache.model.runs import U64

WAITING_PAGES_MAX: Final = 65_536
"""More than any batch; the actor bounds what it hands over in bytes."""

LAST_S: Final = 0.25
"""How long `close` waits for the very last call, when it has given up the rest."""

LOOK_S: Final = 0.05
"""How late a deadline may be noticed."""

LOOKS_TO_DOZE: Final = 20
"""Looks without anything to do, a second of them, before the watcher waits to be woken: waking it
for every single load would cost each a hand-over of the interpreter more."""

HOUSEKEEPING_S: Final = 5.0

LOADS, ERRANDS, SPILLS = 0, 1, 2
"""Loads go first, as somebody waits for them; wipes before the spills to the same places."""


@attrs.frozen(eq=False)
class Errand:
    """Something else that needs the file system. do: raises nothing for what the world does.

    patience_s: how long it may take from when a thread begins with it.
    """

    do: Callable[[Unit], None]
    then: DiskFact | None = None
    patience_s: float = inf


@attrs.define(eq=False)
class Job:
    """One Load, Spill or Errand; it is answered when the last of its units is."""

    effect: Load | Spill | Errand
    outcomes: bytearray
    checksums: U64
    units_left: int = 0

    @classmethod
    def of(cls, effect: Load | Spill | Errand, pages: int) -> Job:
        """Begin a job of so many pages."""
        return cls(effect, bytearray((DISK_UNTRIED,)) * pages, np.zeros(pages, np.uint64))

    def answer(self) -> list[DiskFact]:
        """Return what is told at the end."""
        if isinstance(self.effect, Load):
            return [LoadDone(self.effect.job, bytes(self.outcomes), self.checksums)]
        if isinstance(self.effect, Spill):
            return [SpillDone(self.effect.job, bytes(self.outcomes))]
        return [self.effect.then] if self.effect.then is not None else []

    @property
    def kind(self) -> int:
        """Return which queue it waits in."""
        if isinstance(self.effect, Load):
            return LOADS
        return SPILLS if isinstance(self.effect, Spill) else ERRANDS


@attrs.define(eq=False)
class Unit:
    """Pages of one job that one thread takes care of.

    outcomes: of these pages; the thread sets each as soon as it is known.
    is_over:  the deadline has passed, and its pages were answered without waiting for the thread.
    """

    job: Job
    pages: range
    until: float
    outcomes: bytearray = attrs.field(init=False)
    is_over: bool = False
    late: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Begin with nothing tried."""
        self.outcomes = bytearray((DISK_UNTRIED,)) * len(self.pages)

    @property
    def moved(self) -> int:
        """Return how many pages of the bound it takes."""
        return 0 if isinstance(self.job.effect, Errand) else len(self.pages)


class Workers:
    """The threads of one store."""

    def __init__(
        self,
        perform: Callable[[Unit], None],
        *,
        threads: int,
        stuck_s: float,
        clock: Callable[[], float],
        judged: Callable[[Unit, bytes], None],
        tell: Callable[[DiskFact], None],
        look: Callable[[Unit], None],
        log: Any,
    ) -> None:
        """Start.

        perform: does a unit, setting its outcomes; raises nothing for what the world does.
        judged:  hears a unit's outcomes before its job is answered: rows are kept or dropped.
        look:    an errand every HOUSEKEEPING_S: whether the folder still is there.
        """
        self._perform = perform
        self._stuck_s = stuck_s
        self._clock = clock
        self._judged = judged
        self._tell = tell
        self._look_after = look
        self._facts: deque[DiskFact] = deque()
        self._telling = threading.RLock()
        self._log = log
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """Threads wait here for a unit; as many are woken as there are units."""
        self._look_again = threading.Condition(lock)
        self._dozes = False
        self._waiting: tuple[deque[Unit], ...] = (deque(), deque(), deque())
        self._waiting_pages = 0
        self._running: list[Unit] = []
        self._reason = ""
        self._ending = ""
        self._moves_no_more = False
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"peercache-disk-{n}", daemon=True)
            for n in range(threads)
        ]
        self._watcher = threading.Thread(target=self._look, name="peercache-disk", daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()

    def submit(self, job: Job, units: list[Unit]) -> None:
        """Queue a job; never waits."""
        pages = sum(unit.moved for unit in units)
        job.units_left = len(units)
        with self._changed:
            takes = not self._reason and not self._closing
            takes = takes and self._waiting_pages + pages <= WAITING_PAGES_MAX
            takes = takes and not (self._moves_no_more and job.kind != ERRANDS)
            if takes and units:
                self._waiting[job.kind].extend(units)
                self._waiting_pages += pages
                self._changed.notify(len(units))
                if self._dozes:
                    self._look_again.notify()
            else:
                self._facts += job.answer()
        self._flush()

    def end_soon(self, reason: str) -> None:
        """End the tier as soon as the unit that found out about it has been answered."""
        self._ending = reason

    def end(self, reason: str) -> None:
        """End the tier: answer everything, then tell DiskEnded, once."""
        with self._changed:
            if self._reason or self._closing:
                return
            self._reason = reason
            self._expire(inf)
            self._facts.append(DiskEnded(reason))
            self._changed.notify_all()
        self._log.warning("disk.ended", reason=reason)
        self._flush()

    def move_no_more(self, timeout_s: float) -> None:
        """Take errands only, and wait for the pages that are being moved."""
        with self._changed:
            self._moves_no_more = True
            self._expire(inf, of=(LOADS, SPILLS))
            self._changed.wait_for(lambda: not any(u.moved for u in self._running), timeout_s)
        self._flush()

    def close(self, timeout_s: float) -> bool:
        """Do what errands there are, and stop; False if a thread is stuck in the kernel."""
        with self._changed:
            self._closing = True
            self._expire(inf, of=(LOADS, SPILLS))
            self._changed.notify_all()
            self._look_again.notify()
        self._flush()
        if not self._have_ended(timeout_s):
            with self._changed:
                self._expire(inf, of=(ERRANDS,))
                for unit in self._running:
                    # Nobody is told any more: the thread need not go on with it.
                    unit.is_over = unit.is_over or not unit.moved
            self._flush()
        return self._have_ended(LAST_S)

    def _have_ended(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- threads ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._waiting) or self._closing)
                unit = self._next()
                if unit is None:
                    return
                is_late = self._clock() >= unit.until
                if is_late:
                    self._report(unit, bytes(unit.outcomes))
                else:
                    if isinstance(unit.job.effect, Errand):
                        unit.until = min(unit.until, self._clock() + unit.job.effect.patience_s)
                    # Whatever the thread has not judged when the deadline comes, is late.
                    unit.outcomes[:] = bytes((DISK_LATE,)) * len(unit.outcomes)
                    self._running.append(unit)
            if not is_late:
                self._do(unit)
            self._flush()

    def _do(self, unit: Unit) -> None:
        effect = unit.job.effect
        try:
            if isinstance(effect, Errand):
                effect.do(unit)
            else:
                self._perform(unit)
        except Exception as error:
            self._log.error("disk.internal_error", error=repr(error), exc_info=True)
            unit.outcomes[:] = bytes((DISK_FAILED,)) * len(unit.outcomes)
        with self._changed:
            self._running.remove(unit)
            if self._moves_no_more:
                self._changed.notify_all()
            if not unit.is_over:
                self._report(unit, bytes(unit.outcomes))
            elif unit.late and not isinstance(effect, Errand):
                self._facts.append(LateEnded(effect.job, unit.late))
        if self._ending:
            self.end(self._ending)

    def _look(self) -> None:
        """Watch the deadlines, and send somebody to look after the folder now and then."""
        looked = time.monotonic()
        looks = 0
        while True:
            with self._changed:
                looks = 0 if self._running or any(self._waiting) else looks + 1
                self._dozes = looks > LOOKS_TO_DOZE
                self._look_again.wait(HOUSEKEEPING_S if self._dozes else LOOK_S)
                self._dozes = False
                if self._closing and not self._running:
                    return
                now = self._clock()
                self._expire(now)
                stuck = any(unit.until + self._stuck_s <= now for unit in self._running)
            self._flush()
            if stuck and not self._closing:
                self.end("a call does not return: the file system is stuck")
            elif time.monotonic() - looked >= HOUSEKEEPING_S:
                looked = time.monotonic()
                job = Job.of(Errand(self._look_after), 0)
                self.submit(job, [Unit(job, range(0), now + HOUSEKEEPING_S)])

    # --- under the lock ---------------------------------------------------------------------------

    def _next(self) -> Unit | None:
        for queue in self._waiting:
            if queue:
                unit = queue.popleft()
                self._waiting_pages -= unit.moved
                return unit
        return None

    def _expire(self, now: float, *, of: tuple[int, ...] = ()) -> None:
        """Answer for units whose deadline has come. of: only those that wait in these queues."""
        for queue in [self._waiting[kind] for kind in of] or self._waiting:
            for unit in [unit for unit in queue if unit.until <= now or now == inf]:
                queue.remove(unit)
                self._waiting_pages -= unit.moved
                self._report(unit, bytes(unit.outcomes))
        for unit in self._running if not of else ():
            if not unit.is_over and (unit.until <= now or now == inf):
                unit.is_over = True
                # The thread may go on judging; what counts is what it has said by now.
                said = bytes(unit.outcomes)
                unit.late = tuple(
                    page for page, one in zip(unit.pages, said, strict=True) if one == DISK_LATE
                )
                self._report(unit, said)

    def _report(self, unit: Unit, said: bytes) -> None:
        """Take a unit's outcomes into its job, which is answered with the last one."""
        job = unit.job
        job.outcomes[unit.pages.start : unit.pages.stop] = said
        job.units_left -= 1
        self._judged(unit, said)
        if not job.units_left:
            self._facts += job.answer()

    def _flush(self) -> None:
        """Tell what there is to tell, in order, whichever thread has come to it."""
        with self._telling:
            while self._facts:
                self._tell(self._facts.popleft())
