"""Lets go, in a forked child, of the segments, directory tables and ports that its parent has open.

A child that lives on would keep the lock of a dead node's file, its memory and its ports: the next
start takes the node for alive, and finds neither room nor address. A child uses none of it
(`model.fork_guard`).

Keeps   each descriptor's number, and each mapping's addresses, stay taken until the objects that
        own them are collected: those close and unmap by number and address, and would hit what the
        child has opened there since.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from peercache.memory.layout import is_node_file

_DESCRIPTORS = Path("/proc/self/fd")
_MAPPINGS = Path("/proc/self/maps")
_MAP_FIXED = 0x10
_REMOVED = " (deleted)"

_served: Counter[int | str] = Counter()
"""Where the nodes of this process serve: tcp ports, and paths of unix sockets."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


@cache
def let_go_in_children() -> None:
    """Have each child that is forked from now on let go; to be called before a file is opened."""
    os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def serving_at(addresses: Collection[int | str]) -> Iterator[None]:
    """Have children let go of the sockets with these tcp ports and paths, for a block."""
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
            # The one that lists them has gone by now.
            with suppress(OSError):
                path, number = str(descriptor.readlink()), int(descriptor.name)
                if _is_of_a_node(path) or (path.startswith("socket:") and _is_served(number)):
                    os.dup2(nothing, number, inheritable=False)
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


def _is_served(descriptor: int) -> bool:
    """Tell whether a node listens at a socket, or has accepted it."""
    opened = socket.socket(fileno=descriptor)
    try:
        name = opened.getsockname()
    finally:
        opened.detach()
    return _served[name[1] if isinstance(name, tuple) else name] > 0
