"""Lanes: threads that make blocking calls for an engine whose own threads must not wait.

`Lane` moves transfers chunk by chunk, for the connector, which promises a leading run by a
deadline. `CallLane` is a lane of pieces of work, for adapters that answer each call by themselves.

Owns    one bounded queue a lane, and the threads that take from it.
Takes   work from the engine's threads, and when to stop.
Keeps   each piece of work is done or refused, exactly once, and the engine's thread waits for
        neither. What waited too long is refused: its answer would come after its use. Nothing that
        a call raises reaches the engine (`harmless`).
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

from peercache.observability.log import WarnOnce, get_logger

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def harmless(
    answer: Callable[[], Answer],
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """Have a method log what it would raise, and return what `answer` makes: a miss, or nothing."""

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
"""How long a thread waits for work at once; it is woken earlier."""


@attrs.define(eq=False)
class QueuedTransfer:
    """Pages that move together.

    move:   moves pages begin to end, and returns how many leading ones of them have moved.
    pages:  all of them. chunk: pages that one call of `move` is given.
    until:  on the lane's clock; no chunk begins later.
    unit:   what the Future counts for a page: its tokens.
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
    that has moved; one that is ended before it began is cancelled. A call that hangs holds up its
    own thread only: transfers that wait behind it end at their deadlines.
    The lock is held for a look at the queue, never while pages move or a Future is done.
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
        """Start the threads. pages_max: of all transfers that wait or move."""
        self._name = name
        self._pages_max = pages_max
        self._counts = counts
        self._warn_once = warn
        self._clock = clock
        # Conditions of one lock: a transfer wakes one thread that can move it, and no other.
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._is_due = threading.Condition(lock)
        self._is_idle = threading.Condition(lock)
        self._looks_at = clock() + IDLE_S
        """When the deadlines are looked at next."""
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
        """Queue a transfer; return whether there was room. If not, its Future is done, with 0."""
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
        """End the transfers of a request, or of all: those that wait at once, others at a chunk."""
        with self._changed:
            ended = [each for each in self._waiting if req_id in {None, each.req_id}]
            self._take_out(ended, "cancelled")
            for transfer in self._moving:
                transfer.is_ended |= req_id in {None, transfer.req_id}
        for transfer in ended:
            transfer.future.cancel()
            _begin(transfer.future)

    def drain(self, timeout_s: float | None = None) -> bool:
        """End what waits, and wait for the rest; return whether nothing moves any more."""
        self.end(None)
        with self._is_idle:
            return self._is_idle.wait_for(lambda: not self._pages, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End everything; return whether all threads have ended, and so no byte moves."""
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
                # What it refers to, such as the engine's memory, ends with it.
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
            except Exception as error:  # A bug of ours, or of a store, is a miss for the engine.
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
        """End the transfers that wait behind a call that hangs."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = self._clock()
                late = [transfer for transfer in self._waiting if transfer.until <= now]
                self._take_out(late, "late")
                if not late:
                    # Not woken before: what is queued later is rarely due earlier.
                    waiting = (each.until for each in self._waiting)
                    self._looks_at = min(waiting, default=now + IDLE_S)
                    self._is_due.wait(self._looks_at - now)
            for transfer in late:
                if _begin(transfer.future):
                    _settle(transfer.future, 0)


def _begin(future: Future[int]) -> bool:
    """Return whether a transfer is still wanted: its caller has not cancelled or closed its Future.

    An error of the caller's must end no thread that other requests need.
    """
    # A Future that is done is not asked: it would log a critical line first.
    with suppress(RuntimeError):
        return (future.cancelled() or not future.done()) and future.set_running_or_notify_cancel()
    return False


def _settle(future: Future[int], result: int) -> None:
    """Set a Future's result, unless its caller has closed it."""
    with suppress(InvalidStateError):
        future.set_result(result)


WAITING_MAX = 1024
"""Work of one lane. An engine has some hundred requests, which ask a few times each."""

Work: TypeAlias = Callable[[], None]


@final
class CallLane(Lane):
    """A lane of pieces of work, each of which is done or refused. Thread-safe."""

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

        name: of the threads, for people. timeout_s: after which waiting work is refused.
        """
        super().__init__(name, threads, work_max, Counter(), WarnOnce(log), clock)
        self._log = log
        self._timeout_s = timeout_s

    def submit(self, work: Work, refuse: Work) -> None:
        """Have a thread do `work`; `refuse` is called instead where that cannot be, maybe here.

        refuse: called too where `work` raises, so it must hold for work that was done in part.
        """

        def ended(done: Future[int]) -> None:
            if done.cancelled() or not done.result():
                self._done(refuse)

        until = self._clock() + self._timeout_s
        piece = QueuedTransfer("", lambda _begin, _end: self._done(work), 1, 1, until, 1)
        piece.future.add_done_callback(ended)
        self.add(piece)

    def _done(self, work: Work) -> int:
        """Do something; return 1, or 0 where it raises."""
        try:
            work()
        except Exception:
            self._log.exception("engines.work_failed", thread=threading.current_thread().name)
            return 0
        return 1


LOAD_THREADS = 4
"""A load that waits for a slow peer keeps no other load waiting."""

STORE_TIMEOUT_S = 30.0
"""Stores may wait: engines hold their memory until they are done, and need none of them soon."""

CLOSE_S = 5.0
"""How long a close waits for calls in flight; their own deadlines are shorter."""


@final
class AdapterLanes:
    """The lanes of an adapter: one to ask, one to store and one to load."""

    def __init__(self, engine: str, log: Any, timeout_s: float) -> None:
        """Start them. timeout_s: after which questions and loads that wait are refused."""
        self.ask = CallLane(f"{engine}-lookup", log, timeout_s=timeout_s)
        self.store = CallLane(f"{engine}-store", log, timeout_s=STORE_TIMEOUT_S)
        self.load = CallLane(f"{engine}-load", log, threads=LOAD_THREADS, timeout_s=timeout_s)

    def close(self) -> bool:
        """Close all of them; return whether all threads have ended in time."""
        ended = [lane.close(CLOSE_S) for lane in (self.store, self.ask, self.load)]
        return all(ended)
