"""The compiled writer of directory tables, compiled once more with a look after each of its stores.

What readers of other processes see in the middle of a change is looked at exactly there. Memory can
be refused to it, too, at any time that it asks for some.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from peercache.actors.directory import table as directory_table

SOURCES = ("_table.c", "_table_batches.c", "_table_finding.c", "_table_memory.c")
WRITES = ("new", "begin", "serve", "sweep", "tend", "put", "drop", "replace")
EACH_STORE = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

void (*after_store)(void);
int (*may_have)(int punches);

#define ASKED(mode, call) \\
    ({ int may = may_have(mode); may > 0 ? call : (errno = may ? EINTR : ENOSPC, -1); })
#define fallocate(file, mode, at, bytes) ASKED(mode, fallocate(file, mode, at, bytes))
#define mprotect(at, bytes, access) ASKED(0, mprotect(at, bytes, access))

#define __atomic_store_n(place, value, order) \\
    ((void)(*(volatile __typeof__(*(place)) *)(place) = (value)), after_store())
"""


class WatchedWriter:
    """Calls `act` after each store that readers may see, while there is one.

    is_full: whether the next memory that it asks for is refused. is_interrupted: whether a signal
    comes meanwhile.
    """

    def __init__(self, library: Path) -> None:
        """Load it; nothing is called yet."""
        self.calls = ctypes.PyDLL(str(library))
        self.stores = self.requests = 0
        self.is_full: Callable[[], bool] = lambda: False
        self.is_interrupted: Callable[[], bool] = lambda: False
        self._act: Callable[[], None] | None = None
        self._failures: list[BaseException] = []
        self._told = ctypes.CFUNCTYPE(None)(self._after_store)
        told = ctypes.cast(self._told, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.calls, "after_store").value = told
        self._asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(self._may_have)
        asked = ctypes.cast(self._asked, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.calls, "may_have").value = asked

    def _may_have(self, punches: int) -> int:
        if punches:
            return 1
        self.requests += 1
        return -1 if self.is_interrupted() else not self.is_full()

    def _after_store(self) -> None:
        if self._act is None:
            return
        self.stores += 1
        try:
            self._act()
        except BaseException as failure:  # Nothing is raised through compiled code.
            self._failures.append(failure)

    def watch(self, change: Callable[[], None], act: Callable[[], None]) -> None:
        """Change something, and call `act` after each store of it."""
        self.stores, self._act = 0, act
        try:
            change()
        finally:
            self._act = None
        if self._failures:
            raise self._failures.pop(0)


def compiled(folder: Path) -> Path:
    """Return the library, compiled in a folder."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "each_store.h").write_text(EACH_STORE)
    library = folder / "writing.so"
    at = Path(directory_table.__file__).parent
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-fcommon",
         "-include", str(folder / "each_store.h"), *(str(at / name) for name in SOURCES),
         "-o", str(library)],
        check=True,
    )  # fmt: skip
    return library


def put_in_place(watched: WatchedWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every DirectoryTable use it for what it writes."""
    for part in WRITES:
        right = getattr(directory_table, f"_{part}")
        wrapped = getattr(watched.calls, f"peercache_table_{part}")
        wrapped.restype, wrapped.argtypes = right.restype, right.argtypes
        monkeypatch.setattr(directory_table, f"_{part}", wrapped)
