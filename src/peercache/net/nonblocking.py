"""nng's sends and receives without giving up the GIL.

A busy engine takes the GIL whenever it is let go, and keeps it for a switch interval of 5 ms. pynng
lets it go around every call; these take microseconds and never wait, so they keep it: a question
costs one hand-off, in the poll, instead of three.

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


class _Pipe(ctypes.Structure):
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


class HeldSocket:
    """The calls on one nng socket. Not for use after its close."""

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

    def send_to(self, pipe: int, raw: bytes) -> int:
        """Send on one pipe of a polyamorous socket; return nng's verdict."""
        message = ctypes.c_void_p()
        verdict: int = _nng_msg_alloc(ctypes.byref(message), 0)
        if verdict:
            return verdict
        verdict = _nng_msg_append(message, raw, len(raw))
        if not verdict:
            _nng_msg_set_pipe(message, _Pipe(pipe))
            verdict = _nng_sendmsg(self._socket, message, lib.NNG_FLAG_NONBLOCK)
        if verdict:
            # Only a message that was taken is nng's to free.
            _nng_msg_free(message)
        return verdict

    def receive_from(self) -> tuple[int, int, bytes]:
        """Return nng's verdict and, if that is 0, the pipe it came on and the message."""
        message = ctypes.c_void_p()
        verdict: int = _nng_recvmsg(self._socket, ctypes.byref(message), lib.NNG_FLAG_NONBLOCK)
        if verdict:
            return verdict, 0, b""
        size = _nng_msg_len(message)
        raw = ctypes.string_at(_nng_msg_body(message), size) if size else b""
        pipe: int = _nng_msg_get_pipe(message).id
        _nng_msg_free(message)
        return 0, pipe, raw
