"""Fills and empties the page tables of mappings, which Python's own library cannot do.

Every call releases the GIL for as long as it runs. mmap's own MAP_POPULATE would hold it, and stop
the engine for that long.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_DONTNEED = 4
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_PAGE_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


def address_of(view: Bytes) -> int:
    """Return where the memory of an array begins."""
    return int(view.__array_interface__["data"][0])


def prefault(view: Bytes, *, write: bool, may_load: bool = True) -> None:
    """Fill the page tables of a mapping, so that copies do not stop at every 4 KiB.

    may_load: whether a kernel that cannot (before 5.14) has a byte of each page loaded instead.
    Raises OSError (EFAULT, ENOMEM) where an access would have been a bus error.
    """
    advice = _POPULATE_WRITE if write else _POPULATE_READ
    if _libc.madvise(address_of(view), view.size, advice) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL or not may_load:
        raise OSError(number, os.strerror(number))
    # A kernel before 5.14: one strided copy reads a byte of every page, and releases the GIL too.
    touched = view[::_PAGE_BYTES]
    np.copyto(np.empty(touched.size, np.uint8), touched)


def populate_range(address: int, length: int) -> bool:
    """Populate any memory of this process, in whole pages, without changing a byte.

    Return False where the kernel cannot (before 5.14) or will not (a driver's mapping, read-only
    memory): the user of the memory then meets the fault itself.
    """
    begin = address // _PAGE_BYTES * _PAGE_BYTES
    end = -(-(address + length) // _PAGE_BYTES) * _PAGE_BYTES
    return bool(_libc.madvise(begin, end - begin, _POPULATE_WRITE) == 0)


def unfault(view: Bytes) -> None:
    """Empty the page tables of a shared mapping; the file keeps the bytes.

    An mmap object unmaps under the GIL, in time that grows with its page tables: this leaves
    nothing for it to do.
    """
    # A refusal costs only that time, so it is no error.
    _libc.madvise(address_of(view), view.size, _DONTNEED)
