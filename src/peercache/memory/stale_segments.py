"""Removes the segments that dead processes left behind.

An owner holds its file's lock for life, and the kernel releases it at death, SIGKILL included.
So a file whose lock can be taken has no owner. Files are unlinked by name, never truncated,
written or reused: a process that still has one mapped keeps reading the old bytes.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from peercache.memory.layout import is_segment_name
from peercache.observability.log import get_logger


def remove_leftovers(shm_dir: str | os.PathLike[str]) -> list[str]:
    """Unlink the segments of dead processes; return their names, sorted.

    Never raises for a single file: one that cannot be looked at stays.
    """
    folder = Path(shm_dir)
    try:
        names = sorted(name for name in os.listdir(folder) if is_segment_name(name))  # noqa: PTH208 - names are wanted, not paths
    except OSError as error:
        get_logger().warning("segment.scan_failed", shm_dir=str(folder), reason=str(error))
        return []
    removed = []
    for name in names:
        try:
            if _remove_if_dead(folder / name):
                removed.append(name)
        except OSError as error:  # noqa: PERF203 - one bad file must not keep the others
            # Gone meanwhile, another user's, or no segment at all.
            get_logger().debug("segment.leftover_kept", name=name, reason=str(error))
    if removed:
        get_logger().info("segment.leftovers_removed", names=removed)
    return removed


def _remove_if_dead(path: Path) -> bool:
    # O_NONBLOCK: a pipe by such a name must not stop the start of a node.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # Its owner lives.
        # Only while we hold the lock of the very file that has the name may the name go. A node
        # that is just starting waits for this lock, then sees that its name is gone, and tries
        # again; without this look, we could remove the name of that second file.
        if not os.path.samestat(path.lstat(), found):
            return False
        path.unlink()
        return True
    finally:
        os.close(file)
