"""Slabs: how a store of fixed size is cut into slots of many sizes.

The store is a row of *slabs* of equal size. A slab is bound to one *slot size* while anything is
in it; an empty one is unbound. Its first block is the slab's own. A slot is one block of header
and the page, rounded up to one of 16 sizes a doubling, so that no size wastes more than 1/16.

Pure: no keys, no files, no time. Rows are numbers that the caller gives to what is in a slot.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.runs import I64, U64

BLOCK_BYTES: Final = 4096
"""What direct I/O is aligned to: the sector size of every disk, or a multiple of it."""

SIZES_A_DOUBLING_BITS: Final = 4
"""16 sizes per doubling: at most 1/16 of a slot is unused, and at most 20 x 16 sizes exist."""

SLAB_BYTES_MAX: Final = 256 * 2**20
"""Slabs are larger only if there would be too many. 65,535 blocks for slots: 255 pages of 1 MiB."""

SLABS_MAX: Final = 4096
"""A very large store has larger slabs instead: each slab is a file that is opened at start."""

SLABS_ABOUT: Final = 16
"""A small store still has this many slabs, so that pages of several sizes fit at the same time."""

SLAB_BYTES_MIN: Final = 2**20

EMPTY: Final = -1
PROMISED: Final = -2
"""A slot that is taken, but has no row yet."""

UNBOUND: Final = 0


def slot_blocks(lengths: U64) -> I64:
    """Return the blocks that a slot for a page of each length takes, its header included."""
    pages = -(-lengths.astype(np.int64) // BLOCK_BYTES)
    bits = np.frexp((pages - 1).astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(0, bits - 1 - SIZES_A_DOUBLING_BITS)
    blocks: I64 = (-(-pages >> shift) << shift) + 1
    return blocks


@lru_cache(1024)
def slot_blocks_of(length: int) -> int:
    """Return the same for one page. Cached, because most pages have one of a few lengths."""
    return int(slot_blocks(np.array([length], np.uint64))[0])


def slab_bytes_for(capacity_bytes: int) -> int:
    """Return the slab size of a new store: a power of two, about a 16th of a small store."""
    about = max(SLAB_BYTES_MIN, capacity_bytes // SLABS_ABOUT)
    slab_bytes = min(SLAB_BYTES_MAX, 1 << (about.bit_length() - 1))
    while capacity_bytes // slab_bytes > SLABS_MAX:
        slab_bytes *= 2
    return slab_bytes


def slots_in(slab_bytes: int, blocks: int) -> int:
    """Return how many slots of this many blocks a slab has, after its own block."""
    return (slab_bytes // BLOCK_BYTES - 1) // blocks


@final
@attrs.define(eq=False)
class Slab:
    """One slab. blocks: its slot size, or UNBOUND."""

    number: int
    blocks: int = UNBOUND
    rows: npt.NDArray[np.int32] = attrs.field(factory=lambda: np.empty(0, np.int32))
    """The row of each slot; EMPTY, or PROMISED."""
    taken: int = 0
    closed: bool = False
    """No new pages are put here: the file system had no room."""

    def live_rows(self) -> I64:
        """Return the rows of the pages in this slab."""
        rows: I64 = self.rows[self.rows >= 0].astype(np.int64)
        return rows


@final
@attrs.define(eq=False)
class SlotSize:
    """All slabs of one slot size, in the order in which they were bound."""

    blocks: int
    slabs: dict[int, Slab] = attrs.field(factory=dict)
    with_room: dict[int, Slab] = attrs.field(factory=dict)


@final
class SlabAllocator:
    """Allocates places: byte offsets of slots in the store."""

    def __init__(self, *, slab_count: int, slab_bytes: int) -> None:
        """Start with every slab empty."""
        assert slab_bytes % BLOCK_BYTES == 0, slab_bytes
        assert slab_count >= 0, slab_count
        self.slab_bytes: Final = slab_bytes
        self.capacity_bytes: Final = slab_count * slab_bytes
        self.slabs = [Slab(number) for number in range(slab_count)]
        self.sizes: dict[int, SlotSize] = {}
        self.taken_bytes = 0
        self._unbound = list(range(slab_count))

    def fits(self, blocks: I64) -> npt.NDArray[np.bool_]:
        """Return which slots fit into a slab at all."""
        return blocks <= (self.slab_bytes // BLOCK_BYTES - 1)

    def slots_of(self, slab: Slab, places: U64) -> I64:
        """Return the slot numbers of these places in this slab."""
        within = places.astype(np.int64) - slab.number * self.slab_bytes - BLOCK_BYTES
        return within // (slab.blocks * BLOCK_BYTES)

    def by_slab(self, places: U64) -> list[tuple[Slab, I64]]:
        """Group places: each slab with the indices of its places, in the order of slabs."""
        numbers = (places // np.uint64(self.slab_bytes)).astype(np.int64)
        order = numbers.argsort(kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        groups = np.split(order, cuts) if len(order) else []
        return [(self.slabs[int(numbers[group[0]])], group) for group in groups]

    def take(self, blocks: int, count: int) -> U64:
        """Return up to `count` empty slots of bound slabs, neighbours first, as places."""
        size = self.sizes.get(blocks)
        found: list[U64] = []
        while count and size is not None and size.with_room:
            slab = next(iter(size.with_room.values()))
            slots = np.flatnonzero(slab.rows == EMPTY)[:count]
            slab.rows[slots] = PROMISED
            self._count(slab, len(slots))
            found.append(self._places(slab, slots))
            count -= len(slots)
        return np.concatenate(found) if found else np.empty(0, np.uint64)

    def bind(self, blocks: int) -> bool:
        """Bind the first empty slab to a slot size; False if no slab is empty."""
        while self._unbound:
            slab = self.slabs[heapq.heappop(self._unbound)]
            if not slab.closed and slab.blocks == UNBOUND:
                self._bind(slab, blocks)
                return True
        return False

    def put(self, places: U64, rows: I64) -> None:
        """Set the row of each taken place."""
        for slab, group in self.by_slab(places):
            slab.rows[self.slots_of(slab, places[group])] = rows[group]

    def release(self, places: U64) -> None:
        """Empty these slots; a slab without pages is unbound again."""
        for slab, group in self.by_slab(places):
            slots = self.slots_of(slab, places[group])
            assert (slab.rows[slots] != EMPTY).all(), f"a slot of slab {slab.number} freed twice"
            slab.rows[slots] = EMPTY
            self._count(slab, -len(slots))

    def load(self, places: U64, blocks: I64, rows: I64) -> None:
        """Load the pages found at start; each slab has slots of one size, none named twice."""
        for slab, group in self.by_slab(places):
            self._bind(slab, int(blocks[group[0]]))
            slots = self.slots_of(slab, places[group])
            assert (slab.rows[slots] == EMPTY).all(), f"slab {slab.number}: two in one slot"
            slab.rows[slots] = rows[group]
            self._count(slab, len(group))
        self._unbound = [slab.number for slab in self.slabs if slab.blocks == UNBOUND]

    def close(self, slab: Slab) -> None:
        """Allocate no more places of a slab."""
        slab.closed = True
        if slab.blocks != UNBOUND:
            self.sizes[slab.blocks].with_room.pop(slab.number, None)

    def reopen(self) -> None:
        """Try the closed slabs again."""
        for slab in self.slabs:
            if slab.closed:
                slab.closed = False
                if slab.blocks == UNBOUND:
                    heapq.heappush(self._unbound, slab.number)
                elif slab.taken < len(slab.rows):
                    self.sizes[slab.blocks].with_room[slab.number] = slab

    def _places(self, slab: Slab, slots: I64) -> U64:
        first = slab.number * self.slab_bytes + BLOCK_BYTES
        return (slots * (slab.blocks * BLOCK_BYTES) + first).astype(np.uint64)

    def _bind(self, slab: Slab, blocks: int) -> None:
        size = self.sizes.get(blocks)
        if size is None:
            size = self.sizes[blocks] = SlotSize(blocks)
        slab.blocks = blocks
        slab.rows = np.full(slots_in(self.slab_bytes, blocks), EMPTY, np.int32)
        size.slabs[slab.number] = slab
        size.with_room[slab.number] = slab

    def _count(self, slab: Slab, added: int) -> None:
        """Note that slots were taken (or, below 0, emptied)."""
        slab.taken += added
        self.taken_bytes += added * slab.blocks * BLOCK_BYTES
        size = self.sizes[slab.blocks]
        if slab.taken == 0:
            del size.slabs[slab.number]
            size.with_room.pop(slab.number, None)
            slab.blocks, slab.rows = UNBOUND, np.empty(0, np.int32)
            heapq.heappush(self._unbound, slab.number)
            if not size.slabs:
                del self.sizes[size.blocks]
        elif slab.taken == len(slab.rows) or slab.closed:
            size.with_room.pop(slab.number, None)
        else:
            size.with_room[slab.number] = slab
