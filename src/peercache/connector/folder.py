"""A folder as a page store: one file for each page, on a local disk or a shared file system.

Writes   A page is written to a temporary file and renamed when it is complete, so no reader and no
         other process sees a part of it. With `is_durable` the file is synced before the rename,
         and its folder after it; without, a power failure may leave a torn file.
Reads    Each chunk is verified before it is copied. A torn or changed file is a miss, and is
         removed.
Faults   Temporary errors (a busy or stale share) are retried; others are misses, and logged.

Room     The bytes of all files are bounded; the least recently used are removed first
         (`FolderRoom`).
Format   One page as a file:

    block 0     header of HEADER_BYTES: magic, version, codec, chunk size, key, length of the page,
                then stored length and xxh3_64 of each chunk, and the xxh3_64 of all that
    then        each chunk of the page, as the codec stores it, from a multiple of BLOCK on

Checksums cover the page's own bytes, so they also verify the decompression. Blocks suit O_DIRECT.
Numbers are little-endian.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import xxhash

from peercache.config.quantities import parse_size
from peercache.connector.metadata import OpenStore
from peercache.errors import ConfigError
from peercache.memory.copying import Pieces, Side, scatter
from peercache.model.keys import PageKeys
from peercache.model.runs import PageRuns
from peercache.observability.log import WarnOnce, get_logger

BLOCK = 4096
"""Alignment for O_DIRECT: no device requires more."""

MAGIC = b"PCkv"
VERSION = 1
FIXED = struct.Struct("<4sHHI16sQ")
CHUNK = struct.Struct("<IQ")
HEADER_BYTES = BLOCK
CHUNKS_MAX = (HEADER_BYTES - FIXED.size - 8) // CHUNK.size
CHUNK_BYTES = 4 * 2**20
PAGE_BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES

RAW, ZSTD = 0, 1
"""Codecs."""

WORTH = 15 / 16
"""Fraction of a page's bytes: a page that compresses to more is stored uncompressed."""


class NoPage(Exception):
    """A file is not a page, or not this one. is_damaged: it must be removed."""

    def __init__(self, problem: str, *, is_damaged: bool) -> None:
        """Set the problem."""
        super().__init__(problem)
        self.is_damaged = is_damaged


@final
class Zstd:
    """The codec of the extra `zstd`: compresses chunks; used by one thread at a time."""

    def __init__(self, level: int) -> None:
        """Create a codec. ConfigError: the library is missing."""
        try:
            import zstandard  # noqa: PLC0415 - only a folder that compresses needs it
        except ImportError as error:
            problem = "zstandard is not installed: pip install zstandard"
            raise ConfigError("zstd_level", problem) from error
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()
        self._length_of = zstandard.frame_content_size

    def compress(self, raw: memoryview) -> bytes:
        """Return the compressed chunk."""
        compressed: bytes = self._compressor.compress(raw)
        return compressed

    def decompress(self, stored: memoryview, length: int) -> bytes:
        """Return the chunk of `length` bytes. Raises what the library raises."""
        # The library allocates the size in the frame, without a limit.
        if self._length_of(stored) != length:
            raise ValueError("the frame has another length")
        raw: bytes = self._decompressor.decompress(stored)
        return raw


@final
class Room:
    """Aligned memory of one thread, for a chunk that is copied between a file and the engine."""

    def __init__(self) -> None:
        """Map memory for a chunk and the header."""
        self._map = mmap.mmap(-1, CHUNK_BYTES + HEADER_BYTES)
        self.chunk = memoryview(self._map)[:CHUNK_BYTES]
        self.header = memoryview(self._map)[CHUNK_BYTES:]
        self.chunk_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def write_page(fd: int, key: bytes, page: Side, room: Room, codec: Zstd | None) -> int:
    """Write a page into an empty file; return the file's bytes. Raises OSError.

    page: in the engine's memory. A page that does not become smaller is stored uncompressed.
    """
    length = page.total
    if not 0 < length <= PAGE_BYTES_MAX:
        raise NoPage(f"a page of {length} bytes, at most {PAGE_BYTES_MAX}", is_damaged=False)
    chunks, end = _write_chunks(fd, page, room, codec)
    used = RAW if codec is None else ZSTD
    if used == ZSTD and (not chunks or sum(stored for stored, _ in chunks) > length * WORTH):
        os.ftruncate(fd, 0)
        chunks, end = _write_chunks(fd, page, room, None)
        used = RAW
    header = FIXED.pack(MAGIC, VERSION, used, CHUNK_BYTES, key, length)
    header += b"".join(CHUNK.pack(*chunk) for chunk in chunks)
    header = header.ljust(HEADER_BYTES - 8, b"\0")
    room.header[:] = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header))
    _write_all(fd, room.header, 0)
    return end


def page_length(fd: int) -> int:
    """Return the page length in a file's header, unverified; 0 if it is not a page."""
    raw = os.pread(fd, FIXED.size, 0)
    if len(raw) < FIXED.size or not raw.startswith(MAGIC):
        return 0
    length: int = FIXED.unpack(raw)[5]
    return length


def read_page(fd: int, key: bytes, page: Side, room: Room, codec: Zstd | None) -> None:
    """Read a page into the engine's memory, chunk by chunk, each verified before it is copied.

    NoPage: the file is not the page of that key and length. Raises OSError.
    """
    length = page.total
    used, chunks = _header(fd, key, length, room)
    if used == ZSTD and codec is None:
        raise NoPage("it is compressed, and zstandard is not here", is_damaged=False)
    offset = HEADER_BYTES
    for number, (stored, checksum) in enumerate(chunks):
        begin = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, length - begin)
        wanted = room.chunk[: _blocks(stored)]
        if _read_all(fd, wanted, offset) < stored:
            raise NoPage("the file is too short", is_damaged=True)
        offset += len(wanted)
        raw: Any = room.chunk[:stored]
        if used == ZSTD and codec is not None:
            raw = _decompressed(codec, raw, size)
        if len(raw) != size or xxhash.xxh3_64_intdigest(raw) != checksum:
            raise NoPage("the checksum is wrong", is_damaged=True)
        copied = _copy(page, begin, size, raw, room, to_engine=True)
        if copied != size:
            raise NoPage("the engine's memory is not there", is_damaged=False)


def _header(fd: int, key: bytes, length: int, room: Room) -> tuple[int, list[tuple[int, int]]]:
    """Return the codec, and (stored bytes, checksum) of each chunk of a page that fits."""
    if _read_all(fd, room.header, 0) < HEADER_BYTES:
        raise NoPage("the header is too short", is_damaged=True)
    raw = bytes(room.header)
    (checksum,) = struct.unpack_from("<Q", raw, HEADER_BYTES - 8)
    if xxhash.xxh3_64_intdigest(raw[:-8]) != checksum:
        raise NoPage("the header's checksum is wrong", is_damaged=True)
    magic, version, used, chunk_bytes, of_key, of_length = FIXED.unpack_from(raw)
    if (magic, version, chunk_bytes) != (MAGIC, VERSION, CHUNK_BYTES) or used not in {RAW, ZSTD}:
        raise NoPage("it has another format", is_damaged=False)
    if of_key != key:
        raise NoPage("it is the page of another key", is_damaged=True)
    if of_length != length:
        raise NoPage(f"it has {of_length} bytes, {length} are asked for", is_damaged=False)
    count = -(-length // CHUNK_BYTES)
    chunks = [CHUNK.unpack_from(raw, FIXED.size + i * CHUNK.size) for i in range(count)]
    if any(stored > CHUNK_BYTES for stored, _ in chunks):
        raise NoPage("a chunk is too long", is_damaged=True)
    return used, chunks


def _write_chunks(
    fd: int, page: Side, room: Room, codec: Zstd | None
) -> tuple[list[tuple[int, int]], int]:
    """Return (stored bytes, checksum) of each chunk, and where the file ends.

    No chunks are returned if one of them does not become smaller.
    """
    chunks, offset = [], HEADER_BYTES
    for begin in range(0, page.total, CHUNK_BYTES):
        size = min(CHUNK_BYTES, page.total - begin)
        raw = room.chunk[:size]
        if _copy(page, begin, size, raw, room, to_engine=False) != size:
            raise NoPage("the engine's memory is not there", is_damaged=False)
        checksum = xxhash.xxh3_64_intdigest(raw)
        stored = size
        # A chunk that grows does not fit in the room; then the whole page is stored uncompressed.
        if codec is not None and len(compressed := codec.compress(raw)) <= size:
            stored = len(compressed)
            room.chunk[:stored] = compressed
        elif codec is not None:
            return [], 0
        blocks = _blocks(stored)
        room.chunk[stored:blocks] = bytes(blocks - stored)
        _write_all(fd, room.chunk[:blocks], offset)
        chunks.append((stored, checksum))
        offset += blocks
    return chunks, offset


def _decompressed(codec: Zstd, stored: memoryview, size: int) -> bytes:
    try:
        return codec.decompress(stored, size)
    except Exception as error:  # The library's own class, or MemoryError for absurd lengths.
        raise NoPage(f"it does not decompress: {error}", is_damaged=True) from error


def _copy(page: Side, begin: int, size: int, raw: Any, room: Room, *, to_engine: bool) -> int:
    """Copy a chunk between the engine and the room, or from `raw` bytes; return the bytes."""
    address = room.chunk_address
    if isinstance(raw, bytes):
        address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    ours: Pieces = np.array([[address, size]], np.uint64)
    return scatter(page.cut(begin, begin + size), ours, to_segment=not to_engine)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read_all(fd: int, into: memoryview, offset: int) -> int:
    """Return the bytes read, fewer than asked for at the file's end."""
    total = 0
    while into:
        count = os.preadv(fd, [into], offset)
        total += count
        if count % BLOCK or not count:
            break
        into, offset = into[count:], offset + count
    return total


SWEEP_DIVISOR = 16
"""A sweep is due when a process has written 1/16 of the cap, and reduces the folder to 15/16 of it:
each of several processes exceeds the cap by at most 1/16."""

SWEEP_S = 60.0
"""A sweep is also due this often: other processes write, too."""

CLOSE_S = 5.0
LEFT_OVER_S = 3600.0
"""A temporary file of this age was left by a killed process."""

PAGE_NAME = re.compile(r"[0-9a-f]{32}")
SHELF_NAME = re.compile(r"[0-9a-f]{2}")
WRITING = ".writing"
"""The folder of files that are being written."""
LOCK = ".lock"


@final
class FolderRoom:
    """Keeps the files of a folder below a number of bytes; removes the least recently used first.

    The modification time of a page's file is the time of its last use, so that it survives restarts
    and is visible to other processes. Sweeps run in a thread of their own, in one process at a time
    if the file system has locks; two at a time remove more than necessary, but break nothing.
    """

    def __init__(self, root: Path, bytes_max: int, warn: WarnOnce) -> None:
        """Count the files, and start the thread."""
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
        """Reserve room for a file; return False if there is no room before a sweep."""
        with self._changed:
            has_room = self._found + self._written + self._reserved + size <= self._max
            if has_room:
                self._reserved += size
            if not has_room or self._written > self._max // SWEEP_DIVISOR:
                self._changed.notify_all()
        return has_room

    def settle(self, size: int, written: int) -> None:
        """End a reservation of `size` bytes, of which `written` were written."""
        with self._changed:
            self._reserved -= size
            self._written += written

    def used(self) -> int:
        """Return the counted bytes."""
        with self._changed:
            return self._found + self._written + self._reserved

    def close(self) -> None:
        """End the thread; if it waits for a hanging share, it is left alone."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def sweep(self) -> None:
        """Count the files, and remove the oldest of them if they are too large."""
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
            # Files written in the meantime may be counted twice, until the next sweep.
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
                # A folder that cannot be reduced is not swept again and again.
                if not self._is_closed and self._is_due():
                    self._changed.wait(max(1.0, time.monotonic() - begun))

    def _is_due(self) -> bool:
        return self._written > self._max // SWEEP_DIVISOR or self._found > self._max

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
            if not may_remove or total <= self._max - self._max // SWEEP_DIVISOR:
                return total
            for _, size, path in sorted(files):
                _remove(path)
                total -= size
                if total <= self._max - self._max // SWEEP_DIVISOR:
                    break
            return total

    def _files(self) -> list[tuple[float, int, str]]:
        """Return (last use, bytes, path) of each page; remove files left by killed processes."""
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


MARKER = ".peercache-pages"
"""A file that marks the folder: files in it are removed, so no other folder must be used."""

TRANSIENT = frozenset(
    getattr(errno, name)
    for name in ("EINTR", "EAGAIN", "EBUSY", "ESTALE", "ETIMEDOUT", "EIO", "ENOBUFS", "ENETRESET")
)
RETRY_S = (0.005, 0.02, 0.08)
"""Pauses before the second and later attempts."""

USED_S = 60.0
"""A use within this time after the recorded one is not recorded again."""

READER_LEVEL = 3
"""The level of a store that does not compress; it has no effect."""

NO_RETRY_S = 5.0
"""How long a folder that did not recover gets only one attempt per page, as for a dead share."""

WARN_S = 60.0
Result = TypeVar("Result")


@final
class OfThread(threading.local):
    """State of each thread: room, and a codec; None if the library is missing."""

    def __init__(self, zstd_level: int) -> None:
        """Create them; called in each thread."""
        self.room = Room()
        self.codec: Zstd | None = None
        with suppress(ConfigError):
            self.codec = Zstd(zstd_level)


@final
class FolderPages:
    """A page store in a folder, which several processes and hosts may share."""

    def __init__(
        self,
        root: Path,
        bytes_max: int,
        *,
        zstd_level: int,
        threads: int,
        is_direct: bool,
        is_durable: bool,
    ) -> None:
        """Use `folder_store`."""
        self._root = root
        self._is_compressed = zstd_level > 0
        if zstd_level:
            Zstd(zstd_level)  # Raises at once if the library is missing.
        self._flags = os.O_DIRECT if is_direct else 0
        self._is_durable = is_durable
        self._warn_once = WarnOnce(get_logger(path=str(root)), repeat_s=WARN_S)
        _prepare(root)
        self._room = FolderRoom(root, bytes_max, self._warn_once)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="peercache-folder")
        self._own = OfThread(zstd_level or READER_LEVEL)
        self._numbers = itertools.count()
        self._no_retry_until = 0.0
        self._is_closed = False

    def exists(self, keys: PageKeys, page_bytes: int) -> int:
        """Return the length of the leading run of keys that have a file: a hint."""
        if self._is_closed:
            return 0
        paths = [self._path(key) for key in keys.tolist()]
        lacks = (i for i, path in enumerate(paths) if not _may_be_page(path, page_bytes))
        return next(lacks, len(paths))

    def get_into(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Read one page for each key into its runs; return for each whether they hold it now."""
        return self._each(self._get, keys, runs)

    def set_from(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Store one page for each key from its runs; return for each whether it is stored now."""
        return self._each(self._set, keys, runs)

    def register(self, _address: int, _length: int) -> Callable[[], None]:
        """Do nothing: files need no registered memory."""
        return lambda: None

    def close(self) -> None:
        """Wait for running calls, and end the threads; the pages stay."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown()
            self._room.close()

    def _each(
        self, call: Callable[[bytes, Side], bool], keys: PageKeys, runs: PageRuns
    ) -> list[bool]:
        bounds = runs.starts.tolist()
        pages = [
            Side(runs.addresses[begin:end], runs.sizes[begin:end])
            for begin, end in itertools.pairwise(bounds)
        ]
        results: list[Future[bool]] = []
        try:
            for key, page in zip(keys.tolist(), pages, strict=True):
                # A future of our own: if no thread can be started, `submit` raises, but has queued
                # the call anyway. It must not begin after the return.
                results.append(Future())
                self._threads.submit(_fulfil, results[-1], call, key, page)
            return [each.result() for each in results]
        except RuntimeError:  # The pool of threads is closed, or has no thread.
            return [False] * len(keys)
        finally:
            # After an exception, too: nothing may use the caller's memory after the return.
            wait([each for each in results if not each.cancel()])

    def _get(self, key: bytes, page: Side) -> bool:
        path = self._path(key)
        try:
            return self._patiently(lambda: self._read(path, key, page))
        except FileNotFoundError:
            return False
        except NoPage as problem:
            if problem.is_damaged:
                self._warn_once(
                    "connector.page_damaged", str(problem), page=path, problem=str(problem)
                )
                _unlink(path)
            return False
        except OSError as error:
            self._warn_once("connector.read_failed", error.errno, page=path, error=str(error))
            return False

    def _read(self, path: str, key: bytes, page: Side) -> bool:
        with _opened(path, os.O_RDONLY | self._flags) as fd:
            read_page(fd, key, page, self._own.room, self._own.codec)
            if time.time() - os.fstat(fd).st_mtime > USED_S:
                os.utime(fd)
        return True

    def _set(self, key: bytes, page: Side) -> bool:
        path = self._path(key)
        size = page.total + HEADER_BYTES
        try:
            if os.path.exists(path):  # noqa: PTH110
                return True
            if not self._room.take(size):
                return False
            written = 0
            try:
                written = self._patiently(lambda: self._write(path, key, page))
            finally:
                self._room.settle(size, written)
        except NoPage as problem:
            self._warn_once("connector.page_refused", str(problem), problem=str(problem))
            return False
        except OSError as error:
            self._warn_once("connector.write_failed", error.errno, page=path, error=str(error))
            return False
        return True

    def _write(self, path: str, key: bytes, page: Side) -> int:
        """Write a page to a temporary file, and rename it; return the file's bytes."""
        name = f"{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"
        temporary = os.fspath(self._root / WRITING / name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags
        codec = self._own.codec if self._is_compressed else None
        try:
            with _opened(temporary, flags) as fd:
                written = write_page(fd, key, page, self._own.room, codec)
                if self._is_durable:
                    os.fsync(fd)
            os.rename(temporary, path)  # noqa: PTH104
        except BaseException:
            _unlink(temporary)
            raise
        if self._is_durable:
            with _opened(os.path.dirname(path), os.O_RDONLY) as folder:  # noqa: PTH120
                os.fsync(folder)
        return written

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}"

    def _patiently(self, call: Callable[[], Result]) -> Result:
        """Return the result of a call; retry temporary errors, with increasing pauses."""
        for wait_s in RETRY_S if time.monotonic() >= self._no_retry_until else ():
            try:
                return call()
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            time.sleep(wait_s)
        try:
            return call()
        except OSError as error:
            if error.errno in TRANSIENT:
                self._no_retry_until = time.monotonic() + NO_RETRY_S
            raise


def folder_store(
    path: str | os.PathLike[str],
    size: str | int,
    *,
    zstd_level: int = 0,
    threads: int = 4,
    is_direct: bool = False,
    is_durable: bool = False,
) -> OpenStore:
    """Return a function that opens a folder as a page store: the `store` of a `ConnectorMetadata`.

    path:       an empty folder, one that does not exist yet, or one that a store has used before.
    size:       "100GiB" or bytes; when it is reached, the least recently used pages are removed.
    zstd_level: 1 to 19 compresses pages, with the extra `zstd`; 0 stores them uncompressed.
    threads:    files that are read or written at a time.
    is_direct:  O_DIRECT: pages do not go through the kernel's cache.
    is_durable: stored pages survive a power failure; a set then waits for the disk.

    Raises ConfigError for a value that cannot be used; opening raises it for a folder with other
    files.
    """
    if not 0 <= zstd_level <= 19:
        raise ConfigError("zstd_level", f"0 to 19, not {zstd_level}")
    if threads < 1:
        raise ConfigError("threads", f"1 or more, not {threads}")
    try:
        bytes_max = parse_size(size)
    except ValueError as error:
        raise ConfigError("size", str(error)) from error
    root = Path(path).absolute()
    return lambda _namespace: FolderPages(
        root,
        bytes_max,
        zstd_level=zstd_level,
        threads=threads,
        is_direct=is_direct,
        is_durable=is_durable,
    )


def _prepare(root: Path) -> None:
    """Create the folder and its contents."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (found := os.listdir(root)) and MARKER not in found:  # noqa: PTH208
            raise ConfigError("path", f"{root} holds other files: name an empty folder")
        # This is first: another process may check while this one creates the rest.
        (root / MARKER).touch(mode=0o600)
        for name in (WRITING, *(f"{shelf:02x}" for shelf in range(256))):
            (root / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError("path", f"{root} cannot be used: {error}") from error


def _fulfil(
    result: Future[bool], call: Callable[[bytes, Side], bool], key: bytes, page: Side
) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(call(key, page))
    except BaseException as error:
        result.set_exception(error)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _may_be_page(path: str, page_bytes: int) -> bool:
    """Return whether a file exists, with a page of this size by its header; 0 is any."""
    if not page_bytes:
        return os.path.exists(path)  # noqa: PTH110
    try:
        with _opened(path, os.O_RDONLY) as fd:
            return page_length(fd) == page_bytes
    except OSError:
        return False


def _unlink(path: str) -> None:
    with suppress(OSError):  # It is gone already, or a sweep will remove it.
        os.unlink(path)  # noqa: PTH108
