"""Lanes: threads that make blocking calls for an engine whose own threads must not wait.

Owns    one bounded queue a lane, and the threads that take from it.
Hears   work from the engine's threads, and when to stop.
Keeps   each piece of work is done or refused, exactly once, and the engine's thread waits for
        neither. What waited too long is refused: its answer would come after its use.
Limits  WAITING_MAX pieces wait; the calls that are made have deadlines of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs

WAITING_MAX = 1024
"""Work that waits in one lane. An engine has some hundred requests, which ask a few times each."""

Work: TypeAlias = Callable[[], None]


@attrs.frozen(eq=False)
class _Piece:
    asked_s: float
    work: Work
    refuse: Work


@final
class CallLane:
    """A bounded queue and its threads. Thread-safe."""

    def __init__(
        self,
        name: str,
        log: Any,
        *,
        threads: int = 1,
        patience_s: float,
        waiting_max: int = WAITING_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        name: of the threads, for people. patience_s: after which waiting work is refused.
        """
        self._log = log
        self._patience_s = patience_s
        self._waiting_max = waiting_max
        self._clock = clock
        self._change = threading.Condition()
        self._waiting: deque[_Piece] = deque()
        self._busy = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._main, name=f"peercache-{name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Return how many pieces of work wait or are being done."""
        with self._change:
            return len(self._waiting) + self._busy

    def submit(self, work: Work, refuse: Work) -> None:
        """Have a thread do `work`; `refuse` is called instead where that cannot be, maybe here.

        refuse: called too where `work` raises, so it must hold for work that was done in part.
        """
        piece = _Piece(self._clock(), work, refuse)
        with self._change:
            if not self._is_closed and len(self._waiting) < self._waiting_max:
                self._waiting.append(piece)
                self._change.notify()
                return
        self._refuse(piece)

    def cancel(self) -> None:
        """Refuse what waits; what is being done goes on."""
        with self._change:
            waiting, self._waiting = self._waiting, deque()
        for piece in waiting:
            self._refuse(piece)
        with self._change:
            self._change.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse what waits, and wait for the rest; return whether nothing runs any more."""
        self.cancel()
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take no more work, and drain; return whether all threads have ended in time."""
        until = self._clock() + timeout_s
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self.cancel()
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _main(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._do(piece)
            finally:
                # What the piece refers to, such as the engine's memory, ends with it.
                del piece
                with self._change:
                    self._busy -= 1
                    self._change.notify_all()

    def _next(self) -> _Piece | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._busy += 1
            return self._waiting.popleft()

    def _do(self, piece: _Piece) -> None:
        if self._clock() - piece.asked_s > self._patience_s:
            self._refuse(piece)
            return
        try:
            piece.work()
        except Exception:
            self._log.exception("engines.work_failed", thread=threading.current_thread().name)
            self._refuse(piece)

    def _refuse(self, piece: _Piece) -> None:
        try:
            piece.refuse()
        except Exception:
            self._log.exception("engines.work_failed", thread=threading.current_thread().name)
