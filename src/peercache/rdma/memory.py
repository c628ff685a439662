"""Registered memory: regions that threads register in the background, and blocks lent to reads.

Owns    the registrations of one protection domain, and the threads that make them; the anonymous
        memory of the blocks.
Keeps   memory stays registered, and its owner alive, until `remove` or `close`. A device writes to
        the physical pages that it registered: memory that was freed and mapped again at the same
        address would silently miss its writes.
        Threads populate untouched memory before they register it, in steps without the GIL.
        No field of a registration is read after its end: that can crash.
        A block has one borrower, and comes back after the last write to it.
Limits  THREADS_MAX threads, which end when no task is left; blocks_max blocks of each kind.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.memory.kernel import address_of, populate_range
from peercache.model.process import ForkGuard
from peercache.observability.log import get_logger
from peercache.rdma.key_table import MemoryKeys, Piece
from peercache.rdma.registrar import (
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_READ,
    Registered,
    Registrar,
    RegistrationFailed,
    protect_from_fork,
    registrar_for,
)

THREADS_MAX = 4
"""One thread pins some 10 GB/s of touched memory; more threads wait for the kernel's locks."""

TOUCH_BYTES = 64 * 2**20
"""Bytes that a thread populates in one step of 50 ms. `close` waits for a step and a
registration at most."""

PROGRESS_S = 5.0
"""Interval between two log lines about a long registration."""

CLOSE_S = 30.0
"""How long `close` waits for registrations in flight: a gibibyte each, on a slow machine."""

Task: TypeAlias = "tuple[Region, int, int]"
"""(region, offset, length) that is pending."""


@final
@attrs.define(eq=False)
class Region:
    """A range of memory that is registered, or is being registered. Created by `Regions.add`.

    name:      for operators: "pool", "seals", "engine".
    is_urgent: a read waits for it, so it precedes other pending tasks.
    failure:   "" or why a part cannot be registered; the rest stays usable.

    The other fields belong to `Regions`, which changes them under its lock.
    """

    name: str
    address: int
    length: int
    access: int
    owner: Any
    is_urgent: bool = False
    failure: str = ""
    uses: int = 1
    queued_bytes: int = 0
    pending: int = 0
    is_removed: bool = False
    pieces: dict[int, tuple[int, Registered]] = attrs.field(factory=dict)
    begun_s: float = attrs.field(factory=time.monotonic)
    logged_s: float = attrs.field(factory=time.monotonic)

    @property
    def registered_bytes(self) -> int:
        """Return the number of usable bytes."""
        return sum(length for length, _ in self.pieces.copy().values())

    def remote(self) -> tuple[Piece, ...]:
        """Return (offset, length, rkey) of every registered piece, by offset.

        Offsets count from `address`: a peer reads at `address` + offset with that rkey.
        """
        pieces = sorted(self.pieces.copy().items())
        return tuple([(offset, length, piece.rkey) for offset, (length, piece) in pieces])


@final
class Regions:
    """All registered memory of one protection domain. Thread-safe.

    Usage: `add` memory when it is known, use `table` or `find` in every read, and `close` after
    the last queue pair is destroyed and before the protection domain is closed.
    """

    def __init__(
        self,
        pd: Any = None,
        *,
        device: str = "",
        registrar: Registrar | None = None,
        chunk_bytes: int = 0,
        threads_max: int = THREADS_MAX,
    ) -> None:
        """Register with `pd`, a `pyverbs.pd.PD`.

        device:        the name of the device, for the log.
        registrar:     default: the best one that this pyverbs allows.
        chunk_bytes:   largest registered piece; default: the registrar's.
        """
        self._registrar = registrar or registrar_for(pd)
        self._chunk_bytes = chunk_bytes or self._registrar.chunk_bytes
        self._threads_max = threads_max
        self._log = get_logger(device=device)
        self._changed = threading.Condition()
        self._regions: list[Region] = []
        self._tasks: deque[Task] = deque()
        self._threads = 0
        self._fork = ForkGuard()
        self._is_closed = False
        self._table = MemoryKeys.of(())
        if registrar is None and protect_from_fork():
            self._log.warning("rdma.fork_unprotected", hint="start with RDMAV_FORK_SAFE=1 set")

    # --- registering ------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        address: int,
        length: int,
        *,
        remote: bool,
        ready_bytes: int | None = None,
        owner: Any = None,
        is_urgent: bool = False,
    ) -> Region:
        """Begin to register a range, and return at once; the same range again is the same region.

        remote:      True lets peers read it; False lets local READs fill it.
        ready_bytes: the leading bytes that may be accessed now; default all. `grow` increases them.
        owner:       the object that frees the memory; kept alive until the region is removed.
        is_urgent:   ahead of every pending task: a small range that a read waits for.
        """
        access = ACCESS_REMOTE_READ if remote else ACCESS_LOCAL_WRITE
        if self._fork.is_child:
            # The device belongs to the parent, and a thread of the parent may hold the lock.
            return Region(name, address, length, access, owner)
        with self._changed:
            for known in self._regions:
                if (known.address, known.length, known.access) == (address, length, access):
                    known.uses += 1
                    return known
            region = Region(name, address, length, access, owner, is_urgent)
            if not self._is_closed:
                self._regions.append(region)
        self.grow(region, length if ready_bytes is None else ready_bytes)
        return region

    def grow(self, region: Region, ready_bytes: int, *, is_final: bool = False) -> None:
        """Register whole chunks of a region up to `ready_bytes`.

        is_final: no more bytes will become ready, so an unfinished chunk is registered too.
        """
        ready_bytes = min(ready_bytes, region.length)
        if self._fork.is_child:
            return
        with self._changed:
            if self._is_closed or region.is_removed or region.failure:
                return
            while region.queued_bytes < ready_bytes:
                offset = region.queued_bytes
                length = min(self._chunk_bytes, region.length - offset, ready_bytes - offset)
                is_whole = length == min(self._chunk_bytes, region.length - offset)
                if not is_whole and not is_final:
                    break
                region.queued_bytes += length
                region.pending += 1
                put = self._tasks.appendleft if region.is_urgent else self._tasks.append
                put((region, offset, length))
            wanted = min(self._threads_max - self._threads, len(self._tasks))
            self._threads += max(0, wanted)
        for started in range(wanted):
            thread = threading.Thread(target=self._work, name="peercache-register", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # A running thread, or the next one that can be started, does all pending tasks.
                self._log.warning("rdma.thread_failed", problem=str(error))
                with self._changed:
                    self._threads -= wanted - started
                    self._changed.notify_all()
                return

    def wait(self, region: Region, timeout_s: float) -> bool:
        """Wait until no task of a region is pending; return whether that happened in time.

        A region with a `failure` has no pending tasks either.
        """
        with self._changed:
            return self._changed.wait_for(lambda: region.pending == 0, timeout_s)

    # --- looking up -------------------------------------------------------------------------------

    @property
    def table(self) -> MemoryKeys:
        """Return the lkeys of all usable memory by address: a snapshot."""
        return self._table

    @property
    def failure(self) -> str:
        """Return why some memory cannot be registered, or ""."""
        return next((each.failure for each in list(self._regions) if each.failure), "")

    def find(self, address: int, length: int) -> list[Piece]:
        """Return (address, length, lkey) of the parts of a range; [] unless all of it is usable.

        For a single buffer; `table.cut` cuts a batch.
        """
        cut = self._table.cut(np.array([address], np.uint64), np.array([length], np.uint64))
        return list(zip(cut.begins.tolist(), cut.lengths.tolist(), cut.keys.tolist(), strict=True))

    # --- ending -----------------------------------------------------------------------------------

    def remove(self, region: Region) -> None:
        """End one use of a region; the last use ends its registrations.

        Call it after the last READ into the region: the device fails a READ in flight.
        """
        if self._fork.is_child:
            return
        with self._changed:
            region.uses -= 1
            if region.uses > 0 or region.is_removed:
                return
            region.is_removed = True
            self._drop_tasks_of(region)
            self._regions = [known for known in self._regions if known is not region]
            self._tabulate()
            # A thread that is registering a chunk of it now deregisters that chunk itself.
            pieces, region.pieces = region.pieces, {}
        self._deregister(region, pieces)
        region.owner = None

    def close(self) -> None:
        """End every registration, after the last queue pair and before the protection domain.

        The wait for registrations in flight is bounded. Later calls, and calls of a forked child,
        do nothing.
        """
        if self._fork.is_child:
            return
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for region in self._regions:
                region.is_removed = True
                self._drop_tasks_of(region)
            regions, self._regions = self._regions, []
            self._table = MemoryKeys.of(())
            if not self._changed.wait_for(lambda: self._threads == 0, CLOSE_S):
                self._log.warning(
                    "rdma.registration_stuck", threads=self._threads, waited_s=CLOSE_S
                )
        for region in regions:
            pieces, region.pieces = region.pieces, {}
            self._deregister(region, pieces)
            region.owner = None

    # --- the threads ------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                region, offset, length = self._tasks.popleft()
            piece, failure = self._register(region, offset, length)
            with self._changed:
                is_kept = piece is not None and not region.is_removed
                if is_kept and piece is not None:
                    region.pieces[offset] = (length, piece)
                    self._tabulate()
                if failure and not region.failure:
                    region.failure = failure
                    # The next chunk would be refused too, after seconds of work.
                    self._drop_tasks_of(region)
                region.pending -= 1
                self._changed.notify_all()
            if piece is not None and not is_kept:
                self._deregister(region, {offset: (length, piece)})
            elif not region.is_removed:
                self._log_result(region, failure)

    def _register(self, region: Region, offset: int, length: int) -> tuple[Registered | None, str]:
        begin = region.address + offset
        try:
            for touched in range(0, length, TOUCH_BYTES):
                if region.is_removed:
                    return None, ""
                populate_range(begin + touched, min(TOUCH_BYTES, length - touched))
            return self._registrar.register(begin, length, region.access), ""
        except RegistrationFailed as failed:
            return None, str(failed)
        except Exception as error:
            # An exception must not end this thread: `close` waits for the thread count.
            self._log.exception("rdma.register_crashed", region=region.name)
            return None, f"{type(error).__name__}: {error}"

    def _log_result(self, region: Region, failure: str) -> None:
        now = time.monotonic()
        done = region.registered_bytes
        name, of = region.name, region.length
        if failure:
            self._log.warning(
                "rdma.register_failed", region=name, ready_bytes=done, of_bytes=of, problem=failure
            )
        elif done == of or now - region.logged_s >= PROGRESS_S:
            region.logged_s = now
            seconds = round(now - region.begun_s, 3)
            self._log.info(
                "rdma.memory_registered",
                region=name,
                ready_bytes=done,
                of_bytes=of,
                seconds=seconds,
            )

    def _drop_tasks_of(self, region: Region) -> None:
        """Drop the pending tasks of a region; the caller holds the lock."""
        kept = [task for task in self._tasks if task[0] is not region]
        region.pending -= len(self._tasks) - len(kept)
        self._tasks = deque(kept)
        self._changed.notify_all()

    def _tabulate(self) -> None:
        """Make a new table; the caller holds the lock."""
        self._table = MemoryKeys.of(
            [
                (region.address + offset, length, piece.lkey)
                for region in self._regions
                if region.access & ACCESS_LOCAL_WRITE
                for offset, (length, piece) in region.pieces.items()
            ]
        )

    def _deregister(self, region: Region, pieces: dict[int, tuple[int, Registered]]) -> None:
        problems = [self._registrar.deregister(piece) for _, piece in pieces.values()]
        for problem in filter(None, problems):
            self._log.warning("rdma.deregister_failed", region=region.name, problem=problem)


REGISTER_S = 0.25
"""Longest wait for a new block if another fabric can read instead. A block takes 30 ms, or as long
as the registration in flight."""


LATE_LOOK_S = 0.02
"""Interval at which a borrower without another event looks for a late block."""


@attrs.frozen(eq=False)
class Block:
    """Memory to borrow. address, key: for a scatter entry."""

    address: int
    key: int
    memory: npt.NDArray[np.uint8]


@final
class Blocks:
    """Lends blocks of registered memory, of one size and for one rail. Thread-safe.

    A block is allocated and registered on first use, ahead of other pending registrations. If it is
    still late, because the engine registers a lot of memory, no read waits for it.
    """

    def __init__(
        self, regions: Regions, name: str, *, block_bytes: int, blocks_max: int,
        has_fallback: bool, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """Start without blocks. has_fallback: another fabric serves a read without a block."""
        self.block_bytes = block_bytes
        self._regions = regions
        self._name = name
        self._blocks_max = blocks_max
        self._has_fallback = has_fallback
        self._clock = clock
        # Guards the fields below; a borrower waits on it for a block to come back.
        self._changed = threading.Condition()
        self._idle: list[Block] = []
        self._late: list[Region] = []
        self._count = 0

    def lend(self, until: float) -> Block | None:
        """Return a block; None if no block becomes free in time, or a new one would be late."""
        with self._changed:
            self._take_late()
            while not self._idle and self._count >= self._blocks_max:
                left = until - self._clock()
                if left <= 0 or self._leaves_it():
                    return None
                # The end of a registration wakes no borrower.
                self._changed.wait(min(left, LATE_LOOK_S) if self._late else left)
                self._take_late()
            if self._idle:
                return self._idle.pop()
            if self._leaves_it():
                return None
            self._count += 1
        region: Region | None = None
        try:
            region = self._begin()
            self._regions.wait(region, self._timeout_s(until))
        except BaseException:
            with self._changed:
                if region is None:
                    self._count -= 1
                else:
                    self._late.append(region)
                self._changed.notify_all()
            raise
        with self._changed:
            block = self._made(region)
            self._changed.notify_all()
        return block

    def give_back(self, block: Block) -> None:
        """Take a block back, after the last write to it."""
        with self._changed:
            self._idle.append(block)
            self._changed.notify_all()

    def _begin(self) -> Region:
        """Start the registration of one more block."""
        memory = np.frombuffer(mmap.mmap(-1, self.block_bytes), np.uint8)
        return self._regions.add(
            self._name, address_of(memory), self.block_bytes,
            remote=False, owner=memory, is_urgent=True,
        )  # fmt: skip

    def _leaves_it(self) -> bool:
        """Return whether another fabric must read: one more block would take even longer."""
        return self._has_fallback and bool(self._late)

    def _timeout_s(self, until: float) -> float:
        left = until - self._clock()
        # The other fabric needs the other half of the time.
        return min(REGISTER_S, left / 2) if self._has_fallback else left

    def _made(self, region: Region) -> Block | None:
        """Return the block of a registered region, or None; the caller holds the lock."""
        if not self._regions.wait(region, 0.0):
            # The region is kept: if each read began a new one, no block might ever be ready.
            self._late.append(region)
            return None
        found = self._regions.find(region.address, self.block_bytes)
        if len(found) == 1:
            return Block(region.address, found[0][2], region.owner)
        # Regions has logged the failure; a later read tries again.
        self._regions.remove(region)
        self._count -= 1
        return None

    def _take_late(self) -> None:
        """Take the late blocks that are registered now; the caller holds the lock."""
        late, self._late = self._late, []
        for region in late:
            # Starts a thread if none could be started before.
            self._regions.grow(region, self.block_bytes)
            block = self._made(region)
            if block is not None:
                self._idle.append(block)
        if len(self._late) < len(late):
            # A block came, or there is room for another.
            self._changed.notify_all()
