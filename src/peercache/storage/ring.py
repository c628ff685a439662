"""Reads of many pages in one call of a thread: as one ends, the next starts, and each is verified.

There is no ring where the kernel has no io_uring for this process (before Linux 5.5, or forbidden
in a container), or where xxhash's library hides its function.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Final

import numpy as np

from peercache.actors.ports import Load
from peercache.installation.library import Begin, function
from peercache.model.keys import KEY
from peercache.storage.jobs import Unit
from peercache.storage.layout import SLOT_FORMAT

READS_AT_ONCE: Final = 16
"""Reads in flight of one thread: four threads have as many as a disk needs for its full rate with
small reads."""

_PAGE = np.dtype(
    [("key", KEY), ("space", "<u8"), ("variant", "<u4"), ("file", "<i4"), ("length", "<u8"),
     ("place", "<u8"), ("offset", "<u8"), ("known", "<u8")]
)  # fmt: skip
"""`struct page` of _reads.c."""


class _Setting(ctypes.Structure):
    """`struct setting` of _reads.c."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("format", ctypes.c_char_p),
        ("checksum_of", ctypes.c_void_p),
        ("pool_bytes", ctypes.c_uint64),
        ("slab_bytes", ctypes.c_uint64),
        ("pages_max", ctypes.c_uint32),
        ("depth", ctypes.c_uint32),
    )


_open = function("peercache_reads_open", ctypes.c_void_p, ctypes.POINTER(_Setting))
_close = function("peercache_reads_close", None, ctypes.c_void_p)
_load = function(
    "peercache_reads_load", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


class Ring:
    """The reads in flight of one thread."""

    _at: int | None = None

    def __init__(
        self, pool: memoryview, blocks: memoryview, *, pages_max: int, slab_bytes: int, depth: int
    ) -> None:
        """Make a ring for units of so many pages. blocks: memory for their header blocks."""
        self._memory = (pool, blocks)
        checksum_of = _checksum_function()
        setting = _Setting(
            _address(pool), _address(blocks), SLOT_FORMAT, checksum_of, len(pool), slab_bytes,
            pages_max, depth,
        )  # fmt: skip
        self._at = _open(setting) if checksum_of else None

    @property
    def is_open(self) -> bool:
        """Return whether there is a ring."""
        return self._at is not None

    def __del__(self) -> None:
        # A thread that ends has waited for its reads; one that is stuck does not end.
        if self._at is not None:
            _close(self._at)

    def load(self, unit: Unit, effect: Load, files: list[int]) -> None:
        """Load the pages of a unit; set the outcome of valid ones to DISK_DONE, and their checksum.

        The others keep their outcome: they were not read, or are not what they should be.

        files: the open slab of each page; -1: do not load it.
        """
        begin, end = unit.pages.start, unit.pages.stop
        pages = np.empty(len(files), _PAGE)
        pages["key"] = np.frombuffer(effect.keys, KEY)[begin:end]
        pages["space"] = effect.namespaces["space"][begin:end]
        pages["variant"] = effect.namespaces["variant"][begin:end]
        pages["file"] = files
        pages["length"] = effect.lengths[begin:end]
        pages["place"] = effect.places[begin:end]
        pages["offset"] = effect.offsets[begin:end]
        pages["known"] = 0 if effect.known is None else effect.known[begin:end]
        _load(
            self._at, _address(pages), len(pages), _address(unit.outcomes),
            _address(unit.job.checksums[begin:]), _address(unit.over),
        )  # fmt: skip


def _address(memory: object) -> int:
    return ctypes.addressof(Begin.from_buffer(memory))


@functools.cache
def _checksum_function() -> int | None:
    """Return the address of `XXH3_64bits` in xxhash's library, None if it is hidden there."""
    spec = importlib.util.find_spec("xxhash._xxhash")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    for name in ("XXH3_64bits_dispatch", "XXH3_64bits"):
        if hasattr(library, name):
            return ctypes.cast(library[name], ctypes.c_void_p).value
    return None
