"""The registrars: register memory with a device, through libibverbs or through pyverbs.

pyverbs never releases the GIL: registering a gibibyte of untouched memory blocks every other thread
of the engine for seconds. Where pyverbs shows the pointer of the protection domain, a registrar
calls `ibv_reg_mr` through ctypes, which releases the GIL. Where it hides the pointer (rdma-core
44), pyverbs registers pieces so small that it holds the GIL for a few milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
from importlib import import_module
from typing import Any, Protocol

import attrs

from peercache.rdma.verbs import outlives_fork

ACCESS_LOCAL_WRITE = 1
ACCESS_REMOTE_READ = 4
"""The needed values of enum ibv_access_flags: no peer ever writes remote memory."""

DIRECT_CHUNK_BYTES = 2**30
"""Bytes of one registration without the GIL: about 100 ms of touched memory, so progress is logged
often. A hundred of them make 100 GiB, few enough for the translation caches of a device."""

HELD_CHUNK_BYTES = 64 * 2**20
"""Bytes of one registration that holds the GIL: about 5 ms of touched memory, the interval at which
Python's own threads hand over the GIL."""


class RegistrationFailed(Exception):
    """The kernel or the device refuses to register memory; the message says why, and the fix."""


@attrs.frozen(eq=False)
class Registered:
    """One registered piece. lkey, rkey: read once, because a later read can crash."""

    lkey: int
    rkey: int
    handle: Any


class Registrar(Protocol):
    """Registers memory with one protection domain. Thread-safe."""

    chunk_bytes: int
    """Most bytes of one call."""

    def register(self, address: int, length: int, access: int) -> Registered:
        """Register a range; raise RegistrationFailed."""

    def deregister(self, piece: Registered) -> str:
        """End a registration; call once, before the protection domain closes.

        Return "" or why the memory stays locked until the process ends.
        """


class _MemoryRegion(ctypes.Structure):
    """struct ibv_mr: part of the public ABI of libibverbs."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    )


@functools.cache
def libibverbs() -> ctypes.CDLL:
    """Return the library below pyverbs; raise OSError where it is missing."""
    library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    library.ibv_reg_mr.restype = ctypes.POINTER(_MemoryRegion)
    library.ibv_reg_mr.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
    )  # fmt: skip
    library.ibv_dereg_mr.restype = ctypes.c_int
    library.ibv_dereg_mr.argtypes = (ctypes.POINTER(_MemoryRegion),)
    library.ibv_fork_init.restype = ctypes.c_int
    return library


@functools.cache
def protect_from_fork() -> int:
    """Protect registered memory from a fork of this process; return 0 or an errno.

    Before Linux 5.12 a parent that writes to a private page after a fork gets a copy of it, and
    the device writes to the old page. Call it before the first registration; on newer kernels it
    does nothing.
    """
    return int(libibverbs().ibv_fork_init())


class DirectRegistrar:
    """Calls libibverbs through ctypes; other threads run meanwhile."""

    chunk_bytes = DIRECT_CHUNK_BYTES

    def __init__(self, pd_pointer: int) -> None:
        """Register with the `struct ibv_pd` at this address."""
        assert pd_pointer, "a closed protection domain"
        self._pd = pd_pointer
        self._library = libibverbs()

    def register(self, address: int, length: int, access: int) -> Registered:
        """Register a range; raise RegistrationFailed."""
        region = self._library.ibv_reg_mr(self._pd, address, length, access)
        if not region:
            raise RegistrationFailed(explain(ctypes.get_errno(), length))
        return Registered(int(region.contents.lkey), int(region.contents.rkey), region)

    def deregister(self, piece: Registered) -> str:
        """End a registration; return "" or why it stays."""
        number = int(self._library.ibv_dereg_mr(piece.handle))
        return os.strerror(number) if number else ""


class PyverbsRegistrar:
    """Calls pyverbs, which holds the GIL, with small pieces."""

    chunk_bytes = HELD_CHUNK_BYTES

    def __init__(self, pd: Any) -> None:
        """Register with a `pyverbs.pd.PD`, without reading its properties."""
        self._pd = pd
        self._region = import_module("pyverbs.mr").MR
        self._error = import_module("pyverbs.pyverbs_error").PyverbsError

    def register(self, address: int, length: int, access: int) -> Registered:
        """Register a range; raise RegistrationFailed."""
        try:
            region = outlives_fork(self._region(self._pd, length, access, address=address))
        except self._error as error:
            number = getattr(error, "error_code", 0) or ctypes.get_errno()
            raise RegistrationFailed(explain(abs(number), length)) from error
        return Registered(int(region.lkey), int(region.rkey), region)

    def deregister(self, piece: Registered) -> str:
        """End a registration; return "" or why it stays."""
        try:
            piece.handle.close()
        except self._error as error:
            return str(error)
        return ""


def registrar_for(pd: Any) -> Registrar:
    """Return the best registrar for this protection domain.

    `PD.pd` is the pointer in newer pyverbs, and a crash in 44. No version number distinguishes
    the two; two features that 44 lacks do.
    """
    protect_from_fork()
    return DirectRegistrar(int(pd.pd)) if shows_pointers() else PyverbsRegistrar(pd)


@functools.cache
def shows_pointers() -> bool:
    """Return whether this pyverbs is new enough for `PD.pd` to be the pointer."""
    try:
        import_module("pyverbs.libibverbs_enums")
        return hasattr(import_module("pyverbs.cq").CompChannel, "fd")
    except ImportError:
        return False


def explain(number: int, length: int) -> str:
    """Return why the kernel did not register `length` bytes, with the fix."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return explanation(number, length, memlock_bytes=soft)


def explanation(number: int, length: int, *, memlock_bytes: int) -> str:
    """Return the text of `explain` for a limit of locked memory (-1: no limit)."""
    if number == errno.ENOMEM and memlock_bytes != resource.RLIM_INFINITY:
        return (
            f"{length} bytes more cannot be locked, the limit is {memlock_bytes}: run "
            "`ulimit -l unlimited` in the shell that starts this process, set "
            "`LimitMEMLOCK=infinity` in its systemd unit, or start its container with "
            "`--ulimit memlock=-1`"
        )
    if number == errno.ENOMEM:
        return f"the kernel or the device has no room for {length} bytes more of registered memory"
    if number == errno.EFAULT:
        return (
            "the memory is mapped read-only, or not at all: a device registers writable "
            "mappings only, even where others may only read"
        )
    if number in (errno.EACCES, errno.EPERM):
        return (
            "no permission: this process must be able to read and write /dev/infiniband/uverbs* "
            "(start its container with `--device /dev/infiniband`)"
        )
    if number == errno.EOPNOTSUPP:
        return "the device cannot register memory of this kind: a file on a disk, or another device"
    return os.strerror(number) if number else "the device gives no reason"
