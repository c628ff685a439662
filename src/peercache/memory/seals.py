"""Stores and loads of seals in published memory, in an order that every processor keeps."""

from __future__ import annotations

import ctypes
from typing import Any, final

import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin, function
from peercache.model.runs import I64, U64
from peercache.model.seal import ODD, SEAL, Seals, unread_seals

_store = function(
    "peercache_seals_store", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, *[ctypes.c_char_p] * 3,
    ctypes.c_uint64, keeps_gil=True,
)  # fmt: skip
_LOAD = (ctypes.c_void_p, *(ctypes.c_uint64,) * 2, *(ctypes.c_void_p,) * 2, ctypes.c_uint64)
_words = function("peercache_seals_words", ctypes.c_int, *_LOAD, ctypes.c_int, keeps_gil=True)
_load = function("peercache_seals_load", ctypes.c_int, *_LOAD, ctypes.c_int, keeps_gil=True)


@final
class SealStore:
    """Stores the seals of a node's own segment, which must stay mapped meanwhile."""

    def __init__(self, seals: Seals) -> None:
        """Store into (n,) SEAL, one per granule."""
        self._address, self._count = seals.ctypes.data, len(seals)

    def store(self, indices: I64, words: U64, named: Seals | None = None) -> None:
        """Store `words[i]` at seal `indices[i]`, in order, each as one aligned 8-byte store.

        indices: (n,) int64. words: (n,) uint64.
        named:   (n,) SEAL, whose key, space and length are stored before the words; None keeps the
                 current ones.
        """
        assert indices.dtype == np.int64, indices.dtype
        assert words.dtype == np.uint64, words.dtype
        assert indices.shape == words.shape, (indices.shape, words.shape)
        assert named is None or (named.dtype == SEAL and named.shape == indices.shape), named
        # As bytes: asking numpy for the address of an array takes longer than the call.
        done = _store(
            self._address, self._count, indices.tobytes(), words.tobytes(),
            None if named is None else named.tobytes(), len(indices),
        )  # fmt: skip
        # A wrong index would overwrite something else.
        assert done, (indices, self._count)


@final
class SealTable:
    """The seals of a mapped segment, loaded by the offsets of slots.

    The memory must stay mapped for as long as this is used.
    """

    def __init__(self, seals: Seals, *, granule: int, by_kernel: bool) -> None:
        """Load from (n,) SEAL, one per granule.

        by_kernel: load with the kernel's own copy, which survives a truncated file.
        """
        self._address, self._count = seals.ctypes.data, len(seals)
        self._granule = granule
        self._by_kernel = by_kernel

    def words(self, offsets: U64) -> U64:
        """Load words now, (n,) uint64: before any byte that the caller reads afterwards.

        All are ODD if the table is not mapped any more, which only `by_kernel` detects.
        """
        words = np.empty(len(offsets), np.uint64)
        return words if self._loaded(_words, offsets, words) else np.full(len(offsets), ODD)

    def load(self, offsets: U64) -> Seals:
        """Load seals now, (n,) SEAL: after all bytes that the caller has read, the words last.

        All are unread if the table is not mapped any more, which only `by_kernel` detects.
        """
        seals: Seals = np.empty(len(offsets), SEAL)
        return seals if self._loaded(_load, offsets, seals) else unread_seals(len(offsets))

    def _loaded(self, load: Any, offsets: U64, into: npt.NDArray[Any]) -> bool:
        assert offsets.dtype == np.uint64, offsets.dtype
        done = load(
            self._address, self._count, self._granule, offsets.tobytes(),
            ctypes.addressof(Begin.from_buffer(into)), len(offsets), self._by_kernel,
        )  # fmt: skip
        # A wrong offset would load something else.
        assert done >= 0, (offsets, self._count)
        return bool(done)
