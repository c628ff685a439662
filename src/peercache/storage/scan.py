"""Reads slot headers: what an index is made of when it has been lost, and held against.

A header is believed if it is whole and names its own place. Of two slots with one key the one
written last counts. Whether the pages themselves are right is seen when they are loaded.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peercache.actors.disk.slabs import BLOCK_BYTES, slot_blocks, slot_blocks_of, slots_in
from peercache.actors.storage_port import DISK_ENTRY
from peercache.storage.layout import SlotHeader, parse_slot, slab_name
from peercache.storage.slab_files import SlabFiles

SCAN_THREADS: Final = 8
"""Reads in flight: what a disk wants for small ones."""

WHOLE_BLOCKS_MAX: Final = 8
"""Slots up to here are read with their pages: fewer, larger reads are faster than skipping."""

WINDOW_BYTES: Final = 2**20

Entries = npt.NDArray[np.void]


def headers_of(files: SlabFiles, number: int, memory: memoryview) -> Iterator[SlotHeader]:
    """Yield what the slots of a slab say, those that say something. Raises OSError."""
    blocks = files.blocks_of[number]
    first = number * files.folder.slab_bytes + BLOCK_BYTES
    slot_bytes = blocks * BLOCK_BYTES
    slots = slots_in(files.folder.slab_bytes, blocks)
    together = max(1, WINDOW_BYTES // slot_bytes) if blocks <= WHOLE_BLOCKS_MAX else 1
    size = together * slot_bytes if together > 1 else BLOCK_BYTES
    for begin in range(0, slots, together):
        at = first + begin * slot_bytes
        count = files.read(at, [memory[:size]])
        for slot in range(min(together, slots - begin)):
            offset = slot * slot_bytes
            header = parse_slot(memory[offset : min(offset + BLOCK_BYTES, count)], at + offset)
            if header is not None and slot_blocks_of(header.length) == blocks:
                yield header


def scan(files: SlabFiles, log: Any) -> Entries:
    """Return the entries of every slab, unordered; a key may occur more than once."""

    def of_slab(number: int) -> Entries:
        memory = memoryview(mmap.mmap(-1, WINDOW_BYTES))
        found: list[tuple[bytes, int, int, int, int, int, int, int]] = []
        try:
            found.extend(
                (h.key, h.namespace, h.place, h.sequence, h.length, h.written, h.written, 0)
                for h in headers_of(files, number, memory)
            )
        except OSError as error:
            log.warning("disk.slab_read_failed", file=slab_name(number), error=str(error))
        return np.array(found, DISK_ENTRY)

    numbers = sorted(files.blocks_of)
    with ThreadPoolExecutor(SCAN_THREADS, "peercache-scan") as pool:
        parts = list(pool.map(of_slab, numbers))
    return np.concatenate(parts) if parts else np.empty(0, DISK_ENTRY)


def consistent(entries: Entries, files: SlabFiles, slab_count: int) -> Entries:
    """Return the entries that can be true together, coldest first.

    Their slabs exist and have their slot size, their places are those of slots, no two share one,
    and of one key the newest stays.
    """
    slab_bytes = files.folder.slab_bytes
    blocks_of = np.zeros(slab_count, np.int64)
    for number, size in files.blocks_of.items():
        if number < slab_count:
            blocks_of[number] = size
    entries = entries[entries["place"] < np.uint64(slab_count * slab_bytes)]
    entries = entries[entries["length"] > 0]
    slabs, within = np.divmod(entries["place"].astype(np.int64), slab_bytes)
    blocks = slot_blocks(entries["length"])
    within -= BLOCK_BYTES
    slots = within // (blocks * BLOCK_BYTES)
    fits = (blocks_of[slabs] == blocks) & (within >= 0) & (within % (blocks * BLOCK_BYTES) == 0)
    fits &= slots < (slab_bytes // BLOCK_BYTES - 1) // np.maximum(blocks, 1)
    entries = entries[fits]
    entries["slot"] = blocks[fits]
    newest_last = entries["sequence"].argsort(kind="stable")
    entries = entries[newest_last]
    for field in ("place", "key"):
        entries = entries[_last_of_each(entries, field)]
    order = np.lexsort((entries["sequence"], entries["used"]))
    ordered: Entries = entries[order]
    return ordered


def _last_of_each(entries: Entries, field: str) -> npt.NDArray[np.intp]:
    """Return where the last of equal values stands, ascending."""
    if not len(entries):
        return np.empty(0, np.intp)
    values = np.ascontiguousarray(entries[field]).view("<u8").reshape(len(entries), -1)
    order = np.lexsort(tuple(values.T))
    ordered = values[order]
    last = np.ones(len(entries), np.bool_)
    last[:-1] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(order[last])
