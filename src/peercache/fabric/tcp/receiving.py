"""Sends a little, and receives one stream of bytes into many places, with few hand-offs of the GIL.

A thread beside a busy Python program may wait 5 ms for the GIL each time it has released it, so the
number of releases, not the bytes, decides how long a batch takes.

`socket.recvmsg_into` takes a Python object for each place and builds the kernel's array under the
GIL. Here numpy builds the array of addresses, and one call of a loop in C (`_receiving.c`) fills
all of it with the GIL released once. A request is small, and a send that never waits is a copy into
the kernel of tens of microseconds: it keeps the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.installation.library import function
from peercache.model.runs import U64

STEP_BYTES = 128 * 2**10
"""Bytes after which the loop in C leaves the kernel for a moment; see there."""

_receive = function(
    "peercache_receive", ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint64] * 3
)
# PyDLL calls without releasing the GIL.
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
        self._places: npt.NDArray[np.uint64] = np.empty((len(addresses), 2), np.uint64)
        self._places[:, 0] = addresses
        self._places[:, 1] = sizes
        self._ends: U64 = np.cumsum(sizes, dtype=np.uint64)
        self.total = int(self._ends[-1]) if len(sizes) else 0
        self.received = 0

    def receive(self, descriptor: int) -> int:
        """Receive once, and return the bytes taken; 0 means that the other side closed.

        Returns early, with what came, when the socket's SO_RCVTIMEO has passed. Raises OSError:
        BlockingIOError if nothing came in that time, EINTR as InterruptedError, EFAULT for a place
        that is no memory.
        """
        assert self.received < self.total, "nothing is left to receive"
        here = np.uint64(self.received)
        first = int(np.searchsorted(self._ends, here, side="right"))
        filled = int(here - (self._ends[first] - self._places[first, 1]))
        left = self._places[first:]
        taken: int = _receive(descriptor, left.ctypes.data, len(left), filled, STEP_BYTES)
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.received += taken
        return taken
