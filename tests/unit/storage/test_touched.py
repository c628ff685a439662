"""What a restart is told about use: the entries touched since the last time."""

from __future__ import annotations

import numpy as np

from peercache.actors.disk.index import DiskIndex

SLAB = 64 * 1024


def test_entries_touched_since_are_told_coldest_first() -> None:
    """Only those, in the order of their last touch; what is being written is none of them."""
    index = DiskIndex(capacity_bytes=2 * SLAB, slab_bytes=SLAB)
    keys = b"".join(bytes([n]) * 16 for n in range(5))
    ones = np.ones(5, np.uint64)
    begun = index.begin(keys, ones, 3000 * ones, ones, 0)
    index.finish(begun.entries[:4])
    since = index.clock
    zero, one, two, _ = index.find(keys[:64]).tolist()

    index.touch(np.array([two]))
    index.touch(np.array([zero]))
    index.touch(np.array([one]))
    index.touch(np.array([two]))

    assert index.touched_since(since).tolist() == [zero, one, two]
    assert index.touched_since(index.clock).tolist() == []
