"""Registered memory of our own, lent out in blocks: for generation words, and for pages whose
destination is not registered.

Owns    anonymous memory, one mapping a block, made and registered when it is first needed.
Keeps   a block has one borrower; it comes back only after nothing writes to it any more.
Limits  blocks_max; whoever finds none waits until its deadline.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.rdma.memory import Region, Regions
from peercache.segment.kernel import address_of

REGISTER_S = 5.0
"""Patience for the registration of a new block: milliseconds on every machine that is not ill."""


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
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """Start with none."""
        self.block_bytes = block_bytes
        self._regions = regions
        self._name = name
        self._blocks_max = blocks_max
        self._clock = clock
        self._changed = threading.Condition()
        self._idle: list[Block] = []
        self._count = 0

    def lend(self, until: float) -> Block | None:
        """Return a block, or None if none came free in time, or none can be registered."""
        with self._changed:
            while not self._idle and self._count >= self._blocks_max:
                left = until - self._clock()
                if left <= 0:
                    return None
                self._changed.wait(left)
            if self._idle:
                return self._idle.pop()
            self._count += 1
        block: Block | None = None
        try:
            block = self._make(until)
        finally:
            if block is None:
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()
        return block

    def give_back(self, block: Block) -> None:
        """Take a block back: nothing writes to it any more."""
        with self._changed:
            self._idle.append(block)
            self._changed.notify_all()

    def _make(self, until: float) -> Block | None:
        mapping = mmap.mmap(-1, self.block_bytes)
        memory = np.frombuffer(mapping, np.uint8)
        address = address_of(memory)
        region = self._regions.add(
            self._name, address, self.block_bytes, remote=False, owner=memory
        )
        patience_s = min(REGISTER_S, until - self._clock())
        self._regions.wait(region, patience_s)
        found = self._regions.find(address, self.block_bytes)
        if len(found) != 1:
            # It failed, which Regions has told, or it is late; a later read tries again.
            self._regions.remove(region)
            return None
        return Block(address, found[0][2], memory, region)
