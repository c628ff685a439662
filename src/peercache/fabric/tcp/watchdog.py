"""Ends what is still going on at its deadline.

A receive that waits for many bytes has a time-out in the kernel, which counts only the time that it
sleeps: a peer that sends just faster than we wake up keeps it going for as long as it likes. So
each receive is watched, by one thread for all: it sleeps as long as everything ends in time, wakes
about once in the length of a deadline, and never when nothing is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import final

JOIN_S = 1.0
"""What `close` waits for the thread, which is about to end; it is no reason to hang."""


@final
class Watchdog:
    """Calls `interrupt` of whatever is watched and not released by its deadline."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start no thread yet. clock: the seconds that deadlines are in."""
        self._clock = clock
        self._changed = threading.Condition()
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._next_token = 1
        self._wakes_at = inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, interrupt: Callable[[], None], until: float) -> int:
        """Call `interrupt` at `until`, from another thread, unless `release` comes first.

        interrupt: short; never raises. Raises RuntimeError if no thread can be started.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="peercache-deadlines", daemon=True)
                thread.start()
                self._thread = thread
            token = self._next_token
            self._next_token += 1
            self._watched[token] = (until, interrupt)
            if until < self._wakes_at:
                # Only then: waking it for each read would cost more than the read's own calls.
                self._wakes_at = until
                self._changed.notify()
            return token

    def release(self, token: int) -> bool:
        """Watch it no more; return whether it ended by itself: False after an interrupt."""
        with self._changed:
            return self._watched.pop(token, None) is not None

    def close(self) -> None:
        """End the thread, after everything has been released."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(JOIN_S)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = self._clock()
                due = [token for token, (until, _) in self._watched.items() if until <= now]
                for token in due:
                    # Under the lock: after `release` nothing is interrupted any more.
                    self._watched.pop(token)[1]()
                self._wakes_at = min((until for until, _ in self._watched.values()), default=inf)
                self._changed.wait(None if self._wakes_at == inf else self._wakes_at - now)
