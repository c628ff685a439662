"""nng's sends and receives that never wait, and keep the GIL.

A busy engine takes the GIL whenever another thread releases it, and keeps it for a switch interval
of 5 ms. pynng releases it around every call. These calls take microseconds and never wait, so they
keep it: a question costs one hand-off, in the poll, instead of three.

No call here may block, or wait for one of nng's threads that calls into Python. So only sends and
receives with NNG_FLAG_NONBLOCK are here: nng finishes them in the calling thread, and its pipes
come and go under a lock of their own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pynng._nng import ffi, lib

AGAIN: int = lib.NNG_EAGAIN
CLOSED: int = lib.NNG_ECLOSED


class _Socket(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32),)


class _Pipe(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32),)


def _held(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of nng that is called with the GIL held (PYFUNCTYPE)."""
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
_nng_recvmsg = _held(
    "nng_recvmsg", ctypes.c_int, _Socket, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
_nng_sendmsg = _held("nng_sendmsg", ctypes.c_int, _Socket, ctypes.c_void_p, ctypes.c_int)
_nng_msg_alloc = _held(
    "nng_msg_alloc", ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
)
_nng_msg_append = _held(
    "nng_msg_append", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
)
_nng_msg_free = _held("nng_msg_free", None, ctypes.c_void_p)
_nng_msg_body = _held("nng_msg_body", ctypes.c_void_p, ctypes.c_void_p)
_nng_msg_len = _held("nng_msg_len", ctypes.c_size_t, ctypes.c_void_p)
_nng_msg_get_pipe = _held("nng_msg_get_pipe", _Pipe, ctypes.c_void_p)
_nng_msg_set_pipe = _held("nng_msg_set_pipe", None, ctypes.c_void_p, _Pipe)


class NonblockingSocket:
    """The calls on one nng socket. Not for use after its close."""

    def __init__(self, socket_id: int) -> None:
        """Use the socket of this number."""
        self._socket = _Socket(socket_id)

    def send(self, raw: bytes) -> bool:
        """Hand a message to nng; False if its buffer is full. It may never arrive."""
        verdict: int = _nng_send(self._socket, raw, len(raw), lib.NNG_FLAG_NONBLOCK)
        return verdict != AGAIN

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        verdict: int = _nng_recv(
            self._socket,
            ctypes.byref(data),
            ctypes.byref(size),
            lib.NNG_FLAG_ALLOC | lib.NNG_FLAG_NONBLOCK,
        )
        if verdict:
            return None
        # A message of no bytes has no memory either.
        raw = ctypes.string_at(data.value, size.value) if data.value else b""
        _nng_free(data, size)
        return raw

    def send_to(self, pipe: int, raw: bytes) -> bool:
        """Send on one pipe of a polyamorous socket; False if it is gone or full."""
        message = ctypes.c_void_p()
        verdict: int = _nng_msg_alloc(ctypes.byref(message), 0)
        if verdict:
            return False
        verdict = _nng_msg_append(message, raw, len(raw))
        if not verdict:
            _nng_msg_set_pipe(message, _Pipe(pipe))
            verdict = _nng_sendmsg(self._socket, message, lib.NNG_FLAG_NONBLOCK)
        if verdict:
            # nng frees only a message that it has taken.
            _nng_msg_free(message)
        return not verdict

    def receive_from(self) -> tuple[int, bytes] | None:
        """Return the pipe and the bytes of the next message that has arrived, or None."""
        message = ctypes.c_void_p()
        verdict: int = _nng_recvmsg(self._socket, ctypes.byref(message), lib.NNG_FLAG_NONBLOCK)
        if verdict:
            return None
        size = _nng_msg_len(message)
        raw = ctypes.string_at(_nng_msg_body(message), size) if size else b""
        pipe: int = _nng_msg_get_pipe(message).id
        _nng_msg_free(message)
        return pipe, raw
