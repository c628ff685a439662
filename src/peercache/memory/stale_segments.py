"""Removes the segments and directory tables that dead processes left behind.

An owner holds its file's lock for life, and the kernel releases it at death, SIGKILL included.
So a file whose lock can be taken has no owner. Files are unlinked by name, never truncated,
written or reused: a process that still has one mapped keeps reading the old bytes.
"""

from __future__ import annotations

import fcntl
import os

from peercache.errors import Rejected
from peercache.memory.layout import is_node_file
from peercache.observability.log import get_logger
from peercache.trust.sharing import Sharing


def remove_leftovers(shm_dir: str | os.PathLike[str], sharing: Sharing | None = None) -> list[str]:
    """Unlink the segments and tables of dead processes; return their names, sorted.

    sharing: whose files may go; None is this process's user and root.
    Never raises for a single file: one that cannot be looked at stays.
    """
    try:
        folder = os.open(shm_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return []  # What makes the segment there says so.
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
            # Gone meanwhile, another user's, or no segment at all.
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
            return False  # Its owner lives.
        # Only while we hold the lock of the very file that has the name may the name go. A node
        # that is just starting waits for this lock, then sees that its name is gone, and tries
        # again; without this look, we could remove the name of that second file.
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not os.path.samestat(named, os.fstat(file)):
            return False
        os.unlink(name, dir_fd=folder)
        return True
    finally:
        os.close(file)
