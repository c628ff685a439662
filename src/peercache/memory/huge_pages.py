"""Huge pages: how many the kernel has, the folders that hold them, and how to get more.

A segment in huge pages is a file of a hugetlbfs, because local clients map it by its path. The
kernel hands huge pages out whole and keeps them aside beforehand, so what is missing is known, and
said, before anything is created.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from peercache.errors import ConfigError
from peercache.memory.layout import GIB_PAGE_BYTES, HUGE_PAGE_BYTES, Layout

SIZES = {"2M": HUGE_PAGE_BYTES, "1G": GIB_PAGE_BYTES}
"""Page sizes, by their names in the configuration."""

DEFAULT_PAGE_BYTES = HUGE_PAGE_BYTES
"""The size of a hugetlbfs whose options name none."""

_KERNEL = Path("/sys/kernel/mm/hugepages")
_MOUNTS = Path("/proc/mounts")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@attrs.frozen
class Supply:
    """Huge pages of one size: all that the kernel has, and those that are free and not reserved."""

    page_bytes: int
    total: int
    free: int


def supplies(kernel: Path = _KERNEL) -> tuple[Supply, ...]:
    """Return what there is of each size that this kernel knows, the smallest first."""
    found = []
    for folder in kernel.glob("hugepages-*kB"):
        page_bytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 2**10
        total, free, reserved = (
            int((folder / name).read_text(encoding="ascii"))
            for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
        # Reserved pages count as free until they are touched, but belong to another mapping.
        found.append(Supply(page_bytes, total, free - reserved))
    return tuple(sorted(found, key=lambda supply: supply.page_bytes))


def mounted(mounts: str) -> tuple[tuple[str, int], ...]:
    """Return (folder, page size) of each hugetlbfs, from the text of /proc/mounts."""
    found = []
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "hugetlbfs":
            size = re.search(r"pagesize=(\d+)([KMG]?)", options)
            page_bytes = int(size[1]) * _UNITS[size[2]] if size else DEFAULT_PAGE_BYTES
            found.append((place, page_bytes))
    return tuple(found)


def hugetlbfs_folders() -> tuple[str, ...]:
    """Return the folders in which nodes of this host keep segments in huge pages."""
    try:
        return tuple(folder for folder, _ in mounted(_MOUNTS.read_text(encoding="utf-8")))
    except OSError:
        return ()


def missing(name: str, needed: int, supply: Supply) -> str:
    """Return "" or what is missing, with the line that makes it."""
    if supply.free >= needed:
        return ""
    return (
        f"the pool needs {needed} huge pages of {name}, {supply.free} are free: "
        f"{more(name, supply.total - supply.free + needed)}"
    )


def more(name: str, total: int) -> str:
    """Return the line that makes the kernel keep `total` huge pages."""
    if name == "2M":
        return f"sysctl vm.nr_hugepages={total}"
    return f"boot with hugepagesz=1G hugepages={total}"


def folder_for(name: str, configured: str, mounts: str | None = None) -> str:
    """Return the folder for a segment in huge pages of this size; raise ConfigError."""
    places = mounted(_MOUNTS.read_text(encoding="utf-8") if mounts is None else mounts)
    fitting = [place for place, page_bytes in places if page_bytes == SIZES[name]]
    if configured:
        # A folder within a mount is as good as the mount itself.
        within = Path(configured).resolve()
        if any(within.is_relative_to(place) for place in fitting):
            return configured
        raise ConfigError("hugepages_dir", f"{configured} is on no hugetlbfs of {name} pages")
    if not fitting:
        raise ConfigError(
            "hugepages",
            f"no hugetlbfs of {name} pages is mounted: "
            f"mount -t hugetlbfs -o pagesize={name} none /dev/hugepages",
        )
    return fitting[0]


def expect_enough(name: str, layout: Layout) -> None:
    """Raise ConfigError unless the kernel has the huge pages for a segment."""
    size = SIZES[name]
    supply = next((each for each in supplies() if each.page_bytes == size), Supply(size, 0, 0))
    problem = missing(name, layout.total_bytes // size, supply)
    if problem:
        raise ConfigError("hugepages", problem)
