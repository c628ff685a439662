"""Stores and loads of seals in published memory, in an order that every processor keeps."""

from __future__ import annotations

import ctypes

import numpy as np

from peercache.installation.library import function
from peercache.model.runs import I64, U64
from peercache.model.seal import SEAL, Seals

_store = function(
    "peercache_seals_store", None, *[ctypes.c_void_p] * 4, ctypes.c_uint64, keeps_gil=True
)
_words = function(
    "peercache_seals_words", None, *[ctypes.c_void_p] * 3, ctypes.c_uint64, keeps_gil=True
)
_load = function(
    "peercache_seals_load", None, *[ctypes.c_void_p] * 3, ctypes.c_uint64, keeps_gil=True
)


def store(table: Seals, indices: I64, words: U64, named: Seals | None = None) -> None:
    """Store `words[i]` at seal `indices[i]`, in order, each as one aligned 8-byte store.

    table:   the seals of a segment. indices: (n,) int64. words: (n,) uint64.
    named:   (n,) SEAL, whose key, space and length are stored before the words; None keeps those
             that are there.
    """
    assert indices.dtype == np.int64, indices.dtype
    assert words.dtype == np.uint64, words.dtype
    assert indices.shape == words.shape, (indices.shape, words.shape)
    assert named is None or (named.dtype == SEAL and named.shape == indices.shape), named
    if len(indices) == 0:
        return
    _check(table, indices)
    indices, words = np.ascontiguousarray(indices), np.ascontiguousarray(words)
    packed = None if named is None else np.ascontiguousarray(named)
    _store(
        table.ctypes.data,
        indices.ctypes.data,
        words.ctypes.data,
        None if packed is None else packed.ctypes.data,
        len(indices),
    )


def load_words(table: Seals, indices: I64) -> U64:
    """Load words now, (n,) uint64: before a byte that the caller reads next."""
    words = np.empty(len(indices), np.uint64)
    if len(indices):
        _check(table, indices)
        indices = np.ascontiguousarray(indices)
        _words(table.ctypes.data, indices.ctypes.data, words.ctypes.data, len(indices))
    return words


def load_seals(table: Seals, indices: I64) -> Seals:
    """Load seals now, (n,) SEAL: after every byte that the caller has read, the words last."""
    seals: Seals = np.empty(len(indices), SEAL)
    if len(indices):
        _check(table, indices)
        indices = np.ascontiguousarray(indices)
        _load(table.ctypes.data, indices.ctypes.data, seals.ctypes.data, len(indices))
    return seals


def _check(table: Seals, indices: I64) -> None:
    # A wrong index would change, or read, what is no seal.
    assert int(indices.min()) >= 0, indices
    assert int(indices.max()) < len(table), (indices, len(table))
