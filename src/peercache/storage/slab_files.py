"""Slab files: created when first needed, opened on use, read and written with direct I/O.

Owns    the descriptors of the slabs, and the slot size of each slab.
Keeps   a slab file is allocated completely before a slot is written, or not created at all; the
        floor of free space is checked before. A slab's header has its slot size before a slot is
        written. No descriptor is closed during a call.
Limits  FILES_OPEN_MAX descriptors, except for those in use.

Direct I/O requires aligned offsets, lengths and memory: all are blocks of 4 KiB here. If the file
system refuses it, or is full at the start, the same calls use the page cache, and that is logged
once.

A lost index is rebuilt from the headers of slots, and an index is compared with them. A header is
trusted if it is complete and names its own place. Of two slots with the same key, the last written
one counts. The pages themselves are verified when they are loaded.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.slabs import BLOCK_BYTES, slot_blocks, slot_blocks_of, slots_in
from peercache.actors.ports import DISK_ENTRY
from peercache.model.keys import parts_of
from peercache.storage.folder import Folder, slab_files
from peercache.storage.layout import (
    SlabHeader,
    SlotHeader,
    pack_slab,
    parse_slab,
    parse_slot,
    slab_name,
)

FILES_OPEN_MAX: Final = 64
"""A process has 1,024 descriptors by default, most of which are for connections."""

PROBE_NAME: Final = "probe.tmp"

NO_FILE: Final = "a link, or no file"

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoomError(Exception):
    """The file system is full, or would have less free than its floor."""


@attrs.define(eq=False)
class _Opened:
    """A descriptor, the number of calls that use it, and whether the last of them closes it."""

    file: int
    uses: int = 0
    is_over: bool = False


class SlabFiles:
    """The slabs of one folder. Every method may be called from any thread."""

    def __init__(self, folder: Folder, *, free_floor: float, log: Any, read_only: bool) -> None:
        """Find the existing slabs. free_floor: the fraction of the file system to leave free."""
        self.folder = folder
        self._floor = free_floor
        self._log = log
        self._read_only = read_only
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        self._unsynced: set[int] = set()
        self.is_direct = self._probe()
        self.blocks_of: dict[int, int] = {}
        """The slot size of each slab that has one."""
        for number in slab_files(folder.path):
            header = self._header_of(number)
            if header is not None:
                self.blocks_of[number] = header.blocks

    def name_of(self, place: int) -> str:
        """Return the file of a place, for the log."""
        return str(self.folder.path / slab_name(place // self.folder.slab_bytes))

    def prepare(self, number: int, blocks: int) -> None:
        """Prepare a slab with this slot size; raise NoRoomError, or OSError of the file system."""
        if self.blocks_of.get(number) == blocks:
            return
        with self._making:
            if self.blocks_of.get(number) == blocks:
                return
            self.blocks_of.pop(number, None)
            if self._size_of(number) < self.folder.slab_bytes:
                # New, truncated, or left by a crash while it was created.
                self._make(number)
            header = SlabHeader(number, blocks, self.folder.slab_bytes)
            with aligned(1) as memory:
                memory[:] = pack_slab(header)
                self.write(number * self.folder.slab_bytes, [memory])
            self.blocks_of[number] = blocks

    def usable_bytes(self) -> int:
        """Return the bytes of all slabs, of those that there is room to create, too."""
        free, total = self.folder.free_bytes()
        slab_bytes, made = self.folder.slab_bytes, len(self.blocks_of)
        more = max(0, int(free - self._floor * total)) // slab_bytes
        return min(self.folder.slab_count, made + more) * slab_bytes

    def forget(self, number: int) -> None:
        """Mark a slab to be prepared again before the next write: its file is gone."""
        self.blocks_of.pop(number, None)
        with self._lock:
            opened = self._opened.pop(number, None)
            if opened is not None:
                opened.is_over = True
                self._close_unused(opened)

    def write(self, place: int, buffers: Sequence[memoryview]) -> None:
        """Write aligned memory at a place; raise NoRoomError or OSError unless everything is
        written.

        FileNotFoundError also if the file has no name any more: what is written there is lost with
        the descriptor.
        """
        number, offset = divmod(place, self.folder.slab_bytes)
        wanted = sum(len(buffer) for buffer in buffers)
        with self._use(number) as file:
            if not os.fstat(file).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "removed", self.name_of(place))
            try:
                written = os.pwritev(file, buffers, offset)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise NoRoomError from error
                raise
            finally:
                with self._lock:
                    self._unsynced.add(number)
        if written != wanted:
            # A full or failing disk causes a short write; writing the rest would show why.
            raise OSError(errno.EIO, f"wrote {written} of {wanted} bytes")

    def read(self, place: int, buffers: Sequence[memoryview]) -> int:
        """Read into aligned memory; return the number of bytes. Raises OSError."""
        number, offset = divmod(place, self.folder.slab_bytes)
        with self._use(number) as file:
            return os.preadv(file, buffers, offset)

    @contextmanager
    def using(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Keep slabs open during a block; yield their descriptors, -1 of one that does not open."""
        files: dict[int, int] = {}
        with ExitStack() as stack:
            for number in numbers:
                if number not in files:
                    files[number] = -1
                    with suppress(OSError):
                        files[number] = stack.enter_context(self._use(number))
            yield [files[number] for number in numbers]

    def sync(self) -> None:
        """Make all earlier writes durable; waits for the disk. Raises OSError."""
        with self._lock:
            numbers, self._unsynced = self._unsynced, set()
        try:
            for number in numbers:
                # If the file was removed in the meantime, its pages are gone anyway.
                with suppress(FileNotFoundError), self._use(number) as file:
                    os.fdatasync(file)
        except BaseException:
            with self._lock:
                self._unsynced |= numbers
            raise

    def close(self) -> None:
        """Close every file without a call in flight."""
        with self._lock:
            for number in [n for n, opened in self._opened.items() if not opened.uses]:
                os.close(self._opened.pop(number).file)

    @contextmanager
    def _use(self, number: int) -> Iterator[int]:
        with self._lock:
            opened = self._opened.get(number)
            if opened is None:
                flags = os.O_RDONLY if self._read_only else os.O_RDWR
                direct = os.O_DIRECT if self.is_direct else 0
                path = self.folder.path / slab_name(number)
                opened = self._opened[number] = _Opened(_open_own(path, flags | direct))
            opened.uses += 1
            self._opened.move_to_end(number)
            self._close_idle()
        try:
            yield opened.file
        finally:
            with self._lock:
                opened.uses -= 1
                self._close_unused(opened)

    def _close_unused(self, opened: _Opened) -> None:
        if opened.is_over and not opened.uses:
            os.close(opened.file)

    def _close_idle(self) -> None:
        excess = len(self._opened) - FILES_OPEN_MAX
        if excess > 0:
            idle = [number for number, opened in self._opened.items() if not opened.uses]
            for number in idle[:excess]:
                os.close(self._opened.pop(number).file)

    def _size_of(self, number: int) -> int:
        """Return the bytes of a slab file; 0 if it is missing, or something else is in its place.

        A link or a pipe there is removed: no node has created it.
        """
        path = self.folder.path / slab_name(number)
        try:
            found = path.lstat()
        except FileNotFoundError:
            return 0
        if stat.S_ISREG(found.st_mode):
            return found.st_size
        self._log.warning("disk.slab_removed", file=str(path), problem=NO_FILE)
        path.unlink()
        self.forget(number)
        return 0

    def _make(self, number: int) -> None:
        """Allocate a slab file completely, or leave none."""
        slab_bytes = self.folder.slab_bytes
        free, total = self.folder.free_bytes()
        if free - slab_bytes < self._floor * total:
            raise NoRoomError
        path = self.folder.path / slab_name(number)
        file = _open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(file, 0, slab_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            # An earlier descriptor is of a file that has no name any more.
            self.forget(number)
            if error.errno in NO_ROOM:
                raise NoRoomError from error
            raise
        finally:
            os.close(file)
        # The name of a new file survives a power failure only after a sync of its folder.
        folder = os.open(self.folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _header_of(self, number: int) -> SlabHeader | None:
        """Return the header of a slab, if it is valid."""
        with aligned(1) as memory:
            try:
                count = self.read(number * self.folder.slab_bytes, [memory])
            except OSError as error:
                self._log.warning("disk.slab_read_failed", file=slab_name(number), error=str(error))
                return None
            header = parse_slab(memory[:count])
        if header is None or (header.number, header.slab_bytes) != (number, self.folder.slab_bytes):
            return None
        return header

    def is_blank(self, number: int) -> bool:
        """Return whether a slab has no header yet: its node was killed while it created it."""
        with aligned(1) as memory:
            try:
                count = self.read(number * self.folder.slab_bytes, [memory])
            except OSError:
                return False
            return not any(memory[:count])

    def _probe(self) -> bool:
        """Return whether direct I/O works here: some file systems refuse it only when used.

        On a full one that cannot be tested, and the page cache works everywhere.
        """
        if self._read_only:
            return False
        path = self.folder.path / PROBE_NAME
        try:
            path.unlink(missing_ok=True)
            file = _open_own(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                with aligned(2) as memory:
                    memory[:BLOCK_BYTES] = bytes(range(256)) * (BLOCK_BYTES // 256)
                    os.pwritev(file, [memory[:BLOCK_BYTES]], 0)
                    os.preadv(file, [memory[BLOCK_BYTES:]], 0)
                    works = memory[:BLOCK_BYTES] == memory[BLOCK_BYTES:]
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, *NO_ROOM):
                raise
            works = False
        finally:
            path.unlink(missing_ok=True)
        if not works:
            self._log.warning("disk.direct_io_refused", folder=str(self.folder.path))
        return works


def _open_own(path: Path, flags: int) -> int:
    """Open a file of this folder, without following links. Raises OSError."""
    # Opening a pipe without O_NONBLOCK blocks; for a file the flag has no effect.
    own = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags | own, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.ELOOP, NO_FILE, str(path))


@contextmanager
def aligned(blocks: int) -> Iterator[memoryview]:
    """Allocate memory for whole blocks, aligned for direct I/O, during a block."""
    memory = mmap.mmap(-1, blocks * BLOCK_BYTES)
    view = memoryview(memory)
    try:
        yield view
    finally:
        view.release()
        memory.close()


SCAN_THREADS: Final = 8
"""Reads in flight: as many as a disk needs for small reads."""

WHOLE_BLOCKS_MAX: Final = 8
"""Slots up to this size are read with their pages: fewer, larger reads are faster than skipping."""

WINDOW_BYTES: Final = 2**20

Entries = npt.NDArray[np.void]


def headers_of(files: SlabFiles, number: int, memory: memoryview) -> Iterator[SlotHeader]:
    """Yield the valid headers of a slab's slots. Raises OSError."""
    blocks = files.blocks_of[number]
    first = number * files.folder.slab_bytes + BLOCK_BYTES
    slot_bytes = blocks * BLOCK_BYTES
    slots = slots_in(files.folder.slab_bytes, blocks)
    together = max(1, WINDOW_BYTES // slot_bytes) if blocks <= WHOLE_BLOCKS_MAX else 1
    size = together * slot_bytes if together > 1 else BLOCK_BYTES
    for begin in range(0, slots, together):
        at = first + begin * slot_bytes
        count = files.read(at, [memory[:size]])
        for slot in range(min(together, slots - begin)):
            offset = slot * slot_bytes
            header = parse_slot(memory[offset : min(offset + BLOCK_BYTES, count)], at + offset)
            if header is not None and slot_blocks_of(header.length) == blocks:
                yield header


def scan(files: SlabFiles, log: Any) -> Entries:
    """Return the entries of every slab, unordered; a key may occur more than once."""

    def of_slab(number: int) -> Entries:
        memory = memoryview(mmap.mmap(-1, WINDOW_BYTES))
        found: list[tuple[Any, ...]] = []
        try:
            found.extend(
                (h.key, parts_of(h.namespace), h.place, h.sequence, h.length,
                 h.written, h.written, 0)
                for h in headers_of(files, number, memory)
            )  # fmt: skip
        except OSError as error:
            log.warning("disk.slab_read_failed", file=slab_name(number), error=str(error))
        return np.array(found, DISK_ENTRY)

    numbers = sorted(files.blocks_of)
    with ThreadPoolExecutor(SCAN_THREADS, "peercache-scan") as pool:
        parts = list(pool.map(of_slab, numbers))
    return np.concatenate(parts) if parts else np.empty(0, DISK_ENTRY)


def consistent(entries: Entries, files: SlabFiles, slab_count: int) -> Entries:
    """Return the entries that are consistent with each other, coldest first.

    Their slabs exist and have their slot size, their places are those of slots, no two share one,
    and for each key the newest stays.
    """
    slab_bytes = files.folder.slab_bytes
    blocks_of = np.zeros(slab_count, np.int64)
    for number, size in files.blocks_of.items():
        if number < slab_count:
            blocks_of[number] = size
    entries = entries[entries["place"] < np.uint64(slab_count * slab_bytes)]
    entries = entries[entries["length"] > 0]
    slabs, within = np.divmod(entries["place"].astype(np.int64), slab_bytes)
    blocks = slot_blocks(entries["length"])
    within -= BLOCK_BYTES
    slots = within // (blocks * BLOCK_BYTES)
    fits = (blocks_of[slabs] == blocks) & (within >= 0) & (within % (blocks * BLOCK_BYTES) == 0)
    fits &= slots < (slab_bytes // BLOCK_BYTES - 1) // np.maximum(blocks, 1)
    entries = entries[fits]
    entries["slot"] = blocks[fits]
    newest_last = entries["sequence"].argsort(kind="stable")
    entries = entries[newest_last]
    for field in ("place", "key"):
        entries = entries[_last_of_each(entries, field)]
    order = np.lexsort((entries["sequence"], entries["used"]))
    ordered: Entries = entries[order]
    return ordered


def _last_of_each(entries: Entries, field: str) -> npt.NDArray[np.intp]:
    """Return the indices of the last of equal values, ascending."""
    if not len(entries):
        return np.empty(0, np.intp)
    values = np.ascontiguousarray(entries[field]).view("<u8").reshape(len(entries), -1)
    order = np.lexsort(tuple(values.T))
    ordered = values[order]
    last = np.ones(len(entries), np.bool_)
    last[:-1] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(order[last])
