"""A folder as a page store: a file a page, on a local disk or a shared file system.

Writes   A page is written beside the others and renamed into its place when it is whole, so no
         reader and no other process sees half of one. With `is_durable` the file is synced before
         the rename, and its folder after it; without, a power failure may leave a torn file.
Reads    Each chunk is verified before it is copied. A torn or changed file is a miss, and goes.
Faults   Errors that pass (a busy or stale share) are tried again; others are misses, and logged.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, final

from peercache.config.quantities import parse_size
from peercache.connector.folder_room import WRITING, FolderRoom
from peercache.connector.page_file import (
    HEADER_BYTES,
    Codec,
    EnginePage,
    NoPage,
    Room,
    Zstd,
    page_length,
    read_page,
    write_page,
)
from peercache.connector.page_store import OpenStore
from peercache.errors import ConfigError
from peercache.model.keys import PageKeys
from peercache.model.runs import PageRuns
from peercache.observability.log import WarnOnce, get_logger

MARKER = ".peercache-pages"
"""A file that says whose folder this is: files in it are removed, so no other folder will do."""

TRANSIENT = frozenset(
    getattr(errno, name)
    for name in ("EINTR", "EAGAIN", "EBUSY", "ESTALE", "ETIMEDOUT", "EIO", "ENOBUFS", "ENETRESET")
)
RETRY_S = (0.005, 0.02, 0.08)
"""Waits before the second and later tries."""

USED_S = 60.0
"""A page whose file says that it was used so recently is not told again."""

READER_LEVEL = 3
"""Of a store that does not compress; it matters for nothing."""

NO_RETRY_S = 5.0
"""How long a folder that did not come back gets one try a page: a dead share costs no more."""

WARN_S = 60.0
Result = TypeVar("Result")


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
        self._codec_level = zstd_level
        if zstd_level:
            Zstd(zstd_level)  # Says at once that the library is missing.
        self._flags = os.O_DIRECT if is_direct else 0
        self._is_durable = is_durable
        self._warn_once = WarnOnce(get_logger(path=str(root)), repeat_s=WARN_S)
        _prepare(root)
        self._room = FolderRoom(root, bytes_max, self._warn_once)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="peercache-folder")
        self._own = threading.local()
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
        """Read one page a key into its runs; return for each whether they hold it now."""
        return self._each(self._get, keys, runs)

    def set_from(self, keys: PageKeys, runs: PageRuns) -> list[bool]:
        """Store one page a key from its runs; return for each whether it is kept now."""
        return self._each(self._set, keys, runs)

    def register(self, _address: int, _length: int) -> Callable[[], None]:
        """Do nothing: files need no registered memory."""
        return lambda: None

    def close(self) -> None:
        """Wait for calls, and end the threads; the pages stay."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown()
            self._room.close()

    def _each(
        self, call: Callable[[bytes, EnginePage], bool], keys: PageKeys, runs: PageRuns
    ) -> list[bool]:
        bounds = runs.starts.tolist()
        places = [
            EnginePage(runs.addresses[begin:end], runs.sizes[begin:end])
            for begin, end in itertools.pairwise(bounds)
        ]
        try:
            return list(self._threads.map(call, keys.tolist(), places))
        except RuntimeError:  # The pool of threads is closed.
            return [False] * len(keys)

    def _get(self, key: bytes, place: EnginePage) -> bool:
        path = self._path(key)
        try:
            return self._patiently(lambda: self._read(path, key, place))
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

    def _read(self, path: str, key: bytes, place: EnginePage) -> bool:
        with _opened(path, os.O_RDONLY | self._flags) as fd:
            read_page(fd, key, place, self._own_room(), self._own_codec())
            if time.time() - os.fstat(fd).st_mtime > USED_S:
                os.utime(fd)
        return True

    def _set(self, key: bytes, place: EnginePage) -> bool:
        path = self._path(key)
        size = place.length + HEADER_BYTES
        try:
            if os.path.exists(path):  # noqa: PTH110
                return True
            if not self._room.take(size):
                return False
            written = 0
            try:
                written = self._patiently(lambda: self._write(path, key, place))
            finally:
                self._room.settle(size, written)
        except NoPage as problem:
            self._warn_once("connector.page_refused", str(problem), problem=str(problem))
            return False
        except OSError as error:
            self._warn_once("connector.write_failed", error.errno, page=path, error=str(error))
            return False
        return True

    def _write(self, path: str, key: bytes, place: EnginePage) -> int:
        """Write a page beside the others, and put it into its place; return the file's bytes."""
        name = f"{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"
        beside = os.fspath(self._root / WRITING / name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags
        codec = self._own_codec() if self._codec_level else None
        try:
            with _opened(beside, flags) as fd:
                written = write_page(fd, key, place, self._own_room(), codec)
                if self._is_durable:
                    os.fsync(fd)
            os.rename(beside, path)  # noqa: PTH104
        except BaseException:
            _unlink(beside)
            raise
        if self._is_durable:
            with _opened(os.path.dirname(path), os.O_RDONLY) as folder:  # noqa: PTH120
                os.fsync(folder)
        return written

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{name[:2]}/{name}"

    def _own_room(self) -> Room:
        if (room := getattr(self._own, "room", None)) is None:
            room = self._own.room = Room()
        return room

    def _own_codec(self) -> Codec | None:
        """Return this thread's codec; None where the library is not installed."""
        if not hasattr(self._own, "codec"):
            try:
                self._own.codec = Zstd(self._codec_level or READER_LEVEL)
            except ConfigError:
                self._own.codec = None
        codec: Codec | None = self._own.codec
        return codec

    def _patiently(self, call: Callable[[], Result]) -> Result:
        """Return what a call comes to; try again, a little later each time, where errors pass."""
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
    """Return what opens a folder as a page store.

    path:       an empty folder, one that is not there yet, or one that a store has used before.
    size:       "100GiB" or bytes; the least recently used pages go when it is reached.
    zstd_level: 1 to 19 compresses pages, with the extra `zstd`; 0 stores them as they are.
    threads:    files that are read or written at once.
    is_direct:  O_DIRECT: pages do not go through the kernel's cache.
    is_durable: what was stored survives a power failure; a set then waits for the disk.
    ConfigError, when it is opened: a value that cannot be used, a folder of something else.
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
    """Make the folder and what belongs in it."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (found := os.listdir(root)) and MARKER not in found:  # noqa: PTH208
            raise ConfigError("path", f"{root} holds other files: name an empty folder")
        # Before anything else: another process may look while this one makes the rest.
        (root / MARKER).touch(mode=0o600)
        for name in (WRITING, *(f"{shelf:02x}" for shelf in range(256))):
            (root / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError("path", f"{root} cannot be used: {error}") from error


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _may_be_page(path: str, page_bytes: int) -> bool:
    """Return whether a file is there, and says that its page has this size; 0 is any."""
    if not page_bytes:
        return os.path.exists(path)  # noqa: PTH110
    try:
        with _opened(path, os.O_RDONLY) as fd:
            return page_length(fd) == page_bytes
    except OSError:
        return False


def _unlink(path: str) -> None:
    with suppress(OSError):  # It has gone, or a sweep will remove it.
        os.unlink(path)  # noqa: PTH108
