"""The jobs of a page store and its threads: bounded, with deadlines that always hold.

Owns    the threads that do input and output, and the watcher thread that enforces their deadlines.
Keeps   each job has exactly one answer, by its deadline. A page whose call is in flight at the
        deadline is DISK_LATE; LateEnded names it when the call has returned. Results are reported
        outside the lock, DiskEnded last.
Limits  WAITING_PAGES_MAX pages are pending; pages beyond are DISK_UNTRIED at once.

A thread that is still stuck `stuck_s` after a deadline ends the tier: a stuck call cannot be
cancelled, and the next call would block another thread. Threads are daemons; `close` abandons a
stuck thread.
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

from peercache.actors.ports import (
    DISK_FAILED,
    DISK_LATE,
    DISK_UNTRIED,
    DiskEnded,
    DiskFact,
    LateEnded,
    Load,
    LoadDone,
    Write,
    WriteDone,
)
from peercache.model.runs import U64

WAITING_PAGES_MAX: Final = 65_536
"""More than any batch; the disk actor bounds in bytes what it submits."""

LOOK_S: Final = 0.05
"""How late a deadline may be noticed."""

LOOKS_TO_DOZE: Final = 20
"""Idle checks, for one second, before the watcher sleeps until a job wakes it. A wake-up for each
load would cost the load one more hand-over of the GIL."""

HOUSEKEEPING_S: Final = 5.0

LOADS, LOOKS, WRITES = 0, 1, 2
"""The queues, by priority: readers wait for loads; a check of the folder takes microseconds."""


@attrs.define(eq=False)
class Job:
    """One Load or Write, answered with the last of its units. None: a check of the folder."""

    effect: Load | Write | None
    outcomes: bytearray
    checksums: U64
    units_left: int = 0

    @classmethod
    def of(cls, effect: Load | Write | None, pages: int) -> Job:
        """Begin a job of `pages` pages."""
        return cls(effect, bytearray((DISK_UNTRIED,)) * pages, np.zeros(pages, np.uint64))

    def answer(self) -> list[DiskFact]:
        """Return the results that answer the job."""
        if isinstance(self.effect, Load):
            return [LoadDone(self.effect.job, bytes(self.outcomes), self.checksums)]
        if isinstance(self.effect, Write):
            return [WriteDone(self.effect.job, bytes(self.outcomes), self.checksums)]
        return []

    @property
    def kind(self) -> int:
        """Return the queue of the job."""
        if isinstance(self.effect, Load):
            return LOADS
        return WRITES if isinstance(self.effect, Write) else LOOKS


@attrs.define(eq=False)
class Unit:
    """Pages of one job that one thread moves.

    outcomes: those of these pages; the thread sets each as soon as it is known.
    over:     one byte, which compiled code reads, too: see `is_over`.
    """

    job: Job
    pages: range
    until: float
    outcomes: bytearray = attrs.field(init=False)
    over: bytearray = attrs.field(init=False)
    late: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Start with all pages untried."""
        self.outcomes = bytearray((DISK_UNTRIED,)) * len(self.pages)
        self.over = bytearray(1)

    @property
    def is_over(self) -> bool:
        """Return whether the pages were answered at the deadline, without the thread."""
        return bool(self.over[0])


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
        notify: Callable[[DiskFact], None],
        look: Callable[[], None],
        log: Any,
    ) -> None:
        """Start.

        perform: performs a unit and sets its outcomes; does not raise for external failures.
        judged: called with a unit's outcomes before its job is answered, to store or drop index
                rows.
        look:    called on a thread every HOUSEKEEPING_S: checks that the folder is there.
        """
        self._perform = perform
        self._stuck_s = stuck_s
        self._clock = clock
        self._judged = judged
        self._notify = notify
        self._check_folder = look
        self._facts: deque[DiskFact] = deque()
        self._reporting = threading.RLock()
        self._log = log
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """Threads wait here for units; as many threads are woken as there are units."""
        self._look_again = threading.Condition(lock)
        self._dozes = False
        self._waiting: tuple[deque[Unit], ...] = (deque(), deque(), deque())
        self._waiting_pages = 0
        self._running: list[Unit] = []
        self._reason = ""
        self._ending = ""
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
        pages = sum(len(unit.pages) for unit in units)
        job.units_left = len(units)
        with self._changed:
            takes = not self._reason and not self._closing
            takes = takes and self._waiting_pages + pages <= WAITING_PAGES_MAX
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
        """End the tier as soon as the unit that found the reason has been answered."""
        self._ending = reason

    def end(self, reason: str) -> None:
        """End the tier: answer everything, then report DiskEnded, once."""
        with self._changed:
            if self._reason or self._closing:
                return
            self._reason = reason
            self._expire(inf)
            self._facts.append(DiskEnded(reason))
            self._changed.notify_all()
        self._log.warning("disk.ended", reason=reason)
        self._flush()

    def close(self, timeout_s: float) -> bool:
        """Stop after the units in flight; False if a thread is stuck in the kernel."""
        with self._changed:
            self._closing = True
            self._expire_pending(inf)
            self._changed.notify_all()
            self._look_again.notify()
        self._flush()
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
                    # A page without an outcome by the deadline is late.
                    unit.outcomes[:] = bytes((DISK_LATE,)) * len(unit.outcomes)
                    self._running.append(unit)
            if not is_late:
                self._do(unit)
            self._flush()

    def _do(self, unit: Unit) -> None:
        effect = unit.job.effect
        try:
            if effect is None:
                self._check_folder()
            else:
                self._perform(unit)
        except Exception as error:
            self._log.error("disk.internal_error", error=repr(error), exc_info=True)
            unit.outcomes[:] = bytes((DISK_FAILED,)) * len(unit.outcomes)
        with self._changed:
            self._running.remove(unit)
            if not unit.is_over:
                self._report(unit, bytes(unit.outcomes))
            elif unit.late and effect is not None:
                self._facts.append(LateEnded(effect.job, unit.late))
        if self._ending:
            self.end(self._ending)

    def _look(self) -> None:
        """Watch the deadlines, and have a thread check the folder every HOUSEKEEPING_S."""
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
                job = Job.of(None, 0)
                self.submit(job, [Unit(job, range(0), now + HOUSEKEEPING_S)])

    # --- under the lock ---------------------------------------------------------------------------

    def _next(self) -> Unit | None:
        for queue in self._waiting:
            if queue:
                unit = queue.popleft()
                self._waiting_pages -= len(unit.pages)
                return unit
        return None

    def _expire_pending(self, now: float) -> None:
        """Answer for pending units past their deadline."""
        for queue in self._waiting:
            for unit in [unit for unit in queue if unit.until <= now]:
                queue.remove(unit)
                self._waiting_pages -= len(unit.pages)
                self._report(unit, bytes(unit.outcomes))

    def _expire(self, now: float) -> None:
        """Answer for all units past their deadline."""
        self._expire_pending(now)
        for unit in self._running:
            if not unit.is_over and unit.until <= now:
                unit.over[0] = True
                # The thread may continue to set outcomes; those of this moment count.
                states = bytes(unit.outcomes)
                unit.late = tuple(
                    page for page, one in zip(unit.pages, states, strict=True) if one == DISK_LATE
                )
                self._report(unit, states)

    def _report(self, unit: Unit, states: bytes) -> None:
        """Copy a unit's outcomes into its job; the last unit answers the job."""
        job = unit.job
        job.outcomes[unit.pages.start : unit.pages.stop] = states
        job.units_left -= 1
        self._judged(unit, states)
        if not job.units_left:
            self._facts += job.answer()

    def _flush(self) -> None:
        """Report the pending results in order, on the calling thread."""
        with self._reporting:
            while self._facts:
                self._notify(self._facts.popleft())
