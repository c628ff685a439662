"""The page store: performs the disk actor's effects, and reports the results.

Owns    one node's folder and its lock, the slab files, the index, and the threads of all of them.
Takes   Write, Load, Forget, NoteUse; `perform` never blocks.
Sends   DiskOpened once, then an answer to every job; DiskEnded when the disk is not used any more.
Keeps   a page is DONE only with correct bytes: on disk as they were in the pool, in the pool as
        they were on disk. An index row is put after its page is written. It is deleted when its
        place is reused, in a batch: a kill before that leaves the row of a page that does not exist
        any more.
Limits  threads, waiting pages (jobs), waiting rows (index_file), open files (files).

Failures of the file system never raise in the caller, nor block it: not at start, which runs in a
thread, too, and not at `close`.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.ports import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_ENTRY,
    DISK_REPLACED,
    DISK_UNTRIED,
    DiskEffect,
    DiskEnded,
    DiskFact,
    DiskOpened,
    DiskRoom,
    Forget,
    ForgetDone,
    Load,
    LoadDone,
    NoteUse,
    Write,
    WriteDone,
)
from peercache.errors import ConfigError
from peercache.observability.log import get_logger
from peercache.storage.folder import Folder, claim
from peercache.storage.index_file import IndexWriter, load_index, remove_index
from peercache.storage.jobs import Job, Unit, Workers
from peercache.storage.mover import PageMover, PoolMemory, units_of
from peercache.storage.ring import READS_AT_ONCE
from peercache.storage.slab_files import NO_ROOM, SlabFiles

STUCK_S: Final = 10.0
"""How long after a deadline a call may still run before the disk is given up."""

ROOM_S: Final = 10.0
"""Pause before a file system without room for our folder is tried again."""

CLOSE_S: Final = 2.0
"""How long `close` waits for running calls."""


@attrs.define(eq=False)
class _Opened:
    """The objects that exist once the folder is locked."""

    folder: Folder
    files: SlabFiles
    index: IndexWriter
    mover: PageMover
    workers: Workers


@final
class DiskStore:
    """The disk of one node. Call `start`, then `perform` with the actor's effects, then `close`."""

    def __init__(
        self,
        disk_path: str,
        *,
        size_bytes: int,
        cluster: str = "",
        pool: PoolMemory,
        notify: Callable[[DiskFact], None],
        free_floor: float = 0.05,
        threads: int = 4,
        reads_at_once: int = READS_AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
        stuck_s: float = STUCK_S,
        log: Any = None,
    ) -> None:
        """Prepare; no file is accessed yet.

        cluster: the cluster of the folder's pages.
        notify: called with the results, from any thread, one at a time and in order; never blocks.
        reads_at_once: reads in flight of each thread.
        clock:  the time of the deadlines in Write and Load; callable from any thread.
        """
        self._disk_path = disk_path
        self._size_bytes = size_bytes
        self._cluster = cluster
        self._pool = pool
        self._notify_node = notify
        self._reporting = threading.RLock()
        self._floor = free_floor
        self._threads = threads
        self._reads_at_once = reads_at_once
        self._clock = clock
        self._stuck_s = stuck_s
        self._log = log if log is not None else get_logger()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.waits_for_room = False
        """Whether the file system had no room yet for the few files of a new folder."""
        self._usable = -1
        self._is_limited = False
        self._opened: _Opened | None = None
        self._opening = threading.Thread(target=self._open, name="peercache-disk", daemon=True)

    def start(self) -> None:
        """Start to open; DiskOpened or DiskEnded reports the result."""
        self._opening.start()

    def perform(self, effect: DiskEffect) -> None:
        """Start an effect of the disk actor; never blocks, never raises for external failures."""
        opened = self._opened
        if opened is None:
            self._refuse(effect)
            return
        match effect:
            case Write() if not opened.index.has_room():
                # The disk does not keep up: these pages are dropped, untouched.
                self._refuse(effect)
            case Write():
                lengths = effect.records["length"].tolist()
                job = Job.of(effect, len(lengths))
                opened.workers.submit(job, units_of(job, lengths, effect.until))
            case Load():
                lengths = effect.lengths.tolist()
                job = Job.of(effect, len(lengths))
                opened.workers.submit(job, units_of(job, lengths, effect.until))
            case Forget():
                self._forget(opened, effect)
            case NoteUse(places, unix_s):
                opened.index.use(places, unix_s)

    @property
    def is_direct(self) -> bool:
        """Return whether an open store uses direct I/O."""
        return self._opened is not None and self._opened.files.is_direct

    def close(self) -> None:
        """Close the folder, within about CLOSE_S even if the disk hangs."""
        with self._lock:
            self._closed.set()
            opened, self._opened = self._opened, None
        if opened is None:
            return
        # The workers first: the index stores the rows of what they have just written.
        ended = opened.workers.close(CLOSE_S / 2)
        ended = opened.index.close(CLOSE_S) and ended
        # While a call may still reach the disk, the folder stays locked until the process ends, and
        # the files stay open: closing one may block on the disk, too.
        if ended:
            opened.files.close()
            opened.folder.close()

    def _notify(self, fact: DiskFact) -> None:
        with self._reporting:
            self._notify_node(fact)

    # --- opening ----------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._open_when_there_is_room()
        except (OSError, ConfigError, sqlite3.Error) as error:
            why = _plain(error)
            self._log.warning("disk.open_failed", path=self._disk_path, error=why)
            self._notify(DiskEnded(why))
        except Exception as error:
            self._log.error("disk.internal_error", error=repr(error), exc_info=True)
            self._notify(DiskEnded(f"a bug: {error!r}"))

    def _open_when_there_is_room(self) -> None:
        """Open the folder; a full file system may have no room for the few files of a new one."""
        is_logged = False
        while not self._closed.is_set():
            try:
                self._open_folder(time.monotonic())
                self.waits_for_room = False
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self.waits_for_room = True
                if not is_logged:
                    self._log.warning("disk.space_ran_out", path=self._disk_path, error=str(error))
                    is_logged = True
            self._closed.wait(ROOM_S)

    def _open_folder(self, started: float) -> None:
        folder = claim(self._disk_path, self._size_bytes, cluster=self._cluster, log=self._log)
        try:
            files = SlabFiles(folder, free_floor=self._floor, log=self._log, read_only=False)
            try:
                connection, entries = load_index(files, self._log)
            except BaseException:
                files.close()
                raise
        except BaseException:
            folder.close()
            raise
        failed = partial(self._index_failed, folder)
        index = IndexWriter(connection, failed=failed, log=self._log, sync=files.sync)
        mover = PageMover(
            files,
            pool=self._pool,
            reads_at_once=self._reads_at_once,
            ended=self._end,
            log=self._log,
        )
        workers = Workers(
            mover.perform,
            threads=self._threads,
            stuck_s=self._stuck_s,
            clock=self._clock,
            judged=partial(_keep_rows, index),
            notify=self._notify,
            look=partial(self._look_after, files),
            log=self._log,
        )
        # What is reported at first, and not repeated by the first check.
        self._usable = folder.slab_count * folder.slab_bytes
        self._log.info(
            "disk.opened",
            folder=str(folder.path),
            pages=len(entries),
            bytes_max=folder.slab_count * folder.slab_bytes,
            direct=files.is_direct,
            seconds=round(time.monotonic() - started, 3),
        )
        opened = _Opened(folder, files, index, mover, workers)
        with self._lock:
            self._opened = opened
            closed = self._closed.is_set()
        if closed:
            self.close()
            return
        wanted = folder.slab_count * folder.slab_bytes
        self._notify(DiskOpened(wanted, folder.slab_bytes, entries, int(time.time())))
        self._report_room(files)

    # --- jobs -------------------------------------------------------------------------------------

    def _forget(self, opened: _Opened, effect: Forget) -> None:
        done = ForgetDone(effect.job) if effect.job else None
        opened.index.drop(effect.places, partial(self._notify, done) if done else None)

    def _refuse(self, effect: DiskEffect) -> None:
        """Answer that nothing was tried: the store is not open, or accepts no more."""
        match effect:
            case Write():
                self._notify(WriteDone(effect.job, bytes((DISK_UNTRIED,)) * len(effect.places)))
            case Load():
                untried = bytes((DISK_UNTRIED,)) * len(effect.places)
                checksums = np.zeros(len(effect.places), np.uint64)
                self._notify(LoadDone(effect.job, untried, checksums))
            case Forget():
                if effect.job:
                    self._notify(ForgetDone(effect.job))
            case NoteUse():
                pass

    # --- ends -------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        opened = self._opened
        if opened is not None:
            opened.workers.end_soon(reason)

    def _look_after(self, files: SlabFiles) -> None:
        folder = files.folder
        if not folder.is_there():
            self._end(f"{folder.path} has gone")
            return
        self._report_room(files)

    def _report_room(self, files: SlabFiles) -> None:
        """Report how much the file system has room for, if that has changed."""
        try:
            usable = files.usable_bytes()
        except OSError:
            return  # The next check reports it, or that the folder has gone.
        if usable == self._usable:
            return
        self._usable = usable
        self._notify(DiskRoom(usable))
        wanted = files.folder.slab_count * files.folder.slab_bytes
        # Once: other programs may take and free the last room all the time.
        if usable < wanted and not self._is_limited:
            self._is_limited = True
            self._log.warning(
                "disk.size_limited",
                path=self._disk_path,
                disk_size=wanted,
                usable=usable,
                problem="the file system has no room for disk_size above disk_free_floor: free "
                "some room, lower disk_size, or name another disk_path",
            )

    def _index_failed(self, folder: Folder, problem: str) -> None:
        """Continue without an index; one that is permanently behind must not be trusted later."""
        self._log.warning("disk.index_failed", error=problem)
        try:
            remove_index(folder.path)
        except OSError as error:
            opened = self._opened
            if opened is not None:
                opened.workers.end(f"the index cannot be written ({problem}) or removed ({error})")


def _keep_rows(index: IndexWriter, unit: Unit, states: bytes) -> None:
    """Put index rows of written pages, drop those of damaged ones."""
    effect = unit.job.effect
    if isinstance(effect, Load) and not states.strip(bytes((DISK_DONE,))):
        return
    outcomes = np.frombuffer(states, np.uint8)
    begin, end = unit.pages.start, unit.pages.stop
    if isinstance(effect, Load):
        wrong = effect.places[begin:end][np.isin(outcomes, (DISK_DAMAGED, DISK_REPLACED))]
        if len(wrong):
            index.drop(wrong)
    elif isinstance(effect, Write):
        done = np.flatnonzero(outcomes == DISK_DONE) + begin
        if len(done):
            index.put(_entries_of(effect, done))


def _entries_of(effect: Write, pages: npt.NDArray[np.intp]) -> npt.NDArray[np.void]:
    entries = np.zeros(len(pages), DISK_ENTRY)
    for name in ("key", "length"):
        entries[name] = effect.records[name][pages]
    entries["namespace"] = effect.namespaces[pages]
    entries["place"] = effect.places[pages]
    entries["sequence"] = effect.sequences[pages]
    entries["written"] = entries["used"] = int(time.time())
    return entries


def _plain(error: Exception) -> str:
    """Return the problem of the folder and what to do, for operators."""
    if not isinstance(error, OSError):
        return str(error)
    at = f"{error.filename}: " if error.filename else ""
    return (
        f"{at}{error.strerror or error}: make it a folder that the node may write to, or name "
        "another disk_path, and restart the node"
    )
