"""nng_send and nng_recv without giving up the GIL.

A busy engine takes the GIL whenever it is let go, and keeps it for a switch interval of 5 ms. pynng
lets it go around every call; these two take a microsecond and never wait, so they keep it: a
question costs one hand-off, in the poll, instead of three.

No call here may block, or wait for one of nng's threads that calls into Python: only sends and
receives with NNG_FLAG_NONBLOCK, which nng finishes in the calling thread. Pipes come and go under a
lock of their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pynng._nng import ffi, lib

AGAIN: int = lib.NNG_EAGAIN
CLOSED: int = lib.NNG_ECLOSED


class _Socket(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32),)


def _held(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of nng as ctypes calls it, with the GIL held (PYFUNCTYPE)."""
    address = int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))
    return ctypes.PYFUNCTYPE(result, *arguments)(address)


_nng_send = _held("nng_send", ctypes.c_int, _Socket, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_nng_recv = _held(
    "nng_recv",
    ctypes.c_int,
    _Socket,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_int,
)
_nng_free = _held("nng_free", None, ctypes.c_void_p, ctypes.c_size_t)


class HeldSocket:
    """The two calls on one nng socket. Not for use after its close."""

    def __init__(self, socket_id: int) -> None:
        """Use the socket of this number."""
        self._socket = _Socket(socket_id)

    def send(self, raw: bytes) -> int:
        """Return nng's verdict: 0, AGAIN, or what else went wrong."""
        verdict: int = _nng_send(self._socket, raw, len(raw), lib.NNG_FLAG_NONBLOCK)
        return verdict

    def receive(self) -> tuple[int, bytes]:
        """Return nng's verdict, and the message if that is 0."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        verdict: int = _nng_recv(
            self._socket,
            ctypes.byref(data),
            ctypes.byref(size),
            lib.NNG_FLAG_ALLOC | lib.NNG_FLAG_NONBLOCK,
        )
        if verdict:
            return verdict, b""
        # A message of no bytes has no memory either.
        raw = ctypes.string_at(data.value, size.value) if data.value else b""
        _nng_free(data, size)
        return 0, raw
