"""The planted bugs of directory tables: of their readers, and of the order that readers rely on.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peercache.actors.directory.table import DirectoryTable
from peercache.memory import table_reading
from peercache.memory.table_reading import TableReader
from sims.tables import Header, header_of

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _under_any_epoch(right: Any) -> Any:
    def end(self: Any, ring: int, now_s: float) -> Any:
        self._reading.epoch = Header.from_address(self._reading.at).epoch
        return right(self, ring, now_s)

    return end


EPOCH_NOT_CHECKED: Patches = ((TableReader, "end", _under_any_epoch),)


def _in_one_epoch(right: Any) -> Any:
    def begin(self: Any, holder: int, *, is_served: bool) -> Any:
        epoch = header_of(self).epoch
        entry = right(self, holder, is_served=is_served)
        header_of(self).epoch = epoch
        return entry

    return begin


ENTRY_REUSED_IN_AN_EPOCH: Patches = ((DirectoryTable, "begin", _in_one_epoch),)


def _of_any_ring(right: Any) -> Any:
    def looked(self: Any, count: int, ring: int, now_s: float) -> Any:
        return right(self, count, self._reading.authority if ring else 0, now_s)

    return looked


ANOTHER_RINGS_WORD_BELIEVED: Patches = ((TableReader, "_looked", _of_any_ring),)


def _for_ever(_: int) -> int:
    return 2**62


OLD_TICK_BELIEVED: Patches = ((table_reading, "_TICK_AGE_MAX_NS", _for_ever),)
