"""The compiled directory table, compiled once more with a look at each of its loads and stores.

What another process may do between two loads of a reader is done exactly there, and what readers of
other processes see in the middle of a change is looked at exactly there. Memory can be refused to
the writer, too, at any time that it asks for some.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peercache.actors.directory import table as directory_table
from peercache.memory import table_reading

READS = ("begin", "look", "end", "batch")
EACH_LOAD = """
#define _GNU_SOURCE
#include <stddef.h>
#include <unistd.h>

void (*before_load)(const void *place);

#define __atomic_load_n(place, order) \\
    (before_load(place), *(volatile __typeof__(*(place)) *)(place))
#define pread(file, into, bytes, at) (before_load(NULL), pread(file, into, bytes, at))
"""

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


class WatchedReader:
    """Counts the loads of a batch, and calls `act` before one of them, or before each."""

    def __init__(self, library: Path) -> None:
        """Load it; no test is notified of its loads yet."""
        self.calls = ctypes.PyDLL(str(library))
        self.loads = 0
        self.act: Callable[[int, int | None], None] = _nothing
        self.failures: list[BaseException] = []
        self._reported = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._before_load)
        reported = ctypes.cast(self._reported, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.calls, "before_load").value = reported

    def _before_load(self, place: int | None) -> None:
        self.loads += 1
        try:
            self.act(self.loads, place)
        except BaseException as failure:  # Nothing is raised through compiled code.
            self.failures.append(failure)

    @contextmanager
    def acting(self, act: Callable[[int, int | None], None]) -> Iterator[None]:
        """Call `act` with the number of each load from 1, and its address; None by `pread`."""
        self.loads, self.act = 0, act
        try:
            yield
        finally:
            self.act = _nothing
        if self.failures:
            raise self.failures.pop()

    def at(self, moment: int, change: Callable[[], Any]) -> Any:
        """Return a context in which something changes just before one load."""
        return self.acting(lambda load, _: change() if load == moment else None)


def _nothing(load: int, place: int | None) -> None:
    del load, place


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
        self._reported = ctypes.CFUNCTYPE(None)(self._after_store)
        reported = ctypes.cast(self._reported, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.calls, "after_store").value = reported
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


def compiled(folder: Path, before: str, sources: Iterable[Path]) -> Path:
    """Return the library of these sources, each behind some text, compiled in a folder."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "before.h").write_text(before)
    library = folder / "watched.so"
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-fcommon",
         "-include", str(folder / "before.h"), *map(str, sources), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return library


def compiled_reader(folder: Path) -> Path:
    """Return the library of the reader."""
    return compiled(folder, EACH_LOAD, [Path(table_reading.__file__).with_name("_table_reading.c")])


def compiled_writer(folder: Path) -> Path:
    """Return the library of the writer."""
    at = Path(directory_table.__file__).parent
    return compiled(folder, EACH_STORE, [at / name for name in SOURCES])


def put_in_place(watched: WatchedReader | WatchedWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every TableReader use it, or every DirectoryTable for what it writes."""
    is_reader = isinstance(watched, WatchedReader)
    module: ModuleType = table_reading if is_reader else directory_table
    for part in READS if is_reader else WRITES:
        right = getattr(module, f"_{part}")
        kind = "reading" if is_reader else "table"
        wrapped = getattr(watched.calls, f"peercache_{kind}_{part}")
        wrapped.restype, wrapped.argtypes = right.restype, right.argtypes
        monkeypatch.setattr(module, f"_{part}", wrapped)
