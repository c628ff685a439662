"""A lane: a bounded queue of transfers, and the threads that move them chunk by chunk."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import final

import attrs

from peercache.observability.log import WarnOnce

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


@final
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
        # Two conditions of one lock: a transfer wakes one thread that can move it, and no other.
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._is_due = threading.Condition(lock)
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
                _settle(transfer.future, moved * transfer.unit)

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
