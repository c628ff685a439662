"""The published segment, from the side of its owner.

Owns    one file in shm_dir, mode 0600 or 0660 for a sharing group, with a lock that is held until
        this process ends: a process that can acquire the lock knows that the owner is dead.
Keeps   only `store_words` changes a seal: the word by one aligned 8-byte store, after the rest. No
        memory is accessed before the file system has allocated it: a full file system is an error
        at start or while populating, never a bus error later. The words of slots that were never
        reserved are zero, which no record has.
Limits  POPULATE_CHUNK_BYTES a step, so that closing never waits long for the populating thread.

The directory's table is a file of the same kind next to the segment; its content belongs to the
directory actor. Files that dead processes left are removed: if the lock of a file can be acquired,
it has no owner. They are unlinked by name, never truncated, written or reused: a process that still
has one mapped keeps reading the old bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import threading
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.errors import AddressTaken, PoolTooLarge, Rejected
from peercache.installation.library import function
from peercache.memory.kernel import Bytes, let_go_in_children, prefault, unfault
from peercache.memory.layout import (
    Header,
    Layout,
    boot_id,
    is_node_file,
    pack_header,
    segment_name,
    table_name,
)
from peercache.model.ids import Incarnation
from peercache.model.process import ForkGuard
from peercache.model.runs import I64, U64
from peercache.model.seal import SEAL, Seals
from peercache.observability.log import get_logger
from peercache.trust.sharing import Sharing

POPULATE_CHUNK_BYTES = 16 * 2**20
"""About 10 ms of zeroing, during which no thread of the process can map memory."""

CREATE_ATTEMPTS_MAX = 100
"""Each failed attempt means that another node's start removed the new file as a leftover in the
microseconds before it was locked; a hundred in a row do not happen."""

_store = function(
    "peercache_seals_store", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, *[ctypes.c_char_p] * 3,
    ctypes.c_uint64, keeps_gil=True,
)  # fmt: skip


class PublishedSegment:
    """A node's own segment. `populate` may run in a thread at the same time as all other calls.

    path:        the file.
    layout:      offsets in the file.
    incarnation: that of the node.
    seals:       (seals_count,) SEAL; change them with `store_words` only.
    words:       (seals_count,) uint64, the words of the seals, a view.
    pages:       (page_bytes,) uint8, the page memory; do not access it beyond `usable_bytes`.
    """

    def __init__(self, path: Path, file: int, layout: Layout, incarnation: Incarnation) -> None:
        """Map a locked file of the full size; use `create`."""
        self.path = path
        self.layout = layout
        self.incarnation = incarnation
        self.usable_bytes = 0
        self._file = file
        self._fork = ForkGuard()
        self._populating = threading.Lock()
        self._closed = False
        mapping = mmap.mmap(file, layout.total_bytes, mmap.MAP_SHARED)
        self._whole: Bytes = np.frombuffer(mapping, np.uint8)
        self.seals: Seals = np.frombuffer(mapping, SEAL, layout.seals_count, layout.seals_offset)
        self._seals_at = self.seals.ctypes.data
        self.words: U64 = self.seals["word"]
        self.pages: Bytes = self._whole[layout.pages_offset :]

    @classmethod
    def create(
        cls, shm_dir: str | os.PathLike[str], *, incarnation: Incarnation, page_bytes: int,
        granule: int, huge_page_bytes: int = 0, sharing: Sharing | None = None,
    ) -> PublishedSegment:  # fmt: skip
        """Create the file, its header and its seals; `populate` adds the page memory.

        Raises PoolTooLarge if shm_dir has no room, AddressTaken if the file exists already, OSError
        if shm_dir cannot be used at all. With `huge_page_bytes` shm_dir is on a hugetlbfs of such
        pages. The file is open to the group of `sharing`, if it names one.
        """
        layout = Layout.of(page_bytes, granule, huge_page_bytes)
        path = Path(shm_dir) / segment_name(incarnation)
        free_bytes = shutil.disk_usage(shm_dir).free
        # A hugetlbfs without a limit of its own reports no free pages.
        if not huge_page_bytes and free_bytes < layout.memory_bytes:
            raise PoolTooLarge(os.fspath(shm_dir), layout.memory_bytes, free_bytes)
        file = create_locked(path)
        try:
            if sharing is not None:
                sharing.open_to_group(file)
            os.ftruncate(file, layout.total_bytes)
            _reserve(file, 0, layout.seals_end, path, layout)
            segment = cls(path, file, layout, incarnation)
            raw = pack_header(
                Header(incarnation, layout.granule, layout.page_bytes, boot_id(), huge_page_bytes)
            )
            # Through the mapping: a hugetlbfs does not support write().
            segment._whole[: len(raw)] = np.frombuffer(raw, np.uint8)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        return segment

    def populate(self, upto_bytes: int) -> int:
        """Make page memory usable up to `upto_bytes`; return the usable size, which never shrinks.

        Blocks without the GIL, about 0.5 s per GiB: for a worker thread. Returns early when the
        segment closes. Raises PoolTooLarge when the file system is full: memory that was usable
        stays usable.
        """
        goal = min(upto_bytes, self.layout.page_bytes)
        # A huge page is populated as a whole.
        chunk_bytes = max(POPULATE_CHUNK_BYTES, self.layout.huge_page_bytes)
        while self.usable_bytes < goal:
            with self._populating:
                if self._closed:
                    break
                begin = self.usable_bytes
                end = min(begin + chunk_bytes, goal)
                if begin >= end:
                    break  # Another thread has populated it.
                offset = self.layout.pages_offset + begin
                _reserve(self._file, offset, end - begin, self.path, self.layout)
                self._prefault(begin, end)
                self.usable_bytes = end
        return self.usable_bytes

    def store_words(self, indices: I64, values: U64, named: Seals | None = None) -> None:
        """Store `values[i]` at word `indices[i]`, in order, each as one aligned 8-byte store.

        indices: (n,) int64, granules of the page memory. values: (n,) uint64.
        named:   (n,) SEAL, whose key, space and length are stored before the words; None keeps the
                 current ones.
        """
        assert indices.dtype == np.int64, indices.dtype
        assert values.dtype == np.uint64, values.dtype
        assert indices.shape == values.shape, (indices.shape, values.shape)
        assert named is None or (named.dtype == SEAL and named.shape == indices.shape), named
        # As bytes: asking numpy for the address of an array takes longer than the call.
        done = _store(
            self._seals_at, len(self.seals), indices.tobytes(), values.tobytes(),
            None if named is None else named.tobytes(), len(indices),
        )  # fmt: skip
        # A wrong index would overwrite something else.
        assert done, (indices, len(self.seals))

    def close(self) -> None:
        """Unlink the file and release the memory, after a running step of `populate`.

        A holder of `seals`, `words` or `pages` keeps the memory mapped until it drops them.
        """
        with self._populating:
            if self._closed:
                return
            self._closed = True
        if not self._fork.is_child:
            # The file belongs to its parent.
            self.path.unlink(missing_ok=True)
        unfault(self._whole)
        empty: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._whole = self.pages = empty
        self.seals = np.empty(0, SEAL)
        self.words = np.empty(0, np.uint64)
        os.close(self._file)

    def _prefault(self, begin: int, end: int) -> None:
        try:
            prefault(self.pages[begin:end], write=True)
        except OSError as error:
            # The memory was reserved above; only a limit of our own container can prevent this.
            if error.errno not in (errno.EFAULT, errno.ENOMEM, errno.ENOSPC):
                raise
            raise _too_large(self.path, self.layout) from error


def create_locked(path: Path) -> int:
    """Return the descriptor of a new, locked file at `path`; children do not inherit the lock."""
    let_go_in_children()
    for _ in range(CREATE_ATTEMPTS_MAX):
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(path, flags, 0o600)
        except FileExistsError as error:
            raise AddressTaken("shm_dir", os.fspath(path)) from error
        try:
            # Waits for microseconds while another starting node checks whether we are alive.
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_still(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        # The other node checked before the lock was acquired, and removed the file as a leftover.
        os.close(file)
    raise AddressTaken("shm_dir", os.fspath(path))


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _reserve(file: int, offset: int, size: int, path: Path, layout: Layout) -> None:
    """Have the file system allocate memory for a part of the file."""
    try:
        os.posix_fallocate(file, offset, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise _too_large(path, layout) from error


def _too_large(path: Path, layout: Layout) -> PoolTooLarge:
    return PoolTooLarge(
        os.fspath(path.parent), layout.memory_bytes, shutil.disk_usage(path.parent).free
    )


GROUP_READS_MODE = 0o640
"""Clients of the group may read, and only the owner may write."""


@final
class TableFile:
    """An empty file for a table, locked. file: its descriptor."""

    def __init__(self, path: Path, file: int) -> None:
        """Take over a locked file; use `create`."""
        self.path = path
        self.file = file
        self._fork = ForkGuard()

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], incarnation: Incarnation, sharing: Sharing | None
    ) -> TableFile:
        """Create the file; raises AddressTaken if it exists already, OSError, ConfigError."""
        path = Path(folder) / table_name(incarnation)
        file = create_locked(path)
        try:
            if sharing is not None:
                sharing.open_to_group(file, GROUP_READS_MODE)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        return cls(path, file)

    def close(self) -> None:
        """Remove the name; the table stays valid where it is mapped. May be repeated."""
        if self.file < 0 or self._fork.is_child:
            return
        self.path.unlink(missing_ok=True)
        os.close(self.file)
        self.file = -1


def remove_leftovers(shm_dir: str | os.PathLike[str], sharing: Sharing | None = None) -> list[str]:
    """Unlink the segments and tables of dead processes; return their names, sorted.

    sharing: the users whose files may be removed; None: this process's user and root. Never raises
    for a single file: a file that cannot be checked stays.
    """
    try:
        folder = os.open(shm_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []  # The creation of the segment there will report it.
    except OSError as error:
        get_logger().warning("segment.scan_failed", shm_dir=str(shm_dir), reason=str(error))
        return []
    try:
        return _removed(folder, sharing or Sharing.of())
    finally:
        os.close(folder)


def _removed(folder: int, sharing: Sharing) -> list[str]:
    removed = []
    for name in sorted(name for name in os.listdir(folder) if is_node_file(name)):
        try:
            if _remove_if_dead(name, folder, sharing):
                removed.append(name)
        except (OSError, Rejected) as error:  # noqa: PERF203 - one bad file must not keep the others
            # Gone already, of another user, or not a segment.
            get_logger().debug("segment.leftover_kept", name=name, reason=str(error))
    if removed:
        get_logger().info("segment.leftovers_removed", names=removed)
    return removed


def _remove_if_dead(name: str, folder: int, sharing: Sharing) -> bool:
    file = sharing.open_file(name, os.O_RDONLY, folder=folder, what=f"the segment {name}")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # Its owner is alive.
        # The name may be removed only while we hold the lock of the very file that has the name. A
        # starting node waits for this lock, then notices that its name is gone, and tries again;
        # without this check, we could remove the name of that second file.
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not os.path.samestat(named, os.fstat(file)):
            return False
        os.unlink(name, dir_fd=folder)
        return True
    finally:
        os.close(file)
