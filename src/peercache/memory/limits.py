"""Limits of memory: what a file system keeps, what a host has, what a cgroup allows."""

from __future__ import annotations

import os
import re
from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems whose files are memory."""

_KIB = 1024


def filesystem_of(folder: str, mounts: str) -> str:
    """Return the type of the file system that a folder lies on, from the text of /proc/mounts."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        # The last of several on one place hides the others.
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind if Path(folder).is_dir() else ""


def cgroup_memory(groups: str, root: Path) -> tuple[int, int]:
    """Return the memory limit that ends this process first (-1: none), and what is used of it.

    groups: the text of /proc/self/cgroup; root: where the cgroup file systems are mounted. A group
    is bound by the limits of all groups above it. In a container its own group may be the root.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        while folder.is_relative_to(base):
            text = text_of(folder / limit)
            # Version 1 writes "no limit" as a number that no machine has.
            if text.isdigit() and int(text) < 2**60:
                limits.append((int(text), int(text_of(folder / used) or 0)))
            folder = folder.parent
    return min(limits, key=lambda each: each[0] - each[1], default=(-1, 0))


def own_cgroup_memory() -> tuple[int, int]:
    """Return `cgroup_memory` of this process."""
    return cgroup_memory(text_of(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))


def host_memory(name: str) -> int:
    """Return a figure of /proc/meminfo in bytes, 0 for an unknown one."""
    match = re.search(rf"^{name}:\s*(\d+)", text_of(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * _KIB if match else 0


def text_of(path: Path) -> str:
    """Return what a file of the kernel says, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
