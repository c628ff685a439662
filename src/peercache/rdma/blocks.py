"""Registered memory of our own, lent out in blocks: for generation words, and for pages whose
destination is not registered.

Owns    anonymous memory, one mapping a block, made and registered when it is first needed.
Keeps   a block has one borrower; it comes back only after nothing writes to it any more.
        A new one is registered ahead of whatever waits to be; while one is late all the same,
        because as much memory as an engine has is being registered, nobody waits for it.
Limits  blocks_max; whoever finds all of them lent waits until its deadline.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.memory.kernel import address_of
from peercache.rdma.memory import Region, Regions

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
