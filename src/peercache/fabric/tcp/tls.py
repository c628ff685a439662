"""TLS of the data port: contexts and sessions of the compiled library with OpenSSL (`_tls.c`).

A session is used by one thread at a time. No Python code runs per record: the serving thread and
the receiving loop call the library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from functools import cache
from typing import Any, NamedTuple, final

import attrs

from peercache.errors import ConfigError, Rejected
from peercache.installation.library import tls_function
from peercache.observability.reasons import (
    BAD_CERTIFICATE,
    BROKEN_TLS,
    EXPIRED,
    HANDSHAKE_LOST,
    NO_CERTIFICATE,
    NO_TLS,
    NOT_YET_VALID,
    OLD_TLS,
    REFUSED_BY_PEER,
    UNKNOWN_CA,
)
from peercache.trust.files import LiveTls, TlsFiles
from peercache.trust.identity import Identity

_FAILURES = (
    "",
    HANDSHAKE_LOST,
    NO_CERTIFICATE,
    UNKNOWN_CA,
    EXPIRED,
    NOT_YET_VALID,
    BAD_CERTIFICATE,
    NO_TLS,
    OLD_TLS,
    REFUSED_BY_PEER,
    BROKEN_TLS,
)
"""Why a session failed, by the numbers of `enum failure`."""

KEY_RECORDS_MAX = 2**22
"""Records that one key encrypts: 64 GiB of pages. RFC 8446 (section 5.5) allows 2**24.5 of AES-GCM,
and a response in progress has up to 2**19. A new key costs 10 µs."""

PEER_BYTES_MAX = 64 * 2**10
"""Longest text of a certificate's names; those of PeerCache have at most 16 KiB."""

_DONE, _WANTS_READ = 0, 1

_SIGNATURES: dict[str, tuple[bool, tuple[Any, ...]]] = {
    "context": (
        False,
        (
            ctypes.c_void_p,
            ctypes.c_int,
            *[ctypes.c_char_p] * 3,
            ctypes.POINTER(ctypes.c_char_p),
        ),
    ),
    "context_free": (True, (None, ctypes.c_void_p)),
    "open": (
        True,
        (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_uint64),
    ),
    "free": (True, (None, ctypes.c_void_p)),
    # Half a millisecond of cryptography, in which other threads can run.
    "handshake": (False, (ctypes.c_int, ctypes.c_void_p)),
    "peer": (True, (ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64)),
    "send": (True, (ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64)),
    "flush": (False, (ctypes.c_int, ctypes.c_void_p)),
    "receive_once": (True, (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)),
    "receive": (
        False,
        (ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_uint64] * 2, ctypes.c_int64),
    ),
    "failure": (True, (ctypes.c_int, ctypes.c_void_p)),
}
"""The library's functions: whether a call keeps Python's global lock, and the signature."""


@cache
def _call() -> dict[str, Any]:
    """Return the library's functions; raises BrokenInstallation if it was not compiled."""
    return {
        name: tls_function(f"peercache_tls_{name}", *signature, keeps_gil=keeps_gil)
        for name, (keeps_gil, signature) in _SIGNATURES.items()
    }


class TlsPeer(NamedTuple):
    """The contents of a peer's certificate.

    serial: its number in hexadecimal; names: its URIs; not_after: in seconds since 1970.
    """

    serial: str
    names: tuple[str, ...]
    not_after: float


@attrs.define(eq=False)
class TlsFailed(Rejected):
    """A session that cannot continue. reason: one of `_FAILURES`."""


@final
class TlsContext:
    """One certificate, its key, and the authorities of peers' certificates."""

    def __init__(self, files: TlsFiles, *, is_server: bool) -> None:
        """Create it; raises BrokenInstallation without OpenSSL, ConfigError for unusable files."""
        self._call = _call()
        self._is_server = is_server
        self._handle: int | None = None
        what = ctypes.c_char_p()
        texts = (text.encode() for text in (files.ca_pem, files.cert_pem, files.key_pem))
        self._handle = self._call["context"](is_server, *texts, ctypes.byref(what))
        if not self._handle:
            setting = (what.value or b"").decode()
            raise ConfigError(setting, "OpenSSL cannot use what the file holds")

    def open(self, connection: socket.socket) -> TlsSession:
        """Return a session over a connection; the caller must do the handshake."""
        wait = 0 if self._is_server else socket.MSG_DONTWAIT
        handle = self._call["open"](
            self._handle, self._is_server, connection.fileno(), wait, KEY_RECORDS_MAX
        )
        if not handle:
            raise MemoryError("no TLS session can be made")
        return TlsSession(handle)

    def __del__(self) -> None:
        """Free the context: OpenSSL keeps what open sessions need."""
        if self._handle:
            self._call["context_free"](self._handle)


@final
class TlsSession:
    """The TLS of one connection. Its owner closes it before the connection's socket."""

    def __init__(self, handle: int) -> None:
        """Take over a session of the library, or one that it hands back."""
        self._call = _call()
        self._handle: int | None = handle

    def step(self) -> bool | None:
        """Continue the handshake: True when it is done, False to wait for the peer's bytes, None to
        wait until the socket is writable. Raises TlsFailed.
        """
        result: int = self._call["handshake"](self._handle)
        if result < 0:
            raise _failed(-result)
        return True if result == _DONE else False if result == _WANTS_READ else None

    def peer(self) -> TlsPeer:
        """Return the contents of the peer's certificate; raises TlsFailed."""
        into = ctypes.create_string_buffer(PEER_BYTES_MAX)
        size: int = self._call["peer"](self._handle, into, PEER_BYTES_MAX)
        if size < 0:
            raise TlsFailed(BAD_CERTIFICATE, "the certificate's names cannot be read")
        try:
            # No other character ends a line: a name with one is not two names.
            serial, not_after, *names, _ = into.raw[:size].decode().split("\n")
        except UnicodeDecodeError as error:
            raise TlsFailed(BAD_CERTIFICATE, "the certificate's names are no text") from error
        return TlsPeer(serial, tuple(names), float(not_after))

    def send_at_once(self, raw: bytes) -> bool:
        """Encrypt bytes, and send what the socket accepts; return whether nothing is left.

        Raises OSError for a connection that is gone.
        """
        if self._call["send"](self._handle, raw, len(raw)) == 0:
            return self.flush_at_once()
        raise _os_error()

    def flush_at_once(self) -> bool:
        """Send what the socket accepts without blocking; return whether nothing is left."""
        if self._call["send"](self._handle, b"", 0) == 0:
            return True
        if ctypes.get_errno() in {errno.EAGAIN, errno.EINTR}:
            return False
        raise _os_error()

    def flush(self) -> None:
        """Send what is left, within the socket's timeout; raises OSError."""
        if self._call["flush"](self._handle) < 0:
            raise _os_error()

    def receive_at_once(self, into: bytearray | memoryview) -> int:
        """Receive once; 0 when the peer has closed. Raises BlockingIOError and OSError."""
        place = (ctypes.c_char * len(into)).from_buffer(into)
        taken: int = self._call["receive_once"](self._handle, ctypes.addressof(place), len(into))
        if taken < 0:
            raise _os_error()
        return taken

    def receive(self, places: int, count: int, skip: int, left_s: float) -> int:
        """Fill places as `peercache_receive` does, for left_s at most; return the bytes.

        Raises OSError. places: the address of (address u64, size u64) pairs.
        """
        taken: int = self._call["receive"](self._handle, places, count, skip, int(left_s * 1e9))
        if taken < 0:
            raise _os_error()
        return taken

    @property
    def failure(self) -> str:
        """Why the session failed; "" while it works, or when its peer just closed."""
        return _FAILURES[self._call["failure"](self._handle)]

    def detach(self) -> int:
        """Give up ownership of the library's session, and return it."""
        handle, self._handle = self._handle, None
        assert handle, "a session is handed over once"
        return handle

    def close(self) -> None:
        """Free the session; may be repeated."""
        if self._handle:
            self._call["free"](self._handle)
            self._handle = None


@final
class Contexts:
    """The context for new connections: replaced as soon as the process has new files."""

    def __init__(self, live: LiveTls, *, is_server: bool) -> None:
        """Make the first context; raises as `TlsContext` does."""
        self._live = live
        self._is_server = is_server
        self._files = live.files
        self._context = TlsContext(live.files, is_server=is_server)

    def open(self, connection: socket.socket) -> TlsSession:
        """Return a session over a connection, with the newest certificate."""
        files = self._live.files
        if files is not self._files:
            # Two threads may both create one: either will do.
            self._context = TlsContext(files, is_server=self._is_server)
            self._files = files
        return self._context.open(connection)

    def admit(self, peer: TlsPeer) -> Identity:
        """Return the identity in a peer's certificate; raises Rejected for one that is refused."""
        return self._live.admit(peer.serial, peer.names)


def _failed(number: int) -> TlsFailed:
    return TlsFailed(_FAILURES[number], "the TLS handshake failed")


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
