"""The index on disk: which place holds which page, in SQLite, written in batches by one thread.

Slot headers are authoritative; the index only saves reading all of them at start. So it may be
lost, and may be behind by COMMIT_S after a crash of the process or the host: a surplus page in it
is detected when it is loaded, a missing one is lost. A row is put after its page was written, and
committed after the page was synced. When the place of a page is given to another one, its row is
deleted in a batch, too: a kill before that leaves it (DISK_REPLACED).

A store starts with the index that it finds, or with one that is rebuilt from the slots.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from peercache.actors.ports import DISK_ENTRY
from peercache.storage.layout import FORMAT_VERSION, INDEX_NAME
from peercache.storage.slab_files import SlabFiles, consistent, scan

COMMIT_S: Final = 0.5
"""What a crash may lose: pages written in the last half second."""

OPERATIONS_A_COMMIT_MAX: Final = 8192
"""Rows changed by one transaction: this limits the write-ahead log to a few megabytes."""

BACKLOG_ROWS_MAX: Final = 262_144
"""60 MB of rows. Beyond that no pages are written, so that only drops follow: at most 90 bytes for
each page on disk."""

SQLITE_PAGE_BYTES: Final = 4096

MISSING: Final = "missing"
"""The problem of an index that was not created, or not entirely: its node was killed."""

Entries: TypeAlias = npt.NDArray[np.void]
Operation: TypeAlias = tuple[str, list[tuple[Any, ...]], Callable[[], None] | None]

PUT: Final = "INSERT OR REPLACE INTO slots (place, entry, used) VALUES (?, ?, ?)"
DROP: Final = "DELETE FROM slots WHERE place = ?"
USE: Final = "UPDATE slots SET used = ? WHERE place = ?"


def open_index(
    folder: Path, *, bytes_max: int, entries: Entries | None = None
) -> sqlite3.Connection:
    """Open or create the index; raise sqlite3.Error if it is damaged or not ours.

    entries: replace all rows, in the transaction that creates the table: an index that a kill has
    left must not be valid and lack rows.
    """
    connection = sqlite3.connect(folder / INDEX_NAME, check_same_thread=False, isolation_level=None)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and version != FORMAT_VERSION:
            raise sqlite3.DatabaseError(f"format {version}")
        connection.execute("PRAGMA journal_mode = WAL")
        # Each commit syncs the log, on the index's thread, at most twice a second.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 4194304")
        connection.execute(f"PRAGMA max_page_count = {bytes_max // SQLITE_PAGE_BYTES}")
        connection.execute("BEGIN")
        if version != FORMAT_VERSION:
            connection.execute(
                "CREATE TABLE slots"
                " (place INTEGER PRIMARY KEY, entry BLOB NOT NULL, used INTEGER NOT NULL)"
            )
            connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        if entries is not None:
            connection.execute("DELETE FROM slots")
            connection.executemany(PUT, _rows_of(entries))
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def read_index(folder: Path, *, locked: bool = False) -> sqlite3.Connection:
    """Open an index read-only; raise sqlite3.Error if it is damaged or not ours.

    locked: we have the lock of the folder, and no process writes. Otherwise its node may write.
    """
    # Without a log no process writes, and reading creates no file: a full disk has no room for it.
    is_still = not (has_log(folder) if locked else (folder / f"{INDEX_NAME}-wal").exists())
    immutable = "&immutable=1" if is_still else ""
    path = quote(str(folder / INDEX_NAME))
    connection = sqlite3.connect(f"file:{path}?mode=ro{immutable}", uri=True)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version != FORMAT_VERSION:
            raise sqlite3.DatabaseError(f"format {version}" if tables else MISSING)
    except BaseException:
        connection.close()
        raise
    return connection


def has_log(folder: Path) -> bool:
    """Return whether the log has rows that were not checkpointed: its node was killed, or runs."""
    log = folder / f"{INDEX_NAME}-wal"
    return log.exists() and log.stat().st_size > 0


def remove_index(folder: Path) -> None:
    """Remove an index and its log: the next start reads the slots."""
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{INDEX_NAME}{suffix}").unlink(missing_ok=True)


def load_entries(connection: sqlite3.Connection) -> Entries:
    """Return every row; raise sqlite3.Error if the file is damaged."""
    blobs: list[bytes] = []
    used: list[int] = []
    cursor = connection.execute("SELECT entry, used FROM slots")
    while rows := cursor.fetchmany(65_536):
        some, times = zip(*rows, strict=True)
        blobs += some
        used += times
    size = DISK_ENTRY.itemsize
    try:
        if any(len(blob) != size for blob in blobs):
            raise ValueError("an entry of another size")
        entries: Entries = np.frombuffer(b"".join(blobs), DISK_ENTRY).copy()
        entries["used"] = np.array(used, np.int64).clip(0, 2**32 - 1)
    except (TypeError, ValueError, OverflowError) as error:
        # SQLite accepts any value in any column, and a damaged file may still be a valid table.
        raise sqlite3.DatabaseError(f"rows that are not ours: {error}") from error
    return entries


def _rows_of(entries: Entries) -> list[tuple[int, bytes, int]]:
    packed, size = entries.tobytes(), DISK_ENTRY.itemsize
    blobs = [packed[at : at + size] for at in range(0, len(packed), size)]
    return list(zip(entries["place"].tolist(), blobs, entries["used"].tolist(), strict=True))


class IndexWriter:
    """Writes the index on a thread of its own; only `close` waits for the disk."""

    def __init__(
        self,
        connection: sqlite3.Connection | None,
        *,
        failed: Callable[[str], None],
        log: Any,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        """Write to `connection`; call `failed` with the first error, after which nothing is
        written.

        None: there is no index, and nothing is written. sync: makes the pages of all rows that were
        put durable; raises OSError.
        """
        self._sync = sync
        self._failed = failed
        self._log = log
        self._changed = threading.Condition()
        self._waiting: deque[Operation] = deque()
        self._backlog = 0
        self._is_behind = False
        self._urgent = 0
        self._closing = False
        self._broken = connection is None
        self._thread = threading.Thread(
            target=self._run, args=(connection,), name="peercache-index", daemon=True
        )
        if connection is not None:
            self._thread.start()

    def has_room(self) -> bool:
        """Return whether more pages may be written; if not, too many rows wait already."""
        if self._backlog < BACKLOG_ROWS_MAX:
            return True
        if not self._is_behind:
            self._is_behind = True
            self._log.warning("disk.index_fell_behind", rows=self._backlog)
        return False

    def put(self, entries: Entries) -> None:
        """Store rows of written pages; for many rows, check `has_room` before."""
        self._add(PUT, _rows_of(entries), None)

    def drop(self, places: npt.NDArray[np.uint64], then: Callable[[], None] | None = None) -> None:
        """Delete rows; `then` is called, on the index's thread, once that is on disk."""
        self._add(DROP, [(place,) for place in places.tolist()], then)

    def use(self, places: npt.NDArray[np.uint64], unix_s: npt.NDArray[np.int64]) -> None:
        """Record when places were used; this is skipped first under load."""
        if self._backlog + len(places) <= BACKLOG_ROWS_MAX // 4:
            self._add(USE, list(zip(unix_s.tolist(), places.tolist(), strict=True)), None)

    def close(self, timeout_s: float) -> bool:
        """Write waiting rows and close; return False if that did not end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _add(
        self, statement: str, rows: list[tuple[Any, ...]], then: Callable[[], None] | None
    ) -> None:
        with self._changed:
            # A broken index stores no rows, and none can come back.
            keeps = not self._broken
            if keeps:
                self._waiting.append((statement, rows, then))
                self._backlog += len(rows)
                self._urgent += then is not None
                self._changed.notify()
        if then is not None and not keeps:
            then()

    def _run(self, connection: sqlite3.Connection) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                self._gather()
                taken = self._take()
                closing = self._closing and not self._waiting
            try:
                self._write(connection, taken)
            except (sqlite3.Error, OSError) as error:
                self._break(connection, taken, str(error))
                return
            for _, _, then in taken:
                if then is not None:
                    then()
            if closing:
                connection.close()
                return

    def _gather(self) -> None:
        """Wait COMMIT_S for more rows, unless a caller waits for these."""
        until = time.monotonic() + COMMIT_S

        def is_enough() -> bool:
            return bool(self._urgent) or self._closing or self._backlog >= OPERATIONS_A_COMMIT_MAX

        while not is_enough() and (left_s := until - time.monotonic()) > 0:
            self._changed.wait(left_s)

    def _take(self) -> list[Operation]:
        taken: list[Operation] = []
        rows = 0
        while self._waiting and rows < OPERATIONS_A_COMMIT_MAX:
            taken.append(self._waiting.popleft())
            rows += len(taken[-1][1])
            self._urgent -= taken[-1][2] is not None
        self._backlog -= rows
        return taken

    def _write(self, connection: sqlite3.Connection, taken: list[Operation]) -> None:
        if not taken:
            return
        if any(statement is PUT for statement, _, _ in taken):
            self._sync()
        connection.execute("BEGIN")
        for statement, rows, _ in taken:
            connection.executemany(statement, rows)
        connection.execute("COMMIT")
        if any(then is not None for _, _, then in taken):
            # `then` reports that these rows are deleted, which must survive a crash of the host.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not self._backlog:
            self._is_behind = False

    def _break(self, connection: sqlite3.Connection, taken: list[Operation], problem: str) -> None:
        """Give up: `failed` removes the file, and the next start rebuilds it."""
        try:
            connection.close()
        except sqlite3.Error as error:
            problem += f"; closing: {error}"
        with self._changed:
            self._broken = True
            left = taken + list(self._waiting)
            self._waiting.clear()
            self._backlog = 0
        self._failed(problem)
        for _, _, then in left:
            if then is not None:
                then()


MAPPED_BYTES: Final = 256 * 2**10
"""More than SQLite initially maps of a log's index: on a full file system, accessing that mapping
would kill the process."""


def load_index(files: SlabFiles, log: Any) -> tuple[sqlite3.Connection | None, Entries]:
    """Return the index and its entries, rebuilt from the slots if it is missing or damaged.

    None: it cannot be written, and was removed. Its content is read before anything is written, so
    that a full disk costs the index but no page.
    """
    folder = files.folder
    entries, is_unchanged = _indexed_entries(files, log)
    if not _has_room(files):
        log.warning("disk.index_failed", error="no space for it")
        remove_index(folder.path)
        return None, entries
    for _ in range(2):
        try:
            rows = None if is_unchanged else entries
            connection = open_index(folder.path, bytes_max=folder.index_bytes, entries=rows)
            return connection, entries
        except sqlite3.Error as error:
            log.warning("disk.index_failed", error=str(error))
        # The file may be damaged, or use the missing room: try again without it.
        remove_index(folder.path)
        is_unchanged = False
    return None, entries


def _indexed_entries(files: SlabFiles, log: Any) -> tuple[Entries, bool]:
    """Return the existing entries, and whether they are exactly those of the index."""
    folder = files.folder
    problem = "" if folder.fresh else MISSING
    if (folder.path / INDEX_NAME).exists():
        try:
            if has_log(folder.path) and not _has_room(files):
                raise sqlite3.OperationalError("no space to read its log")
            with closing(read_index(folder.path, locked=True)) as connection:
                loaded = load_entries(connection)
            entries = consistent(loaded, files, folder.slab_count)
            if len(entries) < len(loaded):
                log.warning("disk.entries_dropped", pages=len(loaded) - len(entries))
            return entries, len(entries) == len(loaded)
        except sqlite3.Error as error:
            problem = str(error)
    if problem:
        log.warning("disk.index_rebuild_started", folder=str(folder.path), problem=problem)
    remove_index(folder.path)
    return consistent(scan(files, log), files, folder.slab_count), False


def _has_room(files: SlabFiles) -> bool:
    return files.folder.free_bytes()[0] >= MAPPED_BYTES
