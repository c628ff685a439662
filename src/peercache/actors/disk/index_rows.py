"""The entries of a disk index: one row each, in one array that grows by parts.

An entry is named by its row's number, which stays its own as long as the entry lives.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
import numpy.typing as npt

from peercache.actors.disk.slabs import BLOCK_BYTES, slot_blocks
from peercache.model.runs import I64

FREE, WRITING, HELD, ENDED = 0, 1, 2, 3

ROWS_STEP_MIN: Final = 1024
ROWS_STEP_PART: Final = 8
"""The array grows by an eighth: at most so much of it is empty."""

FIELDS: Final = np.dtype(
    [
        ("place", "<u8"),
        ("sequence", "<u8"),
        ("touched", "<u8"),
        ("namespace", "<u8"),
        ("length", "<u4"),
        ("written", "<u4"),
        ("state", "u1"),
        ("pins", "u1"),
    ]
)


@final
class EntryRows:
    """Rows by number. `rows` is another array after `new`: keep no view of it."""

    def __init__(self, slab_bytes: int) -> None:
        """Start with none."""
        self.rows: npt.NDArray[np.void] = np.zeros(0, FIELDS)
        self.end = 0
        """Numbers below were given out at least once."""
        self._spare = np.empty(0, np.int32)
        """Numbers of entries that ended: a stack."""
        self._spare_count = 0
        self._slab_bytes = np.uint64(slab_bytes)

    def new(self, count: int) -> I64:
        """Return the numbers of `count` new rows; their fields are stale."""
        reused = min(count, self._spare_count)
        self._spare_count -= reused
        old = self._spare[self._spare_count : self._spare_count + reused].astype(np.int64)
        begin, self.end = self.end, self.end + count - reused
        if self.end > len(self.rows):
            grown = np.zeros(self.end + max(ROWS_STEP_MIN, self.end // ROWS_STEP_PART), FIELDS)
            grown[:begin] = self.rows[:begin]
            self.rows = grown
        return np.concatenate((old, np.arange(begin, self.end)))

    def free(self, entries: I64) -> None:
        """Let these numbers be given out again."""
        self.rows["state"][entries] = FREE
        count = self._spare_count + len(entries)
        if count > len(self._spare):
            grown = np.empty(max(count, min(2 * count, len(self.rows))), np.int32)
            grown[: self._spare_count] = self._spare[: self._spare_count]
            self._spare = grown
        self._spare[self._spare_count : count] = entries
        self._spare_count = count

    def held(self) -> I64:
        """Return every HELD entry, in no order that means something."""
        return np.flatnonzero(self.rows["state"][: self.end] == HELD)

    def can_go(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Return which are HELD and not pinned."""
        # Field by field: whole rows are 46 bytes each, to look at two of them.
        states, pins = self.rows["state"][entries], self.rows["pins"][entries]
        free: npt.NDArray[np.bool_] = (states == HELD) & (pins == 0)
        return free

    def coldest(self, entries: I64, count: int) -> I64:
        """Return the least recently touched of these, coldest first."""
        touched = self.rows["touched"][entries]
        if count < len(entries):
            chosen = np.argpartition(touched, count)[:count]
            entries, touched = entries[chosen], touched[chosen]
        coldest: I64 = entries[touched.argsort()]
        return coldest

    def slabs_of(self, entries: I64) -> I64:
        """Return the number of the slab that each lies in."""
        slabs: I64 = (self.rows["place"][entries] // self._slab_bytes).astype(np.int64)
        return slabs

    def slot_bytes(self, entries: I64) -> int:
        """Return what their slots take together."""
        return int(slot_blocks(self.rows["length"][entries]).sum()) * BLOCK_BYTES

    def page_bytes(self, entries: I64) -> int:
        """Return what their pages come to."""
        return int(self.rows["length"][entries].sum(dtype=np.int64))
