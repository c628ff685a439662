"""Send a little, and receive one stream of bytes into many places, with few hand-offs of the GIL.

A thread beside a busy Python program may wait 5 ms for the GIL each time it has released it, so the
number of releases, not the bytes, decides how long a batch takes.

`socket.recvmsg_into` wants a Python object a place and builds the kernel's array from them under
the GIL. Here numpy builds that array from the addresses, and one call fills all of it with the GIL
released once: a loop in C (`_receiving.c`), or without it one `recvmsg` with MSG_WAITALL. A request
is small and a send that never waits is a copy into the kernel, tens of microseconds: the GIL is
kept.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.fabric.tcp.native import compiled
from peercache.model.runs import U64

PIECES_MAX = 1024
"""The kernel's IOV_MAX: more pieces in one call are an error."""
STEP_BYTES = 128 * 2**10
"""Bytes after which the loop in C leaves the kernel for a moment; see there."""


class _MessageHeader(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_receive = compiled(
    "peercache_receive",
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint64] * 3,
    keeps_gil=False,
)
_recvmsg = _libc.recvmsg
_recvmsg.argtypes = (ctypes.c_int, ctypes.POINTER(_MessageHeader), ctypes.c_int)
_recvmsg.restype = ctypes.c_ssize_t
# PyDLL: called with the GIL held.
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


def send_at_once(descriptor: int, raw: bytes) -> int:
    """Send what the socket takes without waiting, and return its bytes; raise OSError."""
    sent: int = _send(descriptor, raw, len(raw), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if sent >= 0:
        return sent
    code = ctypes.get_errno()
    if code in {errno.EAGAIN, errno.EINTR}:
        return 0
    raise OSError(code, os.strerror(code))


@final
class Scatter:
    """The places that a stream of `total` bytes fills, in order.

    addresses, sizes: (places,) uint64. The memory must stay valid until the last `receive`;
    `received` counts the bytes that are in place.
    """

    def __init__(self, addresses: U64, sizes: U64) -> None:
        """Lay out the places; nothing is received yet."""
        self._pieces: npt.NDArray[np.uint64] = np.empty((len(addresses), 2), np.uint64)
        self._pieces[:, 0] = addresses
        self._pieces[:, 1] = sizes
        self._ends: U64 = np.cumsum(sizes, dtype=np.uint64)
        self.total = int(self._ends[-1]) if len(sizes) else 0
        self.received = 0

    def receive(self, descriptor: int) -> int:
        """Receive once, and return the bytes taken; 0 means that the other side closed.

        Returns early, with what came, when the socket's SO_RCVTIMEO has been waited for. Raises
        OSError: BlockingIOError if nothing came in that time, EINTR as InterruptedError, EFAULT
        for a place that is no memory.
        """
        assert self.received < self.total, "nothing is left to receive"
        here = np.uint64(self.received)
        first = int(np.searchsorted(self._ends, here, side="right"))
        filled = int(here - (self._ends[first] - self._pieces[first, 1]))
        if _receive is not None:
            left = self._pieces[first:]
            taken = _receive(descriptor, left.ctypes.data, len(left), filled, STEP_BYTES)
        else:
            taken = _receive_once(descriptor, self._pieces[first : first + PIECES_MAX], filled)
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.received += taken
        return int(taken)


def _receive_once(descriptor: int, places: U64, filled: int) -> int:
    pieces = places.copy()
    pieces[0, 0] += np.uint64(filled)
    pieces[0, 1] -= np.uint64(filled)
    header = _MessageHeader(pieces=pieces.ctypes.data, piece_count=len(pieces))
    taken: int = _recvmsg(descriptor, ctypes.byref(header), socket.MSG_WAITALL)
    return taken
