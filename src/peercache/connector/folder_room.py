"""The room of a folder: how many bytes its files have, and which of them go first."""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from peercache.observability.log import WarnOnce

SWEEP_PART = 16
"""A sweep is due when a process has written 1/16 of the cap, and leaves 15/16 of it: several
processes on one folder exceed the cap by 1/16 each at most."""

SWEEP_S = 60.0
"""And this often: other processes write, too."""

CLOSE_S = 5.0
LEFT_OVER_S = 3600.0
"""A file that was being written so long ago is what a killed process left."""

PAGE_NAME = re.compile(r"[0-9a-f]{32}")
SHELF_NAME = re.compile(r"[0-9a-f]{2}")
WRITING = ".writing"
"""The folder of files that are being written."""
LOCK = ".lock"


@final
class FolderRoom:
    """Keeps the files of a folder below a number of bytes, the least recently used go first.

    When a page was used last is its file's time of change, so that restarts and other processes on
    the folder know it too. Sweeps run in a thread of their own, in one process at a time where
    the file system has locks; two at once remove more than they must, and break nothing.
    """

    def __init__(self, root: Path, bytes_max: int, warn: WarnOnce) -> None:
        """Count what is there, and start the thread."""
        self._root = root
        self._max = bytes_max
        self._warn_once = warn
        self._changed = threading.Condition()
        self._is_closed = False
        self._reserved = 0
        self._written = 0
        self._found = 0
        self.sweep()
        self._thread = threading.Thread(target=self._work, name="peercache-sweep", daemon=True)
        self._thread.start()

    def take(self, size: int) -> bool:
        """Reserve room for a file; return False if there is none before a sweep."""
        with self._changed:
            has_room = self._found + self._written + self._reserved + size <= self._max
            if has_room:
                self._reserved += size
            if not has_room or self._written > self._max // SWEEP_PART:
                self._changed.notify_all()
        return has_room

    def settle(self, size: int, written: int) -> None:
        """End a reservation of `size` bytes: so many of them were written."""
        with self._changed:
            self._reserved -= size
            self._written += written

    def used(self) -> int:
        """Return the bytes that are counted."""
        with self._changed:
            return self._found + self._written + self._reserved

    def close(self) -> None:
        """End the thread; one that waits for a share that hangs is left alone."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def sweep(self) -> None:
        """Count the files, and remove the oldest of them where they are too many."""
        with self._changed:
            written_before = self._written
        try:
            found = self._swept()
        except OSError as error:
            self._warn_once(
                "connector.sweep_failed", error.errno, path=str(self._root), error=str(error)
            )
            return
        with self._changed:
            self._found = found
            # What was written meanwhile may be counted twice, until the next sweep.
            self._written -= written_before

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._is_closed and not self._is_due():
                    self._changed.wait(SWEEP_S)
                if self._is_closed:
                    return
            begun = time.monotonic()
            self.sweep()
            with self._changed:
                # A folder that cannot be made smaller is not swept in a circle.
                if not self._is_closed and self._is_due():
                    self._changed.wait(max(1.0, time.monotonic() - begun))

    def _is_due(self) -> bool:
        return self._written > self._max // SWEEP_PART or self._found > self._max

    def _swept(self) -> int:
        with (self._root / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                may_remove = True
            except BlockingIOError:
                may_remove = False
            except OSError:  # A file system without locks.
                may_remove = True
            files = self._files()
            total = sum(size for _, size, _ in files)
            if not may_remove or total <= self._max - self._max // SWEEP_PART:
                return total
            for _, size, path in sorted(files):
                _remove(path)
                total -= size
                if total <= self._max - self._max // SWEEP_PART:
                    break
            return total

    def _files(self) -> list[tuple[float, int, str]]:
        """Return (used last, bytes, path) of each page; remove what killed processes left."""
        files = []
        for shelf in os.scandir(self._root):
            if SHELF_NAME.fullmatch(shelf.name):
                files += [
                    (stat.st_mtime, stat.st_size, entry.path)
                    for entry in os.scandir(shelf.path)
                    if PAGE_NAME.fullmatch(entry.name) and (stat := _stat(entry)) is not None
                ]
        for entry in os.scandir(self._root / WRITING):
            stat = _stat(entry)
            if stat is not None and time.time() - stat.st_mtime > LEFT_OVER_S:
                _remove(entry.path)
        return files


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:  # Another process has removed it.
        return None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - a path object a file costs more than the call
