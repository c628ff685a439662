"""The lock that shows a node whether a client's process is still alive.

A reservation ends when its client's process exits, never by time: a paused client may continue to
write later. So each client holds a POSIX record lock on a private file as long as it is alive. The
kernel keeps the lock while the process is paused, drops it when the process dies, and does not pass
it to a forked child.

The file holds a random secret, which the client sends in its Hello: only a process that may read
the file can act as the client.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import final

from peercache.errors import ConfigError, Rejected
from peercache.model.ids import name_of
from peercache.trust.sharing import (
    GROUP_FOLDER_MODE,
    PRIVATE_FOLDER_MODE,
    ROOT_UID,
    Sharing,
)

# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")
_NAME = re.compile(r"[0-9a-f]{16}\.lock")

SECRET_BYTES = 32
"""Length of the secret in a lock file."""

LOCK_ATTEMPTS = 50
LOCK_RETRY_S = 0.01
"""A starting node holds the lock of a file for a moment while it removes the file."""


def folder_of(home: str) -> Path:
    """Return the folder for the lock files of a home address (ipc://PATH)."""
    return Path(home.removeprefix("ipc://") + ".clients")


def lock_name(client: int) -> str:
    """Return the name of a client's lock file."""
    return f"{name_of(client)}.lock"


def make_folder(home: str, sharing: Sharing) -> None:
    """Make the folder for the lock files; raise ConfigError for one of another uid, or OSError.

    The node makes the folder, so that the node owns it, independent of the uid of the first client.
    """
    make_home_folder(folder_of(home), sharing)


def make_home_folder(path: Path, sharing: Sharing, *, follow: bool = False) -> None:
    """Make a folder for the home address; raise ConfigError for one of another uid, or OSError.

    follow: whether it may be reached by way of a link.
    """
    try:
        os.close(_open_folder(path, sharing, follow=follow))
    except Rejected as refusal:
        raise ConfigError("home", refusal.detail) from refusal


def remove_folder(home: str) -> None:
    """Remove the folder for the lock files, unless clients still hold some."""
    with suppress(OSError):
        folder_of(home).rmdir()


def _open_folder(path: Path, sharing: Sharing, *, follow: bool = False) -> int:
    """Return a descriptor of the folder, made if it is missing; raise Rejected or OSError."""
    try:
        # A client may come before its node, which uses the folder above, too.
        path.parent.mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER_MODE)
        is_new = True
    except FileExistsError:
        is_new = False
    folder = sharing.open_folder(path, follow=follow)
    if is_new:
        try:
            sharing.open_to_group(folder, GROUP_FOLDER_MODE)
        except BaseException:
            os.close(folder)
            raise
    return folder


@final
class ClientLock:
    """A client's lock, on a file of its own, held until `release` or the end of the process."""

    def __init__(self, home: str, client: int, sharing: Sharing) -> None:
        """Create and lock the file; raise ConfigError if that fails."""
        self.name = lock_name(client)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._sharing = sharing
        self._folder = folder_of(home)
        try:
            self._fd = self._locked()
        except Rejected as refusal:
            raise ConfigError("home", refusal.detail) from refusal
        except OSError as error:
            path = self._folder / self.name
            raise ConfigError("home", f"cannot lock {path}: {error.strerror}") from error

    def _locked(self) -> int:
        for _ in range(LOCK_ATTEMPTS):
            try:
                folder = _open_folder(self._folder, self._sharing)
            except FileNotFoundError:
                continue  # A stopping node has just removed the folder.
            try:
                file = self._locked_in(folder)
            except FileNotFoundError:
                continue
            finally:
                os.close(folder)
            if file is not None:
                return file
            time.sleep(LOCK_RETRY_S)
        raise BlockingIOError(errno.EAGAIN, "another process holds the lock")

    def _locked_in(self, folder: int) -> int | None:
        """Return the locked file, None if a starting node is just removing it."""
        flags = os.O_CREAT | os.O_RDWR
        what = f"the lock file {self._folder / self.name}"
        file = self._sharing.open_file(self.name, flags, folder=folder, what=what)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A starting node removes files without a lock, possibly this one.
            if os.path.samestat(os.stat(self.name, dir_fd=folder), os.fstat(file)):
                self._give_to_node(file, os.fstat(folder).st_uid)
                # A node reads it only after a Hello, which comes later.
                os.ftruncate(file, 0)
                os.pwrite(file, self.secret, 0)
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    def _give_to_node(self, file: int, node_uid: int) -> None:
        """Allow the node to read the secret if it has another uid than this process."""
        self._sharing.open_to_group(file)
        if node_uid != self._sharing.uid == ROOT_UID:
            os.fchown(file, node_uid, -1)

    def release(self) -> None:
        """Remove the file and release the lock: the client will write no more."""
        _remove(self._folder, self.name, self._sharing)
        os.close(self._fd)


@final
class LockProbe:
    """A node's view of a client's lock: checks whether the lock is held.

    It keeps the file open, so it checks the file that the client locked, even if its name is gone.
    It must not be used for a client of the node's own process: closing the descriptor would release
    that lock.
    """

    def __init__(self, home: str, name: str, sharing: Sharing) -> None:
        """Open the lock file `name` of the home folder; Rejected if it is not there."""
        if not _NAME.fullmatch(name):
            raise Rejected("lock", f"{name!r} is not the name of a client's lock file")
        self._sharing = sharing
        self._folder = folder_of(home)
        self._name = name
        path = self._folder / name
        try:
            folder = sharing.open_folder(self._folder, follow=False)
            try:
                what = f"the lock file {path}"
                self._fd = sharing.open_file(name, os.O_RDWR, folder=folder, what=what)
            finally:
                os.close(folder)
        except OSError as error:
            raise Rejected("lock", f"cannot open {path}: {error.strerror}") from error

    def is_held(self) -> bool:
        """Return whether the client's process is alive."""
        return self._asked()[0] != fcntl.F_UNLCK

    def holder(self) -> int:
        """Return the pid of the client's process; 0 if it has exited or is in another namespace."""
        kind, _, _, _, pid = self._asked()
        return 0 if kind == fcntl.F_UNLCK else max(0, pid)

    def _asked(self) -> tuple[int, int, int, int, int]:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, whence, start, length, pid = _FLOCK.unpack(
            fcntl.fcntl(self._fd, fcntl.F_GETLK, asked)
        )
        return kind, whence, start, length, pid

    def secret(self) -> bytes:
        """Return the secret in the file; empty if the client has not written it."""
        found = os.pread(self._fd, SECRET_BYTES + 1, 0)
        return found if len(found) == SECRET_BYTES else b""

    def take(self) -> bool:
        """Acquire the lock until `close`, unless it is held; return whether it was free."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self, *, remove: bool) -> None:
        """Close, and remove the file of a client that is gone."""
        if remove:
            _remove(self._folder, self._name, self._sharing)
        os.close(self._fd)


def _remove(folder: Path, name: str, sharing: Sharing) -> None:
    # A failure to remove the file is no reason to keep the lock.
    with suppress(OSError, Rejected):
        opened = sharing.open_folder(folder, follow=False)
        try:
            os.unlink(name, dir_fd=opened)
        finally:
            os.close(opened)


def remove_dead_locks(home: str, sharing: Sharing) -> None:
    """Remove the lock files of clients that died while no node was running."""
    for path in sorted(folder_of(home).glob("*.lock")):
        try:
            probe = LockProbe(home, path.name, sharing)
        except Rejected:
            continue
        probe.close(remove=probe.take())
