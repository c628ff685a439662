"""The compiled batch copy, where it is there: `_scatter.c`, through ctypes."""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def _load() -> Any:
    """Return the function, or None where nothing was compiled, or another machine's file lies."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_scatter{suffix}")
        if path.exists():
            try:
                function = ctypes.CDLL(os.fspath(path)).peercache_scatter
            except (OSError, AttributeError):
                continue
            pieces, number = ctypes.c_void_p, ctypes.c_uint64
            function.argtypes = (pieces, number, pieces, number, number, ctypes.c_int)
            function.restype = ctypes.c_int
            return function
    return None


_scatter = _load()

HAS_SCATTER = _scatter is not None

Pieces = npt.NDArray[np.uint64]


def scatter(ours: Pieces, segment: Pieces, *, to_segment: bool) -> int:
    """Copy between two (n, 2) uint64 lists of (address, size), in order; return the bytes moved.

    Nothing is moved if the pieces of a side are not there at their ends (of many: of some). No
    piece is empty, and both lists hold as many bytes.
    """
    total = int(ours[:, 1].sum())
    to, origin = (segment, ours) if to_segment else (ours, segment)
    done = _scatter(to.ctypes.data, len(to), origin.ctypes.data, len(origin), total, to_segment)
    return total if done else 0
