"""Send a little, and receive one stream of bytes into many places, with few hand-offs of the GIL.

A thread beside a busy Python program may wait 5 ms for the GIL each time it has released it, so the
number of releases, not the bytes, decides how long a batch takes.

`socket.recvmsg_into` wants a Python object a place and builds the kernel's array from them under
the GIL. Here numpy builds that array from the addresses, and one `recvmsg` with MSG_WAITALL fills
all of it with the GIL released once. A request is small and a send that never waits is a copy into
the kernel, tens of microseconds: the GIL is kept.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.runs import U64

PIECES_MAX = 1024
"""The kernel's IOV_MAX: more pieces in one call are an error."""
STEP_BYTES_MAX = 64 * 2**20
"""Most bytes of one call: enough for the usual batch, and a limit for how long one can last."""
STEP_BYTES_MIN = 2**20
"""Least bytes worth a call (if they are wanted), about 0.3 ms."""
COPY_BYTES_PER_S = 1e9
"""What the kernel copies at the least. Its time-out counts only its waiting, not its copying, so a
call takes no more than can be copied in the time that is left."""


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

    def receive(self, descriptor: int, left_s: float) -> int:
        """Receive once, and return the bytes taken; 0 means that the other side closed.

        left_s: the call should take no longer. Its copying is bounded by this, its waiting by
        SO_RCVTIMEO, which the caller sets: when that has been waited for, what came is returned.
        Raises OSError: BlockingIOError if nothing came in that time, EINTR as InterruptedError,
        EFAULT for a place that is no memory.
        """
        pieces = self._next_pieces(int(max(left_s * COPY_BYTES_PER_S, STEP_BYTES_MIN)))
        header = _MessageHeader(pieces=pieces.ctypes.data, piece_count=len(pieces))
        taken: int = _recvmsg(descriptor, ctypes.byref(header), socket.MSG_WAITALL)
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.received += taken
        return taken

    def _next_pieces(self, bytes_max: int) -> npt.NDArray[np.uint64]:
        assert self.received < self.total, "nothing is left to receive"
        here = np.uint64(self.received)
        step = min(bytes_max, STEP_BYTES_MAX)
        until = np.uint64(min(self.received + step, self.total))
        first = int(np.searchsorted(self._ends, here, side="right"))
        last = int(np.searchsorted(self._ends, until, side="left"))
        last = min(last, first + PIECES_MAX - 1)
        pieces: npt.NDArray[np.uint64] = self._pieces[first : last + 1].copy()
        if self._ends[last] > until:
            pieces[-1, 1] -= self._ends[last] - until
        # Last: the first piece may be the last one too, and is cut at both ends then.
        taken = here - (self._ends[first] - self._pieces[first, 1])
        pieces[0, 0] += taken
        pieces[0, 1] -= taken
        return pieces
