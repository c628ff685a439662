"""Handshakes of the control plane: why they fail, and which ones hang.

nng reports little about either. For a failed handshake it logs the reason, but neither the peer nor
the side; `_handshakes.c` counts those. About a hanging handshake it reports nothing, and waits
forever: the descriptors of this process show it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, final

import attrs
import pynng
from pynng import _nng
from pynng._nng import ffi, lib

from peercache.installation.library import function
from peercache.net.peers import Address
from peercache.observability.reasons import (
    BAD_CERTIFICATE,
    HANDSHAKE,
    NO_CERTIFICATE,
    NO_TLS,
    OLD_TLS,
    REFUSED_BY_PEER,
)
from peercache.trust.sharing import plain_ip

SILENCE_S = 10.0
"""Timeout without a byte of a peer in its handshake. nng's own timeout of this length has no
effect. Only silence counts: a node that starts among a thousand others may be slow to answer all of
them."""

_REASONS = (HANDSHAKE, NO_CERTIFICATE, BAD_CERTIFICATE, NO_TLS, OLD_TLS, REFUSED_BY_PEER)
"""Why a handshake failed, by the numbers of `enum reason` in `_handshakes.c`."""

_LOG_WARNINGS = 4
"""nng's NNG_LOG_WARN."""

_DESCRIPTORS = Path("/proc/self/fd")
_TCP_INFO_BYTES = 104
_LAST_RECEIVED = struct.Struct("=52xI")
"""Where tcp_info has `tcpi_last_data_recv`, in milliseconds."""

_failed = function("peercache_handshakes_failed", ctypes.c_uint64, ctypes.c_uint32, keeps_gil=True)


@final
class FailedHandshakes:
    """Counts the TLS handshakes of this process's control plane that fail."""

    def __init__(self) -> None:
        """Count from now on, of the listeners and of the dialers."""
        self._totals = _totals()

    def news(self) -> dict[str, int]:
        """Return how many have failed since the last call, by reason."""
        before, self._totals = self._totals, _totals()
        new = {reason: total - before.get(reason, 0) for reason, total in self._totals.items()}
        return {reason: count for reason, count in new.items() if count > 0}


def _totals() -> dict[str, int]:
    if not _has_nng_log():
        return {HANDSHAKE: _refused_by_listeners()}
    return {reason: _failed(number) for number, reason in enumerate(_REASONS)}


@cache
def _has_nng_log() -> bool:
    """Make nng log why handshakes fail; return whether it can: pynng has no call for that."""
    library = ctypes.CDLL(_nng.__file__)
    try:
        set_logger, set_level = library.nng_log_set_logger, library.nng_log_set_level
    except AttributeError:
        return False
    # A pointer to the C function itself: nng's threads call it without Python.
    log = function("peercache_handshakes_log", None)
    set_logger(ctypes.cast(log, ctypes.c_void_p))
    set_level(_LOG_WARNINGS)
    return True


def _refused_by_listeners() -> int:
    """Return how many handshakes nng's listeners count as refused, for any reason."""
    found = ffi.new("nng_stat **")
    pynng.check_err(lib.nng_stats_get(found))
    try:
        return _sum(found[0], in_listener=False)
    finally:
        lib.nng_stats_free(found[0])


def _sum(first: Any, *, in_listener: bool) -> int:
    total, node = 0, first
    while node != ffi.NULL:
        name = ffi.string(lib.nng_stat_name(node))
        if in_listener and name == b"auth":
            total += int(lib.nng_stat_value(node))
        child = lib.nng_stat_child(node)
        if child != ffi.NULL:
            total += _sum(child, in_listener=name == b"listener")
        node = lib.nng_stat_next(node)
    return total


@attrs.frozen
class _Half:
    """A connection that nng has accepted and does not report. silent_s: time without a byte."""

    file: int
    remote: Address
    silent_s: float


@final
class HalfHandshakes:
    """Ends connections to our ports with a hanging handshake.

    It works without a free descriptor: the hanging connections may have taken the last one.
    """

    def __init__(self, ports: Callable[[], Iterable[int]]) -> None:
        """Watch the connections to these tcp ports of ours, until `close`."""
        self._ports = ports
        self.files = 0
        """How many files this process had open at the last check."""
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # Duplicates a descriptor while it is examined, because its number may be reused at any
        # time.
        self._held = os.dup(self._nothing)
        # By inode: sockets that are not such connections, or are established by now.
        self._others: set[int] = set()

    def close(self) -> None:
        """Release the resources of the checks."""
        os.close(self._nothing)
        os.close(self._held)

    def __enter__(self) -> HalfHandshakes:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def end_silent(self, settled: Iterable[Address], *, most: int) -> list[str]:
        """End those that have been silent for SILENCE_S, and the most silent above `most`.

        settled: the remote ends of connections that nng has reported. Returns the hosts of the
                 ended connections.
        """
        halves = self._halves({plain(each) for each in settled})
        halves.sort(key=lambda half: -half.silent_s)
        excess = len(halves) - most
        ended = []
        for place, half in enumerate(halves):
            if place < excess or half.silent_s >= SILENCE_S:
                self._shut_down(half)
                ended.append(half.remote[0])
        return ended

    def _halves(self, settled: set[Address]) -> list[_Half]:
        ports, others, found = frozenset(self._ports()), set[int](), []
        files = _open_files()
        self.files = len(files)
        for file in files:
            with suppress(OSError):
                status = os.fstat(file)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                half = None if status.st_ino in self._others else self._half(file, ports)
                if half is None or half.remote in settled:
                    others.add(status.st_ino)
                else:
                    found.append(half)
        self._others = others
        return found

    @contextmanager
    def _connection(self, file: int) -> Iterator[socket.socket]:
        """Duplicate a descriptor, so that it cannot be reused."""
        os.dup2(file, self._held, inheritable=False)
        try:
            ours = socket.socket(fileno=self._held)
            try:
                yield ours
            finally:
                ours.detach()
        finally:
            # Otherwise a connection that its owner closes would stay open.
            os.dup2(self._nothing, self._held, inheritable=False)

    def _half(self, file: int, ports: frozenset[int]) -> _Half | None:
        """Return a descriptor's connection, None if it is not one to these ports."""
        with self._connection(file) as ours:
            is_tcp = ours.family in {socket.AF_INET, socket.AF_INET6}
            if not is_tcp or ours.type != socket.SOCK_STREAM or ours.getsockname()[1] not in ports:
                return None
            try:
                remote = ours.getpeername()
            except OSError:
                return None  # A listening socket.
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            silent_s = _LAST_RECEIVED.unpack_from(info)[0] / 1000
            return _Half(file, plain(remote), silent_s)

    def _shut_down(self, half: _Half) -> None:
        """End a connection, if the descriptor is still its own: nng closes it then."""
        with suppress(OSError), self._connection(half.file) as ours:
            if plain(ours.getpeername()) == half.remote:
                ours.shutdown(socket.SHUT_RDWR)


def _open_files() -> Sequence[int]:
    try:
        return [int(each) for each in os.listdir(_DESCRIPTORS)]  # noqa: PTH208 - numbers only
    except OSError:
        # No descriptor is left for this: all of them are open.
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def plain(address: Any) -> Address:
    """Return an address in normal form: without a zone, and mapped IPv4 as IPv4."""
    return str(plain_ip(address[0])), address[1]
