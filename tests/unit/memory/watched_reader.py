"""The compiled reader of directory tables, compiled once more with a look before each of its loads.

What another process may do between two loads is done exactly there, so that a test can try each
moment of a batch.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peercache.memory import table_reading

MEMORY = Path(table_reading.__file__).parent
EACH_LOAD = """
#define _GNU_SOURCE
#include <stddef.h>
#include <unistd.h>

void (*before_load)(const void *place);

#define __atomic_load_n(place, order) \\
    (before_load(place), *(volatile __typeof__(*(place)) *)(place))
#define pread(file, into, bytes, at) (before_load(NULL), pread(file, into, bytes, at))
"""


class WatchedReader:
    """Counts the loads of a batch, and calls `act` before one of them, or before each."""

    def __init__(self, library: Path) -> None:
        """Load it; no test is told of its loads yet."""
        self.calls = ctypes.PyDLL(str(library))
        self.loads = 0
        self.act: Callable[[int, int | None], None] = _nothing
        self.failures: list[BaseException] = []
        self._told = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._before_load)
        told = ctypes.cast(self._told, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self.calls, "before_load").value = told

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


def compiled(folder: Path) -> Path:
    """Return the library, compiled in a folder."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "each_load.h").write_text(EACH_LOAD)
    library = folder / "reading.so"
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-include", str(folder / "each_load.h"),
         str(MEMORY / "_table_reading.c"), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return library


def put_in_place(watched: WatchedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every TableReader use it."""
    for part in ("begin", "look", "end", "batch"):
        right = getattr(table_reading, f"_{part}")
        wrapped = getattr(watched.calls, f"peercache_reading_{part}")
        wrapped.restype, wrapped.argtypes = right.restype, right.argtypes
        monkeypatch.setattr(table_reading, f"_{part}", wrapped)
