"""The lock that tells a node whether a client's process still lives.

A reservation ends when its client's process exits, never by time: a stopped client may go on
writing. So each client holds a POSIX record lock on a private file for as long as it lives. The
kernel keeps it while the process is stopped, drops it the moment the process dies, and does not
hand it to a forked child.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from peercache.errors import ConfigError, Rejected
from peercache.model.ids import name_of

# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")
_NAME = re.compile(r"[0-9a-f]{16}\.lock")

LOCK_ATTEMPTS = 50
LOCK_RETRY_S = 0.01
"""A node that starts holds the lock of a file for the moment in which it removes it."""


def folder_of(home: str) -> Path:
    """Return the folder for the lock files of a home address (ipc://PATH)."""
    return Path(home.removeprefix("ipc://") + ".clients")


def lock_name(client: int) -> str:
    """Return the name of a client's lock file."""
    return f"{name_of(client)}.lock"


@final
class ClientLock:
    """Held by a client, on a file of its own, until `release` or the end of the process."""

    def __init__(self, home: str, client: int) -> None:
        """Make and lock the file; raise ConfigError where that cannot be."""
        self.name = lock_name(client)
        self._path = folder_of(home) / self.name
        try:
            self._fd = self._locked()
        except OSError as error:
            raise ConfigError("home", f"cannot lock {self._path}: {error.strerror}") from error

    def _locked(self) -> int:
        for _ in range(LOCK_ATTEMPTS):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # The last client that left has just removed the folder.
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A node that starts removes files without a lock; it may have caught this one.
                if self._path.stat().st_ino == os.fstat(file).st_ino:
                    return file
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            time.sleep(LOCK_RETRY_S)
        raise BlockingIOError(errno.EAGAIN, "another process holds the lock")

    def release(self) -> None:
        """Remove the file and release the lock: the client will write no more."""
        _remove(self._path)
        os.close(self._fd)


@final
class LockProbe:
    """Held by a node: tells whether a client's lock is held.

    It keeps the file open, so it asks about the file that the client locked, even if its name is
    gone. It must not be used for a client of the node's own process: closing the descriptor would
    release that lock.
    """

    def __init__(self, home: str, name: str) -> None:
        """Open the lock file `name` of the home folder; Rejected if it is not there."""
        if not _NAME.fullmatch(name):
            raise Rejected("lock", f"{name!r} is not the name of a client's lock file")
        self._path = folder_of(home) / name
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Rejected("lock", f"cannot open {self._path}: {error.strerror}") from error

    def is_held(self) -> bool:
        """Return whether the client's process lives."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def take(self) -> bool:
        """Take the lock until `close`, unless it is held; return whether it was free."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self, *, remove: bool) -> None:
        """Close, and remove the file of a client that is gone."""
        if remove:
            _remove(self._path)
        os.close(self._fd)


def _remove(path: Path) -> None:
    """Remove a lock file, and the folder with the last one."""
    # What cannot be removed is no reason to keep the lock.
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def remove_dead_locks(home: str) -> None:
    """Remove the lock files of clients that died while no node was looking."""
    for path in sorted(folder_of(home).glob("*.lock")):
        try:
            probe = LockProbe(home, path.name)
        except Rejected:
            continue
        probe.close(remove=probe.take())
