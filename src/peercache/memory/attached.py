"""A mapped segment of another process, to read its pages, or to write into reserved slots.

Owns    two mappings: header and seals, always read-only; page memory, writable for a writer.
Keeps   nothing is unmapped under a copy: uses are counted, and the last one unmaps after `close`.
        The content of a file is used only after its size and its incarnation match. Memory that the
        owner has not populated is never accessed: it would be charged to this process. A file that
        another user may truncate is only read and written by the kernel's copy: a load beyond its
        end would be a bus error, which kills this process.
Limits  POPULATE_CHUNK_BYTES a step, so that closing never waits long for a prefaulting thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from peercache.errors import PeerUnreachable, Rejected
from peercache.installation.library import Begin, function
from peercache.memory.copying import copy_pages, kernel_copies
from peercache.memory.kernel import Bytes, address_of, let_go_in_children, prefault, unfault
from peercache.memory.layout import HEADER_BYTES, Header, Layout, parse_header, segment_name
from peercache.model.ids import Incarnation, name_of
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import ODD, SEAL, Seals, unread_seals
from peercache.trust.sharing import Sharing

FORBIDDEN = (
    "may be cut short by another user, and this sandbox forbids the copy that survives it: allow "
    "process_vm_readv and process_vm_writev, or run node and engine as one user without share_group"
)

POPULATE_CHUNK_BYTES = 16 * 2**20
"""A few milliseconds of page tables."""

_LOAD = (ctypes.c_void_p, *(ctypes.c_uint64,) * 2, *(ctypes.c_void_p,) * 2, ctypes.c_uint64)
_words = function("peercache_seals_words", ctypes.c_int, *_LOAD, ctypes.c_int, keeps_gil=True)
_load = function("peercache_seals_load", ctypes.c_int, *_LOAD, ctypes.c_int, keeps_gil=True)


class AttachedSegment:
    """A mapped segment of another process. Every method may be called from any thread.

    incarnation:   its owner.
    granule:       bytes for which a seal stands.
    page_bytes:    size of the page memory.
    pages_address: where the page memory begins in our address space; only within `in_use`.
    """

    def __init__(
        self, file: int, layout: Layout, header: Header, *, writable: bool, by_kernel: bool
    ) -> None:
        """Map a file with a verified header; use `open`."""
        self.incarnation = header.incarnation
        self.granule = layout.granule
        self.page_bytes = layout.page_bytes
        self._layout = layout
        self._file = file
        self._writable = writable
        self._by_kernel = by_kernel
        # Huge pages are scarce, and a hugetlbfs does not show which of them the owner has
        # populated.
        self._populated_bytes = layout.page_bytes if layout.huge_page_bytes else 0
        self._uses = 0
        self._closing = False
        self._unmapped = False
        self._changed = threading.Condition()
        read_only = mmap.PROT_READ
        self._head = mmap.mmap(file, layout.pages_offset, mmap.MAP_SHARED, read_only)
        # Where the kernel's pages have 64 KiB, those of a small pool begin within one.
        before = layout.pages_offset % mmap.ALLOCATIONGRANULARITY
        self._body = mmap.mmap(
            file,
            before + layout.page_bytes,
            mmap.MAP_SHARED,
            read_only | mmap.PROT_WRITE if writable else read_only,
            offset=layout.pages_offset - before,
        )
        self._seals: Seals = np.frombuffer(
            self._head, SEAL, layout.seals_count, layout.seals_offset
        )
        self._table = SealTable(self._seals, granule=layout.granule, by_kernel=by_kernel)
        self._pages: Bytes = np.frombuffer(self._body, np.uint8, layout.page_bytes, before)
        self.pages_address = address_of(self._pages)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        incarnation: Incarnation,
        writable: bool,
        sharing: Sharing | None = None,
    ) -> AttachedSegment:
        """Map the segment of a node.

        sharing: the users whose files are mapped; None: this process's user and root.
        Raises PeerUnreachable if there is no such file here, Rejected unless it is the complete
        segment of this incarnation, of a sharing uid, and open to us.
        """
        if Path(path).name != segment_name(incarnation):
            raise Rejected("segment", f"{path} is no file of node {name_of(incarnation)}")
        sharing = sharing if sharing is not None else Sharing.of()
        flags = os.O_RDWR if writable else os.O_RDONLY
        with opened(Path(path), flags, sharing, "segment") as file:
            header, layout = _checked(file, incarnation)
            by_kernel = sharing.may_change_under_us(os.fstat(file))
            if by_kernel and not kernel_copies():
                raise Rejected("segment", f"{path} {FORBIDDEN}")
            return cls(file, layout, header, writable=writable, by_kernel=by_kernel)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the mapping while the block runs; raises PeerUnreachable after `close` began."""
        with self._changed:
            if self._closing:
                raise PeerUnreachable(f"node {name_of(self.incarnation)}, whose segment is closed")
            self._uses += 1
        try:
            yield
        finally:
            with self._changed:
                self._uses -= 1
                last = self._closing and self._uses == 0
            if last:
                self._unmap()

    def words(self, offsets: U64) -> U64:
        """Load the word of each slot's seal now, before any byte of the slots; within `in_use`.

        offsets: (n,) uint64, within the page memory. Returns (n,) uint64; all are ODD if the file
                 was truncated, where a load would be a bus error.
        """
        if self._is_cut_short():
            return np.full(len(offsets), ODD)
        return self._table.words(offsets)

    def seals(self, offsets: U64) -> Seals:
        """Load the seal of each slot now, after the bytes of the slots; within `in_use`.

        offsets: (n,) uint64, within the page memory. Returns (n,) SEAL; all are unread if the file
                 was truncated.
        """
        if self._is_cut_short():
            return unread_seals(len(offsets))
        return self._table.load(offsets)

    def copy(
        self,
        runs: PageRuns,
        offsets: U64,
        *,
        to_slots: bool,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> int:
        """Copy pages between the caller's runs and their slots; within `in_use`.

        offsets: (n,) uint64, within the page memory. Returns how many leading pages were copied, as
        `copy_pages` does, and never raises.
        """
        return copy_pages(
            runs,
            offsets + np.uint64(self.pages_address),
            to_slots=to_slots,
            deadline=deadline,
            clock=clock,
            by_kernel=self._by_kernel,
        )

    def populate(self) -> int:
        """Fill our page tables for what the owner has populated; return the total number of bytes.

        Blocks without the GIL. A worker thread repeats it until it returns `page_bytes`. Returns
        early once `close` began. One thread at a time.
        """
        with suppress(PeerUnreachable):
            while self._populate_chunk():
                pass
        return self._populated_bytes

    def close(self, timeout_s: float) -> bool:
        """Refuse new uses, wait for running ones, unmap; return whether it is unmapped.

        If the time is up first, the last user unmaps instead.
        """
        with self._changed:
            first = not self._closing
            self._closing = True
            idle = self._uses == 0
        if first and idle:
            self._unmap()
        with self._changed:
            return self._changed.wait_for(lambda: self._unmapped, timeout_s)

    def _is_cut_short(self) -> bool:
        return os.fstat(self._file).st_size < self._layout.pages_offset

    def _populate_chunk(self) -> bool:
        with self.in_use():
            begin = self._populated_bytes
            end = min(begin + POPULATE_CHUNK_BYTES, self._owner_populated_bytes())
            if begin >= end:
                return False
            try:
                prefault(self._pages[begin:end], write=self._writable, may_load=not self._by_kernel)
            except OSError:
                return False  # Only speed is lost: copies then fault their pages in.
            self._populated_bytes = end
            return True

    def _owner_populated_bytes(self) -> int:
        # Accessing a hole of the file would allocate it, and charge it to our container.
        try:
            end = os.lseek(self._file, self._layout.pages_offset, os.SEEK_HOLE)
        except OSError:
            return self._populated_bytes
        return min(end - self._layout.pages_offset, self.page_bytes)

    def _unmap(self) -> None:
        # Exactly one caller gets here: the first `close`, or the last user after it.
        unfault(self._pages)
        self.pages_address = 0
        self._seals = np.empty(0, SEAL)
        self._table = SealTable(self._seals, granule=self.granule, by_kernel=False)
        self._pages = np.empty(0, np.uint8)
        # A caller that took a seal outside `in_use` may hold a view for an instant: then the views'
        # own references end the mapping, and this is not an error.
        for mapping in (self._body, self._head):
            with suppress(BufferError):
                mapping.close()
        os.close(self._file)
        with self._changed:
            self._unmapped = True
            self._changed.notify_all()


@final
class SealTable:
    """The seals of a mapped segment, loaded by the offsets of slots.

    The memory must stay mapped for as long as this is used.
    """

    def __init__(self, seals: Seals, *, granule: int, by_kernel: bool) -> None:
        """Load from (n,) SEAL, one per granule.

        by_kernel: load with the kernel's own copy, which survives a truncated file.
        """
        self._address, self._count = seals.ctypes.data, len(seals)
        self._granule = granule
        self._by_kernel = by_kernel

    def words(self, offsets: U64) -> U64:
        """Load words now, (n,) uint64: before any byte that the caller reads afterwards.

        All are ODD if the table is not mapped any more, which only `by_kernel` detects.
        """
        words = np.empty(len(offsets), np.uint64)
        return words if self._loaded(_words, offsets, words) else np.full(len(offsets), ODD)

    def load(self, offsets: U64) -> Seals:
        """Load seals now, (n,) SEAL: after all bytes that the caller has read, the words last.

        All are unread if the table is not mapped any more, which only `by_kernel` detects.
        """
        seals: Seals = np.empty(len(offsets), SEAL)
        return seals if self._loaded(_load, offsets, seals) else unread_seals(len(offsets))

    def _loaded(self, load: Any, offsets: U64, into: npt.NDArray[Any]) -> bool:
        assert offsets.dtype == np.uint64, offsets.dtype
        done = load(
            self._address, self._count, self._granule, offsets.tobytes(),
            ctypes.addressof(Begin.from_buffer(into)), len(offsets), self._by_kernel,
        )  # fmt: skip
        # A wrong offset would load something else.
        assert done >= 0, (offsets, self._count)
        return bool(done)


@contextmanager
def opened(path: Path, flags: int, sharing: Sharing, what: str) -> Iterator[int]:
    """Open a file of another process; its descriptor is closed only if the block raises.

    Raises PeerUnreachable if there is no such file, Rejected if it is not a file of a sharing uid,
    or not open to us. Errors of the block about an unusable file become Rejected, too.
    """
    let_go_in_children()
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = sharing.open_file(path.name, flags, folder=folder, what=f"the {what} {path}")
        finally:
            os.close(folder)
    except FileNotFoundError as error:
        raise PeerUnreachable(f"{path}, which is not there") from error
    except (OSError, ValueError) as error:
        raise Rejected(what, f"cannot open {path}: {error}") from error
    try:
        yield file
    except (OSError, ValueError) as error:
        os.close(file)
        raise Rejected(what, f"cannot map {path}: {error}") from error
    except BaseException:
        os.close(file)
        raise


def _checked(file: int, incarnation: Incarnation) -> tuple[Header, Layout]:
    found = os.fstat(file)
    header = parse_header(os.pread(file, HEADER_BYTES, 0))
    if header.incarnation != incarnation:
        raise Rejected(
            "segment",
            f"it is of node {name_of(header.incarnation)}, not of {name_of(incarnation)}",
        )
    layout = Layout.of(header.page_bytes, header.granule, header.huge_page_bytes)
    if found.st_size != layout.total_bytes:
        raise Rejected(
            "segment", f"{found.st_size} bytes, its header requires {layout.total_bytes}"
        )
    return header, layout
