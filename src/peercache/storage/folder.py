"""A node's folder on disk: how it is chosen, its owner, and its content.

`disk_path` holds one numbered folder per node: a node takes the first one, counted from 0, that is
not locked and that is new or of its own cluster and uid. So a restarted node finds its own again;
two nodes that restart at the same time may swap theirs, and each then announces the pages that it
finds. The lock ends with the process. Only files with our names are ever removed.

Cluster and uid are in the lock file, which is written before the first slab and never again, so a
folder with slabs and an empty lock file is of a version without cluster names. The first node that
finds such a folder adopts it: pages survive the update.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs

from peercache.actors.disk.slabs import BLOCK_BYTES, slab_bytes_for
from peercache.errors import ConfigError
from peercache.storage.layout import (
    FORMAT_VERSION,
    INDEX_NAME,
    LOCK_NAME,
    SUPERBLOCK_NAME,
    parse_slab,
    slab_number,
)

ROOT_UID: Final = 0

NAME_BYTES_MAX: Final = 4096
"""Longest lock file that is read: the longest name of a cluster, escaped, takes 1,600 bytes."""


class ForeignFolderError(ConfigError):
    """The folder is of another cluster or another uid."""


def check_owner(folder: int, shown: str) -> None:
    """Raise ForeignFolderError unless an opened folder is this uid's, and only it can modify it."""
    found = os.fstat(folder)
    ours = os.geteuid()
    if found.st_uid != ours:
        problem = f"{shown} belongs to uid {found.st_uid}, this node runs as uid {ours}"
        raise ForeignFolderError("disk_path", problem)
    # Kubernetes makes a volume writable by the pod's group, at each start.
    if found.st_mode & stat.S_IWOTH:
        problem = f"{shown} may be written by every user: chmod o-w, if what it holds is yours"
        raise ForeignFolderError("disk_path", problem)


def problem_above(root: Path) -> str:
    """Return why another user could remove the folders of nodes from `root`, or "".

    That cannot cause wrong pages, because each node's own folder is checked. But the pages would be
    lost.
    """
    ours = os.geteuid()
    for folder in (root, *root.resolve().parents):
        found = folder.stat()
        if found.st_uid not in (ours, ROOT_UID):
            return f"{folder} belongs to uid {found.st_uid}, which may remove what is in it"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"every user may remove what is in {folder}: chmod o-w, or chmod +t"
    return ""


def take_for(cluster: str, lock: int, shown: str, *, is_fresh: bool) -> bool:
    """Check the name in a locked file, or write it; return whether an older folder was adopted.

    lock:     the descriptor of the lock file, locked.
    is_fresh: whether no slab is in the folder.
    Raises ForeignFolderError for the name of another cluster or uid.
    """
    raw = os.pread(lock, NAME_BYTES_MAX, 0)
    ours = {"cluster": cluster, "uid": os.geteuid()}
    if not raw or is_fresh:
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(ours).encode(), 0)
        # Before the first slab: a power failure must not leave slabs without a name.
        os.fsync(lock)
        return not raw and not is_fresh
    try:
        superblock = json.loads(raw)
        cluster_kept, uid_kept = str(superblock["cluster"]), int(superblock["uid"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        problem = f"{shown} holds pages of an unknown cluster: remove it, or leave it"
        raise ForeignFolderError("disk_path", problem) from error
    if cluster_kept != cluster:
        problem = f"{shown} belongs to cluster {cluster_kept!r}, this node to {cluster!r}"
        raise ForeignFolderError("disk_path", problem)
    if uid_kept != ours["uid"]:
        problem = f"{shown} holds pages of uid {uid_kept}, this node runs as uid {ours['uid']}"
        raise ForeignFolderError("disk_path", problem)
    return False


FOLDERS_MAX: Final = 64
"""The most nodes that share one disk."""

LOCK_ATTEMPTS: Final = 3
LOCK_RETRY_S: Final = 0.02
"""A process that tests whether a folder is in use locks it for a moment; a node keeps the lock."""

INDEX_DIVISOR: Final = 64
"""A 64th of the cap is for the index: 128 bytes for 8 KiB, the smallest slot."""

INDEX_BYTES_MIN: Final = 256 * 2**10


SUPERBLOCK_BYTES_MAX: Final = 4096

NO_SUPERBLOCK: Final = (
    FileNotFoundError, ValueError, KeyError, TypeError, OverflowError, RecursionError,
)  # fmt: skip
"""Exceptions for a lost or damaged superblock: it may contain any bytes."""

_held_locks: dict[int, None] = {}


def _let_go_in_child() -> None:
    """Release the locks in a forked child: it may outlive the node, and would block its folder."""
    for lock in _held_locks:
        os.close(lock)
    _held_locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class FolderBusyError(ConfigError):
    """Another process has locked this folder."""


@attrs.define(eq=False)
class Folder:
    """A locked folder. slab_count slabs of slab_bytes, and index_bytes of index, are the cap."""

    path: Path
    lock: int
    slab_bytes: int
    slab_count: int
    index_bytes: int
    fresh: bool
    """Whether the folder has no readable store yet."""

    def is_there(self) -> bool:
        """Return whether the folder is still the one that we locked."""
        try:
            found = (self.path / LOCK_NAME).stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self.lock))

    def free_bytes(self) -> tuple[int, int]:
        """Return the free bytes and the size of the file system."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def close(self) -> None:
        """Release the lock."""
        _held_locks.pop(self.lock, None)
        os.close(self.lock)


def claim(disk_path: str | os.PathLike[str], size_bytes: int, *, cluster: str, log: Any) -> Folder:
    """Lock the first usable folder; raise ConfigError, or OSError of the file system.

    A folder of another cluster or uid is logged and skipped. A path that another user may modify is
    logged, but used: a Kubernetes volume is often writable by every user of a pod.
    """
    root = Path(disk_path)
    root.mkdir(parents=True, exist_ok=True)
    if problem := problem_above(root):
        log.warning("disk.path_open_to_others", path=str(root), problem=problem)
    for number in range(FOLDERS_MAX):
        path = root / str(number)
        try:
            folder = _claimed(path, size_bytes, cluster, log)
        except FolderBusyError:
            continue
        except ForeignFolderError as error:
            log.warning("disk.folder_passed_over", folder=str(path), problem=error.problem)
            continue
        if folder is not None:
            return folder
    raise ConfigError(
        "disk_path",
        f"all {FOLDERS_MAX} folders in {root} are in use, or of another cluster or user: "
        "name another disk_path",
    )


def _claimed(path: Path, size_bytes: int, cluster: str, log: Any) -> Folder | None:
    """Return the locked folder; None if another program's files are there."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        return None  # A file, or a link.
    except PermissionError as error:
        problem = f"this user may not open {path}"
        raise ForeignFolderError("disk_path", problem) from error
    try:
        check_owner(opened, str(path))
    finally:
        os.close(opened)
    if not _may_be_ours(path):
        return None
    return open_folder(path, size_bytes, cluster=cluster, log=log)


def open_folder(
    path: Path, size_bytes: int | None, *, cluster: str | None = None, log: Any = None
) -> Folder:
    """Lock one node's folder.

    size_bytes: the cap; None: keep the current size.
    cluster:    the cluster to which it must belong; None: any, for maintenance tools.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path / LOCK_NAME, flags, 0o600)
    try:
        _lock(lock, path)
        if cluster is not None:
            is_fresh = not slab_files(path)
            if take_for(cluster, lock, str(path), is_fresh=is_fresh) and log is not None:
                log.warning("disk.folder_adopted", folder=str(path), cluster=cluster)
        if (earlier := _other_format(path)) is not None and log is not None:
            log.warning(
                "disk.format_dropped", folder=str(path), format=earlier, ours=FORMAT_VERSION
            )
        folder = _opened(path, lock, size_bytes)
    except BaseException:
        os.close(lock)
        raise
    _held_locks[lock] = None
    return folder


def slab_files(path: Path) -> dict[int, Path]:
    """Return the slab files in a folder by their numbers, ascending."""
    found = {slab_number(entry.name): entry for entry in path.iterdir()}
    return {number: found[number] for number in sorted(n for n in found if n is not None)}


def _lock(file: int, path: Path) -> None:
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if attempt + 1 == LOCK_ATTEMPTS:
                raise FolderBusyError("disk_path", f"a running node has {path}") from error
        time.sleep(LOCK_RETRY_S)


def _opened(path: Path, lock: int, size_bytes: int | None) -> Folder:
    known = _slab_bytes_of(path)
    slabs = slab_files(path)
    if size_bytes is None:
        slab_bytes = known or 2**20
        count = max(slabs, default=-1) + 1
        return Folder(path, lock, slab_bytes, count, INDEX_BYTES_MIN, known is None)
    index_bytes = max(INDEX_BYTES_MIN, size_bytes // INDEX_DIVISOR)
    room = size_bytes - index_bytes
    slab_bytes = known or slab_bytes_for(room)
    if known is not None and known > max(room, 0):
        # The cap was lowered below one slab: the content cannot stay.
        slab_bytes, known = slab_bytes_for(room), None
    count = max(0, room // slab_bytes)
    if count == 0:
        raise ConfigError("disk_size", f"{size_bytes} bytes are too few for one slab")
    index = [INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm"]
    # SQLite would follow a link.
    for name in index if known is None else [n for n in index if (path / n).is_symlink()]:
        (path / name).unlink(missing_ok=True)
    for number, file in slabs.items():
        # Beyond the cap, or of another slab size: it is ours by its name, and must go.
        if number >= count or known is None:
            file.unlink(missing_ok=True)
    _write_superblock(path, slab_bytes)
    return Folder(path, lock, slab_bytes, count, index_bytes, known is None)


def _may_be_ours(path: Path) -> bool:
    names = {entry.name for entry in path.iterdir()}
    return not names or LOCK_NAME in names or SUPERBLOCK_NAME in names


def _superblock(path: Path) -> Any:
    """Return the content of the superblock; raise one of NO_SUPERBLOCK."""
    file = path / SUPERBLOCK_NAME
    if not stat.S_ISREG(file.lstat().st_mode):
        raise ValueError(f"{file} is no file")
    with file.open("rb") as opened:
        superblock = json.loads(opened.read(SUPERBLOCK_BYTES_MAX))
    if type(superblock["format"]) is not int:
        raise ValueError(f"{file} names no format")
    return superblock


def _slab_bytes_of(path: Path) -> int | None:
    """Return the slab size of a folder's store; None if nothing of this format has one."""
    try:
        superblock = _superblock(path)
        if superblock["format"] != FORMAT_VERSION:
            return None
        slab_bytes = int(superblock["slab_bytes"])
    except NO_SUPERBLOCK:
        # Lost or damaged: every slab also contains its own size.
        slab_bytes = _slab_bytes_of_slabs(path)
    is_whole = slab_bytes >= 2 * BLOCK_BYTES and slab_bytes % BLOCK_BYTES == 0
    return slab_bytes if is_whole else None


def _other_format(path: Path) -> int | None:
    """Return the format of a store that this version cannot read; None if there is none."""
    try:
        found = int(_superblock(path)["format"])
    except NO_SUPERBLOCK:
        return None
    return found if found != FORMAT_VERSION else None


def _slab_bytes_of_slabs(path: Path) -> int:
    for file in slab_files(path).values():
        try:
            if not stat.S_ISREG(file.lstat().st_mode):
                continue
            with file.open("rb") as opened:
                header = parse_slab(opened.read(BLOCK_BYTES))
        except OSError:
            continue
        if header is not None:
            return header.slab_bytes
    return 0


def _write_superblock(path: Path, slab_bytes: int) -> None:
    """Replace the superblock atomically, so that a crash leaves either the old or the new one."""
    content = json.dumps({"format": FORMAT_VERSION, "slab_bytes": slab_bytes})
    # A superblock with this content is left unchanged: a full disk has no room for another.
    with suppress(*NO_SUPERBLOCK):
        if json.dumps(_superblock(path)) == content:
            return
    fresh = path / f"{SUPERBLOCK_NAME}.new"
    # There may be a link, which must not be followed.
    fresh.unlink(missing_ok=True)
    with fresh.open("x") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path / SUPERBLOCK_NAME)
