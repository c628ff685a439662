"""Memory that a device may read and write: registered in the background, usable piece by piece.

Owns    the registrations of one protection domain, and the threads that make them.
Keeps   what is registered stays registered, and what it belongs to is kept alive, until `remove`
        or `close`: a device writes to the physical pages it was given, so memory that was freed
        and mapped anew at the same address would be missed by it, silently.
        Untouched memory is populated first, in steps without the GIL. Nothing is read from a
        registration after it ended: that can crash.
Limits  THREADS_MAX threads, which end when nothing is left to do.
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
from peercache.model.fork_guard import ForkGuard
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

__all__ = ["MemoryKeys", "Piece", "Region", "Regions", "RegistrationFailed"]

THREADS_MAX = 4
"""One thread pins some 10 GB/s of touched memory; more of them meet at the kernel's locks."""

TOUCH_BYTES = 64 * 2**20
"""Untouched memory populated at once, 50 ms: how long `close` may wait for a thread, beside one
registration."""

PROGRESS_S = 5.0
"""How often people hear how far a long registration is."""

CLOSE_S = 30.0
"""How long `close` waits for registrations in progress: a gibibyte each, on a slow machine."""

Task: TypeAlias = "tuple[Region, int, int]"
"""(region, offset, length) that waits for a thread."""


@final
@attrs.define(eq=False)
class Region:
    """One range of memory that is, or is being, registered. Made by `Regions.add`.

    name:    what it is, for people: "pool", "words", "engine".
    address: where it begins.
    length:  its bytes.
    is_urgent: a read waits for it, so it goes ahead of what waits for a thread.
    failure: "" or why some of it cannot be registered; the rest stays usable.

    What follows them is the bookkeeping of `Regions`, changed under its lock.
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
    told_s: float = attrs.field(factory=time.monotonic)

    @property
    def registered_bytes(self) -> int:
        """Return how many bytes are usable."""
        return sum(length for length, _ in self.pieces.copy().values())

    def remote(self) -> tuple[Piece, ...]:
        """Return (offset, length, rkey) of every registered piece, by offset.

        Offsets count from `address`; a peer reads at `address` + offset with that rkey.
        """
        pieces = sorted(self.pieces.copy().items())
        return tuple([(offset, length, piece.rkey) for offset, (length, piece) in pieces])


@final
class Regions:
    """All registered memory of one protection domain. Every method may be called in any thread.

    Usage: `add` what is known, look up with `find` or `table` in every read, and `close` after the
    last queue pair is destroyed and before the protection domain is closed.
    """

    def __init__(
        self,
        pd: Any = None,
        *,
        device: str = "",
        registrar: Registrar | None = None,
        chunk_bytes: int = 0,
        threads_max: int = THREADS_MAX,
        on_registered: Callable[[Region], None] | None = None,
    ) -> None:
        """Register with `pd`, a `pyverbs.pd.PD`.

        device:        its device's name, for the log.
        registrar:     what registers; default: the best way that this pyverbs allows.
        chunk_bytes:   most bytes registered in one piece; default: what suits the registrar.
        on_registered: is told, on a thread of ours, whenever a region has grown or failed.
        """
        self._registrar = registrar or registrar_for(pd)
        self._chunk_bytes = chunk_bytes or self._registrar.chunk_bytes
        self._threads_max = threads_max
        self._on_registered = on_registered
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

        remote:      whether peers may read it; otherwise READs of ours may fill it.
        ready_bytes: how much of it may be touched by now; default all. `grow` says when more may.
        owner:       kept alive until the region is removed: whoever would free the memory.
        is_urgent:   ahead of all that no thread has begun: little memory that a read waits for.
        """
        access = ACCESS_REMOTE_READ if remote else ACCESS_LOCAL_WRITE
        if self._fork.is_child:
            # A forked child: the device is its parent's, and so may be who holds the lock.
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
        """Register a region up to `ready_bytes`: whole chunks, the rest with the last of them.

        is_final: no more will become ready, so that an unfinished chunk is registered too.
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
                # No thread is to be had now: the next that is asks, or one that runs, does it all.
                self._log.warning("rdma.thread_failed", problem=str(error))
                with self._changed:
                    self._threads -= wanted - started
                    self._changed.notify_all()
                return

    def wait(self, region: Region, timeout_s: float) -> bool:
        """Wait until all that was asked for is registered or has failed; return whether it is.

        A region with a `failure` is settled too.
        """
        with self._changed:
            return self._changed.wait_for(lambda: region.pending == 0, timeout_s)

    # --- looking up -------------------------------------------------------------------------------

    @property
    def table(self) -> MemoryKeys:
        """Return the lkeys of all usable memory by address, as they are now: a value to keep."""
        return self._table

    @property
    def failure(self) -> str:
        """Return why some memory cannot be registered, "" while all can."""
        return next((each.failure for each in list(self._regions) if each.failure), "")

    def find(self, address: int, length: int) -> list[Piece]:
        """Return (address, length, lkey) of the parts of a range, [] if not all of it is usable.

        For single buffers; a batch is cut with `table.cut`.
        """
        cut = self._table.cut(np.array([address], np.uint64), np.array([length], np.uint64))
        return list(zip(cut.begins.tolist(), cut.lengths.tolist(), cut.keys.tolist(), strict=True))

    # --- ending -----------------------------------------------------------------------------------

    def remove(self, region: Region) -> None:
        """Forget one use of a region; with the last one end its registrations.

        No READ of ours may be filling it: one that does is ended with an error by the device.
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
            # A thread may be registering a chunk of it at this moment: it deregisters that itself.
            pieces, region.pieces = region.pieces, {}
        self._deregister(region, pieces)
        region.owner = None

    def close(self) -> None:
        """End every registration; once, later calls do nothing.

        After the last queue pair, before the protection domain: bounded by the registrations in
        progress. In a forked child it does nothing: the registrations are its parent's.
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
                    # What one chunk was refused, the next would be too, after seconds of work.
                    self._drop_tasks_of(region)
                region.pending -= 1
                self._changed.notify_all()
            if piece is not None and not is_kept:
                self._deregister(region, {offset: (length, piece)})
            elif not region.is_removed:
                self._tell(region, failure)

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
            # Whatever it is, it must not end this thread: `close` waits for the count of them.
            self._log.exception("rdma.register_crashed", region=region.name)
            return None, f"{type(error).__name__}: {error}"

    def _tell(self, region: Region, failure: str) -> None:
        now = time.monotonic()
        done = region.registered_bytes
        name, of = region.name, region.length
        if failure:
            self._log.warning(
                "rdma.register_failed", region=name, ready_bytes=done, of_bytes=of, problem=failure
            )
        elif done == of or now - region.told_s >= PROGRESS_S:
            region.told_s = now
            seconds = round(now - region.begun_s, 3)
            self._log.info(
                "rdma.memory_registered",
                region=name,
                ready_bytes=done,
                of_bytes=of,
                seconds=seconds,
            )
        if self._on_registered is not None:
            try:
                self._on_registered(region)
            except Exception:
                # This thread must go on: `close` waits for it.
                self._log.exception("rdma.report_failed", region=region.name)

    def _drop_tasks_of(self, region: Region) -> None:
        """Give up what no thread has begun; the caller holds the lock."""
        kept = [task for task in self._tasks if task[0] is not region]
        region.pending -= len(self._tasks) - len(kept)
        self._tasks = deque(kept)
        self._changed.notify_all()

    def _tabulate(self) -> None:
        """Make the table anew; the caller holds the lock."""
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
"""Patience with a new block where another fabric could read instead: it takes 30 ms, or as long as
the registration that goes on at that moment."""


LATE_LOOK_S = 0.02
"""How often whoever has nothing else to wait for looks whether a late block is there."""


@attrs.frozen(eq=False)
class Block:
    """Memory to borrow. address, key: as a scatter entry names it."""

    address: int
    key: int
    memory: npt.NDArray[np.uint8]
    region: Region


@final
class Blocks:
    """Lends blocks of one size, registered with one rail. Thread-safe."""

    def __init__(
        self, regions: Regions, name: str, *, block_bytes: int, blocks_max: int,
        has_fallback: bool, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """Start with none. has_fallback: whether who gets none is served by another fabric."""
        self.block_bytes = block_bytes
        self._regions = regions
        self._name = name
        self._blocks_max = blocks_max
        self._has_fallback = has_fallback
        self._clock = clock
        # Guards what follows; whoever waits on it waits for a block to come back.
        self._changed = threading.Condition()
        self._idle: list[Block] = []
        self._late: list[Region] = []
        self._count = 0

    def lend(self, until: float) -> Block | None:
        """Return a block, or None if none came free in time, or none can be registered soon."""
        with self._changed:
            self._take_late()
            while not self._idle and self._count >= self._blocks_max:
                left = until - self._clock()
                if left <= 0 or self._leaves_it():
                    return None
                # The end of a registration wakes nobody who waits for a block.
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
            self._regions.wait(region, self._patience_s(until))
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
        """Take a block back: nothing writes to it any more."""
        with self._changed:
            self._idle.append(block)
            self._changed.notify_all()

    def _begin(self) -> Region:
        """Begin to register memory for one more block."""
        memory = np.frombuffer(mmap.mmap(-1, self.block_bytes), np.uint8)
        return self._regions.add(
            self._name, address_of(memory), self.block_bytes,
            remote=False, owner=memory, is_urgent=True,
        )  # fmt: skip

    def _leaves_it(self) -> bool:
        """Return whether another fabric is to read: one more block would come later still."""
        return self._has_fallback and bool(self._late)

    def _patience_s(self, until: float) -> float:
        left = until - self._clock()
        # Half of it is the other fabric's.
        return min(REGISTER_S, left / 2) if self._has_fallback else left

    def _made(self, region: Region) -> Block | None:
        """Return the block that a region is, if it is registered; the caller holds the lock."""
        if not self._regions.wait(region, 0.0):
            # Not given up: begun anew by each read, one might never be there.
            self._late.append(region)
            return None
        found = self._regions.find(region.address, self.block_bytes)
        if len(found) == 1:
            return Block(region.address, found[0][2], region.owner, region)
        # It failed, which Regions has told; a later read tries again.
        self._regions.remove(region)
        self._count -= 1
        return None

    def _take_late(self) -> None:
        """Take what was late and is registered by now; the caller holds the lock."""
        late, self._late = self._late, []
        for region in late:
            # Asks for a thread again, if there was none to be had.
            self._regions.grow(region, self.block_bytes)
            block = self._made(region)
            if block is not None:
                self._idle.append(block)
        if len(self._late) < len(late):
            # One came, or there is room for another.
            self._changed.notify_all()
