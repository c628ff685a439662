"""Kernel interfaces for memory: page tables, limits, huge pages, and release in forked children.

Page tables of mappings are filled and emptied here, which Python's own library cannot do. Every
call releases the GIL for as long as it runs. mmap's own MAP_POPULATE would keep the GIL, and block
the engine for that long.

A segment in huge pages is a file of a hugetlbfs, because local clients map it by its path. The
kernel reserves huge pages in advance, so missing ones are known, and reported, before anything is
created.

A long-lived forked child would keep the lock of a dead node's file, its memory and its ports: the
next node would consider that node alive, and find neither room nor address. A child uses none of
them (`model.process`), so it releases the segments, directory tables and ports of its parent. Each
descriptor's number, and each mapping's addresses, stay allocated until the objects that own them
are collected: those close and unmap by number and address, and would otherwise hit what the child
has opened there since.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from peercache.errors import ConfigError
from peercache.memory.layout import GIB_PAGE_BYTES, HUGE_PAGE_BYTES, Layout, is_node_file

Bytes = npt.NDArray[np.uint8]

_DONTNEED = 4
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_PAGE_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


def address_of(view: Bytes) -> int:
    """Return the address of the memory of an array."""
    return int(view.__array_interface__["data"][0])


def prefault(view: Bytes, *, write: bool, may_load: bool = True) -> None:
    """Fill the page tables of a mapping, so that copies do not stop at every 4 KiB.

    may_load: whether one byte of each page is loaded instead on kernels before 5.14, which cannot
              populate.
    Raises OSError (EFAULT, ENOMEM) if an access would have been a bus error.
    """
    advice = _POPULATE_WRITE if write else _POPULATE_READ
    before = address_of(view) % _PAGE_BYTES
    if _libc.madvise(address_of(view) - before, before + view.size, advice) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL or not may_load:
        raise OSError(number, os.strerror(number))
    # A kernel before 5.14: one strided copy reads a byte of every page, and releases the GIL too.
    touched = view[::_PAGE_BYTES]
    np.copyto(np.empty(touched.size, np.uint8), touched)


def populate_range(address: int, length: int) -> bool:
    """Populate any memory of this process, in whole pages, without changing a byte.

    Return False if the kernel cannot (before 5.14) or refuses (a driver's mapping, read-only
    memory): the user of the memory then takes the page faults itself.
    """
    begin = address // _PAGE_BYTES * _PAGE_BYTES
    end = -(-(address + length) // _PAGE_BYTES) * _PAGE_BYTES
    return bool(_libc.madvise(begin, end - begin, _POPULATE_WRITE) == 0)


def unfault(view: Bytes) -> None:
    """Empty the page tables of a shared mapping; the file keeps the bytes.

    An mmap object unmaps under the GIL, in time that grows with its page tables: this leaves
    nothing to do for it.
    """
    # A refusal costs only that time, so it is not an error.
    _libc.madvise(address_of(view), view.size, _DONTNEED)


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems whose files are memory."""

_KIB = 1024


def filesystem_of(folder: str, mounts: str) -> str:
    """Return the type of the file system that a folder is on, from the text of /proc/mounts."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        # The last of several mounts at one place hides the others.
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind if Path(folder).is_dir() else ""


def cgroup_memory(groups: str, root: Path) -> tuple[int, int]:
    """Return the lowest memory limit of this process (-1: none), and how much of it is used.

    groups: the text of /proc/self/cgroup; root: where the cgroup file systems are mounted. The
            limits of all groups above also apply. In a container its own group may be the root.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        while folder.is_relative_to(base):
            text = text_of(folder / limit)
            # Version 1 writes "no limit" as a number that no machine has.
            if text.isdigit() and int(text) < 2**60:
                limits.append((int(text), int(text_of(folder / used) or 0)))
            folder = folder.parent
    return min(limits, key=lambda each: each[0] - each[1], default=(-1, 0))


def own_cgroup_memory() -> tuple[int, int]:
    """Return `cgroup_memory` of this process."""
    return cgroup_memory(text_of(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))


def host_memory(name: str) -> int:
    """Return a figure of /proc/meminfo in bytes, 0 for an unknown one."""
    match = re.search(rf"^{name}:\s*(\d+)", text_of(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * _KIB if match else 0


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel, "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


SIZES = {"2M": HUGE_PAGE_BYTES, "1G": GIB_PAGE_BYTES}
"""Page sizes, by their names in the configuration."""

DEFAULT_PAGE_BYTES = HUGE_PAGE_BYTES
"""The page size of a hugetlbfs without one in its options."""

_KERNEL = Path("/sys/kernel/mm/hugepages")
_MOUNTS = Path("/proc/mounts")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@attrs.frozen
class Supply:
    """Huge pages of one size: all in the kernel's pool, and those free and not reserved."""

    page_bytes: int
    total: int
    free: int


def supplies(kernel: Path = _KERNEL) -> tuple[Supply, ...]:
    """Return the supply of each size that this kernel knows, the smallest first."""
    found = []
    for folder in kernel.glob("hugepages-*kB"):
        page_bytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 2**10
        total, free, reserved = (
            int((folder / name).read_text(encoding="ascii"))
            for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
        # Reserved pages count as free until they are touched, but belong to another mapping.
        found.append(Supply(page_bytes, total, free - reserved))
    return tuple(sorted(found, key=lambda supply: supply.page_bytes))


def mounted(mounts: str) -> tuple[tuple[str, int], ...]:
    """Return (folder, page size) of each hugetlbfs, from the text of /proc/mounts."""
    found = []
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "hugetlbfs":
            size = re.search(r"pagesize=(\d+)([KMG]?)", options)
            page_bytes = int(size[1]) * _UNITS[size[2]] if size else DEFAULT_PAGE_BYTES
            found.append((place, page_bytes))
    return tuple(found)


def hugetlbfs_folders() -> tuple[str, ...]:
    """Return the folders in which nodes of this host keep segments in huge pages."""
    return tuple(folder for folder, _ in mounted(text_of(_MOUNTS)))


def missing(name: str, needed: int, supply: Supply) -> str:
    """Return what is missing, with the command that adds it; "" if nothing is missing."""
    if supply.free >= needed:
        return ""
    return (
        f"the pool needs {needed} huge pages of {name}, {supply.free} are free: "
        f"{more(name, supply.total - supply.free + needed)}"
    )


def more(name: str, total: int) -> str:
    """Return the command that makes the kernel reserve `total` huge pages."""
    if name == "2M":
        return f"sysctl vm.nr_hugepages={total}"
    return f"boot with hugepagesz=1G hugepages={total}"


def folder_for(name: str, configured: str, mounts: str | None = None) -> str:
    """Return the folder for a segment in huge pages of this size; raise ConfigError."""
    places = mounted(_MOUNTS.read_text(encoding="utf-8") if mounts is None else mounts)
    fitting = [place for place, page_bytes in places if page_bytes == SIZES[name]]
    if configured:
        # A folder within a mount is as good as the mount point.
        within = Path(configured).resolve()
        if any(within.is_relative_to(place) for place in fitting):
            return configured
        raise ConfigError("hugepages_dir", f"{configured} is on no hugetlbfs of {name} pages")
    if not fitting:
        raise ConfigError(
            "hugepages",
            f"no hugetlbfs of {name} pages is mounted: "
            f"mount -t hugetlbfs -o pagesize={name} none /dev/hugepages",
        )
    return fitting[0]


def expect_enough(name: str, layout: Layout) -> None:
    """Raise ConfigError unless the kernel has the huge pages for a segment."""
    size = SIZES[name]
    supply = next((each for each in supplies() if each.page_bytes == size), Supply(size, 0, 0))
    problem = missing(name, layout.total_bytes // size, supply)
    if problem:
        raise ConfigError("hugepages", problem)


_DESCRIPTORS = Path("/proc/self/fd")
_MAPPINGS = Path("/proc/self/maps")
_MAP_FIXED = 0x10
_REMOVED = " (deleted)"

_served: Counter[int | str] = Counter()
"""The addresses at which nodes of this process serve: tcp ports, and paths of unix sockets."""

_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


@cache
def let_go_in_children() -> None:
    """Make later forked children release everything; call this before opening files."""
    os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def serving_at(addresses: Collection[int | str]) -> Iterator[None]:
    """Make children release the sockets with these tcp ports and paths, during a block."""
    let_go_in_children()
    _served.update(addresses)
    try:
        yield
    finally:
        _served.subtract(addresses)


def _let_go_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for descriptor in _DESCRIPTORS.iterdir():
            # The descriptor that lists them is closed by now.
            with suppress(OSError):
                path, number = str(descriptor.readlink()), int(descriptor.name)
                if _is_of_a_node(path) or (path.startswith("socket:") and _is_served(number)):
                    os.dup2(nothing, number, inheritable=False)
    finally:
        os.close(nothing)
    for begin, end in list(_mapped()):
        # It has no access rights: an access, which would be a bug, kills the child and harms no
        # page.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(begin, end - begin, mmap.PROT_READ, flags, -1, 0)


def _mapped() -> Iterator[tuple[int, int]]:
    for line in _MAPPINGS.read_text(errors="replace").splitlines():
        place, *_, path = [*line.split(maxsplit=5), ""][:6]
        if _is_of_a_node(path):
            begin, _, end = place.partition("-")
            yield int(begin, 16), int(end, 16)


def _is_of_a_node(path: str) -> bool:
    return path.startswith("/") and is_node_file(Path(path.removesuffix(_REMOVED)).name)


def _is_served(descriptor: int) -> bool:
    """Return whether a node listens on a socket, or has accepted it."""
    opened = socket.socket(fileno=descriptor)
    try:
        name = opened.getsockname()
    finally:
        opened.detach()
    return _served[name[1] if isinstance(name, tuple) else name] > 0
