"""Lets go, in a forked child, of the segments and directory tables that its parent has open.

A child that lives on would keep the lock of a dead node's file, and its memory: the next start
takes the node for alive, and finds no room. A child uses none of it (`model.fork_guard`).

Keeps   each descriptor's number, and each mapping's addresses, stay taken until the objects that
        own them are collected: those close and unmap by number and address, and would hit what the
        child has opened there since.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from peercache.memory.layout import is_node_file

_DESCRIPTORS = Path("/proc/self/fd")
_MAPPINGS = Path("/proc/self/maps")
_MAP_FIXED = 0x10
_REMOVED = " (deleted)"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


@cache
def let_go_in_children() -> None:
    """Have each child that is forked from now on let go; to be called before a file is opened."""
    os.register_at_fork(after_in_child=_let_go_in_child)


def _let_go_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for descriptor in _DESCRIPTORS.iterdir():
            # The one that lists them has gone by now.
            with suppress(OSError):
                if _is_of_a_node(str(descriptor.readlink())):
                    os.dup2(nothing, int(descriptor.name), inheritable=False)
    finally:
        os.close(nothing)
    for begin, end in list(_mapped()):
        # Nothing is there to read: a write, which would be a bug, ends the child and harms no page.
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
