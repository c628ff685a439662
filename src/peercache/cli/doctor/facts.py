"""What is known about a host: plain values, so that a verdict can be tested from recorded ones."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Libraries:
    """The libraries of RDMA.

    libibverbs:  its file, "" where there is none; libibverbs_release: "44.0", "" if unknown.
    offers:      the private interfaces of libibverbs, by number.
    pyverbs:     its folder, "" where there is none; pyverbs_release: "59.0", "" if unknown.
    wants:       the private interface of libibverbs that pyverbs was built for, 0 for none.
    problem:     why pyverbs cannot be used, "" if it can.
    """

    libibverbs: str = ""
    libibverbs_release: str = ""
    offers: tuple[int, ...] = ()
    pyverbs: str = ""
    pyverbs_release: str = ""
    wants: int = 0
    problem: str = ""


@attrs.frozen(kw_only=True)
class PortFact:
    """One port of an RDMA device.

    mtu: what its network interface carries, 0 if unknown. gids: (index, address, kind) each.
    uverbs: its device file, and whether we may use it.
    """

    name: str
    state: str
    link_layer: str
    rate_gbps: float
    lid: int = 0
    mtu: int = 0
    gids: tuple[tuple[int, str, str], ...] = ()
    uverbs: str = ""
    is_usable: bool = True


@attrs.frozen(kw_only=True)
class Memory:
    """Limits and places of memory, in bytes; -1 is no limit.

    shm_type:   the file system of shm_dir, "" where it is not there.
    may_write_shm: whether we may make a file there.
    cgroup:     what our container may use, and uses.
    hugepages:  (page size, all, free) of each size that the kernel has.
    huge_mounts: (folder, page size) of each hugetlbfs.
    """

    memlock: int
    memlock_hard: int
    may_lock_anything: bool
    shm_type: str
    shm_free: int
    available: int
    may_write_shm: bool = True
    cgroup_limit: int = -1
    cgroup_used: int = 0
    hugepages: tuple[tuple[int, int, int], ...] = ()
    huge_mounts: tuple[tuple[str, int], ...] = ()


@attrs.frozen(kw_only=True)
class Speed:
    """What was tried. GB/s are of 1 MiB pages; 0 where it was not tried or failed.

    read_problem: why there were no READs; read_us: one READ of a page of 4 KiB, median.
    """

    tcp_gb_s: float = 0.0
    copy_gb_s: float = 0.0
    read_over: str = ""
    read_gb_s: float = 0.0
    read_us: float = 0.0
    read_problem: str = ""


@attrs.frozen(kw_only=True)
class Facts:
    """A host, and what is wanted of it."""

    peercache: str
    python: str
    kernel: str
    fabric: str
    pool_size: int
    granule: int
    shm_dir: str
    hugepages_wanted: str
    libraries: Libraries
    ports: tuple[PortFact, ...]
    chosen: tuple[tuple[str, int], ...]
    """(port, GID index) of those that would be used."""
    choice_problems: tuple[str, ...]
    memory: Memory
    nofile: int
    nofile_hard: int
    has_scatter: bool
    has_vector_copy: bool
    speed: Speed

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return attrs.asdict(self)


def packet_bytes(mtu: int) -> int:
    """Return the largest payload of a RoCE v2 packet over an interface: its own, active MTU."""
    # A packet has up to 80 bytes beside it.
    return next((size for size in (4096, 2048, 1024, 512) if size + 80 <= mtu), 256)
