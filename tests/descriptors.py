"""The descriptors of this process: which files are open, and a process that may open no more."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.pace import wait_until

SPARE = 16
"""Descriptors that are taken here: the others were taken before."""


def open_files() -> list[Path]:
    """Return what each descriptor of this process leads to; a socket's name is not reused soon.

    A count of all descriptors also changes when what another test has left is collected.
    """
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # The one that lists them is closed by now.
            found.append(each.readlink())
    return found


def open_within(folder: str | Path) -> list[Path]:
    """Return what is open of a folder, itself included, also where it was removed meanwhile."""
    inside = (f"{folder}/", f"{folder} (deleted)")
    return [
        file for file in open_files() if str(file) == str(folder) or str(file).startswith(inside)
    ]


@contextmanager
def no_descriptors(*, left: int = 0) -> Iterator[None]:
    """Let this process open no more than `left` files for the length of a block."""
    # What earlier tests left or closed would give its descriptors back in the meantime.
    gc.collect()
    wait_until(lambda: all(each.name != "peercache-close" for each in threading.enumerate()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + SPARE, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
