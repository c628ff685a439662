"""Lanes: threads that make blocking calls for an engine whose own threads must not wait.

`Lane` moves transfers chunk by chunk, for the connector, which promises a leading run by a
deadline. `CallLane` is a lane of calls, for adapters that answer each call themselves.

Owns    one bounded queue for each lane, and the threads that take work from it.
Takes   work from the engine's threads, and when to stop.
Keeps   each piece of work is done or refused, exactly once, and the engine's thread waits for
        neither. Work that waited too long is refused: its answer would be too late. No exception of
        a call reaches the engine (`harmless`).
Limits  WAITING_MAX pieces, `pages_max` pages of transfers; the calls that are made have
        deadlines of their own.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ParamSpec, TypeAlias, TypeVar, final

import attrs

from peercache.client.tracing import carried
from peercache.model.process import ForkGuard
from peercache.observability.log import WarnOnce, get_logger

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def harmless(
    answer: Callable[[], Answer],
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Make a method log exceptions, and return `answer()` instead: a miss, or nothing."""

    def guard(method: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        @functools.wraps(method)
        def guarded(*positional: Arguments.args, **named: Arguments.kwargs) -> Answer:
            try:
                return method(*positional, **named)
            except Exception:
                get_logger(component="engines").exception(
                    "engines.call_failed", method=method.__qualname__
                )
                return answer()

        return guarded

    return guard


IDLE_S = 3600.0
"""How long a thread waits for work at a time; new work wakes it earlier."""


@attrs.define(eq=False)
class QueuedTransfer:
    """Pages that move together.

    move:   moves the pages of a range, and returns how many leading ones were moved.
    pages:  the number of all pages. chunk: pages of one call of `move`.
    until:  on the lane's clock; no chunk begins later.
    unit:   what the Future counts for each page: its tokens.
    """

    req_id: str
    move: Callable[[int, int], int]
    pages: int
    chunk: int
    until: float
    unit: int
    future: Future[int] = attrs.field(factory=Future)
    is_ended: bool = False


class Lane:
    """Transfers in the order of their arrival, each in one thread.

    A transfer's Future is done when no byte of it moves any more, with the units of the leading run
    that was moved; a transfer that ends before it began is cancelled. A call that hangs holds up
    its own thread only: transfers that wait behind it end at their deadlines. The lock is held
    while the queue is accessed, never while pages move or a Future is completed.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        pages_max: int,
        counts: Counter[str],
        warn: WarnOnce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. pages_max: pages of all transfers that wait or move."""
        self._name = name
        self._pages_max = pages_max
        self._counts = counts
        self._warn_once = warn
        self._clock = clock
        self._fork = ForkGuard()
        # Conditions of one lock: a transfer wakes only one thread that can move it.
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._is_due = threading.Condition(lock)
        self._is_idle = threading.Condition(lock)
        self._looks_at = clock() + IDLE_S
        """When the deadlines are checked next."""
        self._waiting: deque[QueuedTransfer] = deque()
        self._moving: set[QueuedTransfer] = set()
        self._pages = 0
        self._is_closed = False
        loops = [self._work] * threads + [self._watch_deadlines]
        self._threads = [
            threading.Thread(target=loop, name=f"peercache-{name}", daemon=True) for loop in loops
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Return the pages of all transfers that wait or move."""
        return self._pages

    def add(self, transfer: QueuedTransfer) -> bool:
        """Queue a transfer; return whether there was room. If not, its Future is done, with 0.

        A forked child has no such threads, and the lock may be held there: it has no room.
        """
        if self._fork.is_child:
            transfer.future.set_result(0)
            return False
        transfer.move = carried(transfer.move)
        with self._changed:
            has_room = not self._is_closed and self._pages + transfer.pages <= self._pages_max
            if has_room and transfer.pages:
                self._pages += transfer.pages
                self._waiting.append(transfer)
                self._changed.notify()
                if transfer.until < self._looks_at:
                    self._is_due.notify()
            if not has_room:
                self._count("refused")
        if not has_room or not transfer.pages:
            transfer.future.set_result(0)
        return has_room

    def end(self, req_id: str | None) -> None:
        """End the transfers of a request, or of all: waiting ones at once, others after a chunk."""
        if self._fork.is_child:
            return
        with self._changed:
            ended = [each for each in self._waiting if req_id in {None, each.req_id}]
            self._take_out(ended, "cancelled")
            for transfer in self._moving:
                transfer.is_ended |= req_id in {None, transfer.req_id}
        for transfer in ended:
            transfer.future.cancel()
            _begin(transfer.future)

    def drain(self, timeout_s: float | None = None) -> bool:
        """End waiting transfers, and wait for the rest; return whether nothing moves any more."""
        if self._fork.is_child:
            return True
        self.end(None)
        with self._is_idle:
            return self._is_idle.wait_for(lambda: not self._pages, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End everything; return whether all threads have ended, and so no byte moves."""
        if self._fork.is_child:
            return True
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._is_due.notify_all()
        self.end(None)
        until = self._clock() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _count(self, what: str) -> None:
        self._counts[f"{self._name}_{what}"] += 1

    def _take_out(self, transfers: list[QueuedTransfer], why: str) -> None:
        for transfer in transfers:
            self._count(why)
            self._waiting.remove(transfer)
            self._pages -= transfer.pages
        self._is_idle.notify_all()

    def _work(self) -> None:
        while (transfer := self._next()) is not None:
            moved = 0
            try:
                if _begin(transfer.future):
                    moved = self._moved(transfer)
            finally:
                with self._changed:
                    self._moving.discard(transfer)
                    self._pages -= transfer.pages
                    self._is_idle.notify_all()
                _settle(transfer.future, moved * transfer.unit)
                # Drops its references, such as those to the engine's memory.
                del transfer

    def _next(self) -> QueuedTransfer | None:
        with self._changed:
            while not self._is_closed and not self._waiting:
                self._changed.wait(IDLE_S)
            if self._is_closed:
                return None
            transfer = self._waiting.popleft()
            self._moving.add(transfer)
            return transfer

    def _moved(self, transfer: QueuedTransfer) -> int:
        """Move chunk after chunk; return the pages of the leading run."""
        moved = 0
        while moved < transfer.pages and not transfer.is_ended:
            if self._clock() >= transfer.until:
                with self._changed:
                    self._count("late")
                break
            end = min(moved + transfer.chunk, transfer.pages)
            try:
                run = transfer.move(moved, end)
            except Exception as error:  # For the engine, a bug of ours or of a store is a miss.
                with self._changed:
                    self._count("failed")
                self._warn_once(
                    "connector.transfer_failed",
                    type(error).__name__,
                    lane=self._name,
                    problem=repr(error),
                )
                break
            moved += run
            if moved < end:
                break
        return moved

    def _watch_deadlines(self) -> None:
        """End the transfers that wait behind a hanging call."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = self._clock()
                late = [transfer for transfer in self._waiting if transfer.until <= now]
                self._take_out(late, "late")
                if not late:
                    # No need to wake it earlier: a later transfer rarely has an earlier deadline.
                    waiting = (each.until for each in self._waiting)
                    self._looks_at = min(waiting, default=now + IDLE_S)
                    self._is_due.wait(self._looks_at - now)
            for transfer in late:
                if _begin(transfer.future):
                    _settle(transfer.future, 0)


def _begin(future: Future[int]) -> bool:
    """Return whether a transfer is still wanted: its caller has not cancelled or closed its Future.

    A mistake of the caller must not end a thread that other requests need.
    """
    # A Future that is done is not called: it would log a critical error first.
    with suppress(RuntimeError):
        return (future.cancelled() or not future.done()) and future.set_running_or_notify_cancel()
    return False


def _settle(future: Future[int], result: int) -> None:
    """Set a Future's result, unless its caller has closed it."""
    with suppress(InvalidStateError):
        future.set_result(result)


WAITING_MAX = 1024
"""Waiting work of one lane. An engine has some hundred requests, each with a few calls."""

Work: TypeAlias = Callable[[], None]


@final
class CallLane(Lane):
    """A lane of calls, each of which is done or refused. Thread-safe."""

    def __init__(
        self,
        name: str,
        log: Any,
        *,
        threads: int = 1,
        timeout_s: float,
        work_max: int = WAITING_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        name: of the threads, for operators. timeout_s: waiting work is refused after this time.
        """
        super().__init__(name, threads, work_max, Counter(), WarnOnce(log), clock)
        self._log = log
        self._timeout_s = timeout_s

    def submit(self, work: Work, refuse: Work) -> None:
        """Have a thread do `work`; if that is impossible, call `refuse` instead, possibly at once.

        refuse: also called if `work` raises, so it must be correct for partly done work.
        """

        def ended(done: Future[int]) -> None:
            if done.cancelled() or not done.result():
                self._done(refuse)

        until = self._clock() + self._timeout_s
        piece = QueuedTransfer("", lambda _begin, _end: self._done(work), 1, 1, until, 1)
        piece.future.add_done_callback(ended)
        self.add(piece)

    def _done(self, work: Work) -> int:
        """Do the work; return 1, or 0 if it raises."""
        try:
            work()
        except Exception:
            self._log.exception("engines.work_failed", thread=threading.current_thread().name)
            return 0
        return 1


LOAD_THREADS = 4
"""Several, so that a load from a slow peer does not delay the others."""

STORE_TIMEOUT_S = 30.0
"""Stores may wait: engines keep the memory until they are done, and need no store soon."""

CLOSE_S = 5.0
"""How long a close waits for calls in flight; their own deadlines are shorter."""


@final
class AdapterLanes:
    """The lanes of an adapter: one for lookups, one for stores and one for loads."""

    def __init__(self, engine: str, log: Any, timeout_s: float) -> None:
        """Start them. timeout_s: waiting lookups and loads are refused after this time."""
        self.ask = CallLane(f"{engine}-lookup", log, timeout_s=timeout_s)
        self.store = CallLane(f"{engine}-store", log, timeout_s=STORE_TIMEOUT_S)
        self.load = CallLane(f"{engine}-load", log, threads=LOAD_THREADS, timeout_s=timeout_s)

    def close(self) -> bool:
        """Close all of them; return whether all threads have ended in time."""
        ended = [lane.close(CLOSE_S) for lane in (self.store, self.ask, self.load)]
        return all(ended)
