"""What a store begins with: the index that lies there, or one that is made from the slots."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peercache.storage.index_file import (
    has_log,
    load_entries,
    open_index,
    read_index,
    remove_index,
    store_entries,
)
from peercache.storage.layout import INDEX_NAME
from peercache.storage.scan import consistent, scan
from peercache.storage.slab_files import SlabFiles

Entries = npt.NDArray[np.void]

MAPPED_BYTES: Final = 256 * 2**10
"""More than SQLite maps of a log's index at first: to touch what a full file system has no room for
would end the process."""


def load_index(files: SlabFiles, log: Any) -> tuple[sqlite3.Connection | None, Entries]:
    """Return the index and its entries, rebuilt from the slots if it is missing or damaged.

    None: it cannot be written, and has been removed. What it tells is read before a byte is
    written, so that a full disk costs the index and no page.
    """
    folder = files.folder
    entries, is_as_told = _told_entries(files, log)
    if not _has_room(files):
        log.warning("disk.index_failed", error="no space for it")
        remove_index(folder.path)
        return None, entries
    for _ in range(2):
        try:
            connection = open_index(folder.path, bytes_max=folder.index_bytes)
            try:
                if not is_as_told:
                    store_entries(connection, entries)
            except sqlite3.Error:
                connection.close()
                raise
            return connection, entries
        except sqlite3.Error as error:
            log.warning("disk.index_failed", error=str(error))
        # The file may be what is wrong, and its room be what is missing: once more without it.
        remove_index(folder.path)
        is_as_told = False
    return None, entries


def _told_entries(files: SlabFiles, log: Any) -> tuple[Entries, bool]:
    """Return what lies there, and whether that is what the index tells, row for row."""
    folder = files.folder
    problem = "" if folder.fresh else "missing"
    if (folder.path / INDEX_NAME).exists():
        try:
            if has_log(folder.path) and not _has_room(files):
                raise sqlite3.OperationalError("no space to read its log")
            with closing(read_index(folder.path, locked=True)) as connection:
                told = load_entries(connection)
            entries = consistent(told, files, folder.slab_count)
            if len(entries) < len(told):
                log.warning("disk.entries_dropped", pages=len(told) - len(entries))
            return entries, len(entries) == len(told)
        except sqlite3.Error as error:
            problem = str(error)
    if problem:
        log.warning("disk.index_rebuild_started", folder=str(folder.path), problem=problem)
    remove_index(folder.path)
    return consistent(scan(files, log), files, folder.slab_count), False


def _has_room(files: SlabFiles) -> bool:
    return files.folder.free_bytes()[0] >= MAPPED_BYTES
