"""Python buffers as page runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from peercache.model.runs import PageRuns


class UnusableBuffers(Exception):
    """The caller's buffers cannot be used; the message says which and why."""


def runs_of_buffers(buffers: Sequence[Any], *, writable: bool) -> tuple[list[Any], PageRuns]:
    """Return views that keep the buffers in place while they are used, and their runs."""
    held: list[Any] = []
    addresses = np.empty(len(buffers), np.uint64)
    sizes = np.empty(len(buffers), np.uint64)
    for place, buffer in enumerate(buffers):
        try:
            view = memoryview(buffer)
        except Exception as error:  # also a closed map, a released view, and what a class may do
            raise UnusableBuffers(f"buffer {place} gives no buffer: {error}") from error
        if "O" in view.format:
            raise UnusableBuffers(f"buffer {place} holds references to objects, not bytes")
        if not view.c_contiguous:
            raise UnusableBuffers(f"buffer {place} is not C-contiguous")
        if writable and view.readonly:
            raise UnusableBuffers(f"buffer {place} is read-only")
        flat = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
        held.append(flat)
        addresses[place] = flat.__array_interface__["data"][0]
        sizes[place] = view.nbytes
    return held, PageRuns(addresses, sizes, np.arange(len(buffers) + 1, dtype=np.int64))
