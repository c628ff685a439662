"""Whose a node's folder on disk is: the cluster and the uid that its lock file names.

The name lies in the lock file, which is written before the first slab and never again, so a folder
with slabs and an empty lock file is of a version that did not name clusters. Such a folder is
adopted by the first node that finds it: pages outlive the update.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Final

from peercache.errors import ConfigError

ROOT_UID: Final = 0

NAME_BYTES_MAX: Final = 4096
"""Longest lock file that is read: the longest name of a cluster, escaped, takes 1,600 bytes."""


class ForeignFolderError(ConfigError):
    """The folder is of another cluster or another uid."""


def check_owner(folder: int, shown: str) -> None:
    """Raise ForeignFolderError unless an opened folder is this uid's, and changed by no other."""
    found = os.fstat(folder)
    ours = os.geteuid()
    if found.st_uid != ours:
        problem = f"{shown} belongs to uid {found.st_uid}, this node runs as uid {ours}"
        raise ForeignFolderError("disk_path", problem)
    # Kubernetes opens a volume to the pod's group, at each start.
    if found.st_mode & stat.S_IWOTH:
        problem = f"{shown} may be written by every user: chmod o-w, if what it holds is yours"
        raise ForeignFolderError("disk_path", problem)


def problem_above(root: Path) -> str:
    """Return why another user could take the folders of nodes out of `root`, or "".

    They hold no wrong page for it: each node's own folder is checked. But they are gone.
    """
    ours = os.geteuid()
    for folder in (root, *root.resolve().parents):
        found = folder.stat()
        if found.st_uid not in (ours, ROOT_UID):
            return f"{folder} belongs to uid {found.st_uid}, which may remove what lies in it"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"every user may remove what lies in {folder}: chmod o-w, or chmod +t"
    return ""


def take_for(cluster: str, lock: int, shown: str, *, is_fresh: bool) -> bool:
    """Check the name in a locked file, or write it; return whether an older folder was adopted.

    lock:     the descriptor of the lock file, locked.
    is_fresh: whether no slab lies in the folder.
    Raises ForeignFolderError for the name of another cluster or uid.
    """
    raw = os.pread(lock, NAME_BYTES_MAX, 0)
    ours = {"cluster": cluster, "uid": os.geteuid()}
    if not raw or is_fresh:
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(ours).encode(), 0)
        # Before the first slab: a power loss must not leave slabs without a name.
        os.fsync(lock)
        return not raw and not is_fresh
    try:
        told = json.loads(raw)
        cluster_told, uid_told = str(told["cluster"]), int(told["uid"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        problem = f"{shown} holds pages of an unknown cluster: remove it, or let it lie"
        raise ForeignFolderError("disk_path", problem) from error
    if cluster_told != cluster:
        problem = f"{shown} belongs to cluster {cluster_told!r}, this node to {cluster!r}"
        raise ForeignFolderError("disk_path", problem)
    if uid_told != ours["uid"]:
        problem = f"{shown} holds pages of uid {uid_told}, this node runs as uid {ours['uid']}"
        raise ForeignFolderError("disk_path", problem)
    return False
