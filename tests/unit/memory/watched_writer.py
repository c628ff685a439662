"""The compiled writer of directory tables, compiled once more with a look after each of its stores.

What readers of other processes see in the middle of a change is looked at exactly there.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from peercache.actors.directory import table as directory_table

SOURCES = ("_table.c", "_table_batches.c", "_table_memory.c")
WRITES = ("begin", "serve", "sweep", "tend", "put", "drop", "replace")
EACH_STORE = """
#define _GNU_SOURCE
#include <stdint.h>

void (*after_store)(void);

#define __atomic_store_n(place, value, order) \\
    ((void)(*(volatile __typeof__(*(place)) *)(place) = (value)), after_store())
"""


class WatchedWriter:
    """Calls `act` after each store that readers may see, while there is one."""

    def __init__(self, library: Path) -> None:
        """Load it; nothing is called yet."""
        self.calls = ctypes.PyDLL(str(library))
        self.stores = 0
        self._act: Callable[[], None] | None = None
        self._failures: list[BaseException] = []
        self._told = ctypes.CFUNCTYPE(None)(self._after_store)
        told = ctypes.cast(self._told, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.calls, "after_store").value = told

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
